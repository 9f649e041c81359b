"""The memory that a loaded model takes, from the headers of its files and without torch."""

from __future__ import annotations

import pathlib

from manta.cluster.config import EngineConfig
from manta.cluster.text_bytes import grammar_bytes, tokenizer_bytes
from manta.workers.checkpoints.memory import weight_bytes
from manta.workers.checkpoints.model_folder import load_model_config, read_json_object, resolve_model_folder
from manta.workers.checkpoints.pooling_folder import read_pooling
from manta.workers.checkpoints.stored_draft_head import draft_head
from manta.workers.models.dense import read_dtype


def engine_bytes(engine: EngineConfig) -> int:
    """Returns the bytes of the weights, of the draft model's and of the KV caches of all ranks of one engine, as `manta
    check` counts them, and the most that its constraints take. Where `dtype` is `auto`, weights count in the
    checkpoint's own.

    Raises `ModelError` if the files cannot be read, and `ValueError` if nothing says how large the KV cache is.
    """
    folder = resolve_model_folder(engine.model)
    if read_pooling(folder, engine.task) is not None:
        stored = read_dtype(read_json_object(folder, "config.json"))
        return weight_bytes(folder, _computed(engine, "float32" if stored == "float16" else stored))
    if engine.kv_cache_bytes is None:
        raise ValueError(f"the KV cache of {engine.model} has no size; set engine.kv_cache_bytes")
    model = load_model_config(folder)
    dtype = _computed(engine, model.dtype)
    weights = weight_bytes(folder, dtype, model, engine.weights) + draft_bytes(engine, dtype)
    return weights + engine.num_ranks * engine.kv_cache_bytes + grammar_bytes(engine, model.vocab_size)


def serving_bytes(engine: EngineConfig) -> int:
    """Returns the most that each process that serves a model takes for it: its tokenizer. Raises `ModelError` if the
    files cannot be read.
    """
    folder = resolve_model_folder(engine.model)
    if read_pooling(folder, engine.task) is not None:
        return tokenizer_bytes(read_json_object(folder, "config.json")["vocab_size"].whole(0, least=0))
    return tokenizer_bytes(load_model_config(folder).vocab_size)


def _computed(engine: EngineConfig, stored: str) -> str:
    return stored if engine.dtype == "auto" else engine.dtype


def draft_folder(engine: EngineConfig) -> pathlib.Path | None:
    """Returns the folder of the draft model; None if there is none."""
    if engine.speculative is None or engine.speculative.draft_model is None:
        return None
    return resolve_model_folder(engine.speculative.draft_model)


def draft_bytes(engine: EngineConfig, dtype: str) -> int:
    """Returns the bytes of the weights of the draft model, or of a draft head in a folder of its own; 0 if there is
    none.
    """
    folder = draft_folder(engine)
    if folder is None or engine.speculative is None:
        return 0
    if engine.speculative.uses_draft_head:
        config = draft_head(folder, load_model_config(resolve_model_folder(engine.model)), folder)
    else:
        config = load_model_config(folder)
    return weight_bytes(folder, dtype, config, engine.weights)
