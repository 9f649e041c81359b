"""Rows that a grammar worker fills together equal those that it fills one by one, and a session fails alone. Grammar
workers that are processes start with any vocabulary, replace one another, and end with the pool.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from manta.structured.backends.llguidance import LLGuidanceBackend, LLGuidanceSession
from manta.structured.grammar_pool.pool import GrammarPool
from manta.structured.grammar_pool.tracked_session import TrackedSession
from manta.structured.masks import row_words
from manta.structured.pool_config import PoolConfig
from manta.structured.vocabulary import Vocabulary
from tests.grammar_pools import VOCAB_SIZE, allowed, example, finish, llguidance
from tests.patience import wait_until

pytestmark = pytest.mark.usefixtures("plugin")
REGEXES = ("[0-9]{1,40}", "(ab?c|[x-z]+)*", "a+b*", "[a-z ]{3,}", "(yes|no|maybe)+", "1+2?", "\\w+", "[^a]*b")
NUM_STEPS = 24


def test_rows_filled_together_equal_rows_filled_alone(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, fill_all = [], LLGuidanceSession.fill_all

    def counted(sessions: Sequence[LLGuidanceSession]) -> tuple[np.ndarray, list[Exception | None]]:
        batches.append(len(sessions))
        return fill_all(sessions)

    monkeypatch.setattr(LLGuidanceSession, "fill_all", staticmethod(counted))
    pool = GrammarPool(PoolConfig(num_workers=1), vocabulary, len(REGEXES), form="threads")
    backend, rng = LLGuidanceBackend(vocabulary), random.Random(0)
    starts = [llguidance(regex) for regex in REGEXES]
    alone = [TrackedSession(start, backend.load(start.spec, start.compiled), vocabulary) for start in starts]
    outputs: list[list[int]] = [[] for _ in starts]
    for index, start in enumerate(starts):
        pool.start(index, start)
    going_on = set(range(len(starts)))
    for _ in range(NUM_STEPS):
        pool.prepare([(index, outputs[index]) for index in going_on])
        finish(pool, sorted(going_on))
        for index in sorted(going_on):
            assert pool.session(index).error() is None
            tracked, row = alone[index], np.zeros(row_words(VOCAB_SIZE), np.int32)
            tracked.advance(len(tracked.tokens), outputs[index][len(tracked.tokens) :])
            if tracked.flags():
                going_on.discard(index)
                continue
            tracked.fill(row)
            slot = pool.session(index).slot
            assert np.array_equal(pool.buffer.rows[slot], row), REGEXES[index]
            text = [token for token in allowed(pool, index) if token not in starts[index].end_token_ids]
            if text:
                outputs[index] = [*outputs[index], rng.choice(text)]
            else:
                going_on.discard(index)
    assert max(batches, default=0) > 1
    pool.close()


@pytest.mark.parametrize("how", [{"at": {"6": "raise"}}, {"returned": [6]}], ids=["raises", "returns"])
def test_a_session_that_fails_in_a_batch_fails_alone(vocabulary: Vocabulary, how: dict[str, object]) -> None:
    pool = GrammarPool(PoolConfig(num_workers=1), vocabulary, 4, form="threads")
    words = row_words(VOCAB_SIZE)
    for session_id in range(4):
        pool.start(session_id, example(num_words=words, **(how if session_id == 2 else {})))
    outputs = {session_id: [5] * step for step in range(7) for session_id in range(4)}
    for step in range(7):
        pool.prepare([(session_id, outputs[session_id][:step]) for session_id in range(4)])
        finish(pool, list(range(4)))
    assert sys.modules["manta_example"].JointExampleSession.num_batches > 0
    assert "as it was told to" in (pool.session(2).error() or "")
    for session_id in (0, 1, 3):
        assert pool.session(session_id).error() is None
        assert allowed(pool, session_id) == [5, 6, 7]
        assert pool.buffer.done[pool.session(session_id).slot] == pool.session(session_id).number
    pool.close()


def test_processes_take_a_large_vocabulary_replace_each_other_and_end_with_the_pool(vocabulary: Vocabulary) -> None:
    """A vocabulary of megabytes does not fit into a socket at once."""
    large = Vocabulary(vocabulary.tokenizer_json + " " * (8 << 20), vocabulary.vocab_size, vocabulary.eos_token_ids)
    pool = GrammarPool(PoolConfig(num_workers=1), large, 2, form="processes")
    wait_until(lambda: all(worker.transport.is_ready() for worker in pool.workers.active))
    pool.start(0, llguidance("[0-9]{4}"))
    pool.prepare([(0, [])])
    finish(pool, [0])
    assert pool.session(0).error() is None
    assert pool.workers.num_replaced == 0
    digits = allowed(pool, 0)
    transports = [worker.transport for worker in pool.workers.active]
    assert transports[0].pid is not None
    os.kill(transports[0].pid, signal.SIGKILL)
    wait_until(lambda: not transports[0].is_alive())
    pool.prepare([(0, digits[:1])])
    finish(pool, [0])
    assert pool.session(0).error() is None
    assert allowed(pool, 0) == digits
    assert pool.workers.num_replaced == 1
    transports += [worker.transport for worker in pool.workers.active]
    pool.close()
    assert not any(each.is_alive() for each in transports)
