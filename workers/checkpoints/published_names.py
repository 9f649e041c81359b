"""The names of tensors in published checkpoints of families that transformers names otherwise, and writes like this.

Plain data and regular expressions; imports no framework.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

Renames = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]
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
_INKLING_ENDS: Renames = (
    (r"^model\.llm\.unembed\.", "lm_head."),
    (r"^model\.llm\.embed_norm\.", "model.language_model.embed_tokens.embed_norm."),
    (r"^model\.llm\.embed\.", "model.language_model.embed_tokens."),
    (r"^model\.llm\.", "model.language_model."),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.mlp\.experts\.w2_weight$", ".mlp.experts.down_proj"),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.attn_norm\.", ".input_layernorm."),
)
"""Names that Inkling and Inkling 2 have in common. The gates of MLPs and what they let through keep their names: they
are one tensor, whose rows alternate.
"""
_INKLING: Renames = (
    *_INKLING_ENDS,
    (r"\.attn\.w([qkvr])_d[uv]\.", r".self_attn.\1_proj."),
    (r"\.attn\.wo_ud\.", ".self_attn.o_proj."),
    (r"\.attn\.([kv])_sconv\.", r".self_attn.\1_sconv.conv1d."),
    (r"\.attn\.", ".self_attn."),
    (r"\.(attn|mlp)_sconv\.weight$", r".\1_sconv.conv1d.weight"),
    (r"\.mlp\.w2_md\.", ".mlp.down_proj."),
    (r"\.shared_w2_weight$", ".down_proj"),
)
_MISTRAL_LARGE_4: Renames = (
    (r"^tok_embeddings\.", "model.language_model.embed_tokens."),
    (r"^lerope\.alpha$", "model.language_model.rotary_emb.alpha"),
    (r"^(layers|norm)\.", r"model.language_model.\1."),
    (r"^output\.", "lm_head."),
    (r"\.attention\.wq\.", ".attention.q_proj."),
    (r"\.attention\.wo\.", ".attention.o_proj."),
    (r"\.attention\.wkv_a_with_mqa\.", ".attention.kv_a_proj_with_mqa."),
    (r"\.attention\.wkv_b\.", ".attention.kv_b_proj."),
    (r"\.attention\.kv_a_norm\.", ".attention.kv_a_layernorm."),
    (r"\.ssmax_scaling\.s$", ".softmax_scaling.scale"),
    (r"\.ssmax_scaling\.b$", ".softmax_scaling.bias"),
    (r"\.attention\.", ".self_attn."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.(gate|experts|shared_experts)\.", r".mlp.\1."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
)
_INKLING_2: Renames = (
    *_INKLING_ENDS,
    (r"\.controllers\.attn\.", ".q_message_gate."),
    (r"\.controllers\.(k|v|mlp)\.", r".\1_message_gate."),
    (r"_gate\.down_weight$", "_gate.down_proj.weight"),
    (r"_gate\.gain_weight$", "_gate.message_gate_proj.weight"),
    (r"_gate\.forget_weight$", "_gate.forget_gate_proj.weight"),
    (r"\.attn\.w([qkv])_d[uv]\.", r".self_attn.\1_proj.linear."),
    (r"\.attn\.wo_ud\.", ".self_attn.o_proj.linear."),
    (r"\.attn\.wr_du\.", ".self_attn.relative_position_bias.linear."),
    (r"\.attn\.rel_logits_proj\.", ".self_attn.relative_position_bias."),
    (r"\.attn\.rel_l2_clip\.", ".self_attn.relative_position_bias.norm."),
    (r"\.attn\.q_l2_clip\.", ".self_attn.q_proj.norm."),
    (r"\.attn\.gate_attn\.", ".self_attn.o_proj.gate_proj."),
    (r"\.attn\.attn_sink_proj\.", ".self_attn.sink_proj."),
    (r"\.attn\.([kv])_sconv\.", r".self_attn.\1_proj.sconv."),
    (r"\.attn_sconv\.", ".post_attention_convolution."),
    (r"\.mlp_sconv\.", ".post_mlp_convolution."),
    (r"(convolution|sconv)\.weight$", r"\1.conv1d.weight"),
    (r"sconv\.static_w$", "sconv.static_weight"),
    (r"sconv\.weight_proj$", "sconv.weight_proj.weight"),
    (r"\.([qkv])_input_norm\.", r".\1_input_layernorm."),
    (r"attn_res\.attn_queries\.(\d+)$", lambda match: f"layers.{int(match[1]) + 1}.attention_input.query"),
    (r"attn_res\.mlp_queries\.(\d+)$", r"layers.\1.mlp_input.query"),
    (r"attn_res\.output_query$", "final_input.query"),
)
_GLM5_NEXT: Renames = (
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.index_kpool_compress_gate$", ".index_kpool_compress_gate.weight"),
)
_FAMILIES: dict[str, Renames] = {
    r"^model\.llm\..*\.attn\.q_l2_clip\.": _INKLING_2,
    r"^lerope\.alpha$": _MISTRAL_LARGE_4,
    r"\.learnable_sink_param$": _HY_V4,
    r"\.attn_sink$": _DEEPSEEK_V4,
    r"^model\.llm\..*\.attn\.q_norm\.": _INKLING,
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
