"""The request log: one JSON object per line on stdout, which Ray keeps with the logs of the replica.

The ingress writes a line for each ended request. Ingress and engines write one for each event on its way: `continued`,
`preempted`, `aborted`, `failed`. Each line has the `request_id` that the client reads as x-request-id.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

_ENGINE_NAME = re.compile(r"(?P<id>.*)-[0-9a-f]{8}-\d+(~\d+)?(/\d+)?", re.DOTALL)
"""Form of the ids that `cluster/http/endpoints/generation.py` and `cluster/serve/requests/` make from a request's id.
They append random digits for the body, the number of the prompt, the epoch of an owner that is not the first one, and
the number of continuations.
"""


_logger = logging.getLogger("manta.requests")


def open_request_log() -> logging.Logger:
    """Returns the log; before the first call in a process, nothing is written there."""
    if not _logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        _logger.addHandler(handler)
        _logger.setLevel(logging.INFO)
        _logger.propagate = False
    return _logger


def log_event(event: str, engine_request: str, **fields: Any) -> None:
    """Writes an event of a request, which engines know as `engine_request`. Leaves out fields that are None."""
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
    """Returns the id that the client knows. An id in another form, such as a batch line's, is returned as it is."""
    named = _ENGINE_NAME.fullmatch(engine_request)
    return engine_request if named is None else named["id"]
