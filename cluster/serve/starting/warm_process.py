"""Engines of models on demand start in a process that is forked from one whose imports are done.

Ray starts an actor's process with the command that its runtime environment names (`py_executable`). `own_command` names
this module, which runs as three programs:

- The *stand-in* is the process that Ray starts, in the place of its worker. An own Ray starts it without
  Ray's imports (`cluster/worker_setup.py`). It asks the warm process for a fork, lives as long as that, ends with its
  exit code, and passes signals on.
- The *warm process* has imported what an engine imports. It has a single thread, is no actor, and claims nothing. It
  ends with the raylet of its node.
- Its *fork* becomes Ray's worker: it takes the arguments, the environment and the standard streams of the stand-in, and
  runs Ray's program. Its claims, logs and death are those of any actor. It ends when the stand-in does.

Where no warm process answers, the stand-in starts one for the next engine, and becomes Ray's worker itself. The socket
is in Linux's abstract namespace, and both ends check that the other one belongs to the same user.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

MODULE = __name__ if __name__ != "__main__" else "manta.cluster.serve.starting.warm_process"
IMPORTED = (
    "ray",
    "ray.serve._private.replica",
    "manta.cluster.serve.engine.engine_deployment",
    "manta.cluster.engine.engine",
    "manta.workers.torch_worker.torch_worker",
    "manta.cluster.serve.engine.pooling_replica",
)
"""Modules that the warm process imports. They import all others that an engine needs."""
KEY_BYTES = 8
MAX_MESSAGE_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 5.0
"""Seconds for which a stand-in waits for a fork. The warm process may still be importing."""
RAYLET = "RAY_RAYLET_PID"
"""The variable in which Ray tells a worker the process id of its raylet."""
WARM = "--warm"
"""Argument of the warm process, before its key."""


class Start(NamedTuple):
    """A stand-in's request for a fork, which is sent as JSON with the descriptors of its standard streams."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str


def is_possible() -> bool:
    """Returns whether this system can do it: processes fork, and sockets carry descriptors and names of users."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def own_command(variables: Mapping[str, str]) -> str:
    """Returns the command for Ray's `py_executable`. `variables` are those that the actor's process gets from its
    runtime environment; a library may read them when it is imported.
    """
    return f"{sys.executable} -m {MODULE} {key_of(variables)}"


def key_of(variables: Mapping[str, str]) -> str:
    """Returns the name that tells warm processes of different environments apart, in hexadecimal."""
    import hashlib  # here, because a stand-in imports as little as it can: a request waits for it

    text = repr((sorted(variables.items()), sys.executable))
    return hashlib.sha256(text.encode()).digest()[:KEY_BYTES].hex()


def start_warm_process(variables: Mapping[str, str]) -> None:
    """Starts the warm process for actors with these variables on this node. One that runs there already goes on."""
    environment = {**os.environ, **variables}
    if is_possible() and environment.get(RAYLET):
        _spawn(key_of(variables), environment)


def _spawn(key: str, environment: Mapping[str, str]) -> None:
    import subprocess

    command = [sys.executable, "-m", MODULE, WARM, key]
    # numpy's threads would not outlive the fork.
    variables = {**environment, "OPENBLAS_NUM_THREADS": "1"}
    nowhere = subprocess.DEVNULL
    subprocess.run(
        command, env=variables, start_new_session=True, check=False, stdin=nowhere, stdout=nowhere, stderr=nowhere
    )


def _address(key: str) -> str:
    return f"\0manta-warm-{os.getuid()}-{os.environ[RAYLET]}-{key}"


def _is_own_user(connection: socket.socket) -> bool:
    """Returns whether the process at the other end belongs to this user."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())


# ---- the stand-in ----------------------------------------------------------------------------------------------------


def stand_in(key: str, arguments: list[str]) -> NoReturn:
    """Lives in the place of a fork of the warm process, or becomes Ray's worker where there is none."""
    connection = _connected(key) if is_possible() and RAYLET in os.environ else None
    if connection is None:
        _run_worker(arguments)
    start = Start(arguments, dict(os.environ), os.getcwd())
    socket.send_fds(connection, [json.dumps(start).encode()], [0, 1, 2])
    process = _number(connection)
    if process is None:  # the warm process could not fork
        _run_worker(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: _kill(process, number))
    code = _number(connection)
    os._exit(1 if code is None else code)


