"""The probability of each of a question's answers, from the model's log-probabilities of their tokens.

A constraint that allows these answers alone lets the model draw, after each token, among the tokens with which one of
them goes on. The probability of an answer is the product over its tokens of what the draw gives it, so those of all
answers sum to 1. `cluster/http/endpoints/decisions.py` calls this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from manta.cluster.errors import refuse
from manta.cluster.text.tokenizer import Tokenizer


class AnswerPath(NamedTuple):
    """Tokens that stand for an answer."""

    answer: int
    """Index of the answer."""
    token_ids: tuple[int, ...]


def answer_paths(tokenizer: Tokenizer, answers: Sequence[str], end_ids: Sequence[int], field: str) -> list[AnswerPath]:
    """Returns the tokens of each answer, as the tokenizer writes it alone.

    If one answer is how another begins, only the end tells them apart. Every answer then has a path for each of
    `end_ids`, the end-of-sequence tokens. Raises `RequestRefused` naming `field` if two answers have the same tokens,
    or one has none.
    """
    tokens = [tuple(each) for each in tokenizer.encode_batch(answers, add_special_tokens=False)]
    if len(set(tokens)) < len(tokens) or () in tokens:
        refuse("unfit", field, remedy="change one", cause="two answers are the same text to the model, or one is empty")
    begins = {each[:length] for each in tokens for length in range(1, len(each))}
    ends = [(end,) for end in end_ids] if begins.intersection(tokens) else [()]
    if not ends:
        cause = "one answer begins another, and the model has no end-of-sequence token that would tell them apart"
        refuse("unfit", field, remedy="change one", cause=cause)
    return [AnswerPath(index, (*each, *end)) for index, each in enumerate(tokens) for end in ends]


def probabilities(paths: Sequence[AnswerPath], logprobs: Sequence[Sequence[float]]) -> list[float]:
    """Returns the probability of each answer. `logprobs` has the model's own log-probability of each token of each
    path, after the prompt and the path's tokens before it.
    """
    drawn: dict[tuple[int, ...], dict[int, float]] = {}
    for path, own in zip(paths, logprobs, strict=True):
        for depth, (token_id, logprob) in enumerate(zip(path.token_ids, own, strict=True)):
            drawn.setdefault(path.token_ids[:depth], {})[token_id] = logprob
    totals = {begun: _log_sum(each.values()) for begun, each in drawn.items()}
    found = [0.0] * (1 + max(path.answer for path in paths))
    for path in paths:
        begun = [path.token_ids[:depth] for depth in range(len(path.token_ids))]
        steps = zip(begun, path.token_ids, strict=True)
        found[path.answer] += math.exp(sum(drawn[before][token_id] - totals[before] for before, token_id in steps))
    return found


def _log_sum(logprobs: Iterable[float]) -> float:
    """Returns the logarithm of the sum of probabilities."""
    given = list(logprobs)
    most = max(given)
    return most + math.log(sum(math.exp(each - most) for each in given))
