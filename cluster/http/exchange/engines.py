"""The engines as the HTTP application sees them. `cluster/serve/streams/submission.py` implements this protocol with
calls over Ray.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from cluster.engine.request import EngineRequest, FinishStatus, Usage
from cluster.engine.stats import EngineStats
from structured.constraint import ConstraintSpec
from workers.model_info import ModelInfo
from workers.sampling_params import SamplingParams
from workers.step import TokenLogprobs


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one body of any endpoint, and how engines are to answer them: each with `params.n` choices."""

    request_id: str
    prompts: list[list[int]]
    params: SamplingParams
    timeout_s: float
    """Seconds that each prompt may take."""
    chat: bool = False
    """Drops the space that some tokenizers put in front of an answer's first word."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that stay in the text."""
    priority: int = 0
    client: str = ""
    """The client that sent the body: clients take turns. Empty shares with nobody."""
    weight: float = 1.0
    """The client has so many turns where others have one."""
    session: str = ""
    """Prompts of one session of a client go where the last one went; empty is none."""
    traceparent: str = ""
    """The parent of the engines' spans, in W3C's form; empty if nobody traces the request."""
    cache_root: bytes = b""
    """Requests with different roots read nothing of one another from the prefix cache."""
    reads_whole: bool = False
    """Nobody reads an answer before its end."""

    def of_prompt(self, number: int) -> EngineRequest:
        """Returns the request to an engine for one of the prompts."""
        return EngineRequest(
            request_id=f"{self.request_id}-{number}",
            prompt_token_ids=self.prompts[number],
            params=self.params,
            priority=self.priority,
            deadline_s=self.timeout_s,
            client=self.client,
            weight=self.weight,
            session=self.session,
            traceparent=self.traceparent,
            cache_root=self.cache_root,
            reads_whole=self.reads_whole,
        )


class Event(msgspec.Struct, kw_only=True):
    """What one step added to one choice."""

    index: int
    """Among all choices of the body: choice `i` of prompt `p` is `p * n + i`."""
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """With a prompt's first choice only."""
    finish: FinishStatus | None = None
    stop_reason: str | int | None = None


class Generation(Protocol):
    """The answers to one body, as they grow.

    Async iteration yields `Event`s until every choice has ended; it raises `ServingError` if one cannot be served.
    """

    @property
    def num_choices(self) -> int:
        """Of all prompts."""
        ...

    @property
    def usages(self) -> list[Usage]:
        """One for each prompt that has output."""
        ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def close(self) -> None:
        """Aborts what still runs. Called when the reader is done or gone, perhaps twice."""
        ...


class Engines(Protocol):
    """All engine replicas of one model."""

    def submit(self, request: GenerationRequest) -> Generation:
        """Sends every prompt to an engine."""
        ...

    async def resolve(self, spec: ConstraintSpec, client: str = "") -> tuple[ConstraintSpec, list[str]]:
        """Returns the constraint with its backend, and the keywords that the backend does not enforce. Raises
        `RequestRefused` if none can enforce it, `QueueFull` if too many wait.
        """
        ...

    async def model(self) -> ModelInfo: ...

    async def stats(self) -> list[EngineStats]:
        """Returns the figures of every replica that answers; none if none runs.

        Raises `Unavailable` if none answers.
        """
        ...

    @property
    def num_held(self) -> int:
        """Requests that wait for an engine to start."""
        ...

    async def check_reachable(self) -> None:
        """Raises `Unavailable` while engines cannot send tokens here."""
        ...
