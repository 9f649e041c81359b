"""Checks of every guarded session: its masks judge whole tokens as bytes, and its state is that of its tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from manta.structured.backend import Session
from manta.structured.masks import row_words
from manta.structured.vocabulary import Vocabulary
from tests.structured.grammar_walk import allowed_tokens


def check_mask_byte_by_byte(session: Any, vocabulary: Vocabulary, rng: random.Random, num_tokens: int) -> None:
    """Draws up to `num_tokens` of the tokens that the grammar alone allows: each is in the mask if and only if the
    session takes their bytes one by one: single bytes are judged at every byte.
    """
    tokens, single = vocabulary.tokens, vocabulary.byte_token_ids()
    allowed = set(allowed_tokens(session, vocabulary).tolist())
    wider = set(allowed_tokens(session.unguarded, vocabulary).tolist())
    assert allowed <= wider
    candidates = sorted(wider - set(vocabulary.eos_token_ids))
    for token_id in rng.sample(candidates, min(len(candidates), num_tokens)):
        other = session.fork()
        one_by_one = all(other.accept(single[byte]) for byte in tokens[token_id])
        assert (token_id in allowed) == one_by_one, tokens[token_id]
        assert session.fork().accept(token_id) == one_by_one, tokens[token_id]


def check_state_is_that_of_its_tokens(
    new: Callable[[], Session],
    vocabulary: Vocabulary,
    rng: random.Random,
    num_actions: int,
    num_candidates: int = 1,
    longest_rollback: int | None = None,
) -> None:
    """After each of `num_actions` at random (accept, roll back, fork, a token that may be refused), a session equals a
    new one that took the same tokens. Of `num_candidates` allowed tokens the shortest is accepted.
    """
    session, taken = new(), []
    for _ in range(num_actions):
        action = rng.choice(["accept", "accept", "accept", "rollback", "fork", "refused"])
        if action == "accept":
            ends = vocabulary.eos_token_ids
            allowed = [token_id for token_id in allowed_tokens(session, vocabulary).tolist() if token_id not in ends]
            if not allowed:
                continue
            candidates = rng.sample(allowed, min(num_candidates, len(allowed)))
            taken.append(min(candidates, key=lambda token_id: len(vocabulary.tokens[token_id])))
            assert session.accept(taken[-1])
        elif action == "rollback" and taken:
            count = rng.randint(1, min(longest_rollback or len(taken), len(taken)))
            session.rollback(count)
            del taken[-count:]
        elif action == "fork":
            other = session.fork()
            session.accept(rng.choice(allowed_tokens(session, vocabulary).tolist()))
            session = other
        elif action == "refused":
            session.accept(rng.randrange(vocabulary.vocab_size)) and session.rollback(1)
        again = new()
        assert all(again.accept(token_id) for token_id in taken)
        assert _mask(session, vocabulary) == _mask(again, vocabulary)
        assert session.is_accepting() == again.is_accepting()
        assert session.is_finished() == again.is_finished()
        assert session.forced_tokens() == again.forced_tokens()


def _mask(session: Session, vocabulary: Vocabulary) -> bytes:
    row = np.full(row_words(vocabulary.vocab_size), 0x5A5A5A5A, dtype=np.int32)
    session.fill(row)
    return row.tobytes()
