"""Rows after drafts, and forced tokens, as the grammar pool gives them; and what fails at a draft.

The same tests run over threads and over Ray actors.
"""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from manta.structured.grammar_pool.grammar_worker import GrammarWorker, Job, Message
from manta.structured.grammar_pool.tracked_session import TrackedSession
from manta.structured.masks import FINISHED, REFUSED, BufferShape, MaskBuffer
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
    finish_all,
    finish_drafts,
    llguidance,
    make_grammar,
    regex_of,
    spelled,
)

pytestmark = pytest.mark.usefixtures("plugin")


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_drafts_have_rows_up_to_the_first_refusal(make_pool: MakePool, vocabulary: Vocabulary, backend: str) -> None:
    pool = make_pool(num_drafts=4)
    start = regex_of(backend, "[0-9]{3}(ab|cd)?!")
    pool.start(0, start)
    known = spelled(vocabulary, "12")
    cases = [("3ab!", 3, True), ("3ax!", 2, False), ("3cd", 3, False), ("x", 0, False), ("", 0, False)]
    for text, num_rows, ends in [*cases, ("3!!", 1, True)]:
        for tokens in (known[:1], known):  # drafts of another output first
            drafts = spelled(vocabulary, text)
            num_sent = sum(worker.num_sent for worker in pool.workers.active)
            pool.prepare([(0, tokens)], {0: drafts} if drafts else None)
            assert sum(worker.num_sent for worker in pool.workers.active) <= num_sent + 1
            finish_drafts(pool, [0])
            rows, found_end = pool.session(0).draft_rows()
            assert pool.session(0).error() is None
            assert allowed(pool, 0) == allowed_behind(start, vocabulary, tokens)
            for index, slot in enumerate(rows):
                assert bits(pool.buffer.rows[slot]) == allowed_behind(start, vocabulary, tokens + drafts[: index + 1])
        assert (len(rows), found_end) == (num_rows, ends), text
    end_all(pool)


def test_no_row_follows_an_end_token_among_drafts(make_pool: MakePool, vocabulary: Vocabulary) -> None:
    pool = make_pool(num_drafts=4)
    one = spelled(vocabulary, "1")
    pool.start(0, llguidance("1+"))
    for end in (EOS, 40):  # 40 is a stop token, whatever the grammar thinks of its text
        pool.prepare([(0, one)], {0: [*one, end, *one]})
        finish_drafts(pool, [0])
        rows, ends = pool.session(0).draft_rows()
        assert (len(rows), ends) == (1, False)
        assert EOS in bits(pool.buffer.rows[rows[0]])


def test_drafts_without_slots_have_no_rows(make_pool: MakePool, vocabulary: Vocabulary) -> None:
    # One worker: a session that moves would leave slots behind.
    pool = make_pool(num_sessions=2, num_drafts=3, num_workers=1)
    ones = spelled(vocabulary, "11111")
    for session_id in range(2):
        pool.start(session_id, llguidance("1+"))
    pool.prepare([(0, []), (1, [])], {0: ones, 1: ones})
    finish_drafts(pool, [0, 1])
    assert sorted(len(pool.session(session_id).draft_rows()[0]) for session_id in range(2)) == [1, 5]
    end_all(pool)
    plain = make_pool(num_sessions=2, num_workers=1)
    assert plain.buffer.shape.num_slots == pool.buffer.shape.num_slots - 6
    plain.start(0, llguidance("1+"))
    plain.prepare([(0, [])], {0: ones})
    finish_drafts(plain, [0])
    assert plain.session(0).draft_rows() == ([], False)


@pytest.mark.parametrize("how", ["raise", "exit", "hang"])
def test_a_failure_on_a_draft_costs_its_session(make_pool: MakePool, how: str) -> None:
    # A budget that a busy machine may spend would replace workers besides those that die, and a session that moves from
    # a slow one may end both.
    patience = (
        {"mask_seconds": 1.0, "migrate_seconds": SOON_S}
        if how == "hang"
        else {"mask_seconds": 30.0, "migrate_seconds": 0.5}
    )
    pool = make_pool(num_drafts=3, num_workers=1, **patience)
    if how == "exit" and pool.form == "threads":
        pytest.skip("it would end this process")
    for session_id in range(4):
        pool.start(session_id, example(at={"2": how} if session_id == 1 else {}))
    everyone, others = list(range(4)), [0, 2, 3]
    for length in range(3):
        pool.prepare([(session_id, [5] * length) for session_id in everyone], {i: [6, 7] for i in everyone})
        finish(pool, everyone)
        finish(pool, others)  # rows that were there go again where their worker is replaced
        for session_id in others:
            assert pool.session(session_id).error() is None
            assert allowed(pool, session_id) == [5, 6, 7]
    reason = pool.session(1).error() or ""
    if how == "raise":  # the draft was refused, and the token that came true raised
        assert "as it was told to" in reason
        assert pool.workers.num_replaced == 0
    elif how == "hang":
        assert "was not there after 1 s" in reason
    else:
        assert "grammar workers died over its mask" in reason
        # One over a draft, after which it gets no more rows, and three over its row; on a busy machine it may have
        # moved from a worker that had begun with it, and ends both.
        assert pool.workers.num_replaced <= 6
    pool.end(1)
    pool.prepare([(session_id, [5] * 3) for session_id in others], {i: [6, 7] for i in others})
    finish_drafts(pool, others)
    assert [len(pool.session(session_id).draft_rows()[0]) for session_id in others] == [2, 2, 2]
    if how != "hang" or pool.form != "threads":  # a thread that hangs keeps its slots: it may still write there
        end_all(pool)


