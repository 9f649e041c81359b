"""OpenAI's request bodies for chat and completions as msgspec structs, with vLLM's extensions.

`check` validates everything that needs no model, and raises a `RequestRefused` that names the field of the first
mistake. `sampling_params` turns a body into one `SamplingParams`. Knows neither the tokenizer nor the engine.

A body of a few kilobytes could block the ingress for seconds, and every stream with it. So the bounds at the end of
this module are checked before any work that grows with the body, after those of `cluster/protocol/body_size.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NoReturn

import msgspec

from manta.cluster.errors import RequestRefused, refuse
from manta.cluster.protocol.adapter_scales import AdapterScale, all_scaled
from manta.cluster.protocol.constraint_fields import (
    OLDER_CONSTRAINTS,
    JsonObjectFields,
    ResponseFormat,
    StructuredOutputs,
    requested_constraint,
)
from manta.cluster.protocol.messages import (
    ChatMessage,
    check_continuation,
    check_template_kwargs,
    content_text,
    template_message,
)
from manta.cluster.protocol.tools import (
    AllowedToolsChoice,
    AnyTool,
    ToolChoice,
    arguments_constraint,
    check_tools,
    leave_out_foreign_tools,
    name_types,
)
from manta.structured.constraint import FIELD as CONSTRAINT
from manta.structured.constraint import ConstraintSpec
from manta.structured.logits_processors import LogitsProcessorSpec
from manta.workers.sampling_params import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""Default `max_tokens` of `/v1/completions`, as in OpenAI's API; a chat may use the whole context length."""

NO_EFFORT = "none"
"""The value of `reasoning_effort` that turns thinking off."""
MAX_SALT_CHARACTERS = 1024
"""Most characters of `cache_salt`."""
MAX_TOOLS = 128
"""Most tools of one body, as in OpenAI's API. If their grammar is refused, each tool is compiled by itself to find the
one at fault.
"""
MAX_STOP_CHARACTERS = 4096
"""Most characters of all stop strings together, because each token is searched for them."""
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 20_000
"""Most characters of all `bad_words` together. They are tokenised, and each token is searched for them."""
MAX_CHOICES = 128
"""Largest `n`, as in OpenAI's API. An engine with a smaller `max_num_sequences` refuses earlier."""

MAX_METADATA = 16
"""Most pairs of `metadata`; this bound and the next two are those of OpenAI's API."""
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_VALUE_CHARACTERS = 512

OLDER_NAMES: dict[str, str] = {
    "guided_whitespace_pattern": (
        'it is an older name of vLLM\'s; send structured_outputs: {"disable_any_whitespace": true} for none of it'
    ),
}
"""Fields that older clients of vLLM send, each with its replacement."""


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """Text that the answer is expected to repeat in large part."""

    content: str | list[dict[str, Any]]
    type: Literal["content"] = "content"


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """OpenRouter's options of the thinking section."""

    effort: str | None = None
    """As `reasoning_effort`."""
    max_tokens: int | None = None
    """As `thinking_token_budget`."""
    exclude: bool | None = None
    """Whether the answer has no `reasoning_content`."""
    enabled: bool | None = None
    """False tells the chat template not to think."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted without effect; nothing is obfuscated."""
    continuous_usage_stats: bool | None = None
    """Whether every chunk has the usage so far (vLLM's extension)."""


