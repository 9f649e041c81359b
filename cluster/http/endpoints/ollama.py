"""Ollama's endpoints, for its clients: each body becomes one of OpenAI's, and the answer is written in Ollama's format.

`cluster/protocol/ollama.py` has the structs. Refusals are those of the OpenAI endpoints, with Ollama's field names.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import pathlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import jinja2
import msgspec

from manta.cluster import hub_pull
from manta.cluster.chat.plan import ChatPlan
from manta.cluster.chat.reader import ChatReader, MessageBuilder, whole_arguments
from manta.cluster.chat.reasoning import detect_reasoning
from manta.cluster.chat.tool_formats import detect_format
from manta.cluster.config import EngineConfig
from manta.cluster.engine.request import FinishStatus
from manta.cluster.errors import RequestRefused, ServingError, error_of, refuse
from manta.cluster.http.endpoints import generation
from manta.cluster.http.endpoints.changing_models import changed_models
from manta.cluster.http.exchange.codec import LINES, encode
from manta.cluster.http.exchange.engines import Event, Generation
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.prompts import encode_all
from manta.cluster.http.exchange.state import AppState
from manta.cluster.hub_pull import PullOrder, hub_id_of
from manta.cluster.operated_models import new_entry
from manta.cluster.protocol.ollama import (
    API_VERSION,
    LATEST,
    OllamaAnswerMessage,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaDeleteRequest,
    OllamaDetails,
    OllamaFunction,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaModel,
    OllamaModels,
    OllamaPullRequest,
    OllamaRunning,
    OllamaRunningModel,
    OllamaShow,
    OllamaShowRequest,
    OllamaStatus,
    OllamaToolCall,
    OllamaVersion,
)
from manta.cluster.protocol.responses import ChatResponseMessage
from manta.cluster.protocol.translated import renamed
from manta.cluster.text.chat_template import ChatTemplates
from manta.cluster.text.tokenizer_files import read_tokenizer_config
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of
from manta.workers.checkpoints.model_folder import resolve_model_folder
from manta.workers.checkpoints.pooling_folder import read_pooling
from manta.workers.model_options import DEMO_MODEL
from manta.workers.pooling_info import PoolingInfo

logger = logger_of(__name__)

_NEVER = "2318-01-01T00:00:00Z"
"""Time at which a model that stays loaded expires, as Ollama writes it."""
Write = Callable[..., msgspec.Struct]
"""Function that makes an answer, or a part of one, from an `OllamaAnswerMessage` and the other fields."""


async def chat(state: AppState, exchange: Exchange, body: OllamaChatRequest) -> OllamaChatAnswer | None:
    state.admission.check_model(body.served_model)
    if not body.messages:
        return _chat_part(OllamaAnswerMessage(content="", role="assistant"), **_loaded(body))
    await _chat(state, exchange, body, await state.apart(exchange, body.as_openai), _chat_part)
    return None


async def generate(state: AppState, exchange: Exchange, body: OllamaGenerateRequest) -> OllamaGenerateAnswer | None:
    state.admission.check_model(body.served_model)
    if not body.prompt and not body.suffix:
        return _generate_part(OllamaAnswerMessage(content="", role="assistant"), **_loaded(body))
    if state.tokenizer.has_chat_template and not (body.raw or body.suffix):
        await _chat(state, exchange, body, await state.apart(exchange, body.as_chat), _generate_part)
    else:
        await _complete(state, exchange, body)
    return None


async def _chat(state: AppState, exchange: Exchange, body: Any, request: Any, write: Write) -> None:
    def answer_with(_: Any, identity: Any, model: str, tokenizer: Any, plan: ChatPlan, prompt: Any) -> OllamaAnswer:
        return OllamaAnswer(body.model, plan, write)

    try:
        await generation.chat(state, exchange, request, answer_with)
    except RequestRefused as error:
        raise renamed(error, body) from error


async def _complete(state: AppState, exchange: Exchange, body: OllamaGenerateRequest) -> None:
    request = await state.apart(exchange, body.as_completion)
    try:
        params = await generation.sampling_params(state, exchange, request)
        if not body.has_limit:
            params = msgspec.structs.replace(params, max_tokens=None)
        model = await state.model_info()
        adds = request.add_special_tokens
        if request.suffix:
            params, prompts = await generation.filled_in(state, request, params)
        else:
            prompts = await encode_all(state.tokenizer, request.prompts(), adds, model.max_model_len, "prompt")
        answer = OllamaAnswer(body.model, ChatPlan(prompt=body.prompt, params=params), _generate_part)
        await generation.generate(state, exchange, prompts, params, request, answer)
    except RequestRefused as error:
        raise renamed(error, body) from error


async def tags(state: AppState, exchange: Exchange, _: None) -> OllamaModels:
    served = [each for each in state.models if _may_use(exchange, each)]
    return OllamaModels([OllamaModel(**await _model(each)) for each in served])


async def running(state: AppState, exchange: Exchange, _: None) -> OllamaRunning:
    """Answers with the models that are loaded. None expires: those on demand leave when others need their place."""
    loaded = [each for each in state.models if _may_use(exchange, each) and _is_loaded(each)]
    return OllamaRunning([await _running(each) for each in loaded])


def _may_use(exchange: Exchange, state: AppState) -> bool:
    return exchange.caller.may_use(state.admission.names, state.model_name)


def _is_loaded(state: AppState) -> bool:
    return state.condition is None or state.condition.stage == "loaded"


async def _running(state: AppState) -> OllamaRunningModel:
    info = await state.model_info()
    return OllamaRunningModel(**await _model(state), expires_at=_NEVER, context_length=info.max_model_len)


async def api_version(state: AppState, exchange: Exchange, _: None) -> OllamaVersion:
    return OllamaVersion(API_VERSION)


async def _model(state: AppState) -> dict[str, Any]:
    """Returns the fields of an `OllamaModel`."""
    name = state.model_name
    return {
        "name": name,
        "model": name,
        "modified_at": _time(state.created),
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": await _details(state),
    }


async def show(state: AppState, exchange: Exchange, body: OllamaShowRequest) -> OllamaShow:
    state.admission.check_model(body.served_model)
    if not _is_loaded(state):
        return await _show_unloaded(state)
    info, tokenizer = await state.model_info(), state.tokenizer
    return OllamaShow(
        template=tokenizer.chat_template_source(),
        modified_at=_time(state.created),
        details=await _details(state),
        model_info={"general.architecture": "manta", "manta.context_length": info.max_model_len},
        capabilities=_capabilities(info.pooling, tokenizer.chat_templates),
    )


async def _show_unloaded(state: AppState) -> OllamaShow:
    """Returns what is known of a model whose engines are not there to ask: what its files say, if they are here."""
    templates, pooling = await asyncio.to_thread(_stored, state.config.engine)
    return OllamaShow(
        template=templates.source(tools=False),
        modified_at=_time(state.created),
        details=await _details(state),
        model_info={"general.architecture": "manta"},
        capabilities=_capabilities(pooling, templates),
    )


def _stored(options: EngineConfig) -> tuple[ChatTemplates, PoolingInfo | None]:
    """Returns the chat templates of a model and how it pools, by its files. Downloads nothing. A model whose files are
    not here, or cannot be read, is shown as one that generates text.
    """
    path = pathlib.Path(options.model).expanduser()
    try:
        if options.model != DEMO_MODEL and not path.exists():
            return ChatTemplates({}), None
        folder = resolve_model_folder(options.model)
        texts = folder if options.tokenizer is None else pathlib.Path(options.tokenizer).expanduser()
        return ChatTemplates(read_tokenizer_config(texts).chat_templates), read_pooling(folder, options.task)
    except (ValueError, OSError, jinja2.TemplateError) as error:
        logger.info("what %s can do is not known, because it cannot be read: %s", options.model, error)
        return ChatTemplates({}), None


async def delete(state: AppState, exchange: Exchange, body: OllamaDeleteRequest) -> None:
    """Serves a model no more. Its files stay. Refuses another name of a model, because all of them would go."""
    if body.served_model != state.model_name:
        remedy, cause = f"delete {state.model_name}", "it is another name of that model, or an adapter"
        refuse("not_allowed", "model", body.model, remedy=remedy, cause=cause)
    await changed_models(state).remove(state.model_name)
    await exchange.reply.send_body(b"", "text/plain; charset=utf-8")


async def pull(state: AppState, exchange: Exchange, body: OllamaPullRequest) -> OllamaStatus | None:
    """Says that a model is here, if it is. Downloads others for operators, if the configuration names hosts for it, and
    serves them on demand.
    """
    name, lines = body.name.removesuffix(LATEST), _pulled_already()
    try:
        state.models.find(name, exchange.caller).admission.check_model(name)
    except ServingError as error:
        if not state.config.pull_hosts:
            cause = "this server downloads no models for its clients"
            remedy = "put its files below model_roots on the server, and run there: manta models add NAME=FOLDER"
            raise error_of(Refusal("unsupported", "model", body.name, remedy=remedy, cause=cause)) from error
        state.admission.check_operator(exchange.caller)
        lines = _pulled(state, name)
        exchange.hand_over()  # a download has no deadline
    if not body.stream:
        async for _ in lines:
            pass
        return OllamaStatus("success")
    await exchange.reply.stream((encode(status) + LINES.after async for status in lines), _Pulling(), LINES)
    return None


class _Pulling:
    """The source of the lines of a pull, which holds nothing."""

    def close(self) -> None:
        """Does nothing, because the download ends with the iteration over its lines."""


async def _pulled_already() -> AsyncIterator[OllamaStatus]:
    for status in ("pulling manifest", "success"):
        yield OllamaStatus(status)


async def _pulled(state: AppState, name: str) -> AsyncIterator[OllamaStatus]:
    """Downloads a model of a hub id and adds it. Yields how far that is."""
    models, hub_id = changed_models(state), hub_id_of(name)
    for taken in (name, hub_id):
        if state.models.owner_of(taken) is not None:
            refuse(
                "name_taken", "model", taken, "a name that is served", "pull another model, or remove that one first"
            )
    folder = None
    async for line in hub_pull.pull(PullOrder(hub_id, state.config.pull_hosts, state.config.max_pull_bytes)):
        folder = line.folder
        yield OllamaStatus(line.status, line.digest, line.total, line.completed)
    fields = {"name": hub_id, "aliases": [name] * (name != hub_id), "on_demand": True, "engine": {"model": folder}}
    await models.add(new_entry(fields, state.config.engine))
    yield OllamaStatus("success")


def _capabilities(pooling: PoolingInfo | None, templates: ChatTemplates) -> list[str]:
    """Returns what a model can do, by Ollama's names."""
    if pooling is not None:
        return ["embedding" if pooling.task == "embed" else "classification"]
    found = {
        "tools": detect_format(templates.source(tools=True)),
        "thinking": detect_reasoning(templates.source(tools=False)),
    }
    return ["completion", *(name for name, form in found.items() if form)]


