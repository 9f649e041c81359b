"""`POST /v1/chat/completions` and `POST /v1/completions`: turns a body into prompts, which go to the engines.

`cluster/http/exchange/answers.py` writes the answer. A refusal always names the field of the client's own body.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import msgspec

from manta.cluster.chat.plan import plan_chat, render
from manta.cluster.engine.request import EngineRequest
from manta.cluster.errors import RequestRefused, ServingError, error_of, refuse
from manta.cluster.http.exchange.answers import Answer, ChatAnswer, CompletionAnswer
from manta.cluster.http.exchange.engines import GenerationRequest
from manta.cluster.http.exchange.exchange import GenerationExchange
from manta.cluster.http.exchange.prompts import aside, encode, encode_all, num_kept_tokens
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.body_limits import check_counts, check_echo, check_num_logprobs
from manta.cluster.protocol.error_bodies import under_field
from manta.cluster.protocol.requests import ChatCompletionRequest, CompletionRequest
from manta.cluster.protocol.tools import template_tools
from manta.cluster.telemetry.attributes import generation_attributes
from manta.structured.constraint import FIELD as CONSTRAINT
from manta.structured.refusals import Refusal
from manta.workers.sampling_params import SamplingParams

MAX_HEADER_CHARACTERS = 4000
"""Most characters of one header's value; many clients refuse more than 8 KiB of headers."""
SESSION_HEADER = "x-session-id"
"""Header that names a conversation. Its requests go to one engine where possible. Other routers use the same name."""
MAX_SESSION_CHARACTERS = 256


async def chat(
    state: AppState,
    exchange: GenerationExchange,
    request: ChatCompletionRequest,
    answer_with: Callable[..., Answer] = ChatAnswer,
    most_tokens: int | None = None,
) -> None:
    """Answers a conversation. `answer_with` makes the object that writes the answer; its parameters are those of
    `ChatAnswer`. With `most_tokens` the answer has at most so many, or what the prompt leaves if that is less.
    """
    state.check_model(request.model)
    _check_priority(state, exchange, request.priority)
    check_counts(state.config, 1, request.num_choices)
    params = await sampling_params(state, request)
    conversation = render(state.tokenizer, request, template_tools(request.shown_tools()))
    plan = plan_chat(request, params, state.tokenizer, conversation)
    model = await state.model_info()
    kept = num_kept_tokens(request.truncate_prompt_tokens, params, model.max_model_len)
    prompt = await encode(state.tokenizer, plan.prompt, False, model.max_model_len, "messages", kept)
    check_num_logprobs(state.config.body, plan.params, [prompt], model.max_model_len, bool(request.stream))
    params = await _with_prediction(state, request, plan.params, model.max_model_len)
    answer = answer_with(request, exchange.identity, state.model_name, state.tokenizer, plan, prompt)
    if most_tokens is not None:
        params = msgspec.structs.replace(params, max_tokens=min(most_tokens, model.max_model_len - len(prompt)))
    await generate(state, exchange, [prompt], params, request, answer, plan.shown_ids, plan.not_enforced)


async def _with_prediction(
    state: AppState, request: ChatCompletionRequest, params: SamplingParams, max_model_len: int
) -> SamplingParams:
    """Returns `params` with the tokens of the prediction, if the engine makes drafts of them."""
    speculative, text = state.config.engine.speculative, request.predicted_text()
    if not text or speculative is None or "prediction" not in speculative.proposers:
        return params
    token_ids = await encode(state.tokenizer, text, False, max_model_len, "prediction")
    return msgspec.structs.replace(params, prediction_token_ids=tuple(token_ids[:max_model_len]))


async def completions(state: AppState, exchange: GenerationExchange, request: CompletionRequest) -> None:
    state.check_model(request.model)
    _check_priority(state, exchange, request.priority)
    given = request.prompts()
    check_counts(state.config, len(given), request.num_choices)
    if request.echo:
        check_echo(state.config, given, request.num_choices)
    params = await sampling_params(state, request)
    model = await state.model_info()
    kept = num_kept_tokens(request.truncate_prompt_tokens, params, model.max_model_len)
    adds = request.add_special_tokens
    prompts = await encode_all(state.tokenizer, given, adds, model.max_model_len, "prompt", kept)
    given = given if kept is None else [*prompts]  # echo repeats what was used
    check_num_logprobs(state.config.body, params, prompts, model.max_model_len, bool(request.stream))
    answer = CompletionAnswer(request, exchange.identity, state.model_name, state.tokenizer, given, prompts)
    await generate(state, exchange, prompts, params, request, answer)


def _check_priority(state: AppState, exchange: GenerationExchange, priority: int) -> None:
    """Raises `RequestRefused` if the client asks for a negative priority and may not."""
    allowed = state.config.priority_clients
    if priority < 0 and "*" not in allowed and not (exchange.caller.key and exchange.caller.key in allowed):
        cause = "it goes before others' requests, and the operator did not allow that (priority_clients)"
        refuse("not_allowed", "priority", priority, 0, "leave it out, or send 0 or more", cause=cause)


