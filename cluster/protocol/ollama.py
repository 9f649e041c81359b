"""Ollama's request and response bodies, and the OpenAI bodies that ask the same.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md. Options that determine how Ollama runs a model, and not
its answer, are accepted and have no effect. `cluster/http/endpoints/ollama.py` answers.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

import msgspec

from manta.cluster.errors import refuse
from manta.cluster.protocol.foreign_fields import judge_foreign
from manta.cluster.protocol.requests import ChatCompletionRequest, CompletionRequest
from manta.cluster.protocol.translated import as_openai

RENAMED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repetition_penalty",
    "additional_properties": "additional_properties",
    "property_order": "property_order",
}
"""Ollama's options, and Manta's own, with their names in OpenAI's bodies. Ollama's clients send any option."""
_WITHOUT_EFFECT = (
    *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv"),
    *("logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only", "repeat_last_n", "penalize_newline"),
    *("mirostat_tau", "mirostat_eta"),  # of mirostat alone, which is not served
)
"""Options that are accepted without effect, because the operator sets them (`--max-model-len` and the like)."""
_EFFECTIVE = (*RENAMED, "num_predict")
API_VERSION = "0.9.6"
"""Version of Ollama whose API this is: tools in streams and `think`, without log-probabilities. Clients read it."""
LATEST = ":latest"
"""Tag that clients append to a name without one."""


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    fields_elsewhere: ClassVar[dict[str, str]] = {
        name: f"it belongs into options here: options.{name}" for name in ("additional_properties", "property_order")
    }

    model: str
    stream: bool = True
    format: str | dict[str, Any] | None = None
    """`json`, or a JSON schema."""
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None
    """Accepted without effect on others: models leave as the operator has set. 0 with nothing to answer is confirmed as
    an unload.
    """
    think: bool | str | None = None
    """Passed to chat templates that know `enable_thinking`."""
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        """Raises `RequestRefused` naming the field of the first mistake."""
        if self.format not in (None, "", "json") and not isinstance(self.format, dict):
            refuse("unsupported", "format", self.format, remedy="send json or a JSON schema")
        for name in ("logprobs", "top_logprobs"):
            if getattr(self, name):
                refuse("unsupported", name, remedy="ask /v1/chat/completions for them")
        for name, value in (self.options or {}).items():
            if name not in (*_EFFECTIVE, *_WITHOUT_EFFECT):
                judge_foreign(f"options.{name}", name, value, _EFFECTIVE, is_of_body=True)

    def _common(self) -> dict[str, Any]:
        """Returns the fields of an OpenAI body that chat and completion share."""
        given = self.options or {}
        fields = {RENAMED[name]: value for name, value in given.items() if name in RENAMED and value is not None}
        if (limit := given.get("num_predict")) is not None and limit not in (
            -1,
            -2,
        ):  # both mean no limit
            fields["max_tokens"] = limit
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "format", "schema": self.format},
            }
        return {"model": self.served_model, "stream": self.stream, **fields}

    def _chat_fields(self) -> dict[str, Any]:
        thinks = {} if self.think is None else {"chat_template_kwargs": {"enable_thinking": bool(self.think)}}
        return self._common() | thinks

    def field_of(self, param: str) -> str:
        """Returns this body's name for a field of the OpenAI body."""
        if param == "max_tokens":
            return "options.num_predict"
        if param.startswith("response_format"):
            return "format"
        if param.startswith("chat_template_kwargs"):
            return "think"
        names = {theirs: f"options.{name}" for name, theirs in RENAMED.items()}
        return names.get(param, param)

    @property
    def served_model(self) -> str:
        """Name of the model without Ollama's tag for the latest version."""
        return self.model.removesuffix(LATEST)

    @property
    def unloads(self) -> bool:
        """Whether `keep_alive` asks to unload the model."""
        return self.keep_alive not in (None, "") and not str(self.keep_alive).strip("0.hms")

    @property
    def has_limit(self) -> bool:
        """Whether the request bounds the tokens of the answer."""
        return "max_tokens" in self._common()


class OllamaFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any] = {}


