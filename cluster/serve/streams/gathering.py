"""Outputs of one choice that are handed on together, for their reader is behind or reads nothing before the end.

An ingress spends more on an output than on its tokens. So what has come of a choice since its reader last looked is one
output (`Submission`), and for a line of a batch the engine sends no more than the first and the last (`Gathering`).
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from cluster.engine.request import SequenceOutput

T = TypeVar("T")


def joined(first: SequenceOutput | None, second: SequenceOutput) -> SequenceOutput:
    """Both as one, which is `second`; `first` is used up."""
    if first is not None:
        second.token_ids = _both(first.token_ids, second.token_ids) or []
        second.logprobs = _both(first.logprobs, second.logprobs)
        second.prompt_logprobs = _both(first.prompt_logprobs, second.prompt_logprobs)
        second.usage = second.usage or first.usage
    return second


def _both(first: list[T] | None, second: list[T] | None) -> list[T] | None:
    """In place, since a long answer has many."""
    if first is None or second is None:
        return second if first is None else first
    first += second
    return first


def failure_apart(output: SequenceOutput) -> list[SequenceOutput]:
    """What a choice gained before it failed comes first: a failure may end the answer, and would take it along."""
    if output.error is None or not output.token_ids:
        return [output]
    gained = msgspec.structs.replace(output, finish=None, error=None)
    return [gained, msgspec.structs.replace(output, token_ids=[], logprobs=None, prompt_logprobs=None)]


class Gathering:
    """Of one request that nobody reads before its end. Used by the engine's thread alone."""

    def __init__(self) -> None:
        self._kept: dict[int, SequenceOutput | None] = {}
        """By choice, once its first output was sent: what came since then."""

    def add(self, output: SequenceOutput) -> bool:
        """Whether `output` is to be sent now. The first of a choice is, so that everybody knows that its prompt is
        computed; the last one is with all that was kept.
        """
        joined(self._kept.get(output.index), output)
        is_sent = output.finish is not None or output.index not in self._kept
        self._kept[output.index] = None if is_sent else output
        return is_sent
