"""One sequence's session in the grammar pool: what it wants, and the rows that have come for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from manta.structured.grammar_pool.grammar_worker import SessionStart
from manta.structured.masks import FAILED, FINISHED, MaskBuffer, forced_after

if TYPE_CHECKING:
    from manta.structured.grammar_pool.pool_worker import PoolWorker


class PoolSession:
    """One sequence's constraint, its worker and the rows that it waits for."""

    def __init__(self, session_id: int, start: SessionStart, buffer: MaskBuffer) -> None:
        self._buffer = buffer
        self.session_id = session_id
        self.start = start
        self.tokens: list[int] = []
        """Output tokens, after which the wanted row applies."""
        self.is_wanted = False
        self.drafts: list[int] = []
        """Proposed tokens after `tokens`. The token after each of them has a row too."""
        self.worker: PoolWorker | None = None
        self.slot = -1
        """Index of the wanted row in the buffer's `rows`."""
        self.number = 0
        """Job that fills the wanted row."""
        self.draft_slots: list[int] = []
        """Slots of the drafts' rows, as many as it needed at a time on its present worker."""
        self.drafts_number = 0
        """Job that fills the drafts' rows."""
        self.takes_drafts = True
        """False once a worker has died over a draft of this session."""
        self.num_held = 0
        """Number of leading output tokens that the worker was sent."""
        self.asked_at = 0.0
        """Time of the request for the row (monotonic clock, seconds)."""
        self.moved_at = 0.0
        """Time of the request or of the last move to another worker (monotonic clock, seconds)."""
        self.num_moves = 0
        """Moves since the request. Each one doubles the wait before the next, so that two slow workers do not pass a
        session back and forth.
        """
        self.attempts = 0
        """Number of workers that have died over the wanted row."""
        self.failure: str | None = None
        """Why the session failed, as far as the pool knows; `error` looks into the buffer too."""

    def is_ready(self) -> bool:
        """Whether the wanted row is there, or the session has failed."""
        if self.failure is not None:
            return True
        return self.worker is not None and bool(self._buffer.done[self.slot] == self.number)

    def is_complete(self) -> bool:
        """Whether the wanted row is ready, and all drafts' rows that will come."""
        if not self.is_ready():
            return False
        slots = self.draft_slots[: len(self.drafts)]  # workers fill them in this order
        if self.failure is not None or not slots or self._buffer.flags[self.slot]:
            return True
        return bool(self._buffer.done[slots[-1]] == self.drafts_number)

    def error(self) -> str | None:
        """Why the session failed, or None. Call it once the row is ready."""
        if self.failure is None and self._buffer.flags[self.slot] & FAILED:
            self.failure = self._buffer.error(self.slot)
        return self.failure

    def draft_rows(self) -> tuple[list[int], bool]:
        """Indices in `buffer.rows` of the masks after the first draft, the second and so on, as far as they are there
        and the grammar allows the draft. The bool is True if only the end may follow the last of these drafts. Call it
        once the wanted row is ready.
        """
        buffer = self._buffer
        rows: list[int] = []
        for slot in self.draft_slots[: len(self.drafts)]:
            if buffer.done[slot] != self.drafts_number:
                break
            if buffer.flags[slot]:
                return rows, bool(buffer.flags[slot] & FINISHED)
            rows.append(slot)
        return rows, False

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that the grammar forces after output `tokens`, as far as a worker has found them. `tokens` continues
        the output of the last `prepare`. Never waits.
        """
        known = len(self.tokens)
        gained = list(tokens[known:])
        if list(tokens[:known]) != self.tokens or not self.is_ready() or self.failure is not None:
            return []
        for num_drafts in (len(gained), len(gained) - 1, 0):  # looked for after the output, and after all drafts
            if 0 <= num_drafts <= len(self.drafts) and self.drafts[:num_drafts] == gained[:num_drafts]:
                forced = forced_after(gained[num_drafts:], self._continuations(num_drafts))
                if forced:
                    return forced
        return []

    def _continuations(self, num_drafts: int) -> list[list[int]]:
        """The continuations (`MaskBuffer.forced`) after the output tokens and `num_drafts` drafts, if they were
        found.
        """
        slot, number = self.slot, self.number
        if num_drafts:
            if num_drafts > len(self.draft_slots):
                return []
            slot, number = self.draft_slots[num_drafts - 1], self.drafts_number
        return self._buffer.forced(slot) if self._buffer.forced_done[slot] == number else []
