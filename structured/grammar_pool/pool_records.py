"""The grammar pool's records of its workers and sessions. `structured/grammar_pool/pool.py` alone writes them."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from structured.grammar_pool.grammar_worker import Job, SessionStart
from structured.grammar_pool.transport import Transport


class RetiredSlot(NamedTuple):
    """A slot that a session has left, and that its worker may still write to."""

    number: int
    """The slot is free once the worker acknowledges the message of this number; -1: once the worker is dead."""
    slot: int
    session_id: int


class PoolWorker:
    """One worker: what it was sent and which sessions it holds."""

    def __init__(self, transport: Transport, index: int) -> None:
        self.transport = transport
        self.index = index
        self.started_at = time.monotonic()
        self.sessions: dict[int, PoolSession] = {}
        self.num_sent = 0
        self.under_way: deque[tuple[int, float]] = deque()
        """(number, time of sending) of each message that the worker has not acknowledged."""
        self.jobs: list[Job] = []
        self.ended: list[int] = []
        """`jobs` and `ended` are those of the next message to the worker."""
        self.busy_with = -1
        """The session that the worker worked for when the pool last looked; -1 for none."""
        self.busy_since = self.started_at
        """When the pool first saw the worker busy with that session."""
        self.retired: list[RetiredSlot] = []


class PoolSession:
    """One sequence's constraint: which worker holds it, and which rows it waits for."""

    def __init__(self, session_id: int, start: SessionStart) -> None:
        self.session_id = session_id
        self.start = start
        self.tokens: list[int] = []
        """Output tokens; the wanted row is the mask of the token after them."""
        self.is_wanted = False
        self.drafts: list[int] = []
        """Tokens that may follow `tokens`; there is a row for the token after each of them too."""
        self.worker: PoolWorker | None = None
        self.slot = -1
        self.number = 0
        """Number of the job that fills the wanted row."""
        self.draft_slots: list[int] = []
        """Slots for the drafts' rows: as many as it has needed at a time on its present worker."""
        self.drafts_number = 0
        """Number of the job that fills the drafts' rows."""
        self.takes_drafts = True
        """False once a worker has died while it worked on a draft of this session."""
        self.num_held = 0
        """Leading tokens that were sent to the worker."""
        self.asked_at = 0.0
        """When the row was asked for; like the next, by the monotonic clock in seconds."""
        self.moved_at = 0.0
        """When the row was asked for, or the session moved to its present worker."""
        self.num_moves = 0
        """Moves since the row was asked for. Each one doubles the wait before the next, so that two slow workers do not
        pass a session back and forth.
        """
        self.attempts = 0
        """Workers that have died over the wanted row."""
        self.error: str | None = None
