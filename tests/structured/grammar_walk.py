"""Walks through a grammar as a hostile model would: any allowed token will do, until the text gets long."""

from __future__ import annotations

import random

import numpy as np

from manta.structured.backend import Session
from manta.structured.masks import row_words
from manta.structured.vocabulary import Vocabulary

CLOSING = b'"}],0123456789eE.:nulltrafs'
"""First bytes of tokens that bring a JSON text to an end, the most helpful first."""


def allowed_tokens(session: Session, vocabulary: Vocabulary) -> np.ndarray:
    """Ids that the session's row allows, end-of-sequence ids included."""
    row = np.full(row_words(vocabulary.vocab_size), -1, dtype=np.int32)
    session.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def text_of(token_ids: list[int], vocabulary: Vocabulary) -> bytes:
    return b"".join(vocabulary.tokens[token_id] for token_id in token_ids)


def walk(
    session: Session, vocabulary: Vocabulary, rng: random.Random, free: int = 40, longest: int = 400
) -> tuple[list[int], bool]:
    """Random tokens, `free` of them any that is allowed and then those that close. Returns them without the end, and
    whether the text has come to its end: False is what a limit on tokens does. A dead end is an assertion error.
    """
    token_ids: list[int] = []
    while len(token_ids) < longest:
        if session.is_finished():
            return token_ids, True
        allowed = allowed_tokens(session, vocabulary)
        ends = set(vocabulary.eos_token_ids) & set(allowed.tolist())
        others = [token_id for token_id in allowed.tolist() if token_id not in ends]
        assert ends or others, f"nothing may follow {text_of(token_ids, vocabulary)!r}"
        if ends and (not others or len(token_ids) >= free or rng.random() < 0.1):
            return token_ids, True
        if len(token_ids) < free:
            token_id = rng.choice(others)
        else:
            token_id = min(
                rng.sample(others, min(len(others), 300)), key=lambda t: _distance(vocabulary.tokens[t], rng)
            )
        assert session.accept(token_id), f"{vocabulary.tokens[token_id]!r} is allowed and refused"
        token_ids.append(token_id)
    return token_ids, False


def _distance(token: bytes, rng: random.Random) -> float:
    index = CLOSING.find(token[:1])
    return (index if index >= 0 else len(CLOSING)) + 3 * len(token) + rng.random()
