"""What has come back of a request, and the request that goes on from there on another engine.

All that an engine knows of a request is a function of its parameters, its seed and its tokens. Kept by whoever sends
requests to engines (`cluster/serve/streams/prompt_run.py`); imports neither torch nor ray.
"""

from __future__ import annotations

import msgspec

from cluster.engine.request import ContinuedChoice, EngineRequest, SequenceOutput, Usage


class Progress:
    """Of `request`, whose params hold the seed."""

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._outputs: list[list[int]] = [[] for _ in range(request.params.n)]
        """All tokens of each choice."""
        self._open = set(range(request.params.n))
        """Choices that have not ended."""
        self._usages: dict[int, Usage] = {}
        """Of choices, as last reported."""
        self._num_prompt_logprobs = 0

    @property
    def has_ended(self) -> bool:
        return not self._open

    @property
    def num_tokens(self) -> int:
        """Of all choices."""
        return sum(map(len, self._outputs))

    def is_open(self, index: int) -> bool:
        """Whether more may come of a choice."""
        return index in self._open

    def add(self, output: SequenceOutput) -> bool:
        """Returns whether there was anything in it."""
        if output.token_ids:
            self._outputs[output.index] += output.token_ids
        elif output.finish is None and not output.prompt_logprobs:
            return False
        if output.prompt_logprobs:
            self._num_prompt_logprobs += len(output.prompt_logprobs)
        if output.usage is not None:
            self._usages[output.index] = output.usage
        if output.finish is not None:
            self.end(output.index)
        return True

    def end(self, index: int) -> None:
        """Nothing that comes of this choice matters any more."""
        self._open.discard(index)

    def continuation(self, request_id: str, deadline_s: float | None) -> EngineRequest:
        """The rest of the request, under another name. Where no choice has begun it is the whole request again."""
        has_begun = any(self._outputs) or len(self._open) < len(self._outputs)
        choices = [
            ContinuedChoice(index, self._outputs[index], self._usages.get(index, self._usage_of_prompt))
            for index in sorted(self._open)
        ]
        return msgspec.structs.replace(
            self._request,
            request_id=request_id,
            deadline_s=deadline_s,
            continued=choices if has_begun else [],
            num_prompt_logprobs=self._num_prompt_logprobs,
        )

    @property
    def _usage_of_prompt(self) -> Usage:
        """Of a choice without output."""
        known = next(iter(self._usages.values()), None)
        return Usage(len(self._request.prompt_token_ids), 0, 0 if known is None else known.num_cached_tokens)
