"""The pool's records of its workers and sessions, which only `structured/grammar_pool/pool.py` changes."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from manta.structured.grammar_pool.grammar_worker import Job, SessionStart
from manta.structured.grammar_pool.transport import Transport


class RetiredSlot(NamedTuple):
    """A slot that a session has left and its worker may still write."""

    number: int
    """The worker's acknowledgement of this message frees the slot; with -1, the worker's death does."""
    slot: int
    session_id: int


class PoolWorker:
    """One worker, the messages to it, and its sessions."""

    def __init__(self, transport: Transport, index: int) -> None:
        self.transport = transport
        self.index = index
        self.started_at = time.monotonic()
        self.sessions: dict[int, PoolSession] = {}
        self.num_sent = 0
        self.under_way: deque[tuple[int, float]] = deque()
        """Number and time of sending of each unacknowledged message."""
        self.jobs: list[Job] = []
        self.ended: list[int] = []
        """`jobs` and `ended` form the worker's next message."""
        self.busy_with = -1
        """Session that the worker was busy with at the pool's last look; -1 for none."""
        self.busy_since = self.started_at
        """Time at which the pool first saw the worker busy with that session (monotonic clock, seconds)."""
        self.retired: list[RetiredSlot] = []


class PoolSession:
    """One sequence's constraint, its worker and the rows that it waits for."""

    def __init__(self, session_id: int, start: SessionStart) -> None:
        self.session_id = session_id
        self.start = start
        self.tokens: list[int] = []
        """Output tokens, after which the wanted row applies."""
        self.is_wanted = False
        self.drafts: list[int] = []
        """Proposed tokens after `tokens`. The token after each of them has a row too."""
        self.worker: PoolWorker | None = None
        self.slot = -1
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
        self.error: str | None = None
