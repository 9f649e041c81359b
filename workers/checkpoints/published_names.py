"""The names of tensors in published checkpoints of families that transformers names otherwise, and writes like this.

Plain data and regular expressions; imports no framework.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

Renames = tuple[tuple[str, str], ...]
"""Patterns and what stands for each instead, applied one after the other."""

_HY_V4: Renames = (
    (r"\.hc_pre\.hc_", ".hc_"),
    (r"\.learnable_sink_param$", ".sinks"),
    (r"\.linear_gate\.", ".gate_proj."),
    (r"\.hc_attn_layer\.hc_", ".attn_hc."),
    (r"\.hc_mlp_layer\.hc_", ".ffn_hc."),
    (r"\.hc_head_(fn|base|scale)$", r".hc_\1"),
)
_DEEPSEEK_V4: Renames = (
    (r"\.scale$", ".weight_scale_inv"),
    (r"^(?!model\.|lm_head\.|mtp\.)", "model."),
    (r"^model\.head\.", "lm_head."),
    (r"^model\.embed\.", "model.embed_tokens."),
    (r"^model\.hc_head_(fn|base|scale)$", r"model.hc_head.hc_\1"),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
    (r"(\.self_attn|\.compressor|\.indexer)\.norm\.", r"\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.w(q|o)_(a|b)\.", r".\1_\2_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
)
_GLM5_NEXT: Renames = (
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.index_kpool_compress_gate$", ".index_kpool_compress_gate.weight"),
)
_FAMILIES: dict[str, Renames] = {
    r"\.learnable_sink_param$": _HY_V4,
    r"\.attn_sink$": _DEEPSEEK_V4,
    r"\.index_kpool_compress_gate$": _GLM5_NEXT,
}
"""The renames of each family by a pattern that only names of its published checkpoints fit."""


def renames_of(names: Iterable[str]) -> Renames:
    """Returns the renames that a checkpoint with these tensors needs; none if it has the names of transformers."""
    for name in names:
        for pattern, renames in _FAMILIES.items():
            if re.search(pattern, name):
                return renames
    return ()


def renamed(name: str, renames: Renames) -> str:
    """Returns transformers' name of a tensor."""
    for pattern, instead in renames:
        name = re.sub(pattern, instead, name)
    return name
