"""Pooling for the endpoints of all shapes: bounds, tokens in turns with other clients, and the call to an engine.

A refusal names the field of the client's own body.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from manta.cluster.engine.pooling_request import PooledInput, PoolingRequest
from manta.cluster.engine.request import FinishStatus
from manta.cluster.errors import error_of, refuse
from manta.cluster.http.exchange.exchange import GenerationExchange
from manta.cluster.http.exchange.prompts import tokenising
from manta.cluster.http.exchange.state import AppState
from manta.cluster.text.pooled_texts import FieldOf, TextForm, tokenise
from manta.cluster.text.tokenizer import LONG_TEXT, TextOrPair

MANY_NUMBERS = 4096
"""Numbers above which an answer is written elsewhere than in the event loop, like one to a long body: short texts may
have long vectors.
"""


def check_texts(state: AppState, exchange: GenerationExchange, num_texts: int, priority: int, field: str) -> None:
    """Checks the priority, and the operator's limit on the texts of one request."""
    state.admission.check_priority(exchange.caller, priority)
    limit = state.config.max_prompts_per_request
    if num_texts > limit:
        remedy = "send several requests or raise max_prompts_per_request"
        refuse("over_limit", field, num_texts, limit, remedy, unit="texts")


async def tokenised(
    state: AppState, exchange: GenerationExchange, texts: Sequence[TextOrPair | list[int]], form: TextForm
) -> list[PooledInput]:
    """Returns the tokens of texts. Long ones, and those that a template writes, are tokenised in a thread, in pieces,
    so that others get their turn.
    """
    assert form.model.pooling is not None
    renders = form.model.pooling.messages is not None
    if not renders and sum(map(_size, texts)) < LONG_TEXT:
        return tokenise(state.tokenizer, texts, form)
    found: list[PooledInput] = []
    batch: list[TextOrPair | list[int]] = []
    size = 0
    for index, text in enumerate(texts, 1):
        batch.append(text)
        size += _size(text)
        if size >= LONG_TEXT or index == len(texts):
            piece = tokenise, state.tokenizer, batch, form, len(found)
            found += await (state.rendered(exchange, *piece) if renders else tokenising(*piece))
            batch, size = [], 0
    return found


def _size(text: TextOrPair | list[int]) -> int:
    return sum(map(len, text)) if isinstance(text, tuple) else len(text)


async def pooled(
    state: AppState, exchange: GenerationExchange, texts: list[PooledInput], field_of: FieldOf, priority: int = 0
) -> np.ndarray:
    """Returns float32 [num_texts, dimension] from an engine. Counts the tokens against the client's rate limits. Raises
    `ServingError`, which names the text if there is no answer for one.
    """
    num_tokens = sum(len(text.token_ids) for text in texts)
    meter = exchange.caller.admit(num_tokens, 0, exchange.reply.headers_always)
    if meter is not None:
        meter.end()
    sharer = exchange.caller.sharer
    request = PoolingRequest(
        request_id=f"{exchange.request_id}-{secrets.token_hex(4)}",
        texts=texts,
        priority=priority,
        deadline_s=exchange.remaining_s,
        client=sharer,
        weight=state.config.client_weights.get(sharer, 1.0),
    )
    exchange.hand_over()
    began = time.perf_counter()
    exchange.note_texts(len(texts), num_tokens)
    result = await state.engines.pool(request)
    if result.refusal is not None:
        if result.refusal.kind == "deadline":
            state.metrics.request_ended(FinishStatus.FINISHED_ABORTED)
        elif result.refusal.kind != "queue_full":  # which admitted nothing that could end
            state.metrics.request_ended(FinishStatus.FINISHED_INTERNAL_ERROR)
        field = "" if result.text is None else field_of(result.text)
        raise error_of(msgspec.structs.replace(result.refusal, field=field))
    state.metrics.request_ended(FinishStatus.FINISHED_STOPPED)
    state.metrics.e2e_latency.observe(time.perf_counter() - began)
    state.metrics.prompt_tokens.inc(num_tokens)
    state.metrics.pooled_texts.inc(len(texts))
    rows = result.rows()
    exchange.is_small = exchange.is_small and rows.size <= MANY_NUMBERS
    return rows