async def sampling_params(state: AppState, request: ChatCompletionRequest | CompletionRequest) -> SamplingParams:
    """Returns the body's sampling parameters. Raises `RequestRefused` if a logits processor is not registered."""
    params = request.sampling_params((await state.model_info()).sampling_defaults)
    registered = state.config.engine.logits_processors
    for index, spec in enumerate(params.logits_processors):
        if spec.name not in registered:
            known = tuple(registered) or "none, for this server has none"
            refuse("unknown_value", f"logits_processors[{index}].name", spec.name, known)
    return await aside(state.tokenizer.resolve_bad_words, params) if params.bad_words else params


async def generate(
    state: AppState,
    exchange: GenerationExchange,
    prompts: list[list[int]],
    params: SamplingParams,
    request: ChatCompletionRequest | CompletionRequest,
    answer: Answer,
    shown_ids: frozenset[int] = frozenset(),
    not_carried: tuple[str, ...] = (),
) -> None:
    """Runs the prompts and sends the answer. A header of the answer names what its constraint leaves out, `not_carried`
    included. Raises `ServingError` naming the field of `request` if the engine refuses one of `params`.
    """
    try:
        params = await _enforceable(exchange, params, not_carried)
        asked = _engines_request(state, exchange, prompts, params, request, shown_ids)
        streams = bool(request.stream)
        if exchange.span is not None:
            attributes = generation_attributes(state.model_name, params, chat=asked.chat, stream=streams)
            exchange.span.set_attributes(attributes)
        exchange.caller.admit(sum(map(len, prompts)), exchange.reply.headers_always)
        generation = await exchange.engines.submit(asked)
        exchange.hand_over()
        try:
            if streams:
                await exchange.reply.stream(answer.stream(generation), generation, answer.form)
            else:
                await exchange.reply.send_json(await answer.whole(generation))
        finally:
            generation.close()
            exchange.note(generation)
    except RequestRefused as error:
        field, refusal = await _field_at_fault(exchange, request, error.refusal)
        raise error_of(under_field(refusal, field)) from error


def _engines_request(
    state: AppState,
    exchange: GenerationExchange,
    prompts: list[list[int]],
    params: SamplingParams,
    request: ChatCompletionRequest | CompletionRequest,
    shown_ids: frozenset[int],
) -> GenerationRequest:
    sharer = exchange.caller.sharer
    engine = EngineRequest(
        request_id=f"{exchange.request_id}-{secrets.token_hex(4)}",
        prompt_token_ids=[],
        params=params,
        deadline_s=exchange.remaining_s,
        priority=request.priority,
        client=sharer,
        weight=state.config.client_weights.get(sharer, 1.0),
        session=_session(exchange),
        traceparent=exchange.traceparent,
        cache_root=state.prefix_scope.root(exchange.caller.owner, request.cache_salt),
    )
    chat = isinstance(request, ChatCompletionRequest)
    return GenerationRequest(prompts=prompts, engine=engine, chat=chat, shown_ids=shown_ids)


async def _field_at_fault(
    exchange: GenerationExchange,
    request: ChatCompletionRequest | CompletionRequest,
    refusal: Refusal,
) -> tuple[str, Refusal]:
    """Returns the field of the body that a refusal is about, and the refusal. Among several tools it is the first one
    whose schema is refused on its own.
    """
    for field, spec in request.tool_constraints() if refusal.field == CONSTRAINT else []:
        try:
            async with asyncio.timeout(exchange.remaining_s):
                await exchange.engines.resolve(spec, exchange.caller.sharer)
        except ServingError as of_tool:
            return field, of_tool.refusal
        except TimeoutError:
            break
    return request.field_of(refusal.field), refusal


async def _enforceable(
    exchange: GenerationExchange, params: SamplingParams, not_carried: tuple[str, ...]
) -> SamplingParams:
    """Returns `params` with a loose constraint resolved. A header of the answer lists what is not enforced."""
    if params.constraint is None or not params.constraint.loose:
        return params
    spec, not_enforced = await exchange.engines.resolve(params.constraint, exchange.caller.sharer)
    if not_enforced or not_carried:
        exchange.reply.headers_out.append((b"x-manta-not-enforced", _header_value([*not_carried, *not_enforced])))
    return msgspec.structs.replace(params, constraint=spec)


def _session(exchange: GenerationExchange) -> str:
    """Returns the client's name of its conversation; empty if there is none. Raises `RequestRefused` if it is too
    long.
    """
    session = exchange.headers.get(SESSION_HEADER, "")
    if len(session) > MAX_SESSION_CHARACTERS:
        remedy = "send a shorter name, or a hash of it"
        refuse("over_limit", SESSION_HEADER, len(session), MAX_SESSION_CHARACTERS, remedy, unit="characters")
    return session


def _header_value(names: list[str]) -> bytes:
    """Returns a list as a header value: ASCII without control characters, cut at `MAX_HEADER_CHARACTERS`."""
    value = ", ".join(name.encode("unicode_escape").decode() for name in names)
    return (value if len(value) <= MAX_HEADER_CHARACTERS else f"{value[:MAX_HEADER_CHARACTERS]} ...").encode()
