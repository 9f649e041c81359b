"""OpenAI's responses and stream chunks as msgspec structs, with vLLM's extensions. `cluster/http/exchange/answers.py`
fills them in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from manta.cluster.engine.request import Usage

SERVICE_TIER = "default"
"""The one service tier, in OpenAI's words."""


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    accepted_prediction_tokens: int
    """Drafts that the model drew itself, from any proposer; they are part of `completion_tokens`."""
    rejected_prediction_tokens: int
    """Drafts that the model did not draw. They are not part of `completion_tokens`."""


class UsageInfo(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_info(parts: Iterable[Usage]) -> UsageInfo:
    """Returns the usage of a response: the sum of `parts`, which holds one usage for each prompt."""
    prompt = output = cached = accepted = rejected = 0
    for usage in parts:
        prompt += usage.num_prompt_tokens
        output += usage.num_output_tokens
        cached += usage.num_cached_tokens
        accepted += usage.num_accepted_drafts
        rejected += usage.num_rejected_drafts
    drafts = CompletionTokensDetails(accepted, rejected)
    return UsageInfo(prompt, output, prompt + output, PromptTokensDetails(cached), drafts)


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]
    origin: Literal["model", "forced", "prediction", "history", "ngram", "draft", "mtp", "eagle3"] | UnsetType = UNSET
    """Origin of the token, if the request asks for it (Manta's extension): `forced` if the constraint left no
    choice, the name of a proposer if it was an accepted draft of that one, else `model`.
    """


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry a token; None only for the first token of an echoed prompt."""

    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]

    def extend(self, other: CompletionLogprobs) -> None:
        self.text_offset += other.text_offset
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs


class PromptTokenLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None
    """Arguments as JSON text; in a stream, the next piece of it."""


class CustomDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    input: str | None = None
    """Input of a custom tool; in a stream, the next piece of it."""


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """A call, or in a stream a part of call number `index`: `id`, `type` and the name come with the first part. It is
    the call of a function or of a custom tool.
    """

    index: int | UnsetType = UNSET
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None

    @property
    def name(self) -> str:
        """The name of the tool; empty in the later parts of a stream."""
        return (self.custom or self.function or _NOTHING).name or ""

    @property
    def text(self) -> str:
        """The arguments as JSON text, or the input of a custom tool; in a stream, the next piece of it."""
        if self.custom is not None:
            return self.custom.input or ""
        return (self.function or _NOTHING).arguments or ""

    def with_text(self, text: str) -> ToolCallDelta:
        """Returns the whole call: this one with all of its arguments or its input."""
        if self.custom is not None:
            return ToolCallDelta(id=self.id, type=self.type, custom=CustomDelta(self.name, text))
        return ToolCallDelta(id=self.id, type=self.type, function=FunctionDelta(self.name, text))


_NOTHING = FunctionDelta()


class ChatResponseMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    message: ChatResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    """OpenAI's reason, or "error" if this choice failed and others of the answer did not."""
    stop_reason: str | int | None = None
    """Stop string or stop token id that ended the text (vLLM's extension)."""
    token_ids: list[int] | UnsetType = UNSET
    """Token ids of the output, if the request asks for them."""


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    service_tier: str | UnsetType = UNSET
    """`SERVICE_TIER`, if the request names a tier."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """`usage` is left out unless the stream was asked for it; then it is null in every chunk but the last."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Token ids of the prompt, in the first chunk, if the request asks for them."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A choice of a completion or of a chunk of its stream. There `finish_reason` is null until the last chunk; it is
    "error" if this choice failed and others of the answer did not.
    """

    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Token ids of the prompt; in a stream, in the choice's first chunk only."""
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A completion, and a chunk of its stream (OpenAI uses one type for both)."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | UnsetType | None = UNSET
