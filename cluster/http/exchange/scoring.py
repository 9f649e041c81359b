"""A generation for requests that want only the log-probabilities of their prompts (`max_tokens: 0`).

An engine computes a prompt in order to draw a token. This module hides that token from the client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from manta.cluster.engine.request import FinishStatus, Usage
from manta.cluster.http.exchange.engines import Event, Generation


class Scored:
    """The events and usages of `generation` without its output."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.num_choices = generation.num_choices

    @property
    def usages(self) -> list[Usage]:
        nothing = {"num_output_tokens": 0, "num_accepted_drafts": 0, "num_rejected_drafts": 0}
        return [msgspec.structs.replace(usage, **nothing) for usage in self._generation.usages]

    @property
    def ended_at(self) -> int:
        return self._generation.ended_at

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self._generation:
            is_stop = event.finish is FinishStatus.FINISHED_STOPPED
            yield Event(
                index=event.index,
                prompt_logprobs=event.prompt_logprobs,
                finish=FinishStatus.FINISHED_LENGTH if is_stop else event.finish,
            )

    def close(self) -> None:
        self._generation.close()
