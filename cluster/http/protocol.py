"""The OpenAI wire format: request bodies, responses, stream chunks and errors, as msgspec structs.

Decoding validates everything that needs no model and turns each mistake into an `ApiError` that names the field; what a
request asks for becomes one `SamplingParams`. Knows neither the tokenizer nor the
engine.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from cluster.http.body_limits import check_bad_words, check_n, check_token_ids
from cluster.http.chat_messages import ChatMessage, check_template_kwargs, template_message
from cluster.http.constraints import ResponseFormat, StructuredOutputs, requested_constraint
from cluster.http.errors import ApiError as ApiError
from cluster.http.errors import bound_error, refuse, shape_error
from cluster.http.tools import Tool, ToolChoice, arguments_constraint, check_tools
from cluster.http.usage import UsageInfo
from structured.constraint import ConstraintSpec
from structured.logits_processors import LogitsProcessorSpec
from workers.sampling_params import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` of `/v1/completions`; chat goes on to the context length."""

SSE_DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


# ---- requests ------------------------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; nothing is obfuscated."""


class _SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and completion bodies share. None, where OpenAI allows null, means the default."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    n: int | None = None
    """Choices for each prompt; choice `i` of prompt `p` has index `p * n + i`."""
    use_beam_search: bool | None = None
    priority: int = 0
    """Lower runs first (vLLM's extension)."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    logits_processors: tuple[LogitsProcessorSpec, ...] | None = None
    """Run in this order; only those that the operator registered."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        """For each prompt."""
        return 1 if self.n is None else self.n

    def _check_common(self) -> None:
        check_n(self.num_choices)
        if self.use_beam_search:
            refuse(
                "use_beam_search", "use_beam_search is not supported; leave it out, and choose n for several answers"
            )
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "stream_options is only allowed with stream = true")
        if self.prompt_logprobs is not None and self.stream:
            refuse("prompt_logprobs", "prompt_logprobs is not available with stream = true; leave one of them out")
        if not -(2**31) <= self.priority < 2**31:
            refuse("priority", f"priority {self.priority} does not fit in 32 signed bits")
        check_bad_words(self.bad_words or ())

    def _sampling_params(self, names: dict[str, str] | None = None, **more: Any) -> SamplingParams:
        """The fields of the same name, and `more`. `names` maps a parameter to the body's field it came from."""
        values = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        values |= {name: value for name, value in more.items() if value is not None}
        values["constraint"], _ = requested_constraint(self.response_format, self.structured_outputs)
        if self.stop is not None:
            values["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        try:
            return SamplingParams(**values)
        except ValueError as error:
            raise bound_error(str(error), names or {}) from error

    def field_of(self, param: str) -> str:
        """The field of this body that an engine's refusal of `param` is about."""
        if param != "constraint":
            return param
        return requested_constraint(self.response_format, self.structured_outputs)[1]

    def tool_constraints(self) -> list[tuple[str, ConstraintSpec]]:
        """Field and schema of what a call's arguments must fit, tool by tool."""
        return []


_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "logits_processors",
)