async def _details(state: AppState) -> OllamaDetails:
    if not _is_loaded(state):  # its engines are not there to ask
        return OllamaDetails(quantization_level="" if state.known_model is None else state.known_model.dtype)
    return OllamaDetails(quantization_level=(await state.model_info()).dtype)


class OllamaAnswer:
    """An answer of `/api/chat` or `/api/generate`, whole or as a stream of JSON lines."""

    form = LINES

    def __init__(self, model: str, plan: ChatPlan, write: Write) -> None:
        self._model = model
        self._reader = ChatReader(plan)
        self._write = write
        self._begun = time.perf_counter_ns()
        self._first: int | None = None
        """Time of the first token, in ns of `perf_counter_ns`."""

    async def whole(self, generation: Generation) -> bytes:
        builder = MessageBuilder()
        async for event in generation:
            builder.add(self._read(event))
            finish = event.finish
        return encode(self._part(_message(builder.message()), **self._ending(finish, generation)))

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """Yields text as it comes, and tool calls, which Ollama's clients expect whole, before the last line."""
        calls = MessageBuilder()
        async for event in generation:
            for delta in self._read(event):
                if delta.tool_calls:
                    calls.add([delta])
                elif delta.content or delta.reasoning_content:
                    thinking = delta.reasoning_content
                    yield self._line(
                        OllamaAnswerMessage(content=delta.content or "", role="assistant", thinking=thinking)
                    )
            finish = event.finish
        message = _message(calls.message())
        if message.tool_calls:
            yield self._line(message)
        yield self._line(OllamaAnswerMessage(content="", role="assistant"), **self._ending(finish, generation))

    def _read(self, event: Event) -> list[Any]:
        if self._first is None and event.token_ids:
            self._first = time.perf_counter_ns()
        return self._reader.feed(event.text, event.finish is not None, event.is_cut)

    def _ending(self, finish: FinishStatus | None, generation: Generation) -> dict[str, Any]:
        (usage,), now = generation.usages, time.perf_counter_ns()
        first = self._first or now
        return {
            "done": True,
            "done_reason": "length" if finish is FinishStatus.FINISHED_LENGTH else "stop",
            "total_duration": now - self._begun,
            "load_duration": 0,
            "prompt_eval_count": usage.num_prompt_tokens,
            "prompt_eval_duration": first - self._begun,
            "eval_count": usage.num_output_tokens,
            "eval_duration": now - first,
        }

    def _line(self, message: OllamaAnswerMessage, **ending: Any) -> bytes:
        return encode(self._part(message, **ending)) + LINES.after

    def _part(self, message: OllamaAnswerMessage, **ending: Any) -> msgspec.Struct:
        return self._write(message, **{"model": self._model, "created_at": _time(time.time()), "done": False} | ending)


