"""Why a replica did not start, in words: the replica writes a sentence, and the driver finds it in Serve's report.

Serve reports a failed constructor as text only: tracebacks of Ray and Serve around the replica's own, whose last line
names the exception. `told_in_words` makes that line a sentence. `wait_until_running` waits for the application and
raises as soon as one replica fails, although Serve would try twice more.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import queue
import re
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator

from ray import serve
from ray._private import worker
from ray.exceptions import RayTaskError
from ray.serve.schema import ApplicationStatusOverview

logger = logging.getLogger(__name__)

POLL_S = 0.25
"""Seconds between two looks at Serve's status; Serve itself checks its replicas every 0.1 to 0.5 s."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Z]\w*)(?:: (.*))?")
"""The line of a traceback that names the exception: the only line that is not indented."""
_DIED = re.compile(r"ActorDiedError|ActorUnavailableError|RayActorError|WorkerCrashedError|OutOfMemoryError")
_CRASHED = re.compile(r"\*\*\* (SIG[A-Z]+) received|Fatal Python error: (.+)")
_NO_MEMORY = re.compile(r"MemoryError|can't allocate memory|Cannot allocate memory|bad_alloc|running low on memory")
_NO_PORT = re.compile(r"Failed to bind to address")
"""What Serve's proxy says if its port is taken."""
_NO_MODULE = re.compile(r"No module named '(?:cluster|specdecode|structured|workers)\b")
_RETRIES = ("A replica failed to start", "The deployment failed to start")
"""How Serve's status message of a deployment begins once one of its replicas has failed."""

_NO_ROOM = re.compile(r"Resources required for each replica: (.*), total resources available: (.*?)\. Use")
"""In Serve's status message of a deployment that has waited for half a minute, perhaps for nodes that are starting."""

_FREE_MEMORY = "free some memory, lower kv_cache_bytes, or take a smaller model (manta check says what it takes)"
_FULL_MEMORY = f"Ray ended its process because the machine's memory was full; {_FREE_MEMORY}"


class StartFailed(Exception):
    """The application did not start. The message is one paragraph: what failed, the remedy if known, and the log."""


class InWords(Exception):
    """A replica's constructor raises this instead of the exception that occurred in it: one line, for people."""


@contextlib.contextmanager
def told_in_words() -> Iterator[None]:
    """A context for the code that starts a replica: an exception in it is logged in full and raised as `InWords`."""
    try:
        yield
    except (Exception, SystemExit) as error:  # Ray would take a SystemExit for an intended end
        logger.exception("this replica cannot start")
        raise InWords(in_words(error)) from None


