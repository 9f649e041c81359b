"""The offline `LLM` over a tiny model, with room for a number of KV blocks that the test chooses."""

from __future__ import annotations

from typing import Any

from manta.cluster.llm import LLM
from manta.workers.checkpoints.model_folder import load_model_config
from tests.checkpoints import checkpoint

BLOCK_TOKENS = 16
"""Tokens of a KV block."""


def make_llm(num_blocks: int = 256, **options: Any) -> LLM:
    """Makes one of the tiny Llama in float32; `options` are fields of its configuration."""
    folder = checkpoint("llama")
    kv_cache_bytes = load_model_config(folder).kv_bytes_per_token("float32") * BLOCK_TOKENS * num_blocks
    return LLM(str(folder), dtype="float32", kv_cache_bytes=kv_cache_bytes, **options)
