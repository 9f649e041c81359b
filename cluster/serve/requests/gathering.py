"""Merges outputs of one choice when its reader is behind, or reads nothing before the end.

An ingress spends more on an output than on the output's tokens. `Submission` therefore merges whatever arrives of a
choice before its reader looks again. For a request that is read whole, such as a line of a batch, the engine sends only
the first output and the merged rest (`Gathering`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from manta.cluster.engine.request import SequenceOutput

T = TypeVar("T")


def joined(first: SequenceOutput | None, second: SequenceOutput) -> SequenceOutput:
    """Returns both outputs merged into `second`; `first` must not be used afterwards."""
    if first is not None:
        second.token_ids = _both(first.token_ids, second.token_ids) or []
        second.logprobs = _both(first.logprobs, second.logprobs)
        second.prompt_logprobs = _both(first.prompt_logprobs, second.prompt_logprobs)
        second.usage = second.usage or first.usage
    return second


def _both(first: list[T] | None, second: list[T] | None) -> list[T] | None:
    """Extends `first` in place, because a long answer has many items."""
    if first is None or second is None:
        return second if first is None else first
    first += second
    return first


def failure_apart(output: SequenceOutput) -> list[SequenceOutput]:
    """Splits a failed output in two: the tokens that came before the failure, then the failure. A failure may end the
    whole answer, and would otherwise take the tokens along.
    """
    if output.error is None or not output.token_ids:
        return [output]
    gained = msgspec.structs.replace(output, finish=None, error=None)
    return [gained, msgspec.structs.replace(output, token_ids=[], logprobs=None, prompt_logprobs=None)]


def parts(output: SequenceOutput, num_tokens: int) -> Iterator[SequenceOutput]:
    """Splits an output into parts of at most `num_tokens` tokens. The last part has its end, and each has its usage."""
    last = max(0, len(output.token_ids) - 1) // num_tokens
    for number in range(last + 1):
        place = slice(number * num_tokens, (number + 1) * num_tokens)
        part = msgspec.structs.replace(
            output,
            token_ids=output.token_ids[place],
            logprobs=output.logprobs and output.logprobs[place],
            prompt_logprobs=None if number else output.prompt_logprobs,
        )
        if number < last:
            part.finish = part.stop_token_id = part.error = None
        yield part


class Gathering:
    """Merges the outputs of one request that is read whole. Only the engine's thread uses it."""

    def __init__(self) -> None:
        self._kept: dict[int, SequenceOutput | None] = {}
        """Unsent output of each choice whose first output was sent."""

    def add(self, output: SequenceOutput) -> bool:
        """Returns whether `output` has to be sent now. A choice's first output has to be, because it tells that the
        prompt is computed. Its last output has to be, merged with everything that was kept.
        """
        joined(self._kept.get(output.index), output)
        is_sent = output.finish is not None or output.index not in self._kept
        self._kept[output.index] = None if is_sent else output
        return is_sent
