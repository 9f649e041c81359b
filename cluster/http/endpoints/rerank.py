"""`/v1/rerank`, `/v1/score`, `/v1/classify` and `/pooling`: what models with a head for labels answer.

A pair of texts is cut only in its second one: a query that lost its end would score every document wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from manta.cluster.http.endpoints.embeddings import field_names
from manta.cluster.http.exchange.codec import encode
from manta.cluster.http.exchange.exchange import Exchange, GenerationExchange
from manta.cluster.http.exchange.pooling import check_texts, pooled, tokenised
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.pooling_api import PoolingUsage, Truncation
from manta.cluster.protocol.rerank_api import (
    Classification,
    ClassificationList,
    ClassifyRequest,
    Pooled,
    PooledList,
    RerankAnswer,
    RerankDocument,
    RerankRequest,
    RerankResult,
    Score,
    ScoreList,
    ScoreRequest,
)
from manta.cluster.text.pooled_texts import TextForm, instruction_of, prompt_of
from manta.cluster.text.tokenizer import TextOrPair
from manta.workers.model_info import ModelInfo
from manta.workers.pooling_info import PoolingTask


async def rerank(state: AppState, exchange: Exchange, body: RerankRequest) -> RerankAnswer:
    """Answers with documents and scores, the best first."""
    return await _reranked(state, exchange, body, body.return_documents is not False)


async def rerank_v2(state: AppState, exchange: Exchange, body: RerankRequest) -> RerankAnswer:
    """Answers as `rerank`, without documents unless they are asked for."""
    return await _reranked(state, exchange, body, body.return_documents is True)


async def _reranked(state: AppState, exchange: Exchange, body: RerankRequest, has_texts: bool) -> RerankAnswer:
    state.admission.check_model(body.model)
    texts = body.texts()
    check_texts(state, exchange, len(texts), body.priority, "documents")
    field_of = field_names("documents", is_single=False)
    form = await _pair_form(state, body, field_of, body.max_tokens_per_doc, first_field="query")
    rows, usage = await _rows(state, exchange, [(body.query, text) for text in texts], form, body.priority)
    scores = rows[:, 0]
    best = np.argsort(-scores, kind="stable")[: body.top_n]
    results = [
        RerankResult(
            index=int(index),
            relevance_score=float(scores[index]),
            document=RerankDocument(text=texts[index]) if has_texts else None,
        )
        for index in best
    ]
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    answer_id = exchange.identity.new_id("rerank-")
    return RerankAnswer(id=answer_id, model=state.model_name, results=results, usage=usage, meta=meta)


async def score(state: AppState, exchange: Exchange, body: ScoreRequest) -> ScoreList:
    """Answers with a score for each pair."""
    state.admission.check_model(body.model)
    pairs = body.pairs()
    check_texts(state, exchange, len(pairs), body.priority, "text_2")
    field_of = field_names("text_2", is_single=isinstance(body.text_2, str))
    form = await _pair_form(state, body, field_of)
    rows, usage = await _rows(state, exchange, pairs, form, body.priority)
    scores = [Score(index=index, score=number) for index, number in enumerate(rows[:, 0].tolist())]
    return ScoreList(**_common(state, exchange, "score-"), data=scores, usage=usage)


async def classify(state: AppState, exchange: Exchange, body: ClassifyRequest) -> None:
    """Answers with a number for each label of each text."""
    rows, usage, model = await _inputs(state, exchange, body, "classify")
    assert model.pooling is not None
    labels, common = model.pooling.labels, _common(state, exchange, "classify-")

    def answer() -> bytes:
        found = [
            Classification(index=index, label=labels[int(row.argmax())], probs=row.tolist(), num_classes=len(labels))
            for index, row in enumerate(rows)
        ]
        return encode(ClassificationList(**common, data=found, usage=usage))

    await exchange.reply.send_json(await state.apart(exchange, answer))


async def pool_texts(state: AppState, exchange: Exchange, body: ClassifyRequest) -> None:
    """Answers with what the model gives: a vector, or a number for each label."""
    rows, usage, _ = await _inputs(state, exchange, body, "embed", "classify")
    common = _common(state, exchange, "pool-")

    def answer() -> bytes:
        found = [Pooled(index=index, data=row.tolist()) for index, row in enumerate(rows)]
        return encode(PooledList(**common, data=found, usage=usage))

    await exchange.reply.send_json(await state.apart(exchange, answer))


async def _inputs(
    state: AppState, exchange: Exchange, body: ClassifyRequest, *tasks: PoolingTask
) -> tuple[np.ndarray, PoolingUsage, ModelInfo]:
    state.admission.check_model(body.model)
    model, info = await state.pooling_model(*tasks)
    texts = body.texts()
    check_texts(state, exchange, len(texts), body.priority, "input")
    field_of = field_names("input", is_single=isinstance(body.input, str) or isinstance(body.input[0], int))
    form = _form(model, body, field_of, prompt=prompt_of(info, None), adds_special=body.add_special_tokens)
    rows, usage = await _rows(state, exchange, texts, form, body.priority)
    return rows, usage, model


async def _pair_form(
    state: AppState,
    body: RerankRequest | ScoreRequest,
    field_of: Callable[[int], str],
    most_of_second: int | None = None,
    first_field: str = "",
) -> TextForm:
    """Returns how pairs of texts become tokens. Refuses a model that gives them no score."""
    model, info = await state.pooling_model("classify")
    if not info.scores_pairs:
        state.refuse_model(f"it has {info.dimension} labels, and a score of two texts needs a model with one")
    prompt = instruction_of(info, body.instruction)
    form = _form(model, body, field_of, prompt=prompt, most_of_second=most_of_second, first_field=first_field)
    field = "model" if body.instruction is None else "instruction"
    return msgspec.structs.replace(form, prompt_field=field)


def _form(
    model: ModelInfo,
    body: Truncation,
    field_of: Callable[[int], str],
    most_of_second: int | None = None,
    prompt: str = "",
    adds_special: bool = True,
    first_field: str = "",
) -> TextForm:
    return TextForm(
        model=model,
        field_of=field_of,
        prompt=prompt,
        add_special_tokens=adds_special,
        most_tokens=body.most_tokens(model.max_model_len),
        most_of_second=most_of_second,
        first_field=first_field,
        side=body.truncation_side or "right",
    )


async def _rows(
    state: AppState,
    exchange: GenerationExchange,
    texts: Sequence[TextOrPair | list[int]],
    form: TextForm,
    priority: int,
) -> tuple[np.ndarray, PoolingUsage]:
    inputs = await tokenised(state, exchange, texts, form)
    rows = await pooled(state, exchange, inputs, form.field_of, priority)
    num_tokens = sum(len(each.token_ids) for each in inputs)
    return rows, PoolingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)


def _common(state: AppState, exchange: GenerationExchange, prefix: str) -> dict[str, Any]:
    identity = exchange.identity
    return {"id": identity.new_id(prefix), "created": identity.created, "model": state.model_name}
