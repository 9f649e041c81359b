"""Draft heads in GGUF files: they draft what the heads of the converted checkpoints do."""

from __future__ import annotations

import functools
import pathlib
import tempfile
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from manta.cluster.llm import LLM
from manta.workers.checkpoints.gguf_file import gguf_folder
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.checkpoints.stored_draft_head import about_draft_heads
from tests.converted_gguf import convert
from tests.draft_heads import folder_with_head
from tests.specdecode.test_draft_heads import MTP, drafts_of, quick, run
from tests.workers.recurrent_cases import ROPE

_root = tempfile.TemporaryDirectory(prefix="manta-gguf-heads-")
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_value_heads": 6}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5": DELTA,
    "qwen3_5_moe": DELTA,
    "qwen3_next": DELTA | {"mlp_only_layers": []},
    "glm4_moe": {"n_group": 1, "topk_group": 1},
    "deepseek_v3": {"rope_parameters": ROPE, "attention_bias": False},
}
"""Changes of the configurations, which GGUF files can express."""


@functools.cache
def converted(kind: str, linears: str = "F32") -> pathlib.Path:
    def kind_of(name: str) -> str:
        return linears if name.endswith((".eh_proj.weight", ".ffn_down.weight", ".attn_output.weight")) else "F32"

    return convert(folder_with_head(kind, **KINDS[kind]), pathlib.Path(_root.name) / f"{kind}-{linears}.gguf", kind_of)


def tokens_and_drafts(path: pathlib.Path) -> tuple[list[list[int]], list[tuple[list[int], list[int]]]]:
    llm = LLM(str(path), dtype="float32", num_threads=1, kv_cache_bytes=1 << 22, speculative=MTP)
    seen = drafts_of(llm)
    return run(llm), seen


@pytest.mark.parametrize("kind", quick(KINDS, "qwen3_5", "glm4_moe"))
def test_tokens_and_drafts_are_those_of_the_converted_checkpoint(kind: str) -> None:
    tokens, drafts = tokens_and_drafts(converted(kind))
    assert (tokens, drafts) == tokens_and_drafts(folder_with_head(kind, **KINDS[kind]))
    assert len(drafts) > 50


@pytest.mark.prove
@pytest.mark.parametrize("linears", ["Q8_0", "Q4_0"])
def test_heads_are_rounded_like_the_rest_of_a_file(linears: str) -> None:
    path = converted("glm4_moe", linears)
    tokens, drafts = tokens_and_drafts(path)
    assert tokens == run(LLM(str(path), dtype="float32", num_threads=1, kv_cache_bytes=1 << 22))
    assert len(drafts) > 50


def test_copies_of_embedding_and_head_are_left_out(tmp_path: pathlib.Path) -> None:
    """DeepSeek's published heads have them."""
    kind = "glm4_moe"
    folder = folder_with_head(kind, **KINDS[kind])
    more = tmp_path / "more"
    more.mkdir()
    for path in folder.iterdir():
        (more / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    copies = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
    tensors |= {f"model.layers.4.{name}.weight": tensors[stored].clone() for name, stored in copies.items()}
    save_file(tensors, more / "model.safetensors", {"format": "pt"})
    path = convert(more, tmp_path / "more.gguf")
    own = gguf_folder(path)
    assert "one, which drafts" in str(about_draft_heads(own, load_model_config(own)))
    LLM(str(path), kv_cache_bytes=1 << 20, speculative=MTP)
