"""The request log: one JSON object per line, in a file of each replica that is rotated by size.

The ingress writes a line for each ended request. Ingress and engines write one for each event on its way: `continued`,
`preempted`, `aborted`, `failed`. Each line has the `request_id` that the client reads as x-request-id. A process that
names no file, as in tests, writes to its standard output. `cluster/cli/request_lines.py` reads the files.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import math
import pathlib
import re
import sys
import time
import urllib.parse
from typing import Any

from manta.structured.visible_logs import JSON_LOG, logger_of
from manta.structured.visible_text import cut

MAX_PATH = 200
"""Most characters of a request's path, because anybody may send one of 8 KB."""
MAX_TEXT = 1000
"""Most characters of any other text in a line, such as the reason of a failure."""
MAX_FILE_BYTES = 16 * 2**20
"""Size at which a replica's file is rotated."""
NUM_OLD_FILES = 3
"""Rotated files of a replica that are kept: its log takes 64 MiB at most, some 250,000 requests."""
EXAMPLE_INTERVAL_S = 60.0
"""Seconds between two lines about requests that no route takes."""
LOST_INTERVAL_S = 60.0
"""Seconds between two warnings that lines are lost."""
_ENGINE_NAME = re.compile(r"(?P<id>.*)-[0-9a-f]{8}-\d+(~\d+)?(/\d+)?", re.DOTALL)
"""Form of the ids that `cluster/http/endpoints/generation.py` and `cluster/serve/requests/` make from a request's id.
They append random digits for the body, the number of the prompt, the epoch of an owner that is not the first one, and
the number of continuations.
"""


_logger = logging.getLogger(JSON_LOG)
_own_logger = logger_of(__name__)


def log_folder(logs: pathlib.Path, application: str) -> pathlib.Path:
    """Returns the folder of an application's request logs, below Ray's folder of logs."""
    return logs / "manta" / urllib.parse.quote(application, safe="")


def keep_request_log(path: pathlib.Path, max_bytes: int = MAX_FILE_BYTES) -> None:
    """Makes this process write its request log to a file from now on, which is rotated at `max_bytes`. Raises `OSError`
    if it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"maxBytes": max_bytes, "backupCount": NUM_OLD_FILES, "encoding": "ascii"}
    handler = logging.handlers.RotatingFileHandler(path, **options)
    handler.handleError = _Losses().note  # type: ignore[method-assign]
    _open(handler)


class _Losses:
    """The lines that could not be written, because the disk is full. Requests go on."""

    def __init__(self) -> None:
        self._num_lost = 0
        self._next_s = -math.inf

    def note(self, record: logging.LogRecord) -> None:
        """Logs why lines are lost, once in `LOST_INTERVAL_S`. `logging` would print a traceback for each of them."""
        self._num_lost += 1
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LOST_INTERVAL_S
            error = sys.exception()
            why = error.strerror if isinstance(error, OSError) else type(error).__name__
            _own_logger.warning("%s: %d lines of the request log are lost so far", why, self._num_lost)


def open_request_log() -> logging.Logger:
    """Returns the log; before the first call in a process, nothing is written there."""
    if not _logger.handlers:
        _open(logging.StreamHandler(sys.stdout))
    return _logger


def _open(handler: logging.Handler) -> None:
    handler.setFormatter(logging.Formatter("%(message)s"))
    _logger.handlers[:] = [handler]
    _logger.setLevel(logging.INFO)
    _logger.propagate = False


def log_request(request_id: str, path: str, **fields: Any) -> None:
    """Writes the line of a request that has ended. Leaves out fields that are None."""
    _write({"request_id": request_id, "path": cut(path, MAX_PATH), **fields})


def log_event(event: str, engine_request: str, **fields: Any) -> None:
    """Writes an event of a request, which engines know as `engine_request`. Leaves out fields that are None."""
    if _logger.isEnabledFor(logging.INFO):
        request_id = request_id_of(engine_request)
        _write({"request_id": request_id, "event": event, "engine_request": engine_request, **fields})


def _write(fields: dict[str, Any]) -> None:
    entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    for name, value in fields.items():
        if value is not None:
            entry[name] = cut(value, MAX_TEXT) if isinstance(value, str) else value
    _logger.info(json.dumps(entry))


class Examples:
    """Decides which of many requests that no route takes gets a line: one in `EXAMPLE_INTERVAL_S`."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._num_others = 0

    def take(self) -> int | None:
        """Returns the number of requests since the last one that got a line, if this one gets one; else None."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            self._num_others += 1
            return None
        others, self._num_others, self._next_s = self._num_others, 0, now_s + EXAMPLE_INTERVAL_S
        return others


def request_id_of(engine_request: str) -> str:
    """Returns the id that the client knows. An id in another form, such as a batch line's, is returned as it is."""
    named = _ENGINE_NAME.fullmatch(engine_request)
    return engine_request if named is None else named["id"]
