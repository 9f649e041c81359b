"""`POST /v1/chat/completions` and `POST /v1/completions`: turns a body into prompts, which go to the engines.

`cluster/http/exchange/answers.py` writes the answer. A refusal always names the field of the client's own body.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

import msgspec

from manta.cluster.chat.plan import ChatPlan, plan_chat, render
from manta.cluster.chat.reasoning import NOT_THINKING, budget_of, detect_reasoning, with_thinking
from manta.cluster.engine.request import EngineRequest
from manta.cluster.errors import RequestRefused, ServingError, error_of
from manta.cluster.http.access.request_admission import GenerationBody, max_output_tokens, session_of
from manta.cluster.http.exchange.answers import Answer, ChatAnswer, CompletionAnswer
from manta.cluster.http.exchange.chosen_adapter import chosen_adapter
from manta.cluster.http.exchange.engines import UNMETERED, Generation, GenerationRequest
from manta.cluster.http.exchange.exchange import GenerationExchange
from manta.cluster.http.exchange.prompts import aside, encode, encode_all, num_kept_tokens
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.error_bodies import under_field
from manta.cluster.protocol.foreign_fields import ignore
from manta.cluster.protocol.requests import ChatCompletionRequest, CompletionRequest
from manta.cluster.protocol.tools import template_tools
from manta.cluster.telemetry.attributes import generation_attributes
from manta.cluster.text.fill_in import FillIn
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.constraint import FIELD as CONSTRAINT
from manta.structured.constraint import JsonObjects
from manta.structured.refusals import Refusal
from manta.structured.thinking import ThinkingSection
from manta.workers.sampling_params import SamplingParams


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
    state.admission.check_generation(request, exchange.caller, num_prompts=1)
    plan, prompt = await prompted(state, exchange, request)
    model = await state.model_info()
    state.admission.check_answer(plan.params, [prompt], model.max_model_len, bool(request.stream))
    params = await _with_prediction(state, request, plan.params, model.max_model_len)
    name = state.admission.check_model(request.model) or state.model_name
    answer = answer_with(request, exchange.identity, name, state.tokenizer, plan, prompt)
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
    given = await state.apart(exchange, request.prompts)
    state.admission.check_generation(request, exchange.caller, len(given))
    if request.echo:
        state.admission.check_echo(given, request.num_choices)
    params = await sampling_params(state, exchange, request)
    model = await state.model_info()
    kept = num_kept_tokens(request.truncate_prompt_tokens, params, model.max_model_len)
    adds = request.add_special_tokens
    if request.suffix:
        params, prompts = await filled_in(state, request, params)
    else:
        prompts = await encode_all(state.tokenizer, given, adds, model.max_model_len, "prompt", kept)
    given = given if kept is None else [*prompts]  # echo repeats what was used
    state.admission.check_answer(params, prompts, model.max_model_len, bool(request.stream))
    name = state.admission.check_model(request.model) or state.model_name
    answer = CompletionAnswer(request, exchange.identity, name, state.tokenizer, given, prompts)
    thinking = await _sections(state, params, prompts)
    await generate(state, exchange, prompts, params, request, answer, thinking=thinking)


async def filled_in(
    state: AppState, request: CompletionRequest, params: SamplingParams
) -> tuple[SamplingParams, list[list[int]]]:
    """Returns the prompts for the gaps between the body's prompts and its suffix, and the parameters with the tokens
    that end the text of a gap. Raises `RequestRefused` for a model that has no tokens for gaps.
    """
    tokenizer, limit = state.tokenizer, (await state.model_info()).max_model_len
    fill_in = FillIn(tokenizer)
    before = await encode_all(tokenizer, request.prompts(), False, limit, "prompt")
    behind = fill_in.own(await encode(tokenizer, fill_in.continuing(request.suffix or ""), False, limit, "suffix"))
    leading = tokenizer.leading_special_ids() if request.add_special_tokens else []
    ends = (*params.stop_token_ids, *fill_in.end_token_ids)
    params = msgspec.structs.replace(params, stop_token_ids=ends)
    return params, [fill_in.prompt(leading, each, behind) for each in before]


async def _sections(state: AppState, params: SamplingParams, prompts: list[list[int]]) -> list[ThinkingSection | None]:
    """Returns the thinking section of each prompt; none if nothing bounds them. A model without such sections keeps any
    bound.
    """
    if budget_of(params) is None:
        return []
    if detect_reasoning(state.tokenizer.chat_template_source()) is None:
        ignore("thinking_token_budget", NOT_THINKING)
        return []
    return [(await aside(with_thinking, params, state.tokenizer, prompt)).thinking for prompt in prompts]


async def prompted(
    state: AppState, exchange: GenerationExchange, request: ChatCompletionRequest
) -> tuple[ChatPlan, list[int]]:
    """Returns the plan of a chat, with its admitted sampling parameters, and the tokens of the prompt."""
    params = await sampling_params(state, exchange, request)
    objects = state.config.engine.json_objects
    plan = await state.rendered(exchange, _plan, state.tokenizer, request, params, objects)
    max_model_len = (await state.model_info()).max_model_len
    kept = num_kept_tokens(request.truncate_prompt_tokens, plan.params, max_model_len)
    return plan, await encode(state.tokenizer, plan.prompt, False, max_model_len, "messages", kept)


def _plan(
    tokenizer: Tokenizer, request: ChatCompletionRequest, params: SamplingParams, objects: JsonObjects
) -> ChatPlan:
    conversation = render(tokenizer, request, template_tools(request.shown_tools()))
    return plan_chat(request, params, tokenizer, conversation, objects)


async def sampling_params(state: AppState, exchange: GenerationExchange, request: GenerationBody) -> SamplingParams:
    """Returns the body's admitted sampling parameters, with the tokens of its `bad_words`. What the body leaves out has
    the model's recommended value.
    """
    defaults = (await state.generating_model()).sampling_defaults
    params = await state.apart(exchange, state.admission.sampling_params, request, defaults)
    return await aside(state.tokenizer.resolve_bad_words, params) if params.bad_words else params


async def generate(
    state: AppState,
    exchange: GenerationExchange,
    prompts: list[list[int]],
    params: SamplingParams,
    request: GenerationBody,
    answer: Answer,
    shown_ids: frozenset[int] = frozenset(),
    not_carried: tuple[str, ...] = (),
    thinking: Sequence[ThinkingSection | None] = (),
    scored_from: Sequence[int] = (),
) -> None:
    """Runs the prompts and sends the answer. A header of the answer names what its constraint leaves out, `not_carried`
    included. `thinking` and `scored_from` have what `GenerationRequest` says of each prompt. Raises `ServingError`
    naming the field of `request` if the engine refuses one of `params`.
    """
    try:
        params = await _enforceable(exchange, params, not_carried)
        chosen = await chosen_adapter(state, request.model, request.lora, exchange.caller)
        exchange.adapter, exchange.adapter_key = chosen
        asked = _engines_request(state, exchange, prompts, params, request, shown_ids)
        asked = msgspec.structs.replace(asked, thinking=[*thinking], scored_from=[*scored_from])
        streams = bool(request.stream)
        state.metrics.model_used(exchange.adapter)
        if exchange.span is not None:
            name = exchange.adapter or state.model_name
            attributes = generation_attributes(name, params, chat=asked.chat, stream=streams)
            exchange.span.set_attributes(attributes)
        generation = await _submitted(state, exchange, asked)
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
        if error.refusal.kind == "adapter_gone":
            state.forget_model()
            await state.refresh_adapters()
        field, refusal = await _field_at_fault(exchange, request, error.refusal)
        raise error_of(under_field(refusal, field)) from error


async def _submitted(state: AppState, exchange: GenerationExchange, asked: GenerationRequest) -> Generation:
    """Counts a request against its client's rate limits and sends it to the engines."""
    prompts, max_model_len = asked.prompts, (await state.model_info()).max_model_len
    most = max_output_tokens(asked.engine.params, prompts, max_model_len)
    meter = exchange.caller.admit(sum(map(len, prompts)), most, exchange.reply.headers_always) or UNMETERED
    try:
        return await exchange.engines.submit(asked, meter)
    except BaseException:
        meter.end()
        raise


def _engines_request(
    state: AppState,
    exchange: GenerationExchange,
    prompts: list[list[int]],
    params: SamplingParams,
    request: GenerationBody,
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
        session=session_of(exchange.headers),
        traceparent=exchange.traceparent,
        cache_root=state.server.prefix_scope.root(exchange.caller.owner, request.cache_salt),
        adapter=exchange.adapter_key,
        cache_salt=request.cache_salt or "",
        shares_answers=state.server.prefix_scope.is_shared,
    )
    chat = isinstance(request, ChatCompletionRequest)
    return GenerationRequest(prompts=prompts, engine=engine, chat=chat, shown_ids=shown_ids)


async def _field_at_fault(
    exchange: GenerationExchange,
    request: GenerationBody,
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
    """Returns `params` with a loose constraint resolved. The reply notes what is not enforced."""
    if params.constraint is None or not params.constraint.loose:
        return params
    spec, not_enforced = await exchange.engines.resolve(params.constraint, exchange.caller.sharer)
    exchange.reply.not_enforced = (*not_carried, *not_enforced)
    return msgspec.structs.replace(params, constraint=spec)
