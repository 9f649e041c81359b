"""The request log: one JSON object a line on stdout, which Ray keeps with the logs of the replica.

The ingress writes a line for each request that ended; ingress and engines write one for what befell a request on its
way: `continued`, `preempted`, `aborted`, `failed`. All carry the `request_id` that the client reads as x-request-id.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

_ENGINE_NAME = re.compile(r"(?P<id>.*)-[0-9a-f]{8}-\d+(/\d+)?", re.DOTALL)
"""What `endpoints/generation.py`, `serve/submission.py` and `serve/prompt_run.py` make of a request's id: a body's own
letters, the number of its prompt, and how often it went on.
"""


_logger = logging.getLogger("manta.requests")


def open_request_log() -> logging.Logger:
    """Before it is called in a process, nothing is written there."""
    if not _logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        _logger.addHandler(handler)
        _logger.setLevel(logging.INFO)
        _logger.propagate = False
    return _logger


def log_event(event: str, engine_request: str, **fields: Any) -> None:
    """Writes what befell a request, which engines know as `engine_request`. Fields that are None are left out."""
    if not _logger.isEnabledFor(logging.INFO):
        return
    entry = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "request_id": request_id_of(engine_request),
        "event": event,
        "engine_request": engine_request,
        **{name: value for name, value in fields.items() if value is not None},
    }
    _logger.info(json.dumps(entry))


def request_id_of(engine_request: str) -> str:
    """The id that the client knows. A name that no HTTP request has, as a batch's, is its own."""
    named = _ENGINE_NAME.fullmatch(engine_request)
    return engine_request if named is None else named["id"]
