"""The architectures of GGUF files that are served: what llama.cpp calls a model's tensors, and how it stores them.

The names are those of https://github.com/ggml-org/llama.cpp, `gguf-py/gguf/constants.py`; what its converter does to
tensors is in `conversion/`. `gguf_config.py` reads their metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

EXPERT = "{expert}"
"""Stands for the number of an expert in the names of tensors that a GGUF file holds for all experts of a layer."""


class GgufArchitecture(NamedTuple):
    """The tensors of an architecture. Names are without `blk.N.` and `model.layers.N.`, and without their suffix unless
    the suffix changes.
    """

    model: str
    """The architecture in transformers."""
    parts: Mapping[str, str]
    """Maps llama.cpp's names of a layer's tensors to transformers'."""
    interleaves_heads: bool = False
    """Whether the two halves of each query and key head are interleaved."""
    adds_one: bool = False
    """Whether norms hold one more than in transformers."""
    wholes: Mapping[str, str] = {}
    """Names of tensors that belong to no layer, where they are not the usual ones."""


_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}


def _experts(prefix: str, router: str, gate: str, up: str, down: str) -> dict[str, str]:
    return {
        "ffn_gate_inp": f"{prefix}.{router}",
        "ffn_gate_exps": f"{prefix}.experts.{EXPERT}.{gate}",
        "ffn_up_exps": f"{prefix}.experts.{EXPERT}.{up}",
        "ffn_down_exps": f"{prefix}.experts.{EXPERT}.{down}",
    }


_EXPERTS = _experts("mlp", "gate", "gate_proj", "up_proj", "down_proj")
_SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_DENSE = _ATTENTION | _MLP
_MIXTRAL = _experts("block_sparse_moe", "gate", "w1", "w3", "w2")

_LFM_2 = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM_2_NORM = {"token_embd_norm": "model.embedding_norm"}

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", _DENSE | _MIXTRAL, interleaves_heads=True),  # Mistral's and Mixtral's
    "mistral": GgufArchitecture("LlamaForCausalLM", _DENSE, interleaves_heads=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", _DENSE),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", _DENSE | _HEAD_NORMS),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", _DENSE | _HEAD_NORMS | _EXPERTS),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", _DENSE | _NORMS_AROUND, adds_one=True),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", _DENSE | _NORMS_AROUND | _HEAD_NORMS, adds_one=True),
    "phi3": GgufArchitecture(
        "Phi3ForCausalLM",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
        }
        | _FUSED_MLP,
    ),
    "gpt-oss": GgufArchitecture(
        "GptOssForCausalLM",
        _ATTENTION
        | {"post_attention_norm": "post_attention_layernorm", "attn_sinks.weight": "self_attn.sinks"}
        | _experts("mlp", "router", "gate_proj", "up_proj", "down_proj"),
    ),
    "granite": GgufArchitecture("GraniteForCausalLM", _DENSE, interleaves_heads=True),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", _DENSE, interleaves_heads=True),
    "olmo2": GgufArchitecture(
        "Olmo2ForCausalLM",
        _DENSE
        | _HEAD_NORMS
        | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
    "glm4": GgufArchitecture(
        "Glm4ForCausalLM",
        _ATTENTION
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        }
        | _FUSED_MLP,
    ),
    "glm4moe": GgufArchitecture(
        "Glm4MoeForCausalLM",
        _DENSE | _HEAD_NORMS | _EXPERTS | _SHARED_EXPERT | {"post_attention_norm": "post_attention_layernorm"},
    ),
    "cohere2": GgufArchitecture("Cohere2ForCausalLM", _DENSE),
    "seed_oss": GgufArchitecture("SeedOssForCausalLM", _DENSE | {"post_attention_norm": "post_attention_layernorm"}),
    "lfm2": GgufArchitecture("Lfm2ForCausalLM", _LFM_2, wholes=_LFM_2_NORM),
    "lfm2moe": GgufArchitecture(
        "Lfm2MoeForCausalLM",
        _LFM_2 | _experts("feed_forward", "gate", "w1", "w3", "w2") | {"exp_probs_b.bias": "feed_forward.expert_bias"},
        wholes=_LFM_2_NORM,
    ),
}
"""The architectures by llama.cpp's name."""

CONVOLUTIONS = ("shortconv.conv",)
"""Tensors [channels, width] that torch keeps as [channels, 1, width]."""
_WHOLES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def name_of(architecture: GgufArchitecture, name: str) -> str:
    """Returns transformers' name of a tensor, perhaps with `EXPERT` in it. An unknown tensor keeps its name, so that it
    is reported as unused.
    """
    base, _, suffix = name.rpartition(".")
    wholes = {**_WHOLES, **architecture.wholes}
    if base in wholes:
        return f"{wholes[base]}.{suffix}"
    kind, _, rest = base.partition(".")
    layer, _, part = rest.partition(".")
    if kind != "blk":
        return name
    prefix = f"model.layers.{layer}"
    if (whole := architecture.parts.get(f"{part}.{suffix}")) is not None:
        return f"{prefix}.{whole}"
    return f"{prefix}.{architecture.parts[part]}.{suffix}" if part in architecture.parts else name
