"""Tiny models with latent attention, chunks, heads that differ by layer, and experts, for `test_layer_kinds.py`."""

from __future__ import annotations

from typing import Any

from tests.workers.recurrent_cases import LATENT, ROPE, Case

YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
NO_WINDOW = {"window": {"sliding_window": 4096}}
YARN_PAIR = YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
OTHER_SCALE = {"scaled products": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.0}}}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "tie_word_embeddings": False,
}
ATTENTION_CASES: dict[str, Case] = {
    "deepseek_v2": Case(
        "DeepseekV2Config",
        LATENT
        | EXPERTS
        | {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
            "rope_parameters": YARN_PAIR,
        },
        {
            "groups of experts": {"topk_method": "greedy"},
            "scaled shares": {"routed_scaling_factor": 1.0},
            "choice of three experts": {"num_experts_per_tok": 2},
        }
        | OTHER_SCALE,
    ),
    "deepseek_v2 without a query rank": Case("DeepseekV2Config", LATENT | EXPERTS | {"q_lora_rank": None}),
    "deepseek_v3": Case(
        "DeepseekV3Config",
        LATENT | EXPERTS | {"n_group": 4, "topk_group": 2, "rope_parameters": YARN_PAIR, "attention_bias": True},
        {
            "groups of experts": {"n_group": 1, "topk_group": 1},
            "shares that sum to one": {"norm_topk_prob": False},
            "interleaved rope": {"rope_interleave": False},
        }
        | OTHER_SCALE,
    ),
    "glm4_moe_lite": Case(
        "Glm4MoeLiteConfig",
        LATENT | EXPERTS | {"mlp_layer_types": ["dense", "sparse"] * 2, "routed_scaling_factor": 3.0},
        {"scaled shares": {"routed_scaling_factor": 1.0}},
    ),
    "axk1": Case(
        "AXK1Config",
        LATENT | EXPERTS | {"n_group": 4, "topk_group": 2, "rope_parameters": YARN_PAIR, "attention_bias": True},
        {"groups of experts": {"n_group": 1, "topk_group": 1}, "shares that sum to one": {"norm_topk_prob": False}}
        | OTHER_SCALE,
    ),
    "sarvam_mla": Case(
        "SarvamMLAConfig",
        LATENT | EXPERTS | {"q_lora_rank": None, "rope_parameters": YARN_PAIR, "routed_scaling_factor": 3.0},
        {"scaled shares": {"routed_scaling_factor": 1.0}} | OTHER_SCALE,
    ),
    "mistral4": Case(
        "Mistral4Config",
        LATENT
        | EXPERTS
        | {
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": YARN_PAIR
            | {"llama_4_scaling_beta": 0.6, "partial_rotary_factor": 0.4, "original_max_position_embeddings": 32},
        },
        {"groups of experts": {"n_group": 1, "topk_group": 1}, "shares that sum to one": {"norm_topk_prob": False}},
    ),
    "glm4_moe": Case(
        "Glm4MoeConfig",
        EXPERTS | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True, "n_group": 4, "topk_group": 2},
        {
            "groups of experts": {"n_group": 1, "topk_group": 1},
            "partial rotation": {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
        },
    ),
    "mimo_v2": Case(
        "MiMoV2FlashConfig",
        EXPERTS
        | {
            "n_shared_experts": None,
            "head_dim": 32,
            "v_head_dim": 20,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "rope_parameters": {
                "full_attention": ROPE | {"partial_rotary_factor": 0.5},
                "sliding_attention": ROPE | {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
            },
        },
        {
            "scaled values": {"attention_value_scale": 1.0},
            "local rope": {"rope_parameters": {"full_attention": ROPE | {"partial_rotary_factor": 0.5}}},
            "choice of three experts": {"num_experts_per_tok": 2},
        }
        | NO_WINDOW,
    ),
    "mixtral": Case(
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
        {"choice of two experts": {"num_experts_per_tok": 1}} | NO_WINDOW,
    ),
    "llama4": Case(
        "Llama4TextConfig",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 80,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1, 1],
            "attention_chunk_size": 32,
            "floor_scale": 16,
            "attn_scale": 0.5,
        },
        {
            "chunks": {"attention_chunk_size": 512},
            "layers without positions": {"no_rope_layers": [1, 1, 1, 1]},
            "norms of heads": {"use_qk_norm": False},
            "growing queries": {"attn_temperature_tuning": False},
            "choice of two experts": {"num_experts_per_tok": 1},
        },
    ),
    "gemma4": Case(
        "Gemma4TextConfig",
        GEMMA4
        | {
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 320,
        },
        NO_WINDOW,
    ),
    "gemma4, keys as values": Case(
        "Gemma4TextConfig",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4, experts": Case(
        "Gemma4TextConfig",
        GEMMA4
        | {
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        {"choice of two experts": {"top_k_experts": 1}} | NO_WINDOW,
    ),
    "gemma3n": Case(
        "Gemma3nTextConfig",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 300,
            "activation_sparsity_pattern": [0.6, 0.0, 0.4, 0.0],
            "altup_num_inputs": 3,
            "laurel_rank": 6,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE | {"rope_theta": 100.0}},
        },
        {
            "sparse gates": {"activation_sparsity_pattern": [0.0] * 4},
            "local rope": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
        }
        | NO_WINDOW,
    ),
    "minicpm3": Case(
        "MiniCPM3Config",
        LATENT | {"scale_depth": 0.5, "scale_emb": 9.0, "dim_model_base": 256, "tie_word_embeddings": False},
        {"residual multiplier": {"scale_depth": 2.0}, "embedding multiplier": {"scale_emb": 1}},
    ),
    # transformers zeroes the embedding of this family's padding when it loads it.
    "youtu": Case("YoutuConfig", LATENT | {"tie_word_embeddings": False, "pad_token_id": None}),
}
