"""The request log of this process, as a test reads it."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from typing import Any

from manta.cluster.telemetry.request_log import open_request_log


@contextlib.contextmanager
def request_log() -> Iterator[list[dict[str, Any]]]:
    """Yields a list that gets each entry that is written meanwhile."""
    lines: list[dict[str, Any]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(json.loads(record.getMessage()))  # type: ignore[method-assign]
    logger = open_request_log()
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def events(lines: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    """Returns the entries of one event."""
    return [line for line in lines if line.get("event") == event]
