"""`POST /infill`, llama.cpp's endpoint for the text of a gap, with other files of the project before it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from manta.cluster.engine.request import FinishStatus
from manta.cluster.errors import RequestRefused
from manta.cluster.http.endpoints import generation
from manta.cluster.http.exchange.codec import EVENTS, encode, sse_event
from manta.cluster.http.exchange.engines import Event, Generation
from manta.cluster.http.exchange.exchange import GenerationExchange
from manta.cluster.http.exchange.prompts import encode_all
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.infill import InfillAnswer, InfillRequest
from manta.cluster.protocol.translated import renamed
from manta.cluster.text.fill_in import FillIn


async def infill(state: AppState, exchange: GenerationExchange, body: InfillRequest) -> None:
    request = await state.apart(exchange, body.as_openai)
    try:
        state.admission.check_generation(request, exchange.caller, num_prompts=1)
        fill_in = FillIn(state.tokenizer)
        params = await generation.sampling_params(state, exchange, request)
        params = msgspec.structs.replace(
            params,
            max_tokens=params.max_tokens if body.has_limit else None,
            stop_token_ids=(*params.stop_token_ids, *fill_in.end_token_ids),
        )
        limit = (await state.model_info()).max_model_len
        extra = [(file.filename, file.text) for file in body.input_extra]
        continuing = map(fill_in.continuing, (body.input_suffix, body.prompt))
        texts = [*fill_in.other_files(extra), body.input_prefix, *continuing]
        *others, before, behind, begun = await encode_all(state.tokenizer, texts, False, limit, "input_prefix")
        leading = [*state.tokenizer.leading_special_ids(), *fill_in.joined(others)]
        prompt = [*fill_in.prompt(leading, before, fill_in.own(behind)), *fill_in.own(begun)]
        state.admission.check_answer(params, [prompt], limit, body.stream)
        await generation.generate(state, exchange, [prompt], params, request, GapAnswer(state.model_name))
    except RequestRefused as error:
        raise renamed(error, body) from error


class GapAnswer:
    """An answer of `/infill`, whole or as a stream of events."""

    form = EVENTS

    def __init__(self, model: str) -> None:
        self._model = model

    async def whole(self, generation: Generation) -> bytes:
        text, token_ids = "", list[int]()
        async for event in generation:
            text += event.text
            token_ids += event.token_ids
            last = event
        return encode(self._last(text, token_ids, last, generation))

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        async for event in generation:
            if event.finish is None:
                yield sse_event(InfillAnswer(index=0, content=event.text, tokens=event.token_ids, stop=False))
            else:
                yield sse_event(self._last(event.text, event.token_ids, event, generation))

    def _last(self, text: str, token_ids: list[int], ending: Event, generation: Generation) -> InfillAnswer:
        (usage,) = generation.usages
        is_word = isinstance(ending.stop_reason, str)
        is_limit = ending.finish is FinishStatus.FINISHED_LENGTH
        return InfillAnswer(
            index=0,
            content=text,
            tokens=token_ids,
            stop=True,
            model=self._model,
            stop_type="word" if is_word else "limit" if is_limit else "eos",
            stopping_word=str(ending.stop_reason) if is_word else "",
            tokens_predicted=usage.num_output_tokens,
            tokens_evaluated=usage.num_prompt_tokens,
            tokens_cached=usage.num_cached_tokens,
            truncated=False,
        )