def _chat_part(message: OllamaAnswerMessage, **fields: Any) -> OllamaChatAnswer:
    return OllamaChatAnswer(message=message, **fields)


def _generate_part(message: OllamaAnswerMessage, **fields: Any) -> OllamaGenerateAnswer:
    return OllamaGenerateAnswer(response=message.content, thinking=message.thinking, **fields)


def _message(message: ChatResponseMessage) -> OllamaAnswerMessage:
    calls = [
        OllamaToolCall(OllamaFunction(call.name, arguments), call.id)
        for call in message.tool_calls or []
        if (arguments := whole_arguments(call)) is not None
    ]
    return OllamaAnswerMessage(
        content=message.content or "",
        role="assistant",
        thinking=message.reasoning_content or None,
        tool_calls=calls or None,
    )


def _loaded(body: OllamaChatRequest | OllamaGenerateRequest) -> dict[str, Any]:
    """Returns the fields of the answer to a request that only loads the model, or that asks to unload it. Only the
    operator's options decide when a model leaves, so nothing is done for the latter.
    """
    reason = "unload" if body.unloads else "load"
    return {"model": body.model, "created_at": _time(time.time()), "done": True, "done_reason": reason}


def _time(seconds: float) -> str:
    """Returns a time in RFC 3339, in UTC."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")
