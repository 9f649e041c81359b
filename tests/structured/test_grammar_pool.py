"""The grammar pool keeps every session but the guilty one: if a worker dies, hangs or is late, others take its
sessions.

The same tests run over threads and over Ray actors. The example backend (`tests/plugin`) misbehaves on request.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import socket
import struct
import tempfile
import time

import numpy as np
import pytest

from manta.structured.backend import Grammar
from manta.structured.backends.llguidance import ROW_BYTES, LLGuidanceBackend
from manta.structured.constraint import ConstraintSpec
from manta.structured.grammar_pool.grammar_worker import GrammarWorker, Job, Message
from manta.structured.grammar_pool.pool import GrammarPool
from manta.structured.grammar_pool.tracked_session import SessionStart, TrackedSession
from manta.structured.grammar_pool.transport import ActorTransport, ThreadTransport
from manta.structured.masks import FAILED, FINISHED, BufferShape, MaskBuffer
from manta.structured.pool_config import PoolConfig
from manta.structured.vocabulary import Vocabulary
from tests.grammar_pools import (
    EOS,
    SOON_S,
    VOCAB_SIZE,
    MakePool,
    allowed,
    allowed_behind,
    bits,
    end_all,
    example,
    finish,
    llguidance,
    spelled,
)
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("plugin")
ACTORS = pytest.mark.parametrize("make_pool", ["actors"], indirect=True)


def test_rows_arrive_and_follow_the_tokens(make_pool: MakePool) -> None:
    pool = make_pool()
    for session_id in range(6):
        pool.start(session_id, example(allowed=[10 + session_id, 100 + session_id], length=3))
    outputs: list[list[int]] = [[] for _ in range(6)]
    for step in range(4):
        pool.prepare([(session_id, outputs[session_id]) for session_id in range(6)])
        finish(pool, list(range(6)))
        for session_id in range(6):
            assert pool.session(session_id).error() is None
            if step == 3:
                assert pool.buffer.flags[pool.session(session_id).slot] == FINISHED
            else:
                assert allowed(pool, session_id) == [10 + session_id, 100 + session_id]
                outputs[session_id] = [*outputs[session_id], 10 + session_id]
    end_all(pool)


def test_end_tokens_are_allowed_where_text_may_end(make_pool: MakePool, vocabulary: Vocabulary) -> None:
    pool = make_pool()
    start = llguidance("1+2?")
    one, two = (next(i for i, token in enumerate(vocabulary.tokens) if token == text) for text in (b"1", b"2"))
    pool.start(0, start)
    for output, may_end in ([[], False], [[one], True], [[one, one], True]):
        pool.prepare([(0, output)])
        finish(pool, [0])
        assert pool.session(0).error() is None
        assert {EOS, 40} & set(allowed(pool, 0)) == ({EOS, 40} if may_end else set())
    pool.prepare([(0, [one, two])])
    finish(pool, [0])
    assert pool.buffer.flags[pool.session(0).slot] == FINISHED


def test_a_refused_token_fails_its_session_alone(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.start(0, example())
    pool.start(1, example())
    pool.start(2, example(at={"0": "raise"}))
    pool.prepare([(0, [5]), (1, [99]), (2, [])])
    finish(pool, [0, 1, 2])
    assert allowed(pool, 0) == [5, 6, 7]
    assert pool.session(0).error() is None
    assert "refuses token 99" in (pool.session(1).error() or "")
    assert "as it was told to" in (pool.session(2).error() or "")
    end_all(pool)


def test_adjustments_reach_the_buffer(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.start(0, example(favour={"6": 2.5, "7": -1.0}))
    pool.prepare([(0, [])])
    finish(pool, [0])
    ids, values = pool.buffer.adjustments(pool.session(0).slot)
    assert ids.tolist() == [6, 7]
    assert values.tolist() == [2.5, -1.0]


@pytest.mark.parametrize(
    ("favour", "error"),
    [
        ({"6": 1e300}, "must be finite in float32"),
        ({"6": float("nan")}, "must be finite in float32"),
        ({str(VOCAB_SIZE): 1.0}, f"must be in [0, {VOCAB_SIZE})"),
        ({"-1": 1.0}, f"must be in [0, {VOCAB_SIZE})"),
        ({str(2**40): 1.0}, f"must be in [0, {VOCAB_SIZE})"),
    ],
)
def test_unusable_adjustments_fail_their_session(vocabulary: Vocabulary, favour: dict[str, float], error: str) -> None:
    pool = GrammarPool(PoolConfig(num_workers=1), vocabulary, 4, form="threads")
    pool.start(0, example(favour=favour))
    pool.prepare([(0, [])])
    finish(pool, [0])
    assert error in (pool.session(0).error() or "")
    pool.close()


@pytest.mark.parametrize("how", ["quit", "half a pair", "out of memory", "too deep"])
def test_any_backend_exception_costs_only_its_session(make_pool: MakePool, how: str) -> None:
    pool = make_pool(num_workers=1)
    pool.start(0, example(at={"0": how}))
    pool.start(1, example())
    pool.prepare([(0, []), (1, [])])
    finish(pool, [0, 1])
    assert pool.session(0).error() is not None
    assert allowed(pool, 1) == [5, 6, 7]
    assert pool.workers.num_replaced == 0


@pytest.mark.parametrize("num_replaced", [0, 1, 200])
def test_the_end_of_a_long_output_may_be_replaced(vocabulary: Vocabulary, num_replaced: int) -> None:
    """The row is that of the new output, where other tokens may follow than behind the old one."""
    pool = GrammarPool(PoolConfig(num_workers=1), vocabulary, 1, form="threads")
    one, other = (spelled(vocabulary, letter)[0] for letter in "ab")
    pool.start(0, llguidance("a*(b{99,400}c)?"))
    for output in ([one] * 700, [one] * (700 - num_replaced) + [other] * (num_replaced + 99)):
        pool.prepare([(0, output)])
        finish(pool, [0])
        assert pool.session(0).error() is None
        assert allowed(pool, 0) == allowed_behind(llguidance("a*(b{99,400}c)?"), vocabulary, output)
    pool.close()


def test_an_unloadable_grammar_fails_its_session_alone(vocabulary: Vocabulary) -> None:
    pool = GrammarPool(PoolConfig(num_workers=1), vocabulary, 8, form="threads")
    for session_id, backend in enumerate(("llguidance", "xgrammar", "nowhere", "\ud800")):
        spec = ConstraintSpec(kind="regex", text="a", backend=backend)
        pool.start(session_id, SessionStart(spec, b"\xc1 no such thing", (EOS,)))
    pool.start(4, example())
    pool.prepare([(session_id, []) for session_id in range(5)])
    finish(pool, list(range(5)))
    assert all(pool.session(session_id).error() for session_id in range(4))
    assert allowed(pool, 4) == [5, 6, 7]
    assert pool.workers.num_replaced == 0
    pool.close()


def serve(worker: GrammarWorker, start: SessionStart, number: int) -> None:
    """Opens a session anew and fills its first row."""
    worker.handle(Message(0, [Job(0, number, 0, 0, [], start=start)], []))


def test_a_failed_or_grown_grammar_is_rebuilt(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions share automata: those that have reached a limit would fail every later session too."""
    loads: list[str] = []
    load = LLGuidanceBackend.load

    def counted_load(self: LLGuidanceBackend, spec: ConstraintSpec, compiled: bytes) -> Grammar:
        loads.append(spec.text)
        return load(self, spec, compiled)

    monkeypatch.setattr(LLGuidanceBackend, "load", counted_load)
    monkeypatch.setattr("manta.structured.grammar_pool.grammar_worker.MAX_GROWTH_BYTES", 10 * ROW_BYTES)
    buffer = MaskBuffer(BufferShape(1, VOCAB_SIZE // 32, 1))
    worker = GrammarWorker(vocabulary, buffer, 0)
    start = llguidance("[ab]{9}")
    for number in range(1, 12):
        serve(worker, start, number)
    assert buffer.cached[0].tolist() == [0, 0]
    assert len(loads) == 1
    serve(worker, start, 12)
    assert buffer.cached[0, 0] == 1
    worker.handle(Message(0, [Job(0, 13, 0, 0, [EOS])], []))
    assert buffer.flags[0] == FAILED
    serve(worker, start, 14)
    assert len(loads) == 3
    assert not buffer.flags[0]


def test_a_hanging_session_fails_alone_within_its_budget(make_pool: MakePool) -> None:
    pool = make_pool(mask_seconds=5.0, migrate_seconds=SOON_S)
    for session_id in range(8):
        pool.start(session_id, example(at={"1": "hang"} if session_id == 3 else {}))
    pool.prepare([(session_id, []) for session_id in range(8)])
    finish(pool, list(range(8)))
    pool.prepare([(session_id, [5]) for session_id in range(8)])
    others = [session_id for session_id in range(8) if session_id != 3]
    finish(pool, others)
    assert all(allowed(pool, session_id) == [5, 6, 7] for session_id in others)
    finish(pool, [3])
    assert "was not there after 5 s" in (pool.session(3).error() or "")
    assert pool.workers.num_replaced >= 1  # a busy machine may spend another worker's time too, which costs no session
    for length in range(2, 6):
        pool.prepare([(session_id, [5] * length) for session_id in others])
        finish(pool, others)
        assert all(pool.session(session_id).error() is None for session_id in others)


def test_sessions_behind_a_slow_one_move(make_pool: MakePool, tmp_path: pathlib.Path) -> None:
    pool = make_pool(num_workers=1, migrate_seconds=SOON_S)
    pool.start(0, example(at={"1": f"until {tmp_path}/gate"}))
    for session_id in range(1, 4):
        pool.start(session_id, example())
    pool.prepare([(session_id, []) for session_id in range(4)])
    finish(pool, list(range(4)))
    pool.prepare([(0, [5])])
    time.sleep(0.05)
    pool.prepare([(session_id, [5]) for session_id in range(1, 4)])
    finish(pool, [1, 2, 3])
    assert not pool.is_ready(0), "the slow row should still be under way"
    (tmp_path / "gate").touch()
    finish(pool, [0])
    assert [pool.session(session_id).error() for session_id in range(4)] == [None] * 4
    assert pool.workers.num_replaced == 0
    end_all(pool)


def test_sessions_stay_with_a_late_worker_while_another_one_starts(
    vocabulary: Vocabulary, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process takes seconds to start. The late worker may go on before that, as it does on a busy machine."""
    config = PoolConfig(num_workers=1, mask_seconds=PATIENCE_S, migrate_seconds=SOON_S)
    pool = GrammarPool(config, vocabulary, 4, form="threads")
    (first,) = pool.workers.active
    monkeypatch.setattr(ThreadTransport, "is_ready", lambda self: self is first.transport)
    pool.start(0, example(at={"1": f"until {tmp_path}/gate"}))
    pool.start(1, example())
    pool.prepare([(0, []), (1, [])])
    finish(pool, [0, 1])
    pool.prepare([(0, [5])])
    time.sleep(0.05)
    pool.prepare([(1, [5])])
    wait_until(lambda: pool.supervise() or len(pool.workers.active) > 1)
    for _ in range(5):
        time.sleep(SOON_S)
        pool.supervise()
    assert len(pool.workers.active) == 2, "one more starts, and no further one before that has"
    (tmp_path / "gate").touch()
    finish(pool, [0, 1])
    assert [pool.session(session_id).error() for session_id in range(2)] == [None] * 2
    pool.close()


def test_a_worker_hanging_without_its_session_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool(num_workers=1, mask_seconds=1.0)
    pool.start(0, example(at={"0": "hang"}))
    pool.prepare([(0, [])])
    wait_until(lambda: int(pool.buffer.current[pool.workers.active[0].index]) == 1)
    time.sleep(0.5)  # from taking the tokens, which it has begun, to filling the row, where it hangs
    pool.end(0)

    def is_replaced() -> bool:
        pool.supervise()
        return pool.workers.num_replaced == 1

    wait_until(is_replaced)
    if pool.form != "threads":  # a thread that hangs keeps its slot: it may still write there
        wait_until(lambda: pool.num_slots_in_use == 0)


def test_a_hanging_thread_keeps_only_its_slot(vocabulary: Vocabulary, tmp_path: pathlib.Path) -> None:
    """The slots of the worker's other sessions are free at once; else a few workers that hang would leave none."""
    pool = GrammarPool(PoolConfig(num_workers=1, mask_seconds=1.0), vocabulary, 4, form="threads")
    others = [1, 2, 3]
    for session_id in others:
        pool.start(session_id, example())
    for num_hanging in range(1, 5):
        pool.prepare([(session_id, [5] * num_hanging) for session_id in others])
        finish(pool, others)
        hanging = 10 * num_hanging
        pool.start(hanging, example(at={"0": f"until {tmp_path}/gate"}))
        pool.prepare([(hanging, [])])
        finish(pool, [hanging])
        assert "was not there after 1 s" in (pool.session(hanging).error() or "")
        pool.end(hanging)
        finish(pool, others)
        wait_until(lambda: pool.num_slots_in_use == len(others) + num_hanging)  # noqa: B023 # once the message is done
        assert (len(pool.workers.given_up), pool.num_lost_slots) == (num_hanging, 0)
    assert [allowed(pool, session_id) for session_id in others] == [[5, 6, 7]] * 3
    (tmp_path / "gate").touch()


def test_when_every_worker_hangs_sessions_fail(vocabulary: Vocabulary, tmp_path: pathlib.Path) -> None:
    """Threads that hang cannot be ended. The pool goes on with those that it has left, be it none."""
    pool = GrammarPool(PoolConfig(num_workers=1, mask_seconds=1.0), vocabulary, 4, form="threads", max_workers=3)
    for hanging in range(3):
        pool.start(hanging, example(at={"0": f"until {tmp_path}/gate"}))
        pool.prepare([(hanging, [])])
        finish(pool, [hanging])
        assert "was not there after 1 s" in (pool.session(hanging).error() or "")
        pool.end(hanging)
    assert (len(pool.workers.given_up), pool.workers.active) == (3, [])
    pool.start(7, example())
    pool.prepare([(7, [])])
    assert pool.session(7).error() == "all 3 grammar workers hang; simplify the constraints that are in use"
    pool.end(7)
    (tmp_path / "gate").touch()
    wait_until(lambda: not any(worker.transport.is_alive() for worker in pool.workers.given_up))
    pool.start(8, example())
    pool.prepare([(8, [])])
    finish(pool, [8])
    assert allowed(pool, 8) == [5, 6, 7]
    pool.end(8)
    assert (len(pool.workers.given_up), pool.num_lost_slots) == (0, 0)


@ACTORS
def test_a_killed_actors_sessions_are_replayed(make_pool: MakePool) -> None:
    pool = make_pool(migrate_seconds=SOON_S)
    for session_id in range(8):
        pool.start(session_id, example(allowed=[10 + session_id, 50 + session_id]))
    outputs: dict[int, list[int]] = {session_id: [] for session_id in range(8)}
    for step in range(12):
        pool.prepare(outputs.items())
        if step in (3, 8):
            victim = max(pool.workers.active, key=lambda worker: len(worker.sessions)).transport
            while victim.pid is None:  # it may be the one that replaces the first victim, and still start
                wait_until(victim.is_ready)
            os.kill(victim.pid, signal.SIGKILL)
        finish(pool, list(outputs))
        for session_id, output in outputs.items():
            assert pool.session(session_id).error() is None
            assert allowed(pool, session_id) == [10 + session_id, 50 + session_id]
            output.append(random.Random(step).choice([10 + session_id, 50 + session_id]))
    # Sessions may have left a dead worker before anybody knew.
    wait_until(lambda: pool.supervise() or pool.workers.num_replaced >= 1)
    end_all(pool)


@ACTORS
def test_a_session_that_kills_its_workers_fails_alone(make_pool: MakePool) -> None:
    pool = make_pool(migrate_seconds=SOON_S)
    pool.start(0, example(at={"1": "exit"}))
    pool.start(1, example())
    pool.prepare([(0, []), (1, [])])
    finish(pool, [0, 1])
    pool.prepare([(0, [5])])
    finish(pool, [0])
    assert "grammar workers died over its mask" in (pool.session(0).error() or "")
    pool.prepare([(1, [5, 6])])
    finish(pool, [1])
    assert pool.session(1).error() is None


@ACTORS
def test_grammar_actors_import_neither_torch_nor_transformers(make_pool: MakePool) -> None:
    import ray

    from manta.structured.grammar_pool.transport import ActorTransport

    pool = make_pool(num_workers=1)
    pool.start(0, llguidance("a+"))
    pool.prepare([(0, [])])
    finish(pool, [0])
    transport = max(pool.workers.active, key=lambda worker: len(worker.sessions)).transport
    assert isinstance(transport, ActorTransport)
    modules = ray.get(transport._actor.__ray_call__.remote(lambda self: list(__import__("sys").modules)))
    assert "llguidance" in modules
    assert not {"torch", "transformers"} & set(modules)


def test_the_constraint_begins_after_the_marker(vocabulary: Vocabulary) -> None:
    start = llguidance("1+", begin_after=(30, 31))
    grammar = LLGuidanceBackend(vocabulary).load(start.spec, start.compiled)
    tracked = TrackedSession(start, grammar, vocabulary)

    def allowed_now() -> list[int]:
        row = np.zeros(VOCAB_SIZE // 32, dtype=np.int32)
        tracked.fill(row)
        return bits(row)

    anything = [token_id for token_id in range(len(vocabulary.tokens)) if token_id not in (EOS, 40)]
    tracked.advance(0, [99, 30, 30])
    assert allowed_now() == anything, "all but the end may come before the constraint begins"
    tracked.advance(3, [31])
    masked = allowed_now()
    assert len(masked) < 10
    tracked.advance(2, [31])  # as if [99, 30, 31]
    assert allowed_now() == masked
    tracked.advance(1, [55])
    assert allowed_now() == anything
    tracked.advance(1, [30, 31])
    assert allowed_now() == masked


def test_duplicate_or_late_messages_do_no_harm(vocabulary: Vocabulary) -> None:
    start = llguidance("[0-9]{12}")
    grammar = LLGuidanceBackend(vocabulary).load(start.spec, start.compiled)
    digits = [index for index, token in enumerate(vocabulary.tokens) if len(token) == 1 and token.isdigit()]
    chooser = random.Random(3)
    output = [chooser.choice(digits) for _ in range(12)]
    tracked = TrackedSession(start, grammar, vocabulary)
    row, fresh_row = np.zeros((2, VOCAB_SIZE // 32), dtype=np.int32)
    for _ in range(60):
        end = chooser.randrange(12)
        first = chooser.randrange(min(end, len(tracked.tokens)) + 1)
        tracked.advance(first, output[first:end])
        assert tracked.tokens == output[:end]
        fresh = TrackedSession(start, grammar, vocabulary)
        fresh.advance(0, output[:end])
        tracked.fill(row)
        fresh.fill(fresh_row)
        np.testing.assert_array_equal(row, fresh_row)
    with pytest.raises(ValueError, match="are missing"):
        tracked.advance(13, [digits[0]])


# ---- drafts --------------------------------------------------------------------------------------------------------


def test_an_actors_death_shows_despite_unread_messages() -> None:
    """As on a machine that gives the actor no time between its connection and that message."""
    transport = ActorTransport.__new__(ActorTransport)
    transport.pid, transport._connection, transport._unsent = None, None, b""
    transport._folder = tempfile.TemporaryDirectory()
    transport._listener = socket.socket(socket.AF_UNIX)
    transport._listener.bind(f"{transport._folder.name}/0")
    transport._listener.listen(1)
    transport._listener.setblocking(False)
    assert not transport.is_ready()
    with socket.socket(socket.AF_UNIX) as actor:
        actor.connect(f"{transport._folder.name}/0")
        assert transport.is_alive()
        assert not transport.is_ready()
        actor.sendall(struct.pack("i", 12345))
        assert transport.is_alive()
        assert transport.pid == 12345
    assert not transport.is_alive()
