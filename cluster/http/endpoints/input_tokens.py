"""`POST /v1/chat/completions/input_tokens` and `POST /v1/responses/input_tokens`: the prompt's tokens of such a body.

Nothing is generated or kept. The count is that of `usage` in the answer to the same body. The shapes are those of
OpenAI's Responses API, which llama.cpp's server has for chats too.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from manta.cluster.errors import RequestRefused
from manta.cluster.http.endpoints import generation
from manta.cluster.http.endpoints.stored_responses import conversation
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.requests import ChatCompletionRequest
from manta.cluster.protocol.responses_api import ResponsesRequest
from manta.cluster.protocol.translated import renamed


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


async def of_chat(state: AppState, exchange: Exchange, request: ChatCompletionRequest) -> InputTokens:
    """Counts the prompt's tokens of a chat."""
    state.admission.check_model(request.model)
    _, prompt = await generation.prompted(state, exchange, request)
    return InputTokens(len(prompt))


async def of_response(state: AppState, exchange: Exchange, body: ResponsesRequest) -> InputTokens:
    """Counts the prompt's tokens of a response, those of the conversation that it continues included."""
    items, _ = await conversation(state, exchange, body)
    body = msgspec.structs.replace(body, input=items)
    request = await state.apart(exchange, body.as_openai)
    try:
        return await of_chat(state, exchange, request)
    except RequestRefused as error:
        raise renamed(error, body) from error