class OllamaToolCall(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    role: str
    content: str = ""
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(_Body, kw_only=True):
    """`POST /api/chat`."""

    messages: list[OllamaMessage] = []
    """Messages of the conversation; an empty list only loads the model."""
    tools: list[dict[str, Any]] | None = None

    @property
    def needs_model(self) -> bool:
        """Whether the model has to be loaded: not for a request that only unloads."""
        return bool(self.messages) or not self.unloads

    def as_openai(self) -> ChatCompletionRequest:
        """Returns the equivalent OpenAI body. Raises `RequestRefused` naming the field of this body."""
        fields = self._chat_fields() | {"messages": _openai_messages(self.messages)}
        if self.tools:
            fields["tools"] = self.tools
        return as_openai(fields, ChatCompletionRequest, self)


class OllamaGenerateRequest(_Body, kw_only=True):
    """`POST /api/generate`."""

    prompt: str = ""
    """Text of the prompt; an empty one only loads the model."""
    system: str | None = None
    raw: bool | None = None
    """Whether the prompt goes to the model as it is, without a chat template."""
    suffix: str | None = None
    """Text behind the gap that the answer fills. The prompt is then the text in front of it, without a template."""
    template: str | None = None
    context: list[int] | None = None
    images: list[Any] | None = None

    @property
    def needs_model(self) -> bool:
        """Whether the model has to be loaded: not for a request that only unloads."""
        return bool(self.prompt) or not self.unloads

    def check(self) -> None:
        super().check()
        if self.images:
            refuse("unsupported", "images", remedy="send text")
        if self.template:
            remedy = "send raw: true to write the prompt"
            refuse("unsupported", "template", remedy=remedy, cause="the model's own is used")
        if self.context:
            refuse("unsupported", "context", remedy="send a conversation to /api/chat")

    def field_of(self, param: str) -> str:
        return "prompt" if param == "messages" else super().field_of(param)

    def as_chat(self) -> ChatCompletionRequest:
        """Returns the prompt as a conversation. Raises `RequestRefused` naming the field of this body."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.prompt})
        return as_openai(self._chat_fields() | {"messages": messages}, ChatCompletionRequest, self)

    def as_completion(self) -> CompletionRequest:
        """Returns the prompt as it is. Raises `RequestRefused` naming the field of this body."""
        fields = self._common() | {
            "prompt": self.prompt,
            "suffix": self.suffix,
            "add_special_tokens": not self.raw,
        }
        return as_openai(fields, CompletionRequest, self)


def _openai_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Returns OpenAI's messages. OpenAI's calls have ids, which Ollama's may lack: calls, and likewise their results,
    are then numbered in order.
    """
    found, num_calls, num_answers = [], 0, 0
    for index, message in enumerate(messages):
        if message.images:
            refuse("unsupported", f"messages[{index}].images", remedy="send text")
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            entry["reasoning_content"] = message.thinking
        if message.tool_calls:
            entry["tool_calls"] = []
            for call in message.tool_calls:
                function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments)}
                entry["tool_calls"].append({"id": call.id or f"call_{num_calls}", "function": function})
                num_calls += 1
        if message.role == "tool":
            entry["tool_call_id"] = message.tool_call_id or f"call_{num_answers}"
            num_answers += 1
        found.append(entry)
    return found


# ---- answers -----------------------------------------------------------------------------------------------------


class _Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An answer, or a part of its stream; the last has `done` and the counts. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaAnswerMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    content: str
    role: str
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None


class OllamaChatAnswer(_Answer, kw_only=True):
    """An answer of `/api/chat`."""

    message: OllamaAnswerMessage


class OllamaGenerateAnswer(_Answer, kw_only=True):
    """An answer of `/api/generate`."""

    response: str
    thinking: str | None = None


class _EmbedBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None
    """Accepted without effect on others: models leave as the operator has set."""

    @property
    def served_model(self) -> str:
        """Name of the model without Ollama's tag for the latest version."""
        return self.model.removesuffix(LATEST)

    def check(self) -> None:
        """Raises `RequestRefused` for an option that would change the answer."""
        for name, value in (self.options or {}).items():
            if name not in (*_EFFECTIVE, *_WITHOUT_EFFECT):  # what bounds a text has no effect on a vector
                judge_foreign(f"options.{name}", name, value, _EFFECTIVE, is_of_body=True)


class OllamaEmbedRequest(_EmbedBody, kw_only=True):
    """`POST /api/embed`."""

    input: str | list[str] = ""
    truncate: bool | None = None
    """Whether the end of a text that is too long is cut; Ollama's default is true."""
    dimensions: int | None = None


class OllamaEmbeddings(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    """Nanoseconds."""
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbeddingRequest(_EmbedBody, kw_only=True):
    """`POST /api/embeddings`, which older clients send."""

    prompt: str = ""


class OllamaEmbedding(msgspec.Struct, kw_only=True):
    embedding: list[float]


class OllamaDetails(msgspec.Struct, kw_only=True):
    parent_model: str = ""
    format: str = "safetensors"
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str
    """Dtype of the weights."""


class OllamaModel(msgspec.Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int = 0
    digest: str
    details: OllamaDetails


class OllamaModels(msgspec.Struct):
    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel, kw_only=True):
    expires_at: str
    size_vram: int = 0
    context_length: int


class OllamaRunning(msgspec.Struct):
    models: list[OllamaRunningModel]


class OllamaVersion(msgspec.Struct):
    version: str


class OllamaShowRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /api/show`."""

    model: str
    verbose: bool | None = None
    needs_model: ClassVar[bool] = False
    """Programs ask about every model that is listed, and load none by that."""

    @property
    def served_model(self) -> str:
        """Name of the model without Ollama's tag for the latest version."""
        return self.model.removesuffix(LATEST)

    def check(self) -> None:
        """Does nothing, because every value is valid."""


class OllamaDeleteRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`DELETE /api/delete`."""

    model: str
    needs_model: ClassVar[bool] = False
    """It is not loaded to be removed."""

    @property
    def served_model(self) -> str:
        """Name of the model without Ollama's tag for the latest version."""
        return self.model.removesuffix(LATEST)

    def check(self) -> None:
        """Does nothing, because every name is looked up."""


class OllamaPullRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /api/pull`."""

    name: str = msgspec.field(name="model")
    """Name of the model. It need not be served here."""
    stream: bool = True
    insecure: bool | None = None
    """Accepted without effect, because the operator's options say which hosts are asked."""

    def check(self) -> None:
        """Does nothing, because every name is looked up."""


class OllamaStatus(msgspec.Struct, omit_defaults=True):
    """The progress of `/api/pull`."""

    status: str
    digest: str | None = None
    total: int | None = None
    """Bytes of all files."""
    completed: int | None = None
    """Bytes that are there."""


class OllamaShow(msgspec.Struct, kw_only=True):
    modelfile: str = ""
    parameters: str = ""
    template: str
    modified_at: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
