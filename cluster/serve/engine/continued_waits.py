"""Measures how long requests that continue on this engine wait for their first token there, and for what.

The step thread calls it. An ingress makes phases of a takeover of it (`cluster/serve/requests/takeover.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from manta.cluster.engine.request import SequenceOutput, Waits
from manta.cluster.engine.sequence import Sequence


class _Times(msgspec.Struct):
    """Times of one request, on `time.monotonic`'s clock."""

    arrived: float
    added: float
    scheduled: float | None = None
    """Begin of the first step that computes it."""


class ContinuedWaits:
    """The continued requests that have no token yet."""

    def __init__(self) -> None:
        self._times: dict[str, _Times] = {}

    def added(self, request_id: str, arrived: float, now: float) -> None:
        """Notes that the engine has queued a request, whose call arrived at `arrived`."""
        self._times[request_id] = _Times(arrived, now)

    def stepped(self, begun: float, now: float, outputs: list[SequenceOutput], running: Iterable[Sequence]) -> None:
        """Notes a step that began at `begun` and produced `outputs`. Sets `waits` of a request's first tokens."""
        if not self._times:
            return
        for sequence in running:
            times = self._times.get(sequence.request_id)
            if times is not None and times.scheduled is None:
                times.scheduled = begun
        for output in outputs:
            if output.token_ids and (times := self._times.pop(output.request_id, None)) is not None:
                scheduled = begun if times.scheduled is None else times.scheduled
                output.waits = Waits(times.added - times.arrived, scheduled - times.added, now - scheduled)

    def ended(self, request_id: str) -> None:
        """Notes the end of a request, which may have no token."""
        self._times.pop(request_id, None)
