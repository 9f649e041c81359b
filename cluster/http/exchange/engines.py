"""The engines as the HTTP application sees them. `cluster/serve/requests/` implements these protocols with calls over
Ray.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from manta.cluster.engine.pooling_request import PoolingRequest, PoolingResult
from manta.cluster.engine.request import EngineRequest, FinishStatus, Usage
from manta.cluster.engine.stats import EngineStats
from manta.structured.constraint import ConstraintSpec
from manta.structured.thinking import ThinkingSection
from manta.workers.model_info import ModelInfo
from manta.workers.step import TokenLogprobs


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one body of any endpoint and how engines answer them, each with `n` choices."""

    prompts: list[list[int]]
    engine: EngineRequest
    """The request to an engine for each prompt, without the prompt. It has a deadline, and its id is the body's."""
    chat: bool = False
    """Whether the space that some tokenizers put in front of an answer's first word is dropped."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that stay in the text."""
    thinking: list[ThinkingSection | None] = []
    """The thinking section of each prompt, where prompts of one body may differ in it."""
    scored_from: list[int] = []
    """The position, at least 1, of the first token of each prompt whose log-probability is wanted; empty if all are.
    The tokens before it may be read from a prefix cache.
    """

    def of_prompt(self, number: int) -> EngineRequest:
        """Returns the request to an engine for one of the prompts."""
        request_id, params = f"{self.engine.request_id}-{number}", self.engine.params
        if self.thinking:
            params = msgspec.structs.replace(params, thinking=self.thinking[number])
        return msgspec.structs.replace(
            self.engine,
            request_id=request_id,
            prompt_token_ids=self.prompts[number],
            params=params,
            num_prompt_logprobs=self.scored_from[number] - 1 if self.scored_from else 0,
        )


class Meter(Protocol):
    """Counts the output tokens of one body against its client's rate limit."""

    def spend(self, num_tokens: int) -> None:
        """Counts tokens as they arrive from an engine. A negative number takes back those that do not count."""
        ...

    def end(self) -> None:
        """Ends the count, because the generation is over. Later calls do nothing."""
        ...


class Unmetered:
    """Counts nothing, for clients without a rate limit."""

    def spend(self, num_tokens: int) -> None: ...

    def end(self) -> None: ...


UNMETERED = Unmetered()


class Event(msgspec.Struct, kw_only=True):
    """The output that one step, or several merged steps, added to one choice."""

    index: int
    """Index among all choices of the body: choice `i` of prompt `p` is `p * n + i`."""
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of prompt tokens; with a prompt's first choice only."""
    finish: FinishStatus | None = None
    stop_reason: str | int | None = None

    @property
    def is_cut(self) -> bool:
        """Whether something else than the model ended the text: a limit, a stop string or token, a failure."""
        stopped_itself = self.finish is FinishStatus.FINISHED_STOPPED and self.stop_reason is None
        return self.finish is not None and not stopped_itself


class Generation(Protocol):
    """The answers to one body while they are generated.

    Async iteration yields `Event`s until every choice has ended; it raises `ServingError` if the body cannot be served.
    """

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        ...

    @property
    def usages(self) -> list[Usage]:
        """Usage of each prompt that has output."""
        ...

    @property
    def ended_at(self) -> int:
        """Time of the last event, in seconds since 1970; once all events were read."""
        ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def close(self) -> None:
        """Aborts everything that still runs. Called when the reader has finished or left, perhaps twice."""
        ...


class GenerationEngines(Protocol):
    """The part of the engines that answers a request."""

    async def submit(self, request: GenerationRequest, meter: Meter = UNMETERED) -> Generation:
        """Sends every prompt to an engine. The generation ends `meter`; if this raises, the caller does."""
        ...

    async def resolve(self, spec: ConstraintSpec, client: str = "") -> tuple[ConstraintSpec, list[str]]:
        """Returns the constraint with its backend, and the keywords that the backend does not enforce. Raises
        `RequestRefused` if no backend can enforce it, and `QueueFull` if too many constraints wait.
        """
        ...


class Engines(GenerationEngines, Protocol):
    """All engine replicas of one model."""

    async def model(self) -> ModelInfo: ...

    async def pool(self, request: PoolingRequest) -> PoolingResult:
        """Returns the numbers of the request's texts, or a refusal. Cancelling the call ends the work for it."""
        ...

    async def stats(self) -> list[EngineStats]:
        """Returns the statistics of every replica that answers; an empty list if none runs.

        Raises `Unavailable` if replicas run and none answers.
        """
        ...

    async def drop_kept(self, hashes: list[bytes]) -> None:
        """Removes the blocks with these hashes from what running engines keep in files (`prefix_store_bytes`). Raises
        nothing: what a replica does not remove, because it does not run, leaves by its age.
        """
        ...

    @property
    def num_held(self) -> int:
        """Requests that wait for an engine to start."""
        ...

    async def check_reachable(self) -> None:
        """Raises `Unavailable` while engines cannot send tokens here."""
        ...
