"""Helpers for tests of the grammar pool: pools over threads, processes and actors, sessions, and waiting for rows."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import time
from collections.abc import Callable

import numpy as np
import pytest

from manta.structured.backend import Grammar, make_backend
from manta.structured.constraint import ConstraintSpec
from manta.structured.grammar_pool.pool import GrammarPool
from manta.structured.grammar_pool.tracked_session import SessionStart, TrackedSession
from manta.structured.pool_config import PoolConfig, PoolForm
from manta.structured.vocabulary import Vocabulary
from tests.patience import PATIENCE_S, wait_until
from tests.sharing import shared

DEMO = pathlib.Path(__file__).parents[1] / "configs" / "demo" / "target"
VOCAB_SIZE = 4160
EOS = 2

MakePool = Callable[..., GrammarPool]
"""The type of the fixture `make_pool`."""

PLUGIN = pathlib.Path(__file__).parent / "plugin"
MAX_IDLE = 5
"""The most unused pools that are kept for a later test; each has processes."""
SOON_S = 0.02
"""Seconds that a row waits for a busy worker before its session moves, in pools of tests about such moves. A pool whose
sessions have moved has more workers than a new one, so no other test can use it.
"""
IDLE_S = 10.0
"""Seconds after which a pool that still has sessions is not used again."""


def share_ray() -> None:
    """Starts a Ray for this process unless one runs: that of `manta serve`, whose actors find the example backend."""
    from manta.cluster import own_ray

    def start() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGIN), str(PLUGIN.parents[1])]))
            own_ray.start(num_cpus=4)

    shared("ray", start, lambda _: own_ray.stop())


class Pools:
    """Makes grammar pools of one form. Over processes or actors, a pool that a test leaves as it got it serves the next
    test that asks for the same, since they take seconds to start.
    """

    def __init__(self, vocabulary: Vocabulary, form: PoolForm) -> None:
        self._vocabulary = vocabulary
        self._form = form
        self._used: list[tuple[tuple, GrammarPool]] = []
        self._idle: dict[tuple, GrammarPool] = {}
        """Maps the arguments of `make` to an unused pool that was made with them, the oldest first."""

    def make(self, num_sessions: int = 16, num_drafts: int = 0, num_forced: int = 0, **options: float) -> GrammarPool:
        """Returns a pool whose workers are ready. By default it waits for a mask for as long as tests do, and sessions
        stay with workers that are merely slow.
        """
        config = PoolConfig(**{"mask_seconds": PATIENCE_S, "migrate_seconds": 30.0} | options)  # type: ignore[arg-type]
        asked = (config, num_sessions, num_drafts, num_forced)
        pool = self._idle.pop(asked, None)
        if pool is None:
            pool = GrammarPool(config, self._vocabulary, num_sessions, self._form, num_drafts, num_forced)
        self._used.append((asked, pool))
        wait_until(lambda: all(worker.transport.is_ready() for worker in pool.workers.active))
        return pool

    def give_back(self) -> None:
        """Keeps or closes the pools that a test used. Called at the end of the test."""
        for asked, pool in self._used:
            if self._form != "threads" and asked not in self._idle and is_as_new(pool):
                self._idle[asked] = pool
            else:
                pool.close()
        self._used = []
        while len(self._idle) > MAX_IDLE:
            self._idle.pop(next(iter(self._idle))).close()

    def close(self) -> None:
        for pool in self._idle.values():
            pool.close()


def is_as_new(pool: GrammarPool) -> bool:
    """Ends the pool's sessions. Returns whether it is in the state of a new one then."""
    for session_id in pool.session_ids:
        pool.end(session_id)
    pool.prepare([])  # sends the news
    deadline = time.monotonic() + IDLE_S
    workers = pool.workers
    while (workers.num_replaced, workers.given_up, len(workers.active)) == (0, [], pool.num_workers):
        if pool.num_slots_in_use == 0:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return False


def example(**options: object) -> SessionStart:
    text = json.dumps({"allowed": [5, 6, 7], **options})
    return SessionStart(ConstraintSpec(kind="regex", text=text, backend="example"), text.encode(), (EOS,))


def llguidance(regex: str, **fields: object) -> SessionStart:
    return regex_of("llguidance", regex, **fields)


def regex_of(backend: str, regex: str, **fields: object) -> SessionStart:
    from manta.structured.backends.choose import Backends

    spec = ConstraintSpec(kind="regex", text=regex, backend=backend, **fields)
    resolved = Backends(Vocabulary.load(str(DEMO), VOCAB_SIZE, (EOS,))).resolve(spec)
    return SessionStart(resolved.spec, resolved.compiled, (EOS, 40))


def bits(row: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def allowed(pool: GrammarPool, session_id: int) -> list[int]:
    return bits(pool.buffer.rows[pool.session(session_id).slot])


def allowed_behind(start: SessionStart, vocabulary: Vocabulary, tokens: list[int]) -> list[int]:
    """By a session that was made for these tokens alone."""
    tracked = TrackedSession(start, make_grammar(start, vocabulary), vocabulary)
    tracked.advance(0, tokens)
    row = np.zeros(VOCAB_SIZE // 32, dtype=np.int32)
    tracked.fill(row)
    return bits(row)


@functools.cache
def make_grammar(start: SessionStart, vocabulary: Vocabulary) -> Grammar:
    return make_backend(start.spec.backend, vocabulary).load(start.spec, start.compiled)


def spelled(vocabulary: Vocabulary, text: str) -> list[int]:
    """A token for each byte."""
    single = {token: token_id for token_id, token in reversed(list(enumerate(vocabulary.tokens)))}
    return [single[bytes([byte])] for byte in text.encode()]


def finish(pool: GrammarPool, session_ids: list[int]) -> None:
    """Waits for every row, as the engine does: step after step."""
    deadline = time.monotonic() + PATIENCE_S
    missing = session_ids
    while missing:
        assert time.monotonic() < deadline, f"no row for {missing}"
        pool.supervise()
        missing = pool.wait(session_ids, 0.01, lambda count: count == 0)


def finish_drafts(pool: GrammarPool, session_ids: list[int]) -> None:
    """Waits for every row of their drafts too."""
    finish(pool, session_ids)
    wait_until(lambda: not pool.wait(session_ids, 0.01, lambda count: count == 0, for_drafts=True))


def finish_all(pool: GrammarPool) -> None:
    """Waits until the workers have done all that they were told to."""
    workers = pool.workers.active
    wait_until(lambda: all(pool.buffer.acknowledged[worker.index] == worker.num_sent for worker in workers))


def end_all(pool: GrammarPool) -> None:
    """Nothing may be left: every slot comes back."""
    for session_id in pool.session_ids:
        pool.end(session_id)
    pool.start(10**6, example())  # a message to each worker carries the news
    for _ in range(8):
        pool.prepare([(10**6, [])])
        finish(pool, [10**6])
        pool.end(10**6)
        pool.start(10**6, example())
    pool.end(10**6)
    deadline = time.monotonic() + PATIENCE_S
    while pool.num_slots_in_use > len(
        pool.workers.active
    ):  # an idle worker hears of the last end with its next message
        assert time.monotonic() < deadline, f"{pool.num_slots_in_use} slots leaked"
        time.sleep(0.01)
        pool.supervise()  # as the engine does with every step: a worker that died over rows nobody wants is replaced
    assert pool.num_lost_slots == 0
