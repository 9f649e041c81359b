"""What the HTTP application asks of the engines. `cluster/serve/submission.py` implements it with calls over Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from cluster.engine.request import FinishStatus, Usage
from cluster.engine.stats import EngineStats
from structured.constraint import ConstraintSpec
from workers.model_info import ModelInfo
from workers.sampling_params import SamplingParams
from workers.step import TokenLogprobs


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

    Async iteration yields `Event`s until every choice has ended; it raises `ApiError` if one cannot be served.
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

    def submit(
        self,
        request_id: str,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        chat: bool,
        priority: int,
        timeout_s: float,
        client: str = "",
        weight: float = 1.0,
        session: str = "",
        shown_ids: frozenset[int] = frozenset(),
        traceparent: str = "",
        cache_root: bytes = b"",
    ) -> Generation:
        """Sends every prompt to an engine; each has `params.n` choices and `timeout_s` seconds.

        `client` is whose they are, and clients take turns, `weight` of them where others have one. The prompts of a
        client's `session` go where the last one went. `chat` drops the space that some tokenizers put in front of
        an answer's first word. Special tokens of `shown_ids` stay in the text.
        `traceparent` is the span that the engines' spans belong to, if there is one. Prompts with different
        `cache_root`s read nothing of one another from the prefix cache.
        """
        ...

    async def resolve(self, spec: ConstraintSpec, client: str = "") -> tuple[ConstraintSpec, list[str]]:
        """The constraint with its backend, and the keywords that this backend does not enforce. Raises `ApiError` 400
        if none can enforce it, 429 if too many wait.
        """
        ...

    async def model(self) -> ModelInfo: ...

    async def stats(self) -> list[EngineStats]:
        """Of every replica that answers, of none if none runs. Raises `ApiError` 503 if none answers."""
        ...

    @property
    def num_held(self) -> int:
        """Requests that wait for an engine to start."""
        ...

    async def check_reachable(self) -> None:
        """Raises `ApiError` 503 while engines cannot send tokens here."""
        ...
