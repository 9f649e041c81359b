"""The outputs of a request so far, and the request that continues from there on another engine.

An engine's state for a request is a function of its parameters, seed and tokens. `cluster/serve/requests/prompt_run.py`
keeps one `Progress` for each prompt. Imports neither torch nor ray.
"""

from __future__ import annotations

import msgspec

from manta.cluster.engine.request import ContinuedChoice, EngineRequest, SequenceOutput, Usage


class Progress:
    """The progress of `request`, whose params must hold the seed."""

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._outputs: list[list[int]] = [[] for _ in range(request.params.n)]
        """All tokens of each choice."""
        self._open = set(range(request.params.n))
        """Choices that have not ended."""
        self._usages: dict[int, Usage] = {}
        """Usage of each choice, as last reported."""
        self._num_prompt_logprobs = 0

    @property
    def has_ended(self) -> bool:
        return not self._open

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(map(len, self._outputs))

    def is_open(self, index: int) -> bool:
        """Returns whether the choice has not ended."""
        return index in self._open

    def add(self, output: SequenceOutput) -> bool:
        """Adds an output, and returns whether it held tokens, prompt log-probabilities or an end."""
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
        """Marks a choice as ended, so that later outputs do not count."""
        self._open.discard(index)

    def continuation(self, request_id: str, deadline_s: float | None) -> EngineRequest:
        """Returns the rest of the request under another id; the whole request if no choice has begun."""
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
        """Usage of a choice without output."""
        known = next(iter(self._usages.values()), None)
        return Usage(len(self._request.prompt_token_ids), 0, 0 if known is None else known.num_cached_tokens)
