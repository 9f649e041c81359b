"""Vectors for Ollama's clients: `POST /api/embed` and the older `POST /api/embeddings`."""

from __future__ import annotations

import time

import numpy as np

from manta.cluster.http.endpoints.embeddings import embedded
from manta.cluster.http.exchange.codec import encode
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.ollama import (
    OllamaEmbedding,
    OllamaEmbeddingRequest,
    OllamaEmbeddings,
    OllamaEmbedRequest,
)
from manta.cluster.protocol.pooling_api import EmbeddingRequest


async def embed(state: AppState, exchange: Exchange, body: OllamaEmbedRequest) -> OllamaEmbeddings | None:
    """Sends vectors of length 1, as Ollama does. Without a text it only confirms that the model is loaded."""
    state.admission.check_model(body.served_model)
    began = time.perf_counter_ns()
    if not body.input:
        await state.pooling_model("embed")
        return OllamaEmbeddings(model=body.model, embeddings=[], total_duration=0, prompt_eval_count=0)
    request = EmbeddingRequest(
        input=list(body.input) if isinstance(body.input, list) else body.input,
        dimensions=body.dimensions,
        normalize=True,
        truncate_prompt_tokens=None if body.truncate is False else -1,
    )
    vectors, usage = await embedded(state, exchange, request, "input")
    duration = time.perf_counter_ns() - began
    await exchange.reply.send_json(
        await state.apart(exchange, _whole, body.model, vectors, duration, usage.prompt_tokens)
    )
    return None


def _whole(model: str, vectors: np.ndarray, duration: int, num_tokens: int) -> bytes:
    return encode(
        OllamaEmbeddings(
            model=model,
            embeddings=[row.tolist() for row in vectors],
            total_duration=duration,
            prompt_eval_count=num_tokens,
        )
    )


async def embed_one(state: AppState, exchange: Exchange, body: OllamaEmbeddingRequest) -> OllamaEmbedding:
    state.admission.check_model(body.served_model)
    if not body.prompt:
        await state.pooling_model("embed")
        return OllamaEmbedding(embedding=[])
    request = EmbeddingRequest(input=body.prompt, truncate_prompt_tokens=-1)
    vectors, _ = await embedded(state, exchange, request, "prompt")
    return OllamaEmbedding(embedding=vectors[0].tolist())
