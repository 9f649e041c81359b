"""The reason why a replica did not start, in one sentence: the replica writes it, and the driver finds it in Serve's
report.

Serve reports a failed constructor as text only: tracebacks of Ray and Serve around the replica's own, whose last line
names the exception. `told_in_words` makes that line a sentence. `cluster/serve/starting/start_watch.py` decides which
failures end a start.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import tempfile
from collections.abc import Iterator

from ray._private import worker
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.schema import ApplicationStatusOverview

from manta.structured.visible_logs import logger_of
from manta.structured.visible_text import visible_traceback

logger = logger_of(__name__)

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Z]\w*)(?:: (.*))?")
"""Line of a traceback that names the exception: the only line that is not indented."""
_DIED = re.compile(r"ActorDiedError|ActorUnavailableError|RayActorError|WorkerCrashedError|OutOfMemoryError")
_CRASHED = re.compile(r"\*\*\* (SIG[A-Z]+) received|Fatal Python error: (.+)")
_NO_MEMORY = re.compile(r"MemoryError|can't allocate memory|Cannot allocate memory|bad_alloc|running low on memory")
_NO_PORT = re.compile(r"Failed to bind to address")
"""Text of Serve's proxy if its port is taken."""
_NO_MODULE = re.compile(r"No module named 'manta\b")
_NO_ROOM = re.compile(r"Resources required for each replica: (.*), total resources available: (.*?)\. Use")
"""Serve's status message of a deployment that has waited for half a minute, perhaps for nodes that start."""

_FREE_MEMORY = "free some memory, lower kv_cache_bytes, or take a smaller model (manta check says what it takes)"
FULL_MEMORY = f"Ray ended its process because the machine's memory was full; {_FREE_MEMORY}"


class StartFailed(Exception):
    """The application did not start. The message is one paragraph: what failed, the remedy if known, and the log."""


class InWords(Exception):
    """A replica's constructor raises this instead of the exception that occurred in it: one line, for people."""


@contextlib.contextmanager
def told_in_words() -> Iterator[None]:
    """Logs an exception of the code that starts a replica in full, and raises it as `InWords`."""
    try:
        yield
    except (Exception, SystemExit) as error:  # Ray would take a SystemExit for an intended end
        logger.exception("this replica cannot start")
        raise InWords(in_words(error)) from None


def in_words(error: BaseException) -> str:
    """Returns an exception as one line: its name unless it is a `ValueError` or `OSError`, its message, and a remedy if
    known. Of an error of Ray it is the first sentence, or the cause that Ray quotes below it.
    """
    if isinstance(error, RayError):
        return _ray_error_in_words(error)
    text = " ".join(str(error).split())
    if isinstance(error, OSError):
        text = re.sub(r"^\[Errno \d+\] ", "", text)
    elif not (text and isinstance(error, ValueError)):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return _with_remedy(text)


def _ray_error_in_words(error: RayError) -> str:
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return in_words(error.cause)
    is_quoting = isinstance(error, RayTaskError) or (isinstance(error, RayActorError) and error.actor_init_failed)
    if is_quoting:
        return last_exception(str(error))
    sentence = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
    return _with_remedy(f"{type(error).__name__}: {sentence}" if sentence else type(error).__name__)


def unexpected(error: Exception) -> StartFailed:
    """Returns the `StartFailed` for an exception that Ray or Serve raised in this process."""
    return StartFailed(f"the application did not start: {in_words_with_story(error)}")


def in_words_with_story(error: Exception) -> str:
    """Returns `in_words(error)` and where the traceback is: in a new file, or below if none can be written. It is for
    the person who runs the command, and not for clients.
    """
    try:
        with tempfile.NamedTemporaryFile("w", prefix="manta-serve-", suffix=".log", delete=False) as log:
            log.write(f"{visible_traceback(error)}\n")
    except OSError as failure:
        return f"{in_words(error)}. No log was written ({failure.strerror}):\n{visible_traceback(error)}"
    return f"{in_words(error)}. The whole story is in {log.name}"


def waiting_for_room(application: ApplicationStatusOverview, which: str | None = None) -> str | None:
    """Returns a sentence with the remedy if a replica claims more than the cluster has free now, else None.

    It considers only the deployment `which`, or all if that is None. A replica whose claim is free only waits for its
    process.
    """
    for name, deployment in application.deployments.items():
        match = _NO_ROOM.search(deployment.message)
        if match is not None and which in (None, name) and not _has_room(match[1], match[2]):
            return (
                f"the {name} waits for room on the cluster: each of its replicas claims {match[1]}, and {match[2]} is "
                "free; end what else runs there, lower engine.num_threads, or add nodes"
            )
    return None


def _has_room(claimed: str, free: str) -> bool:
    """Returns whether every resource that is claimed is free, both as JSON objects of amounts by name."""
    amounts = json.loads(free)
    return all(amounts.get(name, 0.0) >= amount for name, amount in json.loads(claimed).items())


def cause_and_log(application: str, deployment: str, message: str, begun: float) -> str:
    """Returns why a replica of the deployment did not start, and where its log is.

    `message` is Serve's status message. `begun` is the start's time in seconds since the epoch.
    """
    log = log_file(application, deployment, begun)
    where = f". The whole story is in {log}" if log is not None else ""
    return f"{cause_of(message, log)}{where}"


def cause_of(message: str, log: pathlib.Path | None = None) -> str:
    """Returns why a replica did not start, from Serve's status message and the replica's log, if that is known."""
    return _cause_of_death(message, log) if _DIED.search(message) else last_exception(message)


def last_exception(message: str) -> str:
    """Returns the exception at the end of the tracebacks in `message`, with its name unless it is an `InWords`."""
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
    """Returns the reason why a process ended without an exception."""
    crash = _CRASHED.search(log.read_text(errors="replace")) if log is not None else None
    if crash is not None:
        return f"its process crashed ({crash[1] or crash[2]})"
    if _NO_MEMORY.search(message):
        return FULL_MEMORY
    return f"its process was killed while it started, as the system does when memory runs out; {_FREE_MEMORY}"


def _with_remedy(text: str) -> str:
    if _NO_MEMORY.search(text):
        return f"{text}; {_FREE_MEMORY}"
    if _NO_PORT.search(text):
        return f"{text.rstrip('.')}: another program uses the port; stop it, or choose another one with --port"
    if _NO_MODULE.search(text):
        return f"{text}; install Manta on every node of the cluster, in the same version"
    return text


def log_file(application: str, deployment: str, begun: float) -> pathlib.Path | None:
    """Returns the log of the deployment's replica, if one has written to it on this machine since `begun` (seconds
    since the epoch); else the log of Serve's controller.
    """
    folder = logs_folder()
    if folder is None:
        return None
    title = f":actor_name:ServeReplica:{application}:{deployment}\n"
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
    """Returns the log folder of the Ray that this process is connected to; None if it has none on this machine."""
    node = worker._global_node  # Ray has no public way to ask
    if node is None:
        return None
    folder = pathlib.Path(node.get_session_dir_path()) / "logs"
    return folder if folder.is_dir() else None