def in_words(error: BaseException) -> str:
    """One line: the exception's name (not of a `ValueError` or `OSError`), its message, and the remedy if known."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError):
        text = re.sub(r"^\[Errno \d+\] ", "", text)
    elif not (text and isinstance(error, ValueError)):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return _with_remedy(text)


def unexpected(error: Exception) -> StartFailed:
    """The `StartFailed` for an exception that Ray or Serve raised in this process. Its traceback goes to a file, which
    the message names.
    """
    with tempfile.NamedTemporaryFile("w", prefix="manta-serve-", suffix=".log", delete=False) as log:
        traceback.print_exception(error, file=log)
    cause = last_exception(str(error)) if isinstance(error, RayTaskError) else in_words(error)
    return StartFailed(f"the application did not start: {cause}. The whole story is in {log.name}")


def wait_until_running(name: str) -> None:
    """Returns when the application `name` runs. Raises `StartFailed` as soon as one of its replicas has failed.

    A thread asks Serve, because the answer may never come: if memory runs out Ray may end Serve's controller too, and
    only a new controller would answer. Meanwhile this thread reads the raylet's log.
    """
    outcome: queue.SimpleQueue[StartFailed | None] = queue.SimpleQueue()
    raylet = _Raylet(name)
    shown = worker.print_to_stdstream
    # Ray would print at length how a process ended; here one sentence says it.
    worker.print_to_stdstream = lambda *_, **__: None
    threading.Thread(target=_watch, args=(name, outcome), name="start", daemon=True).start()
    running = False
    while not running:
        try:
            failure = outcome.get(timeout=1)
            running = failure is None
        except queue.Empty:
            failure = raylet.killed()
        if failure is not None:
            raise failure
    worker.print_to_stdstream = shown


def _watch(name: str, outcome: queue.SimpleQueue[StartFailed | None]) -> None:
    """Puts None into `outcome` once the application runs, or the reason if it does not start."""
    begun = time.time()
    told = False
    try:
        while True:
            application = serve.status().applications.get(name)
            if application is None:
                outcome.put(StartFailed(f"the application {name!r} was removed from Serve while it started"))
                return
            failed = _failed_deployment(application)
            if failed is not None or application.status == "RUNNING":
                outcome.put(StartFailed(_sentence(*failed, begun)) if failed is not None else None)
                return
            waits = waiting_for_room(application)
            if waits is not None and not told:
                told = True
                logger.warning(waits)
            time.sleep(POLL_S)
    except Exception as error:
        outcome.put(unexpected(error))


class _Raylet:
    """Reads the log of this machine's raylet, from its end now on: if memory runs out the raylet ends processes, and
    only its log says so.
    """

    def __init__(self, application: str) -> None:
        folder = logs_folder()
        self._log = folder / "raylet.out" if folder is not None else None
        self._begin = self._log.stat().st_size if self._log is not None and self._log.is_file() else 0
        self._killed = re.compile(rf"Selected to kill: .*SERVE_REPLICA::{re.escape(application)}#(\w+)#")

    def killed(self) -> StartFailed | None:
        """The failure if the raylet has ended a replica of the application; else None."""
        if self._log is None or not self._log.is_file():
            return None
        found = self._killed.findall(self._log.read_bytes()[self._begin :].decode(errors="replace"))
        if not found:
            return None
        name = "engine" if "engine" in found else found[0]
        return StartFailed(f"the {name} did not start: {_FULL_MEMORY}. The whole story is in {self._log}")


def _failed_deployment(application: ApplicationStatusOverview) -> tuple[str, str] | None:
    """(name, Serve's message) of a deployment with a failed replica; None if there is none."""
    for name, deployment in application.deployments.items():
        if deployment.status == "DEPLOY_FAILED" or deployment.message.startswith(_RETRIES):
            return name, deployment.message
    return ("application", application.message) if application.status == "DEPLOY_FAILED" else None


def waiting_for_room(application: ApplicationStatusOverview, which: str | None = None) -> str | None:
    """A sentence if a replica waits because it claims more than the cluster has free now, with the remedy; else None.
    Looks at the deployment `which` alone, or at all.
    """
    for name, deployment in application.deployments.items():
        match = _NO_ROOM.search(deployment.message)
        if match is not None and which in (None, name):
            return (
                f"the {name} waits for room on the cluster: each of its replicas claims {match[1]}, and {match[2]} is "
                "free; end what else runs there, lower engine.num_threads, or add nodes"
            )
    return None


def _sentence(deployment: str, message: str, begun: float) -> str:
    """What failed, why, and where the log is; `message` is Serve's, and the start began at `begun` by the clock."""
    log = log_file(deployment, begun)
    cause = _cause_of_death(message, log) if _DIED.search(message) else last_exception(message)
    where = f". The whole story is in {log}" if log is not None else ""
    return f"the {deployment} did not start: {cause}{where}"


def last_exception(message: str) -> str:
    """The exception at the end of the tracebacks in `message`, with its name unless it is an `InWords`."""
    lines = _COLOUR.sub("", message).strip().splitlines()
    for index in range(len(lines) - 1, -1, -1):
        match = _EXCEPTION.fullmatch(lines[index])
        if match is not None and (match[2] is not None or index == len(lines) - 1):
            text = " ".join(" ".join([match[2] or "", *lines[index + 1 :]]).split())
            if match[1] == InWords.__name__:
                return text
            return _with_remedy(f"{match[1]}: {text}" if text else match[1])
    return " ".join(lines[-1:])


def _cause_of_death(message: str, log: pathlib.Path | None) -> str:
    """Why a process ended that left no exception."""
    crash = _CRASHED.search(log.read_text(errors="replace")) if log is not None else None
    if crash is not None:
        return f"its process crashed ({crash[1] or crash[2]})"
    if _NO_MEMORY.search(message):
        return _FULL_MEMORY
    return f"its process was killed while it started, as the system does when memory runs out; {_FREE_MEMORY}"


def _with_remedy(text: str) -> str:
    if _NO_MEMORY.search(text):
        return f"{text}; {_FREE_MEMORY}"
    if _NO_PORT.search(text):
        return f"{text.rstrip('.')}: another program uses the port; stop it, or choose another one with --port"
    if _NO_MODULE.search(text):
        return f"{text}; install Manta on every node of the cluster, in the same version"
    return text


def log_file(deployment: str, begun: float) -> pathlib.Path | None:
    """The log of the deployment's replica, if one has written to it on this machine since `begun` (seconds of the
    clock); else the log of Serve's controller.
    """
    folder = logs_folder()
    if folder is None:
        return None
    title = f":actor_name:ServeReplica:manta:{deployment}\n"
    newest_first = sorted(folder.glob("worker-*.err"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest_first:
        if path.stat().st_mtime < begun:
            break
        _, found, written = path.read_text(errors="replace").partition(title)
        if found and written.strip():  # not the title alone
            return path
    controllers = sorted(folder.glob("serve/controller_*.log"), key=lambda path: path.stat().st_mtime)
    return controllers[-1] if controllers else None


def logs_folder() -> pathlib.Path | None:
    """The folder of logs of the Ray that this process is connected to; None if it has none on this machine."""
    node = worker._global_node  # Ray has no public way to ask
    if node is None:
        return None
    folder = pathlib.Path(node.get_session_dir_path()) / "logs"
    return folder if folder.is_dir() else None
