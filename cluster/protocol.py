"""The OpenAI wire format: request bodies, responses, stream chunks and errors, as msgspec structs.

Decoding validates everything that needs no model and turns each mistake into an `ApiError` that names the field; what a
request asks for becomes one `SamplingParams`. Used by the ingress alone (its logprob structs by `cluster/output.py`
too); knows neither the tokenizer nor the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from cluster.errors import ApiError as ApiError
from cluster.errors import bound_error, refuse, shape_error
from cluster.request import Usage
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


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message; its parts are checked by `_template_message`."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


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
    priority: int = 0
    """Lower runs first (vLLM's extension)."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    structured_outputs: Any = None
    response_format: Any = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def _check_common(self) -> None:
        if self.n is not None and self.n != 1:
            refuse("n", f"n {self.n} is not supported: only n = 1 is; send the request {max(self.n, 2)} times instead")
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "stream_options is only allowed with stream = true")
        if self.prompt_logprobs is not None and self.stream:
            refuse("prompt_logprobs", "prompt_logprobs is not available with stream = true; leave one of them out")
        _only(self, "structured_outputs", None, "constrained output is not supported; leave it out")
        if self.response_format is not None and self.response_format != {"type": "text"}:
            refuse("response_format", 'only response_format {"type": "text"} is supported')
        if not -(2**31) <= self.priority < 2**31:
            refuse("priority", f"priority {self.priority} does not fit in 32 signed bits")

    def _sampling_params(self, names: dict[str, str] | None = None, **more: Any) -> SamplingParams:
        """The fields of the same name, and `more`. `names` maps a parameter to the body's field it came from."""
        values = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        values |= {name: value for name, value in more.items() if value is not None}
        for name in ("stop_token_ids", "bad_words", "allowed_token_ids"):
            if name in values:
                values[name] = tuple(values[name])
        if self.stop is not None:
            values["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        try:
            return SamplingParams(**values)
        except ValueError as error:
            raise bound_error(str(error), names or {}) from error


_SAMPLING_FIELDS = (
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

    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    verbosity: str | None = None
    store: bool | None = None

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    web_search_options: Any = None
    moderation: Any = None

    def check(self) -> None:
        self._check_common()
        if not self.messages:
            refuse("messages", "messages is empty; give at least one message")
        if self.store:
            refuse("store", "store = true is not supported: nothing is kept; leave it out or send false")
        for name in ("tools", "functions"):
            if getattr(self, name) not in (None, []):
                refuse(name, f"{name} is not supported; leave it out")
        for name in ("tool_choice", "function_call"):
            if getattr(self, name) not in (None, "none", "auto"):
                refuse(name, f'{name} may only be "none" or "auto", because tools are not supported')
        if self.modalities not in (None, ["text"]):
            refuse("modalities", 'only modalities ["text"] is supported')
        for name in ("audio", "prediction", "reasoning_effort", "web_search_options", "moderation"):
            _only(self, name, None, f"{name} is not supported; leave it out")
        if self.top_logprobs is not None and not self.logprobs:
            refuse("top_logprobs", "top_logprobs is only allowed with logprobs = true")
        _check_template_kwargs(self.chat_template_kwargs)

    def field_of(self, param: str) -> str:
        """The field of this body that an engine's refusal of `param` is about."""
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "messages" if param == "prompt" else param

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates read them: plain text contents, `developer` as `system`."""
        return [_template_message(message, f"messages[{index}]") for index, message in enumerate(self.messages)]

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
        if self.best_of not in (None, 1):
            refuse("best_of", f"best_of {self.best_of} is not supported: only best_of = 1 is")
        if self.suffix:
            refuse("suffix", "suffix is not supported; leave it out")
        self.prompts()

    def field_of(self, param: str) -> str:
        """The field of this body that an engine's refusal of `param` is about."""
        return param

    def prompts(self) -> list[str | list[int]]:
        """Every prompt, as text or as token ids; a choice's index is its place here."""
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
        _check_template_kwargs(self.chat_template_kwargs)
        if self.messages is not None and not self.messages:
            refuse("messages", "messages is empty; give at least one message")

    def template_messages(self) -> list[dict[str, Any]]:
        messages = self.messages or []
        return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


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


_RESERVED_TEMPLATE_KWARGS = frozenset({"self", "messages", "tools", "documents", "add_generation_prompt"})


def _check_template_kwargs(given: dict[str, Any] | None) -> None:
    reserved = _RESERVED_TEMPLATE_KWARGS & set(given or ())
    if reserved:
        name = min(reserved)
        refuse(f"chat_template_kwargs.{name}", f"chat_template_kwargs may not set {name}; use the body's own field")


_ROLES = ("system", "developer", "user", "assistant")


def _template_message(message: ChatMessage, path: str) -> dict[str, Any]:
    """One message with plain text; refuses what would be lost on the way to the model."""
    if message.role in ("tool", "function") or message.tool_call_id or message.tool_calls or message.function_call:
        field = "role" if message.role in ("tool", "function") else "tool_calls"
        refuse(f"{path}.{field}", f"{path}: tools are not supported; roles are {', '.join(_ROLES)}")
    if message.role not in _ROLES:
        refuse(f"{path}.role", f"{path}.role {message.role!r} is unknown; use one of {', '.join(_ROLES)}")
    if message.audio is not None:
        refuse(f"{path}.audio", f"{path}.audio is not supported; leave it out")
    content = message.content
    if content is None:
        refuse(f"{path}.content", f"{path}.content is missing; give a string or a list of text parts")
    if isinstance(content, list):
        content = "\n".join(_part_text(part, f"{path}.content[{index}]") for index, part in enumerate(content))
    result = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        result["name"] = message.name
    if message.reasoning_content is not None:
        result["reasoning_content"] = message.reasoning_content
    return result


def _part_text(part: dict[str, Any], path: str) -> str:
    if part.get("type") != "text":
        refuse(f"{path}.type", f"{path}: a part of type {part.get('type')!r} is not supported; only text parts are")
    unknown = set(part) - {"type", "text"}
    if unknown:
        refuse(f"{path}.{min(unknown)}", f"{path} holds the unknown field {min(unknown)!r}; leave it out")
    if not isinstance(part.get("text"), str):
        refuse(f"{path}.text", f"{path}.text must be a string")
    return part["text"]


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


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class UsageInfo(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_info(parts: Iterable[Usage]) -> UsageInfo:
    """The usage of a response: the sum over its prompts."""
    usages = list(parts)
    prompt = sum(usage.num_prompt_tokens for usage in usages)
    output = sum(usage.num_output_tokens for usage in usages)
    cached = sum(usage.num_cached_tokens for usage in usages)
    return UsageInfo(prompt, output, prompt + output, PromptTokensDetails(cached))


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


class ChatResponseMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    message: ChatResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
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
    """A choice of a completion, and of its stream's chunks, where `finish_reason` is null until the last."""

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
