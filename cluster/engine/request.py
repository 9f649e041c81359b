"""What travels between the engine and its callers (the ingress, `LLM`): requests in, token deltas out.

Plain data, with token ids only: text belongs to `cluster/text/`. Imports neither torch nor ray.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from workers.sampling_params import SamplingParams
from workers.step import TokenLogprobs


class FinishStatus(enum.StrEnum):
    """How a sequence ended."""

    FINISHED_STOPPED = "stop"
    """End-of-sequence or stop token, or a stop string found by the detokenising side."""
    FINISHED_LENGTH = "length"
    """`max_tokens` or the context length."""
    FINISHED_ABORTED = "abort"
    """The client went away, the deadline passed or the caller aborted."""
    FINISHED_INTERNAL_ERROR = "error"
    """This sequence failed; the others went on."""


class Usage(msgspec.Struct, array_like=True):
    """Token counts of a finished request."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Prompt tokens read from the prefix cache instead of computed."""
    num_accepted_drafts: int = 0
    """Output tokens that were proposed as drafts before the model drew them."""
    num_rejected_drafts: int = 0
    """Drafts that the model did not draw."""

    @classmethod
    def of_choices(cls, num_prompt_tokens: int, choices: list[Usage]) -> Usage:
        """Counts the prompt once, and the output of all choices, of which there is at least one."""
        total = cls(num_prompt_tokens, 0, choices[0].num_cached_tokens)
        for choice in choices:
            total.num_output_tokens += choice.num_output_tokens
            total.num_accepted_drafts += choice.num_accepted_drafts
            total.num_rejected_drafts += choice.num_rejected_drafts
        return total


class ContinuedChoice(msgspec.Struct, array_like=True):
    """A choice that another engine brought to where it is."""

    index: int
    token_ids: list[int]
    """Its output so far."""
    usage: Usage
    """As the other engine reported it; what follows is added."""


class EngineRequest(msgspec.Struct, kw_only=True, array_like=True):
    """One request to the engine."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    """Lower runs first; equal priorities by turns of their clients."""
    deadline_s: float | None = None
    """Seconds from admission after which the request is aborted; None for no deadline."""
    num_branches: int = 0
    """If the caller chooses the tokens (`Engine.branch`): the most sequences that it will have at a time. Else 0."""
    client: str = ""
    """Whose it is: clients take turns. Empty is a caller who shares with nobody."""
    weight: float = 1.0
    """The client's share: with 2 it has two turns where others have one."""
    session: str = ""
    """Names a conversation of the client, whose requests should go where the last one went; empty is none."""
    num_new_tokens: int | None = None
    """Prompt tokens that the engine probably has to compute, as the router found when it chose it."""
    continued: list[ContinuedChoice] | None = None
    """Of a request that ran on another engine: its choices that have not ended, or none if all are where they began.
    Its params hold the seed.
    """
    num_prompt_logprobs: int = 0
    """Prompt positions that the other engine reported."""
    traceparent: str = ""
    """The span that those of the engine belong to, in W3C's form; empty if nobody traces the request."""
    reads_whole: bool = False
    """Nobody reads its output before the end: what comes after the first of a choice is sent with the last."""
    cache_root: bytes = b""
    """The parent of the first block's hash in the prefix cache. Requests with different roots share no block."""


class Branch(NamedTuple):
    """One of a request's sequences, continued by one token."""

    parent: int
    """Index of the sequence that is continued."""
    token_id: int


class SequenceOutput(msgspec.Struct, array_like=True, gc=False):
    """What one step added to one choice of one request."""

    request_id: str
    index: int
    """The choice: 0 unless n > 1."""
    token_ids: list[int]
    """New tokens only (a delta). An ending stop or end-of-sequence token is included."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """New entries for prompt positions 1 onward; position 0 has none."""
    finish: FinishStatus | None = None
    stop_token_id: int | None = None
    """The stop or end-of-sequence token that ended the sequence; it is the last of `token_ids` and not part of the
    text.
    """
    error: str | None = None
    usage: Usage | None = None
    """Set with the first tokens, with the tokens of a step that verified drafts, and with `finish`."""
    is_refusal: bool = False
    """Whether the request's own parameters are the cause of `error`."""