class ChatCompletionRequest(_SamplingFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    """Newer name of `max_tokens`; it wins where both are given."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True
    """False keeps `reasoning_content` out of the answer (vLLM's extension); the model thinks all the same."""
    reasoning_effort: str | None = None
    """Given to chat templates that know it."""

    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    """None is "auto" where there are tools."""
    parallel_tool_calls: bool | None = None
    """False allows one call at most; None is True."""

    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    verbosity: str | None = None
    store: bool | None = None

    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    moderation: Any = None

    def check(self) -> None:
        self._check_common()
        if not self.messages:
            refuse("messages", "messages is empty; give at least one message")
        if self.store:
            refuse("store", "store = true is not supported: nothing is kept; leave it out or send false")
        if self.functions not in (None, []):
            refuse("functions", "functions is not supported; use tools")
        if self.function_call not in (None, "none", "auto"):
            refuse("function_call", "function_call is not supported; use tool_choice")
        check_tools(self.tools or [], self.tool_choice)
        if self.structured_outputs is not None and self.callable_tools():
            message = 'structured_outputs and tools exclude each other, unless tool_choice is "none"'
            refuse("structured_outputs", message)
        if self.modalities not in (None, ["text"]):
            refuse("modalities", 'only modalities ["text"] is supported')
        for name in ("audio", "prediction", "web_search_options", "moderation"):
            _only(self, name, None, f"{name} is not supported; leave it out")
        if self.top_logprobs is not None and not self.logprobs:
            refuse("top_logprobs", "top_logprobs is only allowed with logprobs = true")
        check_template_kwargs(self.chat_template_kwargs)

    def callable_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    def tool_constraints(self) -> list[tuple[str, ConstraintSpec]]:
        return [
            (f"tools[{index}].function.parameters", arguments_constraint(tool))
            for index, tool in enumerate(self.callable_tools())
        ]

    def field_of(self, param: str) -> str:
        if param == "constraint" and self.callable_tools():
            return "tools"
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "messages" if param == "prompt" else super().field_of(param)

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates read them: plain text contents, `developer` as `system`."""
        return [template_message(message, f"messages[{index}]") for index, message in enumerate(self.messages)]

    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template gets beside messages and tools."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})

    def sampling_params(self) -> SamplingParams:
        """Raises `ApiError` naming the field that is out of bounds."""
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return self._sampling_params(
            names,
            max_tokens=self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class CompletionRequest(_SamplingFields, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True
    """Text prompts get the tokenizer's own special tokens, such as a beginning-of-sequence token."""
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        self._check_common()
        if self.best_of not in (None, self.num_choices):
            message = f"best_of {self.best_of} is not supported beside n {self.num_choices}: it must equal n"
            refuse("best_of", f"{message}; leave it out")
        if self.suffix:
            refuse("suffix", "suffix is not supported; leave it out")
        names = ("logit_bias", "allowed_token_ids", "stop_token_ids")
        check_token_ids({name: getattr(self, name) for name in names}, len(self.prompts()))

    def prompts(self) -> list[str | list[int]]:
        """Every prompt, as text or as token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            prompt = [prompt]
        if not prompt:
            refuse("prompt", "prompt is empty; give a string, token ids, or a list of either")
        if all(type(item) is int for item in prompt):
            return [_checked_token_ids(prompt, "prompt")]
        found: list[str | list[int]] = []
        for index, item in enumerate(prompt):
            param = "prompt" if isinstance(self.prompt, str) else f"prompt[{index}]"
            if isinstance(item, int) or type(item) is not type(prompt[0]):
                refuse(param, f"{param}: strings, token ids and lists of token ids cannot be mixed; use one of them")
            if not item:
                refuse(param, f"{param} is empty; give at least one character or token id")
            found.append(item if isinstance(item, str) else _checked_token_ids(item, param))
        return found

    def sampling_params(self) -> SamplingParams:
        """Raises `ApiError` naming the field that is out of bounds."""
        prompt_logprobs = self.logprobs if self.echo else None
        if prompt_logprobs is not None and self.prompt_logprobs is not None:
            prompt_logprobs = max(prompt_logprobs, self.prompt_logprobs)
        return self._sampling_params(
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
            max_tokens=DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else None,
        )


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /tokenize`: either `prompt` or `messages` (vLLM's shape)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    """For `prompt`; a chat template writes its own."""
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            refuse("prompt", "give either prompt or messages")
        check_template_kwargs(self.chat_template_kwargs)
        if self.messages is not None and not self.messages:
            refuse("messages", "messages is empty; give at least one message")

    def template_kwargs(self) -> dict[str, Any]:
        return self.chat_template_kwargs or {}

    def template_messages(self) -> list[dict[str, Any]]:
        messages = self.messages or []
        return [template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False

    def check(self) -> None:
        _checked_token_ids(self.tokens, "tokens")


def _only(request: msgspec.Struct, name: str, allowed: Any, message: str) -> None:
    if getattr(request, name) != allowed:
        refuse(name, f"{name}: {message}" if not message.startswith(name) else message)


def _checked_token_ids(token_ids: list[Any], param: str) -> list[int]:
    """Ids that no vocabulary has; the upper bound is the model's, and checked where it is known."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < 2**31:
            refuse(f"{param}[{index}]", f"{param}[{index}]: token id {token_id} is outside every vocabulary")
    return token_ids


# ---- decoding ------------------------------------------------------------------------------------------------------

_chat_decoder = msgspec.json.Decoder(ChatCompletionRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)

_Request = TypeVar("_Request")


def decode_chat(body: bytes) -> ChatCompletionRequest:
    """Raises `ApiError` 400 naming the field of the first mistake."""
    request = _decode(_chat_decoder, body)
    request.check()
    request.template_messages()
    return request


def decode_completion(body: bytes) -> CompletionRequest:
    """Raises `ApiError` 400 naming the field of the first mistake."""
    request = _decode(_completion_decoder, body)
    request.check()
    return request


def decode_tokenize(body: bytes) -> TokenizeRequest:
    """Raises `ApiError` 400 naming the field of the first mistake."""
    request = _decode(_tokenize_decoder, body)
    request.check()
    request.template_messages()
    return request


def decode_detokenize(body: bytes) -> DetokenizeRequest:
    """Raises `ApiError` 400 naming the field of the first mistake."""
    request = _decode(_detokenize_decoder, body)
    request.check()
    return request


def _decode(decoder: msgspec.json.Decoder[_Request], body: bytes) -> _Request:
    try:
        body.decode()
        return decoder.decode(body)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8: byte {error.start} is {body[error.start]:#04x}") from error
    except msgspec.ValidationError as error:
        raise shape_error(str(error)) from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ApiError(400, "the body's JSON is nested too deeply") from error


# ---- responses -----------------------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


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
    """JSON text; in a stream the next piece of it."""


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """A call, or in a stream a part of call number `index`: `id`, `type` and the name come with the first part."""

    index: int | UnsetType = UNSET
    id: str | None = None
    type: str | None = None
    function: FunctionDelta = msgspec.field(default_factory=FunctionDelta)


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
    """OpenAI's, or "error" where this choice failed and others of the answer did not."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the text (vLLM's extension)."""


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


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


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """`usage` is left out unless the stream was asked for it; then it is null in every chunk but the last."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | UnsetType | None = UNSET
    system_fingerprint: str | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A choice of a completion, and of its stream's chunks, where `finish_reason` is null until the last; "error" where
    this choice failed and others of the answer did not.
    """

    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A completion, and a chunk of its stream (OpenAI uses one type for both)."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | UnsetType | None = UNSET
    system_fingerprint: str | None = None


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "manta"
    max_model_len: int


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


def encode(response: msgspec.Struct) -> bytes:
    """A response body."""
    return _encoder.encode(response)


def sse_event(chunk: msgspec.Struct) -> bytes:
    """A chunk as one server-sent event."""
    return b"data: " + _encoder.encode(chunk) + b"\n\n"
