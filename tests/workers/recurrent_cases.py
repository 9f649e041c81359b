"""Tiny configurations of families with recurrent mixers, in which each feature matters, for `test_layer_kinds.py`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROPE = {"rope_type": "default", "rope_theta": 10000.0}


class Case(NamedTuple):
    config: str
    """transformers' class of the configuration."""
    options: dict[str, Any] = {}
    without: dict[str, dict[str, Any]] = {}
    """The keys of `config.json` that leave out each feature."""


DELTA: dict[str, Any] = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.25},
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
}
HYBRID: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"] * 2}
STATE_SPACE: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
}
INKLING_2: dict[str, Any] = {
    "vocab_size": 340,
    "unpadded_vocab_size": 320,
    "intermediate_size": 32,
    "head_dim": 16,
    "swa_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    "sliding_window_size": 24,
    "d_rel": 6,
    "rel_extent": 40,
    "log_scaling_n_floor": 20,
    "log_scaling_alpha": 0.5,
    "qk_l2_clip_threshold": 5.0,
    "rel_l2_clip_threshold": 2.0,
    "n_layers_per_attn_res_block": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "route_scale": 2.5,
    "mlp_gate_softcap": 0.5,
    "mlp_up_softcap": 0.7,
    "final_logit_softcapping": 5.0,
}
WITHOUT_INKLING_2: dict[str, dict[str, Any]] = {
    "choice of two experts": {"num_experts_per_tok": 1},
    "scaled shares": {"route_scale": 1.0},
    "growth of queries": {"log_scaling_n_floor": 4096},
    "strength of the growth": {"log_scaling_alpha": 0.1},
    "bounded queries and keys": {"qk_l2_clip_threshold": 1000.0},
    "bounded numbers for distances": {"rel_l2_clip_threshold": 1000.0},
    "blocks of two layers": {"n_layers_per_attn_res_block": 4},
    "bounded gates": {"mlp_gate_softcap": 1000.0},
    "bounds of what gates let through": {"mlp_up_softcap": 1000.0},
}
INKLING_TENSORS = (
    ("inkling", "k_sconv"),
    ("inkling", "v_sconv"),
    ("inkling", "attn_sconv"),
    ("inkling", "mlp_sconv"),
    ("inkling", "rel_logits_proj"),
    ("inkling", "embed_norm"),
    ("inkling", "mlp.global_scale"),
    ("inkling", "gate.global_scale"),
    ("inkling", "shared_experts.down_proj"),
    ("inkling", "e_score_correction_bias"),
    ("inkling2", "attn_sink_proj"),
    ("inkling2", "gate_attn"),
    ("inkling2", "q_l2_clip"),
    ("inkling2", "rel_l2_clip"),
    ("inkling2", "k_sconv.static_w"),
    ("inkling2", "v_sconv.weight_proj"),
    ("inkling2", "attn_res.attn_queries"),
    ("inkling2", "attn_res.mlp_queries"),
    ("inkling2", "attn_res.output_query"),
    ("inkling2", "q_input_norm"),
    ("inkling2_loop", "controllers.k"),
    ("inkling2_loop", "controllers.mlp"),
    ("inkling2_loop", "cross_pass_kv_queries"),
)
"""Parts of the names of tensors of Inkling, each of which matters."""
FALCON_H1: dict[str, Any] = STATE_SPACE | {
    "mamba_d_ssm": 128,
    "key_multiplier": 0.5,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9],
    "mlp_multipliers": [0.6, 1.4],
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.5,
}
SHARED_EXPERT: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
RECURRENT_CASES: dict[str, Case] = {
    "granite_hybrid": Case(
        "GraniteMoeHybridConfig",
        HYBRID
        | STATE_SPACE
        | {
            "mamba_n_groups": 1,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 8.0,
        },
        {
            "choice of two experts": {"num_experts_per_tok": 1},
            "residual multiplier": {"residual_multiplier": 1.0},
            "attention multiplier": {"attention_multiplier": 0.25},
            "attention without positions": {"position_embedding_type": "rope"},
        },
    ),
    "granite_hybrid without experts": Case(
        "GraniteMoeHybridConfig",
        HYBRID | STATE_SPACE | {"num_local_experts": 0, "shared_intermediate_size": 96, "attention_multiplier": 0.4},
    ),
    "bamba": Case("BambaConfig", STATE_SPACE | {"attn_layer_indices": [1, 3]}),
    "falcon_h1": Case(
        "FalconH1Config",
        FALCON_H1,
        {
            name: {name: value}
            for name, value in {
                "key_multiplier": 1.0,
                "attention_in_multiplier": 1.0,
                "attention_out_multiplier": 1.0,
                "ssm_in_multiplier": 1.0,
                "ssm_out_multiplier": 1.0,
                "ssm_multipliers": [1.0] * 5,
                "mlp_multipliers": [1.0, 1.0],
            }.items()
        },
    ),
    "falcon_h1 with norms": Case(
        "FalconH1Config",
        STATE_SPACE | {"mamba_d_ssm": 128, "mamba_rms_norm": True},
        {"norms before gates": {"mamba_norm_before_gate": False}},
    ),
    "nemotron_h": Case(
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 12,
            "n_groups": 2,
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "routed_scaling_factor": 2.5,
        },
        {"choice of two experts": {"num_experts_per_tok": 1}, "scaled shares": {"routed_scaling_factor": 1.0}},
    ),
    "jamba": Case(
        "JambaConfig",
        {
            "num_experts": 4,
            "mamba_d_state": 12,
            "mamba_dt_rank": 6,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 3,
            "expert_layer_offset": 1,
        },
        {"choice of two experts": {"num_experts_per_tok": 1}},
    ),
    "kimi_linear": Case(
        "KimiLinearConfig",
        HYBRID
        | LATENT
        | {
            "q_lora_rank": None,
            "linear_num_heads": 4,
            "linear_head_dim": 12,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
        },
        {
            "choice of three experts": {"num_experts_per_token": 2},
            "groups of experts": {"num_expert_group": 1, "topk_group": 1},
            "shares that sum to one": {"moe_renormalize": False},
            "scaled shares": {"routed_scaling_factor": 1.0},
        },
    ),
    "bailing_hybrid": Case(
        "BailingHybridConfig",
        HYBRID
        | LATENT
        | {
            "q_lora_rank": None,
            "head_dim": 12,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "kda_lower_bound": -3.0,
        },
        {
            "choice of three experts": {"num_experts_per_token": 2},
            "groups of experts": {"num_expert_group": 1, "topk_group": 1},
            "shares that sum to one": {"moe_renormalize": False},
            "scaled shares": {"routed_scaling_factor": 1.0},
            "bounded decays": {"kda_safe_gate": False},
            "the bound of decays": {"kda_lower_bound": -0.5},
        },
    ),
    "bailing_hybrid without a bound": Case(
        "BailingHybridConfig",
        HYBRID
        | LATENT
        | {
            "head_dim": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "kda_safe_gate": False,
            "tie_word_embeddings": True,
        },
    ),
    "minimax": Case(
        "MiniMaxConfig",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "full_attn_alpha_factor": 1.7,
            "full_attn_beta_factor": 0.8,
            "linear_attn_alpha_factor": 1.5,
            "linear_attn_beta_factor": 1.2,
            "mlp_alpha_factor": 1.4,
            "mlp_beta_factor": 0.7,
            "rope_parameters": ROPE,
        },
        {"choice of two experts": {"num_experts_per_tok": 1}}
        | {
            f"{part}'s {name}": {f"{part}_{name}_factor": 1.0}
            for part in ("full_attn", "linear_attn", "mlp")
            for name in ("alpha", "beta")
        },
    ),
    "mamba2": Case("Mamba2Config", {"num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2}),
    "mamba": Case("MambaConfig", {"state_size": 12, "tie_word_embeddings": False}),
    "falcon_mamba": Case(
        "FalconMambaConfig", {"state_size": 12, "tie_word_embeddings": False}, {"norms": {"mixer_rms_eps": 0.9}}
    ),
    "lfm2_moe": Case(
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "conv_L_cache": 4,
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "rope_parameters": ROPE,
        },
        {"choice of two experts": {"num_experts_per_tok": 1}, "shares that sum to one": {"norm_topk_prob": False}},
    ),
    "lfm3": Case(
        "Lfm3Config",
        {
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
            "conv_L_cache": 5,
            "head_dim": 32,
            "sliding_window": 24,
            "rope_parameters": {
                "full_attention": ROPE | {"rope_type": "proportional", "partial_rotary_factor": 0.5},
                "sliding_attention": ROPE | {"rope_theta": 100.0},
            },
        },
        {
            "local rope": {
                "rope_parameters": {
                    "full_attention": ROPE | {"rope_type": "proportional", "partial_rotary_factor": 0.5},
                    "sliding_attention": ROPE,
                }
            },
            "proportional rope": {
                "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE | {"rope_theta": 100.0}}
            },
            "window": {"sliding_window": 4096},
        },
    ),
    "lfm3 without gates and norms": Case(
        "Lfm3Config",
        {
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
            "head_dim": 16,
            "sliding_window": 24,
            "use_attention_gate": False,
            "use_sandwich_norm": False,
            "attention_bias": True,
            "conv_bias": True,
        },
    ),
    "lara_mini": Case(
        "LaraMiniConfig",
        DELTA
        | SHARED_EXPERT
        | {
            "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
            "sliding_window": 24,
            "rope_parameters": ROPE,
        },
        {
            "choice of two experts": {"num_experts_per_tok": 1},
            "shares that sum to one": {"norm_topk_prob": False},
            "layers without positions": {
                "layer_types": ["linear_attention", "sliding_attention"] * 2,
                "sliding_window": 4096,
            },
            "window": {"sliding_window": 4096},
        },
    ),
    "recurrent_gemma": Case(
        "RecurrentGemmaConfig",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "lru_width": 96,
            "block_types": ["recurrent", "attention"],
            "attention_window_size": 24,
            "logits_soft_cap": 5.0,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
        {
            "window": {"attention_window_size": 4096},
            "partial rotation": {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
        },
    ),
    "qwen3_next": Case(
        "Qwen3NextConfig",
        DELTA | SHARED_EXPERT | {"mlp_only_layers": [1]},
        {"choice of two experts": {"num_experts_per_tok": 1}, "shares that sum to one": {"norm_topk_prob": False}},
    ),
    "qwen3_5_moe": Case(
        "Qwen3_5MoeTextConfig", DELTA | SHARED_EXPERT, {"choice of two experts": {"num_experts_per_tok": 1}}
    ),
    "qwen4_exp": Case(
        "Qwen4ExpTextConfig",
        DELTA
        | SHARED_EXPERT
        | {
            "hc_count": 3,
            "hc_lowrank": 24,
            "indexer_n_heads": 16,  # so many that hardly any score is zero
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 12,
            "indexer_compress_ratio": 4,
            "ple_layer_ids": [1, 3],
            "ple_embed_dim": 48,
            "ngram_size": 3,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 50,
            "make_ngram_vocab_size_divisible_by": 8,
            "split_ngram_parts": 3,
            "output_gate_type": "sigmoid",
        },
        {
            "choice of two experts": {"num_experts_per_tok": 1},
            "shares that sum to one": {"norm_topk_prob": False},
            "choice of blocks": {"indexer_budget": 512},
            "number of blocks": {"indexer_budget": 24},
            "length of blocks": {"indexer_compress_ratio": 3},
            "hashes": {"seed": 1235},
            "end of a text": {"eos_token_id": 7},
            "sigmoids of gates": {"output_gate_type": "silu"},
            "partial rotation": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
        },
    ),
    "olmo_hybrid": Case(
        "OlmoHybridConfig",
        HYBRID
        | {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 6,  # transformers writes the three convolutions with equal sizes
            "rope_parameters": ROPE,
        },
        {
            "negative eigenvalues": {"linear_allow_neg_eigval": False},
            "positions": {"rope_parameters": None},
        },
    ),
    "zamba": Case(
        "ZambaConfig",
        {
            "num_key_value_heads": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "n_mamba_heads": 2,
            "mamba_d_state": 12,
            "mamba_dt_rank": 6,
        },
    ),
    "zamba2": Case(
        "Zamba2Config",
        {
            "num_key_value_heads": 4,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
            "num_mem_blocks": 2,
            "n_mamba_heads": 8,
            "mamba_d_state": 12,
            "mamba_ngroups": 2,
            "adapter_rank": 6,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "rope_parameters": ROPE,
        },
        {"positions": {"use_mem_rope": False}},
    ),
    "zaya": Case(
        "ZayaConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "router_hidden_size": 24,
            "cca_time0": 2,
            "cca_time1": 3,
            "head_dim": 16,
            "layer_types": ["hybrid", "hybrid_sliding"] * 2,
            "sliding_window": 24,
            "rope_parameters": {
                "hybrid": ROPE | {"partial_rotary_factor": 0.5},
                "hybrid_sliding": ROPE | {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
            },
        },
        {
            "window": {"sliding_window": 4096},
            "local rope": {
                "rope_parameters": {
                    kind: ROPE | {"partial_rotary_factor": 0.5} for kind in ("hybrid", "hybrid_sliding")
                }
            },
            "partial rotation": {
                "rope_parameters": {"hybrid": ROPE, "hybrid_sliding": ROPE | {"rope_theta": 100.0}},
            },
        },
    ),
    "inkling": Case(
        "InklingTextConfig",
        {
            "vocab_size": 340,
            "unpadded_vocab_size": 320,
            "head_dim": 16,
            "swa_head_dim": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "sliding_window_size": 24,
            "d_rel": 6,
            "rel_extent": 40,
            "log_scaling_n_floor": 20,
            "log_scaling_alpha": 0.5,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "route_scale": 2.5,
            "logits_mup_width_multiplier": 2.0,
        },
        {
            "choice of two experts": {"num_experts_per_tok": 1},
            "scaled shares": {"route_scale": 1.0},
            "growth of queries": {"log_scaling_n_floor": None},
            "strength of the growth": {"log_scaling_alpha": 0.1},
        },
    ),
    "inkling2": Case("Inkling2TextConfig", INKLING_2, WITHOUT_INKLING_2),
    "inkling2_loop": Case(
        "Inkling2LoopTextConfig",
        INKLING_2
        | {
            "num_hidden_layers": 6,
            "layer_types": ["hybrid_sliding", "hybrid"] * 3,
            "loop_layer_index_start": 2,
            "loop_layer_index_end": 4,
            "loop_num_passes": 3,
            "loop_gate_rank": 12,
        },
        {"third pass": {"loop_num_passes": 2}, "longer loop": {"loop_num_passes": 4}},
    ),
    "rwkv": Case("RwkvConfig", {"rescale_every": 1}),
    "xlstm": Case("xLSTMConfig", {"num_heads": 4}, {"capped gates": {"gate_soft_cap": 0.3}}),
    "qwen3_5": Case(
        "Qwen3_5TextConfig",
        DELTA,
        {"partial rotation": {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}},
    ),
}


_ARCHITECTURES = {"glm5_next_text": "Glm5NextTextModel"} | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def values_of_cases(cases: Iterable[Case], sizes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the `config.json` of each family, by its architecture. `sizes` are those of tiny models."""
    found: dict[str, dict[str, Any]] = {}
    for case in cases:
        config = getattr(transformers, case.config)(**sizes | case.options, dtype="float32")
        architecture = _ARCHITECTURES[config.model_type]
        found.setdefault(architecture, json.loads(config.to_json_string()) | {"architectures": [architecture]})
    return found