def _connected(key: str) -> socket.socket | None:
    """Returns a connection with the warm process. Starts one and returns None if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(CONNECT_TIMEOUT_S)
    try:
        connection.connect(_address(key))
    except OSError:
        connection.close()
        _spawn(key, os.environ)
        return None
    if not _is_own_user(connection):
        connection.close()
        return None
    connection.settimeout(None)
    return connection


def _number(connection: socket.socket) -> int | None:
    """Returns a number that the other end sends; None if it has ended."""
    try:
        message = connection.recv(16)
    except OSError:
        return None
    return int(message) if message else None


def _kill(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _run_worker(arguments: list[str]) -> NoReturn:
    """Runs Ray's program for workers in this process. `arguments` begin with its file."""
    sys.argv = arguments
    sys.path[0] = os.path.dirname(arguments[0])
    runpy.run_path(arguments[0], run_name="__main__")
    sys.exit(0)


# ---- the warm process ------------------------------------------------------------------------------------------------


class WarmProcess:
    """Forks workers for stand-ins until the raylet of its node ends."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._raylet = os.pidfd_open(int(os.environ[RAYLET]))
        self._forks: dict[int, tuple[int, socket.socket]] = {}
        """Process ids of forks and connections with their stand-ins, by the descriptor that tells of their end."""

    def run(self) -> None:
        while True:
            listening = self._listening.fileno()
            ready, _, _ = select.select([listening, self._raylet, *self._forks], [], [])
            if self._raylet in ready:
                return
            for descriptor in ready:
                if descriptor in self._forks:
                    self._tell_end(descriptor)
            if listening in ready:
                connection, _ = self._listening.accept()
                self._answer(connection)

    def _tell_end(self, descriptor: int) -> None:
        process, connection = self._forks.pop(descriptor)
        os.close(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with contextlib.suppress(OSError):
            connection.send(str(code if code >= 0 else 128 - code).encode())
        connection.close()

    def _answer(self, connection: socket.socket) -> None:
        """Forks for a stand-in, unless this process has threads, of which none would outlive the fork."""
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            message, streams, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 3)
        except OSError:
            connection.close()
            return
        if not _is_own_user(connection) or len(streams) != 3 or num_threads() > 1:
            connection.close()
        elif (process := os.fork()) == 0:
            self._close()
            _become_worker(connection, Start(*json.loads(message)), streams)
        else:
            connection.send(str(process).encode())
            self._forks[os.pidfd_open(process)] = process, connection
        for descriptor in streams:
            os.close(descriptor)

    def _close(self) -> None:
        """Closes in a fork what belongs to the warm process alone."""
        self._listening.close()
        os.close(self._raylet)
        for descriptor, (_, connection) in self._forks.items():
            os.close(descriptor)
            connection.close()


def num_threads() -> int:
    """Returns the threads of this process, those that libraries have started included."""
    return len(os.listdir("/proc/self/task"))


def _become_worker(connection: socket.socket, start: Start, streams: list[int]) -> NoReturn:
    """Runs Ray's worker in a fork. Never returns to the warm process's code."""
    import random
    import threading

    code = 1
    try:
        os.setsid()  # Ray ends a worker with its process group
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.chdir(start.folder)
        os.environ.clear()
        os.environ.update(start.environment)
        random.seed()
        connection.settimeout(None)
        threading.Thread(target=_end_with, args=(connection,), name="manta-stand-in", daemon=True).start()
        gc.enable()
        _run_worker(start.arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end_with(connection: socket.socket) -> None:
    """Ends this process when its stand-in has ended. The stand-in sends nothing more."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def warm_up(key: str, imported: Sequence[str] = IMPORTED) -> None:
    """Runs the warm process, which imports the modules first. Returns at once if there is one already."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listening.bind(_address(key))
    except OSError:
        return
    gc.disable()  # the modules stay
    for name in imported:
        __import__(name)
    gc.freeze()  # so that no collection in a fork writes to pages that it shares
    listening.listen()
    with contextlib.suppress(ProcessLookupError):  # the raylet has ended meanwhile
        WarmProcess(listening).run()


def main(arguments: list[str]) -> None:
    if arguments[0] == WARM:
        if os.fork() == 0:  # Ray ends the children of a worker with it, but not their orphans
            warm_up(arguments[1])
    else:
        stand_in(arguments[0], arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
