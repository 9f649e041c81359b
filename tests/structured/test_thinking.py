"""The thinking section of a sequence: exact counts whatever is drawn, marks however they are written, and a state that
is a function of the tokens.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from manta.structured.grammar_pool.tracked_session import SessionStart, TrackedSession
from manta.structured.thinking import ThinkingSection
from manta.structured.vocabulary import Vocabulary
from tests.conftest import PROVE
from tests.grammar_pools import DEMO, EOS, VOCAB_SIZE, bits, llguidance, make_grammar, spelled

NUM_WALKS = 300 if PROVE else 10
BUDGETS = (0, 1, 5, 20, None)
WORDS = VOCAB_SIZE // 32


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load(str(DEMO), VOCAB_SIZE, (EOS,))


def think(vocabulary: Vocabulary, budget: int | None, is_open: bool) -> ThinkingSection:
    """The marks are tokens."""
    end = vocabulary.tokens.index(b"</think>")
    return ThinkingSection(begin="<think>", end="</think>", end_token_ids=(end,), is_open=is_open, budget=budget)


def written(vocabulary: Vocabulary, budget: int | None, is_open: bool) -> ThinkingSection:
    """The marks are text, and the end begins like itself."""
    ids = tuple(spelled(vocabulary, "<<end>>"))
    return ThinkingSection(begin="[think]", end="<<end>>", end_token_ids=ids, is_open=is_open, budget=budget)


def channels(vocabulary: Vocabulary, budget: int | None, is_open: bool) -> ThinkingSection:
    ids = tuple(spelled(vocabulary, "|e|"))
    return ThinkingSection(
        begin="|c|analysis|m|",
        end="|e|",
        end_token_ids=ids,
        answer="|c|final|m|",
        recurs=True,
        is_open=is_open,
        budget=budget,
    )


FORMS = (think, written, channels)


def row_of(tracked: TrackedSession) -> list[int]:
    row = np.zeros(WORDS, dtype=np.int32)
    tracked.fill(row)
    return bits(row)


def text_of(vocabulary: Vocabulary, tokens: list[int]) -> bytes:
    return b"".join(vocabulary.tokens[token] for token in tokens)


def num_thinking(vocabulary: Vocabulary, section: ThinkingSection, tokens: list[int]) -> int:
    """Counts, with no help of what is tested, the tokens that hold more of a section than its mark at the end."""
    text = text_of(vocabulary, tokens).decode(errors="replace")
    ends = np.cumsum([len(text_of(vocabulary, [token]).decode(errors="replace")) for token in tokens]).tolist()
    begin = 0 if section.is_open else text.find(section.begin) + len(section.begin)
    count = 0
    while begin >= len(section.begin) or (section.is_open and begin == 0):
        end = text.find(section.end, begin)
        stop = len(text) if end < 0 else end
        count += sum(begin < reached <= stop for reached in ends)
        if end < 0 or not section.recurs:
            break
        begin = text.find(section.begin, end) + len(section.begin)
    return count


@pytest.mark.few(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_grammar", [False, True])
def test_a_random_walk_never_thinks_more_than_its_budget(vocabulary: Vocabulary, form: Any, has_grammar: bool) -> None:
    chooser = random.Random(1)
    grammar = llguidance("(yes|no)")
    letters = [token for token, text in enumerate(vocabulary.tokens) if text.isascii() and text.isalpha()]
    marks = [*spelled(vocabulary, "<>end|cm")]
    num_whole = 0
    for walk in range(NUM_WALKS):
        budget = BUDGETS[walk % len(BUDGETS)]
        section = form(vocabulary, budget, is_open=has_grammar or walk % 2 == 0)
        start = SessionStart(grammar.spec if has_grammar else None, grammar.compiled, (EOS,), section)
        tracked = TrackedSession(start, make_grammar(grammar, vocabulary) if has_grammar else None, vocabulary)
        tokens = [] if section.is_open else spelled(vocabulary, section.begin)[: len(section.begin) if budget else 0]
        tracked.advance(0, tokens)
        while len(tokens) < 60 and not tracked.flags():
            allowed = row_of(tracked)
            pool = [each for each in allowed if each in marks or each in letters[:40]] or allowed
            tokens.append(chooser.choice(pool) if chooser.random() < 0.9 else chooser.choice(allowed))
            if tokens[-1] == EOS:
                break
            tracked.advance(len(tokens) - 1, tokens[-1:])
        if budget is not None and (section.is_open or budget):
            assert num_thinking(vocabulary, section, tokens) <= budget, text_of(vocabulary, tokens)
            num_whole += text_of(vocabulary, tokens).count(section.end.encode())
        if has_grammar and tracked.flags():
            mark = section.answer or section.end
            assert text_of(vocabulary, tokens).split(mark.encode(), 1)[1] in (b"yes", b"no")
    assert num_whole > NUM_WALKS // 4


@pytest.mark.parametrize("form", FORMS)
def test_a_state_is_a_function_of_the_tokens(vocabulary: Vocabulary, form: Any) -> None:
    chooser = random.Random(2)
    grammar = llguidance("(yes|no)")
    section = form(vocabulary, 4, is_open=True)
    start = SessionStart(grammar.spec, grammar.compiled, (EOS,), section)

    def fresh() -> TrackedSession:
        return TrackedSession(start, make_grammar(grammar, vocabulary), vocabulary)

    kept, tokens = fresh(), list[int]()
    for _ in range(NUM_WALKS):
        if kept.flags() or (tokens and chooser.random() < 0.3):
            del tokens[chooser.randrange(len(tokens)) :]
        else:
            tokens.append(chooser.choice([each for each in row_of(kept) if each != EOS]))
        kept.advance(0, tokens)
        other = fresh()
        other.advance(0, tokens)
        assert kept.flags() == other.flags()
        if not kept.flags():
            assert row_of(kept) == row_of(other)


def test_a_mark_that_the_model_has_begun_is_completed(vocabulary: Vocabulary) -> None:
    """A peer wrote the mark anew: `</` `</` `think>`."""
    section = written(vocabulary, 3, is_open=True)
    tracked = TrackedSession(SessionStart(None, b"", (EOS,), section), None, vocabulary)
    tracked.advance(0, spelled(vocabulary, "a<<"))
    for number, token in enumerate(spelled(vocabulary, "end>>")):
        assert row_of(tracked) == [token]
        tracked.advance(3 + number, [token])
    assert len(row_of(tracked)) > 1


def test_a_mark_is_found_however_it_is_written(vocabulary: Vocabulary) -> None:
    """The tokenizer's own way is only one of several, and a token must not go beyond the mark."""
    grammar = llguidance("yes")
    section = ThinkingSection(begin="[", end="an", end_token_ids=(), is_open=True, budget=9)
    start = SessionStart(grammar.spec, grammar.compiled, (EOS,), section)
    tracked = TrackedSession(start, make_grammar(grammar, vocabulary), vocabulary)
    whole = vocabulary.tokens.index(b"an")
    beyond = [index for index, text in enumerate(vocabulary.tokens) if b"an" in text[:-1]]
    assert beyond
    assert whole in row_of(tracked)
    assert not set(beyond) & set(row_of(tracked))
    tracked.advance(0, [whole])
    assert all(b"yes".startswith(vocabulary.tokens[each]) for each in row_of(tracked))


def test_no_channel_of_thoughts_opens_after_the_budget(vocabulary: Vocabulary) -> None:
    for budget, opens in ((0, False), (1, True)):
        section = channels(vocabulary, budget, is_open=False)
        tracked = TrackedSession(SessionStart(None, b"", (EOS,), section), None, vocabulary)
        tracked.advance(0, spelled(vocabulary, "|c|"))
        first = [text for each in row_of(tracked) if (text := vocabulary.tokens[each])[:1] == b"a"]
        assert any(b"analysis".startswith(text) for text in first) == opens
        assert b"b" in [vocabulary.tokens[each] for each in row_of(tracked)]


def test_a_row_without_a_budget_is_free(vocabulary: Vocabulary) -> None:
    section = think(vocabulary, None, is_open=True)
    tracked = TrackedSession(SessionStart(None, b"", (EOS,), section), None, vocabulary)
    tracked.advance(0, spelled(vocabulary, "Hm." * 9))
    assert len(row_of(tracked)) == len(vocabulary.tokens)