class _SamplingFields(JsonObjectFields, forbid_unknown_fields=True, kw_only=True):
    """Fields that chat and completion bodies share. Where OpenAI allows null, None means the default."""

    model: str | None = None
    """Name of the model; None, or an empty one, means the only one."""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | list[tuple[int, float]] | None = None
    """Biases by token id; llama.cpp's clients send pairs."""
    seed: int | None = None
    n: int | None = None
    """Choices for each prompt; choice `i` of prompt `p` has index `p * n + i`."""
    use_beam_search: bool | None = None
    priority: int = 0
    """Priority of the request; lower runs first (vLLM's extension)."""

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
    truncate_prompt_tokens: int | None = None
    """Number of tokens at the prompt's end that are used; -1 uses as many as leave room for the output (vLLM's
    extension).
    """
    return_token_ids: bool | None = None
    """Whether the answer has the token ids of prompt and output (vLLM's extension)."""
    thinking_token_budget: int | None = None
    """The most tokens of thinking (vLLM's extension)."""
    logits_processors: tuple[LogitsProcessorSpec, ...] | None = None
    """Logits processors, which run in this order; only those that the operator registered."""

    cache_salt: str | None = None
    """Salt of the prefix cache: only requests of this client with the same salt share cached prompts (vLLM's
    extension).
    """
    lora: list[AdapterScale] | None = None
    """Scales of adapters; None means what the model's name and the operator say (llama.cpp's field)."""
    user: str | None = None
    metadata: dict[str, str] | None = None
    """Accepted within OpenAI's bounds; nothing is kept that it could label."""
    service_tier: str | None = None
    """Accepted; the answer says "default", the only tier."""
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    """The first of vLLM's older names of `structured_outputs`' fields. The next ones are further such names, and after
    them llama.cpp's.
    """
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return 1 if self.n is None else self.n

    def _check_common(self) -> None:
        check_n(self.num_choices)
        check_metadata(self.metadata)
        if self.use_beam_search:
            refuse("unsupported", "use_beam_search", remedy="leave it out, and choose n for several answers")
        if self.stream_options is not None and not self.stream:
            refuse("requires", "stream_options", bound="stream = true")
        if self.prompt_logprobs is not None and self.stream:
            refuse("excludes", "prompt_logprobs", bound="stream = true", remedy="leave one of them out")
        if (kept := self.truncate_prompt_tokens) is not None and kept < 1 and kept != -1:
            bound = "at least 1, or -1 for as many as leave room for the output"
            refuse("wrong_value", "truncate_prompt_tokens", kept, bound)
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= MAX_SALT_CHARACTERS:
            refuse_length("cache_salt", len(self.cache_salt), MAX_SALT_CHARACTERS)
        if self.lora is not None:
            all_scaled(self.lora, "lora")
        if not -(2**31) <= self.priority < 2**31:
            refuse("wrong_value", "priority", self.priority, "a number of 32 signed bits")

    def _sampling_params(
        self, defaults: Mapping[str, float], names: dict[str, str] | None = None, **more: Any
    ) -> SamplingParams:
        """Returns the parameters from the fields of the same name and from `more`; those that are None are in
        `defaults`, or SamplingParams has them. `names` maps a parameter to the field of the body that it came from.
        """
        values: dict[str, Any] = {**defaults}
        values |= {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        values |= {name: value for name, value in more.items() if value is not None}
        values["constraint"], _ = self.requested_constraint()
        if isinstance(self.logit_bias, list):
            values["logit_bias"] = dict(self.logit_bias)
        if self.stop is not None:
            values["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        try:
            return SamplingParams(**values)
        except RequestRefused as error:
            field = (names or {}).get(error.refusal.field, error.refusal.field)
            raise RequestRefused(msgspec.structs.replace(error.refusal, field=field)) from error

    def field_of(self, param: str) -> str:
        """Returns the field of this body that an engine's refusal of `param` is about."""
        if param != CONSTRAINT:
            return param
        return self.requested_constraint()[1]

    def requested_constraint(self) -> tuple[ConstraintSpec | None, str]:
        """Returns the constraint and its field; None and an empty field without one. Raises `RequestRefused` if several
        fields ask for one.
        """
        older = {name: value for name in OLDER_CONSTRAINTS if (value := getattr(self, name)) not in (None, "")}
        spec, field = requested_constraint(
            self.response_format, self.structured_outputs, older, self.guided_decoding_backend or "auto"
        )
        return spec and self.with_json_objects(spec), field

    def with_json_objects(self, spec: ConstraintSpec) -> ConstraintSpec:
        """Returns a constraint of this request with what the request says of JSON objects."""
        return msgspec.structs.replace(
            spec,
            additional_properties=spec.additional_properties or self.additional_properties,
            property_order=spec.property_order or self.property_order,
        )

    def tool_constraints(self) -> list[tuple[str, ConstraintSpec]]:
        """Returns, for each tool, its field and the constraint on the arguments of its calls."""
        return []


_CONSTRAINT_FIELDS = ("structured_outputs", *OLDER_CONSTRAINTS)
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
    "thinking_token_budget",
    "logits_processors",
)


class ChatCompletionRequest(_SamplingFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    fields_elsewhere: ClassVar[dict[str, str]] = OLDER_NAMES | {
        "prompt": 'it belongs to /v1/completions; a chat has messages: [{"role": "user", "content": ...}]',
    }

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    """Newer name of `max_tokens`, which wins if both are given."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_origins: bool | None = None
    """Whether each entry of `logprobs` says where its token came from (Manta's extension)."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of an answer. None means true unless the last message is continued."""
    continue_final_message: bool = False
    """Whether the answer continues the last message instead of being a new one (vLLM's extension)."""
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True
    """Whether the answer has `reasoning_content` (vLLM's extension). The model thinks in any case."""
    reasoning_effort: str | None = None
    """Passed to chat templates that know it. "none" turns thinking off."""
    reasoning: ReasoningOptions | None = None
    """OpenRouter's names of `reasoning_effort`, `thinking_token_budget` and `include_reasoning`."""

    tools: list[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    """Tools that the answer may or must call; None means "auto" if there are tools."""
    parallel_tool_calls: bool | None = None
    """Whether the answer may have several calls; None means true."""

    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    verbosity: str | None = None
    store: bool | None = None
    """Accepted without effect, because OpenAI keeps such answers for its own evaluation tools."""
    prediction: Prediction | None = None
    """Drafts for an engine that speculates; otherwise without effect."""

    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None

    @staticmethod
    def leave_out(body: dict[str, Any]) -> None:
        """Leaves out of a decoded JSON body the tools that a server would have to run."""
        leave_out_foreign_tools(body)
        name_types(body)

    def __post_init__(self) -> None:
        if self.add_generation_prompt is None:
            self.add_generation_prompt = not self.continue_final_message
        if self.reasoning is not None:
            self.reasoning_effort = self.reasoning_effort or self.reasoning.effort

    def check(self) -> None:
        """Raises `RequestRefused` naming the field of the first mistake."""
        self._check_common()
        self._check_reasoning()
        if not self.messages:
            refuse("empty", "messages", remedy="give at least one message")
        check_continuation(self.messages, self.continue_final_message, bool(self.add_generation_prompt))
        if self.functions not in (None, []):
            refuse("unsupported", "functions", remedy="use tools")
        if self.function_call not in (None, "none", "auto"):
            refuse("unsupported", "function_call", remedy="use tool_choice")
        check_tools(self.tools or [], self.tool_choice)
        constrained = next((name for name in _CONSTRAINT_FIELDS if getattr(self, name) not in (None, "")), None)
        if constrained is not None and self.callable_tools():
            refuse("excludes", constrained, bound="tools", remedy='leave one out, or send tool_choice "none"')
        if self.modalities not in (None, [], ["text"]):
            refuse("unsupported", "modalities", str(self.modalities), "text", 'send ["text"]')
        for name in ("audio", "web_search_options", "moderation"):
            if getattr(self, name) is not None:
                refuse("unsupported", name, remedy="leave it out")
        if self.top_logprobs is not None and not self.logprobs:
            refuse("requires", "top_logprobs", bound="logprobs = true")
        if self.return_token_origins and not self.logprobs:
            refuse("requires", "return_token_origins", bound="logprobs = true")
        check_template_kwargs(self.chat_template_kwargs)
        self.template_messages()
        self.predicted_text()

    def _check_reasoning(self) -> None:
        given = self.reasoning
        if given is None:
            return
        if given.effort is not None and given.effort != self.reasoning_effort:
            refuse("excludes", "reasoning.effort", bound="reasoning_effort", remedy="leave one out")
        if given.max_tokens is not None and self.thinking_token_budget is not None:
            refuse("excludes", "reasoning.max_tokens", bound="thinking_token_budget", remedy="leave one out")

    @property
    def shows_reasoning(self) -> bool:
        """Whether the answer has `reasoning_content`."""
        return self.include_reasoning and not (self.reasoning and self.reasoning.exclude)

    def predicted_text(self) -> str:
        """Returns the text of `prediction`; empty without one. Raises `RequestRefused` for a part that is no text."""
        return "" if self.prediction is None else content_text(self.prediction.content, "prediction.content")

    def shown_tools(self) -> list[AnyTool]:
        """Returns the tools that the prompt shows."""
        return [] if self.tool_choice == "none" else self.tools or []

    def callable_tools(self) -> list[AnyTool]:
        """Returns the tools that the answer may call."""
        if not isinstance(self.tool_choice, AllowedToolsChoice):
            return self.shown_tools()
        allowed = self.tool_choice.allowed_tools.names
        return [tool for tool in self.shown_tools() if tool.name in allowed]

    def tool_constraints(self) -> list[tuple[str, ConstraintSpec]]:
        return [
            (f"tools[{index}].{tool.demands}", self.with_json_objects(arguments_constraint(tool)))
            for index, tool in enumerate(self.shown_tools())
            if tool in self.callable_tools()
        ]

    def field_of(self, param: str) -> str:
        if param == CONSTRAINT and self.callable_tools():
            return "tools"
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if param == "thinking_token_budget" and self.thinking_token_budget is None:
            return "reasoning.max_tokens"
        return "messages" if param == "prompt" else super().field_of(param)

    def template_messages(self) -> list[dict[str, Any]]:
        """Returns the messages as chat templates read them: with plain text contents, and `developer` as `system`."""
        return [template_message(message, f"messages[{index}]") for index, message in enumerate(self.messages)]

    def template_kwargs(self) -> dict[str, Any]:
        """Returns the values that the chat template gets in addition to messages and tools."""
        found: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            found["reasoning_effort"] = self.reasoning_effort
        is_off = self.reasoning is not None and self.reasoning.enabled is False
        if is_off or self.reasoning_effort == NO_EFFORT:
            found["enable_thinking"] = False
        return found | (self.chat_template_kwargs or {})

    def sampling_params(self, defaults: Mapping[str, float] = MappingProxyType({})) -> SamplingParams:
        """Returns the sampling parameters; what the body leaves out is the model's `defaults`. Raises `RequestRefused`
        naming the field that is out of bounds.
        """
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.reasoning is not None and self.reasoning.max_tokens is not None:
            names["thinking_token_budget"] = "reasoning.max_tokens"
        return self._sampling_params(
            defaults,
            names,
            max_tokens=self.max_completion_tokens,
            thinking_token_budget=self.reasoning and self.reasoning.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            token_origins=self.return_token_origins,
        )


class CompletionRequest(_SamplingFields, kw_only=True):
    """`POST /v1/completions`."""

    fields_elsewhere: ClassVar[dict[str, str]] = OLDER_NAMES | {
        "messages": "they belong to /v1/chat/completions; here the text to continue is the prompt"
    }

    prompt: str | list[str | int | list[int]] | None
    """Text or token ids. OpenAI's null, a text out of nothing, is refused."""
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True
    """Whether text prompts get the tokenizer's own special tokens, such as a beginning-of-sequence token."""
    best_of: int | None = None
    suffix: str | None = None
    """Text behind the gap that the answer fills, for models with tokens for it."""

    def check(self) -> None:
        """Raises `RequestRefused` naming the field of the first mistake."""
        self._check_common()
        if self.best_of not in (None, self.num_choices):
            refuse("wrong_value", "best_of", self.best_of, f"equal to n, {self.num_choices}", "leave it out")
        for name in ("echo", "truncate_prompt_tokens") if self.suffix else ():
            if getattr(self, name):
                refuse("excludes", "suffix", bound=name, remedy="leave one out")
        if self.scores_only and not (self.echo or self.prompt_logprobs is not None):
            refuse("requires", "max_tokens", 0, "echo or prompt_logprobs, to score", "add one, or send at least 1")
        self.prompts()

    @property
    def scores_only(self) -> bool:
        """Whether only the prompt's log-probabilities are wanted."""
        return self.max_tokens == 0

    def prompts(self) -> list[str | list[int]]:
        """Returns every prompt, as text or as token ids. Before a `suffix` it may be an empty text: the gap is then at
        the beginning of a file.
        """
        return texts_or_ids(self.prompt, "prompt", allows_empty_texts=bool(self.suffix))

    def sampling_params(self, defaults: Mapping[str, float] = MappingProxyType({})) -> SamplingParams:
        """Returns the sampling parameters; what the body leaves out is the model's `defaults`. Raises `RequestRefused`
        naming the field that is out of bounds.
        """
        prompt_logprobs = self.logprobs if self.echo else None
        if prompt_logprobs is not None and self.prompt_logprobs is not None:
            prompt_logprobs = max(prompt_logprobs, self.prompt_logprobs)
        return self._sampling_params(
            defaults,
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
            # An engine computes a prompt in order to draw a token; if the prompt is only scored, nobody gets that
            # token.
            max_tokens={None: DEFAULT_COMPLETION_TOKENS, 0: 1}.get(self.max_tokens),
        )


def texts_or_ids(
    given: str | Sequence[str | int | list[int]] | None, field: str, allows_empty_texts: bool = False
) -> list[str | list[int]]:
    """Returns every text of a field, as text or as token ids. Raises `RequestRefused` naming the place of the first
    mistake.
    """
    texts = [given] if isinstance(given, str) else given
    if not texts:
        refuse("empty", field, remedy="give a string, token ids, or a list of either")
    if set(map(type, texts)) == {int}:
        return [checked_token_ids(list(texts), field)]
    found: list[str | list[int]] = []
    for index, item in enumerate(texts):
        param = field if isinstance(given, str) else f"{field}[{index}]"
        if isinstance(item, int) or type(item) is not type(texts[0]):
            cause = "strings, token ids and lists of token ids cannot be mixed"
            refuse("unfit", param, remedy="use one of them", cause=cause)
        if not item and not (allows_empty_texts and isinstance(item, str)):
            refuse("empty", param, remedy="give at least one character or token id")
        found.append(item if isinstance(item, str) else checked_token_ids(item, param))
    return found


def checked_token_ids(token_ids: list[Any], param: str) -> list[int]:
    """Refuses ids that no vocabulary has. The model's own bound is checked later, where the model is known."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < 2**31:
        index, token_id = next((i, each) for i, each in enumerate(token_ids) if not 0 <= each < 2**31)
        refuse("outside_vocabulary", f"{param}[{index}]", token_id, 2**31)
    return token_ids


# ---- bounds of bodies, checked before any work that grows with them --------------------------------------------------


def check_sizes(body: Any) -> None:
    """Checks the lists that have the same limit everywhere. Raises `RequestRefused` naming the field."""
    for field, what, size, limit in _sizes(body):
        if size > limit:
            refuse("over_limit", field, size, limit, "leave some out", unit=what)


def _sizes(body: Any) -> Iterator[tuple[str, str, int, int]]:
    """Yields a field, what is counted in it, how many there are, and how many are allowed."""
    if tools := getattr(body, "tools", None):
        yield "tools", "entries", len(tools), MAX_TOOLS
    if stop := getattr(body, "stop", None):
        yield "stop", "characters", len(stop) if isinstance(stop, str) else sum(map(len, stop)), MAX_STOP_CHARACTERS
    if words := getattr(body, "bad_words", None):
        yield "bad_words", "entries", len(words), MAX_BAD_WORDS
        yield "bad_words", "characters", sum(map(len, words)), MAX_BAD_WORD_CHARACTERS


def check_metadata(metadata: dict[str, str] | None) -> None:
    if not metadata:
        return
    if len(metadata) > MAX_METADATA:
        refuse("over_limit", "metadata", len(metadata), MAX_METADATA, "leave some out", unit="pairs")
    longest_key, longest_value = max(map(len, metadata)), max(map(len, metadata.values()))
    for what, length, limit in (
        ("key", longest_key, MAX_METADATA_KEY_CHARACTERS),
        ("value", longest_value, MAX_METADATA_VALUE_CHARACTERS),
    ):
        if length > limit:
            refuse("over_limit", "metadata", length, limit, "shorten it", unit=f"characters in a {what}")


def check_n(n: int) -> None:
    if not 1 <= n <= MAX_CHOICES:
        bound = f"between 1 and {MAX_CHOICES}"
        refuse("wrong_value", "n", n, bound, "send several requests for more choices")


def refuse_length(field: str, length: int, limit: int) -> NoReturn:
    """Refuses a text that is empty or too long."""
    if length:
        refuse("over_limit", field, length, limit, "shorten it", unit="characters")
    refuse("empty", field, remedy="leave it out")