def test_a_raising_draft_leaves_the_session_unchanged(make_pool: MakePool) -> None:
    pool = make_pool(num_drafts=4)
    pool.start(0, example(on={"6": "raise"}))
    for length in range(4):
        pool.prepare([(0, [5] * length)], {0: [7, 6, 5]})
        finish_drafts(pool, [0])
        assert pool.session(0).error() is None
        assert allowed(pool, 0) == [5, 6, 7]
        assert len(pool.session(0).draft_rows()[0]) == 1
    end_all(pool)


def test_a_session_that_moves_takes_its_drafts_along(make_pool: MakePool, vocabulary: Vocabulary) -> None:
    pool = make_pool(num_workers=1, num_drafts=2, migrate_seconds=SOON_S)
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
    rows, _ = pool.session(1).draft_rows()
    behind = [bits(pool.buffer.rows[slot]) for slot in (pool.session(1).slot, *rows)]
    assert behind == [allowed_behind(start, vocabulary, digits[:count]) for count in (2, 3, 4)]


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_forced_tokens_come_with_the_row(make_pool: MakePool, vocabulary: Vocabulary, backend: str) -> None:
    pool = make_pool(num_drafts=4, num_forced=5)
    pool.start(0, regex_of(backend, "[0-9]customer identification and more: (yes|no)"))
    (one,) = spelled(vocabulary, "1")
    pool.prepare([(0, [])])
    finish_all(pool)
    assert pool.session(0).forced([]) == []
    pool.prepare([(0, [one])])
    finish_all(pool)
    forced = pool.session(0).forced([one])
    assert len(forced) == 5
    assert b"customer identification and more: ".startswith(b"".join(vocabulary.tokens[i] for i in forced))
    assert pool.session(0).forced([one, *forced[:2]]) == forced[2:]
    assert pool.session(0).forced([one, *forced]) == [], "more is not known yet"
    assert pool.session(0).forced([one, one]) == pool.session(0).forced([]) == []
    pool.prepare([(0, [one])], {0: forced[:4]})
    finish_all(pool)
    further = pool.session(0).forced([one, *forced[:4]])
    assert further[0] == forced[4]
    assert len(further) == 5
    assert pool.session(0).forced([one, *forced]) == further[1:]
    assert pool.session(0).forced([one, *forced[:3], one]) == []


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_tokens_forced_by_a_choice_are_known_early(make_pool: MakePool, vocabulary: Vocabulary, backend: str) -> None:
    pool = make_pool(num_drafts=4, num_forced=9)
    start = regex_of(backend, "(yes, and customer|no, the order)!")
    pool.start(0, start)
    pool.prepare([(0, [])])
    finish_all(pool)
    assert pool.session(0).forced([]) == []
    choices = allowed(pool, 0)
    assert 1 < len(choices) <= 8
    before = allowed(pool, 0)
    num_found = 0
    for token_id in choices:
        way = pool.session(0).forced([token_id])
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


def test_fruitless_looks_past_choices_become_rarer(vocabulary: Vocabulary) -> None:
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


def test_forced_tokens_are_found_only_on_request(make_pool: MakePool) -> None:
    pool = make_pool(num_drafts=4)
    pool.start(0, llguidance("customer identification"))
    pool.prepare([(0, [])])
    finish_all(pool)
    assert pool.session(0).forced([]) == []


def test_duplicate_or_reordered_draft_jobs_do_no_harm(vocabulary: Vocabulary) -> None:
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
    buffer.drafts_wanted[0] = 0  # drafts are not wanted any more
    before = buffer.done.tolist()
    worker.handle(Message(99, [Job(7, 100, 0, 0, [], digits[:2], [1, 2])], []))
    assert buffer.done.tolist() == [100, *before[1:]]
