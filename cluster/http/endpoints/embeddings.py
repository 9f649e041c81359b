"""`POST /v1/embeddings`: a vector for each text."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from manta.cluster.http.exchange.codec import encode
from manta.cluster.http.exchange.exchange import GenerationExchange
from manta.cluster.http.exchange.pooling import check_texts, pooled, tokenised
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.pooling_api import EmbeddingRequest, PoolingUsage
from manta.cluster.text.pooled_texts import TextForm, check_vectors, prompt_of, shaped


class _Row(msgspec.Struct, kw_only=True):
    """An `Embedding` whose numbers are JSON already."""

    object: str = "embedding"
    index: int
    embedding: msgspec.Raw


class _Rows(msgspec.Struct, kw_only=True):
    """An `EmbeddingList` of such."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[_Row]
    usage: PoolingUsage


async def create(state: AppState, exchange: GenerationExchange, body: EmbeddingRequest) -> None:
    state.admission.check_model(body.model)
    vectors, usage = await embedded(state, exchange, body, "input")
    answer = await state.apart(exchange, _answer, state.model_name, exchange, body, vectors, usage)
    await exchange.reply.send_json(answer)


async def embedded(
    state: AppState, exchange: GenerationExchange, body: EmbeddingRequest, field: str
) -> tuple[np.ndarray, PoolingUsage]:
    """Returns the vectors [num_texts, dimension] of a body, whose texts come from the client's `field`."""
    model, info = await state.pooling_model("embed")
    check_vectors(info, body.dimensions, body.normalize)
    texts = body.texts()
    check_texts(state, exchange, len(texts), body.priority, field)
    field_of = field_names(field, is_single=isinstance(body.input, str) or isinstance(body.input[0], int))
    form = TextForm(
        model=model,
        field_of=field_of,
        prompt=prompt_of(info, body.prompt_name),
        prompt_field="model" if body.prompt_name is None else "prompt_name",
        add_special_tokens=body.add_special_tokens,
        most_tokens=body.most_tokens(model.max_model_len),
        side=body.truncation_side or "right",
    )
    inputs = await tokenised(state, exchange, texts, form)
    vectors = await pooled(state, exchange, inputs, field_of, body.priority)
    num_tokens = sum(len(each.token_ids) for each in inputs)
    usage = PoolingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return shaped(vectors, body.dimensions, body.normalize), usage


def field_names(field: str, is_single: bool) -> Callable[[int], str]:
    """Returns the function that names a text of a field, which holds one text or a list."""
    return lambda index: field if is_single else f"{field}[{index}]"


def _answer(
    model: str, exchange: GenerationExchange, body: EmbeddingRequest, vectors: np.ndarray, usage: PoolingUsage
) -> bytes:
    write: Callable[[np.ndarray], Any] = _base64 if body.encoding_format == "base64" else _numbers
    rows = [_Row(index=index, embedding=msgspec.Raw(encode(write(row)))) for index, row in enumerate(vectors)]
    identity = exchange.identity
    return encode(_Rows(id=identity.new_id("embd-"), created=identity.created, model=model, data=rows, usage=usage))


def _numbers(row: np.ndarray) -> Any:
    return row.tolist()


def _base64(row: np.ndarray) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()
