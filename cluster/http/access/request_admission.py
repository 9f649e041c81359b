"""Everything that a request must pass before an engine gets it, in one place and in the order of the checks.

| check | by | refused with |
| --- | --- | --- |
| the page and the name that the client used | `Origins.check` | 403 |
| the API key | `Admission.caller` | 401 |
| whether it is an operator's, where that matters | `Admission.check_operator` | 403 |
| bytes and time of the body | `Incoming.body` | 408, 413, 503 |
| requests that are prepared at a time, and the deadline | `Admission.prepare` | 408, 429 |
| values, encoding, shape and lists of the body | `decode` | 400 |
| what the body's fields say together | `check` of its struct | 400 |
| the model, the priority, prompts and choices | `Admission.check_generation` | 400, 404 |
| the size of an echo | `Admission.check_echo` | 400 |
| sampling parameters | `Admission.sampling_params` | 400 |
| template and encoding | `cluster/chat/plan.py`, `cluster/http/exchange/prompts.py` | 400 |
| the size of the answer | `Admission.check_answer` | 400 |
| the conversation's name | `session_of` | 400 |
| requests and tokens per minute | `Caller.admit` | 429 |
| what only the engine knows, such as the vocabulary | `cluster/engine/admission.py` | 400, 429 |

The application makes the checks up to those of the body, and `cluster/http/endpoints/generation.py` the others. A line
of a batch passes the same checks from `decode` on, but no deadline here and no limits per minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec

from manta.cluster.config import ServeConfig
from manta.cluster.errors import TOO_DEEP, Overdue, RequestRefused, refuse
from manta.cluster.http.access.keys import ApiKeys
from manta.cluster.http.access.model_names import ModelNames
from manta.cluster.http.access.origins import Headers, Origins, is_loopback
from manta.cluster.http.access.rate_limits import KeyUse, RateLimits, Reservation
from manta.cluster.protocol.body_size import check_body_size
from manta.cluster.protocol.foreign_fields import leave_out_foreign
from manta.cluster.protocol.requests import ChatCompletionRequest, CompletionRequest, check_sizes
from manta.cluster.protocol.shape_errors import shape_error
from manta.cluster.serve_limits import BodyLimits
from manta.structured.client_shares import ClientShares, Holding, HoldingLost, held
from manta.structured.refusals import Refusal
from manta.workers.sampling_params import SamplingParams

EVERYBODY = "everybody"
SESSION_HEADER = "x-session-id"
"""Header that names a conversation. Its requests go to one engine where possible. Other routers use the same name."""
MAX_SESSION_CHARACTERS = 256
GenerationBody = ChatCompletionRequest | CompletionRequest
_CONVERSATIONS = ("messages", "input")
"""Fields of the bodies that hold a conversation, as a list of messages or items."""
_PARTS = ("content", "tool_calls", "output")
"""Fields of messages and items that are lists of parts or of calls."""
_TOKEN_ID_LISTS = ("logit_bias", "allowed_token_ids", "stop_token_ids")
_LIMITS = BodyLimits()


class Caller:
    """The client of one request. `address` is its own, or that of a proxy in front; for IPv6, the network of it."""

    def __init__(
        self,
        address: str,
        key: str = "",
        owner: str = EVERYBODY,
        use: KeyUse | None = None,
        models: tuple[str, ...] | None = None,
    ) -> None:
        self.models = models
        """Names of models that the API key may use; None if it may use all."""
        self.address = address
        self.key = key
        """Name of the API key that the request brought; empty without keys."""
        self.owner = owner
        """Owner of the files, batches and cached prefixes that the request may use: that of its API key, or `EVERYBODY`
        if the server has no keys.
        """
        self.use = use
        """Rate limits of the API key; None if it has none, or if the request was admitted before."""

    def may_use(self, names: ModelNames, name: str) -> bool:
        """Returns whether the client may use what a name stands for, a model or one of its adapters."""
        return self.models is None or not set(self.models).isdisjoint(names.granting(name))

    @property
    def sharer(self) -> str:
        """Name under which the client takes turns with others: the name of its key, else its address."""
        return self.key or self.address

    def admit(
        self, num_prompt_tokens: int, max_output_tokens: int, headers: list[tuple[bytes, bytes]]
    ) -> Reservation | None:
        """Counts a request and its prompts, and adds what is left to `headers`. Returns what counts its output; None if
        nothing does. Refuses with 429 if the key has used up its requests or tokens per minute.
        """
        if self.use is None:
            return None
        try:
            return self.use.admit(num_prompt_tokens, max_output_tokens)
        finally:
            headers += self.use.headers()


class Body(Protocol):
    """A decoded request body: a msgspec struct with a check of its own. It may have `fields_elsewhere`: names of fields
    that belong to other bodies, each with advice.
    """

    def check(self) -> None:
        """Checks what the types of the fields do not express. Raises `RequestRefused` naming the field."""
        ...


AnyBody = TypeVar("AnyBody", bound="Body | list[Any]")
"""A body, or a list of structs, which its handler checks."""


def decode(kind: type[AnyBody], body: bytes, limits: BodyLimits = _LIMITS) -> AnyBody:
    """Returns the checked body as a `kind`. Raises `RequestRefused` naming the field of the first mistake. Fields that
    nothing knows are ignored or refused, as `cluster/protocol/foreign_fields.py` says.
    """
    check_body_size(body, limits)
    try:
        body.decode()
        request = _decoded(kind, body)
    except UnicodeDecodeError as error:
        refuse("malformed", bound="UTF-8", cause=f"byte {error.start} is {body[error.start]:#04x}")
    except msgspec.ValidationError as error:
        raise shape_error(error, kind) from error
    except msgspec.DecodeError as error:
        refuse("malformed", bound="JSON", cause=str(error))
    except RecursionError as error:
        raise RequestRefused(TOO_DEEP) from error
    check_lists(request, limits)
    _check(request)
    return request


def _check(request: Body | list[Any]) -> None:
    if not isinstance(request, list):
        request.check()


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _decoded(kind: Any, body: bytes) -> Any:
    """Returns a body as a `kind`, without what may be left out. That takes longer, so it is tried as it is first."""
    try:
        return _decoder(kind).decode(body)
    except msgspec.ValidationError:
        fields = msgspec.json.decode(body)
        leave_out_foreign(kind, fields)
        return msgspec.convert(fields, kind, str_keys=True)


def check_lists(body: Any, limits: BodyLimits) -> None:
    """Checks every list of a decoded body. Raises `RequestRefused` naming its field."""
    check_sizes(body)
    for field in _CONVERSATIONS:
        conversation = getattr(body, field, None)
        num_parts = _num_messages_and_parts(conversation if isinstance(conversation, list) else ())
        limit = limits.max_messages
        if num_parts > limit:
            unit, remedy = "messages, parts and calls", "leave some out, or raise body.max_messages"
            refuse("over_limit", field, num_parts, limit, remedy, unit=unit)
    num_choices = _num_prompts(getattr(body, "prompt", None)) * max(1, getattr(body, "n", None) or 1)
    for field in _TOKEN_ID_LISTS:
        given = getattr(body, field, None) or ()
        if num_choices * len(given) <= limits.max_token_ids:
            continue
        count = len(set(given))
        if num_choices * count > limits.max_token_ids:
            remedy = "shorten it, ask for fewer choices, or raise body.max_token_ids"
            unit = f"entries ({count} for each of {num_choices} choices)"
            refuse("over_limit", field, num_choices * count, limits.max_token_ids, remedy, unit=unit)


def _num_messages_and_parts(conversation: Sequence[Any]) -> int:
    """Returns the number of messages, parts and tool calls, or of items and parts. Anthropic's messages have calls
    among their parts.
    """
    parts = (_lists_of(each, *_PARTS) for each in conversation)
    return len(conversation) + sum(sum(map(len, lists)) for lists in parts)


def _lists_of(message: Any, *fields: str) -> Iterator[list[Any]]:
    """Yields those fields of a message, a struct or an object, that are lists."""
    get = message.get if isinstance(message, dict) else functools.partial(getattr, message)
    return (value for field in fields if isinstance(value := get(field, None), list))


def _num_prompts(prompt: Any) -> int:
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


class Preparation:
    """One request that an ingress prepares: no engine has it yet, and its answer has not begun. Until `end`, it has a
    deadline here and counts against the limit.
    """

    def __init__(self, holding: Holding, timeout: asyncio.Timeout, timeout_s: float) -> None:
        self._holding = holding
        self._timeout: asyncio.Timeout | None = timeout
        self._deadline = time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the request's deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def end(self) -> None:
        """Ends the preparation, because an engine has the request and its deadline, or its answer begins. Later calls
        do nothing.
        """
        if self._timeout is None:
            return
        if not self._timeout.expired():
            self._timeout.reschedule(None)
        self._timeout = None
        self._holding.give_back()


class Admission:
    """The checks of one ingress, with what they count: the requests that it prepares, and its keys' use."""

    def __init__(self, config: ServeConfig) -> None:
        self._serve(config)
        self._keys = ApiKeys(config.api_keys or ())
        self.origins = Origins(config)
        self.rate_limits = RateLimits(config.key_limits)
        self._prepared = ClientShares(_most_prepared(config))
        """Requests that are prepared at a time: at most as many as all engines may run and queue."""

    def _serve(self, config: ServeConfig) -> None:
        self._config = config
        self.names = ModelNames(config)
        self._accepts_any_model = config.accept_any_model

    def of_model(self, config: ServeConfig) -> Admission:
        """Returns the checks for one of several models, which share what they count."""
        admission = copy.copy(self)
        admission._serve(config)
        return admission

    def serve_models(self, configs: Collection[ServeConfig]) -> None:
        """Takes the bound on the requests that are prepared from the configurations of several models, whose engines
        together may run and queue as many.
        """
        if configs:
            self._prepared.resize(sum(map(_most_prepared, configs)))

    @property
    def num_prepared(self) -> int:
        """Requests that count against the limit now."""
        return self._prepared.total

    # ---- any request ---------------------------------------------------------------------------------------------

    def caller(self, headers: Headers, address: str) -> Caller:
        """Returns the client that the API key in the headers names. Refuses with 401 if the server has keys and this
        is none of them.
        """
        if not self._config.api_keys:
            return Caller(address)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")  # where Anthropic's clients put it
        name = self._keys.name_of(given) if given else None
        if name is None:
            refuse("no_key", remedy="send Authorization: Bearer KEY")
        use, models = self.use_of(name), self.rate_limits.models_of(name)
        return Caller(address, name, self._keys.owner_of(name), use, models)

    def check_operator(self, caller: Caller) -> None:
        """Refuses with 403 a client that may not change what is served."""
        allowed = self._config.operator_keys
        may = "*" in allowed or caller.key in allowed if allowed else is_loopback(self._config.host)
        if not may:
            refuse("operators_only", value=caller.key or None, remedy="name a key in operator_keys")

    def use_of(self, client: str) -> KeyUse | None:
        """Returns the rate limits of a client; None if it has none. Without API keys nobody has any."""
        return self.rate_limits.of(client) if self._config.api_keys else None

    @contextlib.asynccontextmanager
    async def prepare(self, client: str, is_counted: bool) -> AsyncIterator[Preparation]:
        """Prepares one request in the body of the `async with`. Endpoints about the server's own state need not count.

        Raises `QueueFull` if the client may have no more requests, or if others need the place and it has more than its
        share. Raises `Overdue` if `request_timeout_s` passes before `Preparation.end`.
        """
        timeout_s = self._config.request_timeout_s
        try:
            async with held(self._prepared, client) as holding:
                if is_counted and not holding.take(1):
                    self._refuse_place(client)
                async with asyncio.timeout(timeout_s) as timeout:
                    preparation = Preparation(holding, timeout, timeout_s)
                    try:
                        yield preparation
                    finally:
                        preparation.end()
        except HoldingLost:
            self._refuse_place(client)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            cause, place = "no engine took the request within its time", f"request_timeout_s, {timeout_s:g}"
            raise Overdue(Refusal("deadline", bound=timeout_s, cause=cause, place=place)) from error

    def _refuse_place(self, client: str) -> NoReturn:
        shares, remedy = self._prepared, "retry later, or raise engine.max_num_waiting"
        refuse("queue_full", "", shares.held(client), shares.most(client), remedy, unit="requests of yours wait here")

    def check_model(self, name: str | None) -> str:
        """Returns the name of the adapter that a request names as its model; empty for the model alone, which None or
        an empty name stands for. Refuses with 404 a name that nothing is served under.
        """
        adapter = self.names.adapter_of(name) if name else ""
        if adapter is None and not self._accepts_any_model:
            refuse("unknown_model", "model", name, self.names.listed)
        return adapter or ""

    # ---- a chat or a completion ----------------------------------------------------------------------------------

    def check_generation(self, body: GenerationBody, caller: Caller, num_prompts: int) -> None:
        """Checks the model, the priority, and the operator's limits on prompts and choices of one request."""
        self.check_model(body.model)
        self.check_priority(caller, body.priority)
        limit = self._config.max_prompts_per_request
        if num_prompts > limit:
            remedy = "send several requests or raise max_prompts_per_request"
            refuse("over_limit", "prompt", num_prompts, limit, remedy, unit="prompts")
        limit, num_choices = self._config.max_choices_per_request, num_prompts * body.num_choices
        if num_choices > limit:
            remedy = "lower it, send fewer prompts or raise max_choices_per_request"
            refuse("over_limit", "n", num_choices, limit, remedy, unit=f"choices of {num_prompts} prompts")

    def check_priority(self, caller: Caller, priority: int) -> None:
        """Refuses a negative priority if the client may not ask for one."""
        allowed = self._config.priority_clients
        if priority < 0 and "*" not in allowed and not (caller.key and caller.key in allowed):
            cause = "it goes before others' requests, and the operator did not allow that (priority_clients)"
            refuse("not_allowed", "priority", priority, 0, "leave it out, or send 0 or more", cause=cause)

    def check_echo(self, given: Sequence[str | list[int]], n: int) -> None:
        """Checks the length of echoed prompts, which every choice repeats. A token id counts as 8 characters."""
        limit = self._config.max_body_bytes
        num_characters = n * sum(len(prompt) if isinstance(prompt, str) else 8 * len(prompt) for prompt in given)
        if num_characters > limit:
            unit, remedy = "characters of prompts to repeat", "leave it out, lower n, or raise max_body_bytes"
            refuse("over_limit", "echo", num_characters, limit, remedy, unit=unit)

    def check_repeated(self, num_tokens: int) -> None:
        """Checks the length of the prompts that a body's questions become, one for each answer. A token counts as 8
        bytes of the body.
        """
        limit = self._config.max_body_bytes // 8
        if num_tokens > limit:
            unit, remedy = "tokens of prompts, one for each answer", "ask fewer questions, or raise max_body_bytes"
            refuse("over_limit", "questions", num_tokens, limit, remedy, unit=unit)

    def sampling_params(self, body: GenerationBody, defaults: Mapping[str, float]) -> SamplingParams:
        """Returns the body's sampling parameters; `defaults` fill what it leaves out. Raises `RequestRefused` naming
        the field that is out of bounds, or the logits processor that is not registered.
        """
        params = body.sampling_params(defaults)
        registered = self._config.engine.logits_processors
        for index, spec in enumerate(params.logits_processors):
            if spec.name not in registered:
                known = tuple(registered) or "none, for this server has none"
                refuse("unknown_value", f"logits_processors[{index}].name", spec.name, known)
        return params

    def check_answer(
        self, params: SamplingParams, prompts: Sequence[Collection[int]], max_model_len: int, stream: bool
    ) -> None:
        """Checks how many log-probabilities an answer may hold until it is complete: those of each choice's prompt,
        and those of its output unless that is streamed.
        """
        num_prompt = num_output = 0
        for prompt in prompts:
            if params.prompt_logprobs is not None:
                num_prompt += params.n * len(prompt) * (params.prompt_logprobs + 1)
            if params.logprobs is not None and not stream:
                num_output += max_output_tokens(params, [prompt], max_model_len) * (params.logprobs + 1)
        limit = self._config.body.max_logprobs
        if num_prompt + num_output <= limit:
            return
        field = "prompt_logprobs" if num_prompt > num_output else "logprobs"
        remedy = "lower it, n or max_tokens, send fewer or shorter prompts, or raise body.max_logprobs"
        refuse("over_limit", field, num_prompt + num_output, limit, remedy, unit="log-probabilities in the answer")


def _most_prepared(config: ServeConfig) -> int:
    """Returns the number of requests that all engines of a model may run and queue."""
    return config.max_engines * (config.engine.max_num_sequences + config.engine.max_num_waiting)


def max_output_tokens(params: SamplingParams, prompts: Sequence[Collection[int]], max_model_len: int) -> int:
    """Returns the most output tokens that all choices of the prompts may have together."""
    rooms = (max(0, max_model_len - len(prompt)) for prompt in prompts)
    return params.n * sum(min(params.max_tokens or room, room) for room in rooms)


def session_of(headers: Headers) -> str:
    """Returns the client's name of its conversation; empty if there is none. Raises `RequestRefused` if it is too
    long.
    """
    session = headers.get(SESSION_HEADER, "")
    if len(session) > MAX_SESSION_CHARACTERS:
        remedy = "send a shorter name, or a hash of it"
        refuse("over_limit", SESSION_HEADER, len(session), MAX_SESSION_CHARACTERS, remedy, unit="characters")
    return session
