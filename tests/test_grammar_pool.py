"""The grammar pool keeps every session but the guilty one: workers that die, hang or fall behind lose theirs to others.

The same tests run over threads and over Ray actors. The example backend (`tests/plugin`) misbehaves on request.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import random
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from benchmarks.faults import start_ray
from structured.backend import Grammar, make_backend
from structured.config import PoolConfig
from structured.constraint import ConstraintSpec
from structured.grammar_worker import GrammarWorker, Job, Message, SessionStart, TrackedSession
from structured.masks import FINISHED, REFUSED, BufferShape, MaskBuffer
from structured.pool import GrammarPool
from structured.vocabulary import Vocabulary

pytestmark = pytest.mark.usefixtures("plugin")

DEMO = pathlib.Path(__file__).parents[1] / "configs" / "demo" / "target"
VOCAB_SIZE = 4160
EOS = 2
PATIENCE_S = 60.0
"""How long a test waits for what must come; a loaded machine may take it."""

MakePool = Callable[..., GrammarPool]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load(str(DEMO), VOCAB_SIZE, (EOS,))


@pytest.fixture(scope="module")
def local_ray(plugin: None) -> Iterator[None]:
    ray = pytest.importorskip("ray")
    start_ray()
    yield
    ray.shutdown()


@pytest.fixture(params=["threads", "actors"])
def make_pool(request: pytest.FixtureRequest, vocabulary: Vocabulary) -> Iterator[MakePool]:
    if request.param == "actors":
        request.getfixturevalue("local_ray")
    pools: list[GrammarPool] = []

    def make(num_sessions: int = 16, num_drafts: int = 0, num_forced: int = 0, **options: float) -> GrammarPool:
        actors = request.param == "actors"
        pool = GrammarPool(PoolConfig(**options), vocabulary, num_sessions, actors, num_drafts, num_forced)
        pools.append(pool)
        wait_until(lambda: all(worker.transport.is_ready() for worker in pool.workers))
        return pool

    yield make
    for pool in pools:
        pool.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "what must come did not come"
        time.sleep(0.001)


def example(**options: object) -> SessionStart:
    text = json.dumps({"allowed": [5, 6, 7], **options})
    return SessionStart(ConstraintSpec(kind="regex", text=text, backend="example"), text.encode(), (EOS,))


def llguidance(regex: str, **fields: object) -> SessionStart:
    return regex_of("llguidance", regex, **fields)


def regex_of(backend: str, regex: str, **fields: object) -> SessionStart:
    from structured.backends.choose import Backends

    spec = ConstraintSpec(kind="regex", text=regex, backend=backend, **fields)
    resolved = Backends(Vocabulary.load(str(DEMO), VOCAB_SIZE, (EOS,))).resolve(spec)
    return SessionStart(resolved.spec, resolved.compiled, (EOS, 40))


def bits(row: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def allowed(pool: GrammarPool, session_id: int) -> list[int]:
    return bits(pool.buffer.rows[pool.slot(session_id)])


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
        missing = pool.wait(missing, 0.01, lambda count: count == 0)


def finish_drafts(pool: GrammarPool, session_ids: list[int]) -> None:
    """Waits for every row of their drafts too."""
    finish(pool, session_ids)
    wait_until(lambda: not pool.wait(session_ids, 0.01, lambda count: count == 0, pool.is_complete))


def finish_all(pool: GrammarPool) -> None:
    """Waits until the workers have done all that they were told to."""
    workers = pool.workers
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
    while pool.num_slots_in_use > len(pool.workers):  # an idle worker hears of the last end with its next message
        assert time.monotonic() < deadline, f"{pool.num_slots_in_use} slots leaked"
        time.sleep(0.01)


def test_rows_arrive_and_follow_the_tokens(make_pool: MakePool) -> None:
    pool = make_pool()
    for session_id in range(6):
        pool.start(session_id, example(allowed=[10 + session_id, 100 + session_id], length=3))
    outputs: list[list[int]] = [[] for _ in range(6)]
    for step in range(4):
        pool.prepare([(session_id, outputs[session_id]) for session_id in range(6)])
        finish(pool, list(range(6)))
        for session_id in range(6):
            assert pool.error(session_id) is None
            if step == 3:
                assert pool.buffer.flags[pool.slot(session_id)] == FINISHED
            else:
                assert allowed(pool, session_id) == [10 + session_id, 100 + session_id]
                outputs[session_id] = [*outputs[session_id], 10 + session_id]
    end_all(pool)


def test_end_tokens_are_allowed_exactly_where_the_text_may_end(make_pool: MakePool, vocabulary: Vocabulary) -> None:
    pool = make_pool()
    start = llguidance("1+2?")
    one, two = (next(i for i, token in enumerate(vocabulary.tokens) if token == text) for text in (b"1", b"2"))
    pool.start(0, start)
    for output, may_end in ([[], False], [[one], True], [[one, one], True]):
        pool.prepare([(0, output)])
        finish(pool, [0])
        assert pool.error(0) is None
        assert {EOS, 40} & set(allowed(pool, 0)) == ({EOS, 40} if may_end else set())
    pool.prepare([(0, [one, two])])
    finish(pool, [0])
    assert pool.buffer.flags[pool.slot(0)] == FINISHED


def test_a_refused_token_or_a_raising_backend_fails_its_session_alone(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.start(0, example())
    pool.start(1, example())
    pool.start(2, example(at={"0": "raise"}))
    pool.prepare([(0, [5]), (1, [99]), (2, [])])
    finish(pool, [0, 1, 2])
    assert allowed(pool, 0) == [5, 6, 7]
    assert pool.error(0) is None
    assert "refuses token 99" in (pool.error(1) or "")
    assert "as it was told to" in (pool.error(2) or "")
    end_all(pool)


def test_adjustments_reach_the_buffer(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.start(0, example(favour={"6": 2.5, "7": -1.0}))
    pool.prepare([(0, [])])
    finish(pool, [0])
    ids, values = pool.buffer.adjustments(pool.slot(0))
    assert ids.tolist() == [6, 7]
    assert values.tolist() == [2.5, -1.0]


def test_a_hanging_session_fails_alone_within_its_budget(make_pool: MakePool) -> None:
    pool = make_pool(mask_seconds=1.0)
    for session_id in range(8):
        pool.start(session_id, example(at={"1": "hang"} if session_id == 3 else {}))
    pool.prepare([(session_id, []) for session_id in range(8)])
    finish(pool, list(range(8)))
    pool.prepare([(session_id, [5]) for session_id in range(8)])
    others = [session_id for session_id in range(8) if session_id != 3]
    finish(pool, others)
    assert all(allowed(pool, session_id) == [5, 6, 7] for session_id in others)
    finish(pool, [3])
    assert "was not there after 1 s" in (pool.error(3) or "")
    assert pool.num_replaced >= 1  # a busy machine may spend another worker's second too, which costs no session
    for length in range(2, 6):
        pool.prepare([(session_id, [5] * length) for session_id in others])
        finish(pool, others)
        assert all(pool.error(session_id) is None for session_id in others)


def test_sessions_behind_a_slow_one_move(make_pool: MakePool) -> None:
    pool = make_pool(num_workers=1, mask_seconds=PATIENCE_S)
    pool.start(0, example(at={"1": 3.0}))
    for session_id in range(1, 4):
        pool.start(session_id, example())
    pool.prepare([(session_id, []) for session_id in range(4)])
    finish(pool, list(range(4)))
    pool.prepare([(0, [5])])
    time.sleep(0.05)
    pool.prepare([(session_id, [5]) for session_id in range(1, 4)])
    finish(pool, [1, 2, 3])
    assert not pool.is_ready(0), "the slow row should still be under way"
    finish(pool, [0])
    assert [pool.error(session_id) for session_id in range(4)] == [None] * 4
    assert pool.num_replaced == 0
    end_all(pool)


def test_a_worker_that_hangs_on_a_session_that_has_left_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool(num_workers=1, mask_seconds=1.0)
    pool.start(0, example(at={"0": "hang"}))
    pool.prepare([(0, [])])
    wait_until(lambda: int(pool.buffer.current[pool.workers[0].index]) == 1)
    time.sleep(0.5)  # from taking the tokens, which it has begun, to filling the row, where it hangs
    pool.end(0)

    def is_replaced() -> bool:
        pool.supervise()
        return pool.num_replaced == 1

    wait_until(is_replaced)
    if pool.uses_actors:  # a thread that hangs keeps its slot: it may still write there
        wait_until(lambda: pool.num_slots_in_use == 0)


def test_a_killed_actor_is_replaced_and_its_sessions_are_replayed(local_ray: None, vocabulary: Vocabulary) -> None:
    pool = GrammarPool(PoolConfig(), vocabulary, 16, actors=True)
    try:
        wait_until(lambda: all(worker.transport.is_ready() for worker in pool.workers))
        for session_id in range(8):
            pool.start(session_id, example(allowed=[10 + session_id, 50 + session_id]))
        outputs: dict[int, list[int]] = {session_id: [] for session_id in range(8)}
        for step in range(12):
            pool.prepare(outputs.items())
            if step in (3, 8):
                os.kill(pool.workers[step % 2].transport.pid or 0, signal.SIGKILL)
            finish(pool, list(outputs))
            for session_id, output in outputs.items():
                assert pool.error(session_id) is None
                assert allowed(pool, session_id) == [10 + session_id, 50 + session_id]
                output.append(random.Random(step).choice([10 + session_id, 50 + session_id]))
        assert pool.num_replaced >= 1
        end_all(pool)
    finally:
        pool.close()


def test_a_session_that_kills_its_workers_fails_alone(local_ray: None, vocabulary: Vocabulary) -> None:
    pool = GrammarPool(PoolConfig(), vocabulary, 16, actors=True)
    try:
        wait_until(lambda: all(worker.transport.is_ready() for worker in pool.workers))
        pool.start(0, example(at={"1": "exit"}))
        pool.start(1, example())
        pool.prepare([(0, []), (1, [])])
        finish(pool, [0, 1])
        pool.prepare([(0, [5])])
        finish(pool, [0])
        assert "grammar workers died over its mask" in (pool.error(0) or "")
        pool.prepare([(1, [5, 6])])
        finish(pool, [1])
        assert pool.error(1) is None
    finally:
        pool.close()


def test_grammar_actors_import_neither_torch_nor_transformers(local_ray: None, vocabulary: Vocabulary) -> None:
    import ray

    from structured.transport import ActorTransport

    pool = GrammarPool(PoolConfig(num_workers=1), vocabulary, 4, actors=True)
    try:
        pool.start(0, llguidance("a+"))
        pool.prepare([(0, [])])
        finish(pool, [0])
        transport = max(pool.workers, key=lambda worker: len(worker.sessions)).transport
        assert isinstance(transport, ActorTransport)
        modules = ray.get(transport._actor.__ray_call__.remote(lambda self: list(__import__("sys").modules)))
        assert "llguidance" in modules
        assert not {"torch", "transformers"} & set(modules)
    finally:
        pool.close()


def test_the_constraint_begins_after_the_marker_and_a_rollback_undoes_it(vocabulary: Vocabulary) -> None:
    from structured.backends.llguidance import LLGuidanceBackend

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


def test_messages_that_come_twice_or_late_do_no_harm(vocabulary: Vocabulary) -> None:
    from structured.backends.llguidance import LLGuidanceBackend

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


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_each_draft_has_a_row_up_to_the_first_that_is_refused(
    make_pool: MakePool, vocabulary: Vocabulary, backend: str
) -> None:
    pool = make_pool(num_drafts=4)
    start = regex_of(backend, "[0-9]{3}(ab|cd)?!")
    pool.start(0, start)
    known = spelled(vocabulary, "12")
    cases = [("3ab!", 3, True), ("3ax!", 2, False), ("3cd", 3, False), ("x", 0, False), ("", 0, False)]
    for text, num_rows, ends in [*cases, ("3!!", 1, True)]:
        for tokens in (known[:1], known):  # drafts of another output first
            drafts = spelled(vocabulary, text)
            num_sent = sum(worker.num_sent for worker in pool.workers)
            pool.prepare([(0, tokens)], {0: drafts} if drafts else None)
            assert sum(worker.num_sent for worker in pool.workers) <= num_sent + 1
            finish_drafts(pool, [0])
            rows, found_end = pool.draft_rows(0)
            assert pool.error(0) is None
            assert allowed(pool, 0) == allowed_behind(start, vocabulary, tokens)
            for index, slot in enumerate(rows):
                assert bits(pool.buffer.rows[slot]) == allowed_behind(start, vocabulary, tokens + drafts[: index + 1])
        assert (len(rows), found_end) == (num_rows, ends), text
    end_all(pool)


def test_an_end_token_among_drafts_has_no_row_behind_it(make_pool: MakePool, vocabulary: Vocabulary) -> None:
    pool = make_pool(num_drafts=4)
    one = spelled(vocabulary, "1")
    pool.start(0, llguidance("1+"))
    for end in (EOS, 40):  # 40 is a stop token, whatever the grammar thinks of its text
        pool.prepare([(0, one)], {0: [*one, end, *one]})
        finish_drafts(pool, [0])
        rows, ends = pool.draft_rows(0)
        assert (len(rows), ends) == (1, False)
        assert EOS in bits(pool.buffer.rows[rows[0]])


def test_drafts_beyond_the_slots_have_no_rows_and_sessions_lose_none(
    make_pool: MakePool, vocabulary: Vocabulary
) -> None:
    pool = make_pool(num_sessions=2, num_drafts=3)
    ones = spelled(vocabulary, "11111")
    for session_id in range(2):
        pool.start(session_id, llguidance("1+"))
    pool.prepare([(0, []), (1, [])], {0: ones, 1: ones})
    finish_drafts(pool, [0, 1])
    assert sorted(len(pool.draft_rows(session_id)[0]) for session_id in range(2)) == [1, 5]
    end_all(pool)
    plain = make_pool(num_sessions=2)
    assert plain.buffer.shape.num_slots == pool.buffer.shape.num_slots - 6
    plain.start(0, llguidance("1+"))
    plain.prepare([(0, [])], {0: ones})
    finish_drafts(plain, [0])
    assert plain.draft_rows(0) == ([], False)


@pytest.mark.parametrize("how", ["raise", "exit", "hang"])
def test_what_fails_over_a_draft_costs_its_own_session_only(make_pool: MakePool, how: str) -> None:
    # A budget that a busy machine may spend would replace workers besides those that die, and a session that moves from
    # a slow one may end both.
    patience = {"mask_seconds": 1.0} if how == "hang" else {"mask_seconds": 30.0, "migrate_seconds": 0.5}
    pool = make_pool(num_drafts=3, num_workers=1, **patience)
    if how == "exit" and not pool.uses_actors:
        pytest.skip("it would end this process")
    for session_id in range(4):
        pool.start(session_id, example(at={"2": how} if session_id == 1 else {}))
    everyone, others = list(range(4)), [0, 2, 3]
    for length in range(3):
        pool.prepare([(session_id, [5] * length) for session_id in everyone], {i: [6, 7] for i in everyone})
        finish(pool, everyone)
        finish(pool, others)  # rows that were there go again where their worker is replaced
        for session_id in others:
            assert pool.error(session_id) is None
            assert allowed(pool, session_id) == [5, 6, 7]
    reason = pool.error(1) or ""
    if how == "raise":  # the draft was refused, and the token that came true raised
        assert "as it was told to" in reason
        assert pool.num_replaced == 0
    elif how == "hang":
        assert "was not there after 1 s" in reason
    else:
        assert "grammar workers died over its mask" in reason
        # One over a draft, after which it gets no more rows, and three over its row; on a busy machine it may have
        # moved from a worker that had begun with it, and ends both.
        assert pool.num_replaced <= 6
    pool.end(1)
    pool.prepare([(session_id, [5] * 3) for session_id in others], {i: [6, 7] for i in others})
    finish_drafts(pool, others)
    assert [len(pool.draft_rows(session_id)[0]) for session_id in others] == [2, 2, 2]
    if how != "hang" or pool.uses_actors:  # a thread that hangs keeps its slots: it may still write there
        end_all(pool)


def test_a_draft_over_which_the_grammar_raises_leaves_the_session_as_it_was(make_pool: MakePool) -> None:
    pool = make_pool(num_drafts=3)
    pool.start(0, example(on={"6": "raise"}))
    for length in range(4):
        pool.prepare([(0, [5] * length)], {0: [7, 6, 5]})
        finish_drafts(pool, [0])
        assert pool.error(0) is None
        assert allowed(pool, 0) == [5, 6, 7]
        assert len(pool.draft_rows(0)[0]) == 1
    end_all(pool)


def test_a_session_that_moves_takes_its_drafts_along(make_pool: MakePool, vocabulary: Vocabulary) -> None:
    pool = make_pool(num_workers=1, num_drafts=2, mask_seconds=PATIENCE_S)
    start = llguidance("[0-9]{3}(ab|cd)!")
    digits = spelled(vocabulary, "123a")
    pool.start(0, example(at={"1": "hang"}))
    pool.start(1, start)
    pool.prepare([(0, []), (1, [])])
    finish(pool, [0, 1])
    pool.prepare([(0, [5])])
    time.sleep(0.05)
    pool.prepare([(1, digits[:2])], {1: digits[2:]})
    finish_drafts(pool, [1])
    assert not pool.is_ready(0)
    rows, _ = pool.draft_rows(1)
    behind = [bits(pool.buffer.rows[slot]) for slot in (pool.slot(1), *rows)]
    assert behind == [allowed_behind(start, vocabulary, digits[:count]) for count in (2, 3, 4)]


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_forced_tokens_come_with_the_row_and_are_followed(
    make_pool: MakePool, vocabulary: Vocabulary, backend: str
) -> None:
    pool = make_pool(num_drafts=4, num_forced=5)
    pool.start(0, regex_of(backend, "[0-9]customer identification and more: (yes|no)"))
    (one,) = spelled(vocabulary, "1")
    pool.prepare([(0, [])])
    finish_all(pool)
    assert pool.forced(0, []) == []
    pool.prepare([(0, [one])])
    finish_all(pool)
    forced = pool.forced(0, [one])
    assert len(forced) == 5
    assert b"customer identification and more: ".startswith(b"".join(vocabulary.tokens[i] for i in forced))
    assert pool.forced(0, [one, *forced[:2]]) == forced[2:]
    assert pool.forced(0, [one, *forced]) == [], "more is not known yet"
    assert pool.forced(0, [one, one]) == pool.forced(0, []) == []
    pool.prepare([(0, [one])], {0: forced[:4]})
    finish_all(pool)
    further = pool.forced(0, [one, *forced[:4]])
    assert further[0] == forced[4]
    assert len(further) == 5
    assert pool.forced(0, [one, *forced]) == further[1:]
    assert pool.forced(0, [one, *forced[:3], one]) == []


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_what_a_choice_forces_is_known_before_it_is_made(
    make_pool: MakePool, vocabulary: Vocabulary, backend: str
) -> None:
    pool = make_pool(num_drafts=4, num_forced=9)
    start = regex_of(backend, "(yes, and customer|no, the order)!")
    pool.start(0, start)
    pool.prepare([(0, [])])
    finish_all(pool)
    assert pool.forced(0, []) == []
    choices = allowed(pool, 0)
    assert 1 < len(choices) <= 8
    before = allowed(pool, 0)
    num_found = 0
    for token_id in choices:
        way = pool.forced(0, [token_id])
        num_found += bool(way)
        text = b"".join(vocabulary.tokens[i] for i in [token_id, *way])
        assert any(whole.startswith(text) for whole in (b"yes, and customer!", b"no, the order!"))
        for index in range(len(way)):
            assert way[index] in allowed_behind(start, vocabulary, [token_id, *way[:index]])
    assert num_found >= 2
    pool.prepare([(0, choices[:1])])
    finish_all(pool)
    pool.prepare([(0, [])])
    finish_all(pool)
    assert allowed(pool, 0) == before, "looking ahead leaves no trace"


def test_one_looks_behind_choices_less_often_where_nothing_is_forced(vocabulary: Vocabulary) -> None:
    start = llguidance("[xz]{60}")
    tracked = TrackedSession(start, make_grammar(start, vocabulary), vocabulary)
    session = tracked._session
    assert session is not None
    row = np.zeros(VOCAB_SIZE // 32, dtype=np.int32)
    accept, num_accepts = session.accept, 0

    def counted(token_id: int) -> bool:
        nonlocal num_accepts
        num_accepts += 1
        return accept(token_id)

    session.accept = counted  # type: ignore[method-assign]
    tracked.fill(row)
    choices = bits(row)
    assert 1 < len(choices) <= 8
    for _ in range(100):
        assert tracked.look_ahead(row, 5) == [[]]
    assert 0 < num_accepts < 20 * len(choices)


def test_forced_tokens_are_not_looked_for_where_nobody_asks(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.start(0, llguidance("customer identification"))
    pool.prepare([(0, [])])
    finish_all(pool)
    assert pool.forced(0, []) == []


def test_jobs_with_drafts_that_come_twice_late_or_in_another_order_do_no_harm(vocabulary: Vocabulary) -> None:
    """One worker without a pool: whatever came before, a job's rows are those of its own tokens."""
    start = llguidance("[0-9]{12}")
    chooser = random.Random(7)
    digits = spelled(vocabulary, "0123456789")
    output = [chooser.choice(digits) for _ in range(8)]
    buffer = MaskBuffer(BufferShape(6, VOCAB_SIZE // 32, 1))
    worker = GrammarWorker(vocabulary, buffer, 0)
    buffer.drafts_wanted[0] = 1
    worker.handle(Message(1, [Job(7, 1, 0, 0, [], start=start)], []))
    jobs: list[Job] = []
    held = 0
    for number in range(2, 60):
        if jobs and chooser.random() < 0.3:
            job = chooser.choice(jobs)
        else:
            end = chooser.randrange(len(output) + 1)
            first = chooser.randrange(min(end, held) + 1)
            num_drafts = chooser.randrange(5)
            drafts = [chooser.choice([*digits, EOS, 300]) for _ in range(num_drafts)]
            wants_row = chooser.random() < 0.7
            job = Job(7, number, 0, first, output[first:end], drafts, [1, 2, 3, 4][:num_drafts], wants_row)
            jobs.append(job)
        length = job.first + len(job.token_ids)
        if job.first > held:
            continue
        held = length
        buffer.drafts_wanted[0] = job.number
        buffer.rows[:] = 0
        worker.handle(Message(number, [job], []))
        if job.wants_row:
            assert buffer.done[0] == job.number
            assert bits(buffer.rows[0]) == allowed_behind(start, vocabulary, output[:length])
        refused = False
        for index, token_id in enumerate(job.draft_token_ids):
            assert buffer.done[1 + index] == job.number
            refused = refused or token_id not in digits or length + index >= 12
            if refused:
                assert buffer.flags[1 + index] == REFUSED
            elif length + index + 1 == 12:
                assert buffer.flags[1 + index] == FINISHED
            else:
                expected = allowed_behind(start, vocabulary, output[:length] + job.draft_token_ids[: index + 1])
                assert bits(buffer.rows[1 + index]) == expected
    buffer.drafts_wanted[0] = 0  # nobody waits for drafts any more
    before = buffer.done.tolist()
    worker.handle(Message(99, [Job(7, 100, 0, 0, [], digits[:2], [1, 2])], []))
    assert buffer.done.tolist() == [100, *before[1:]]
