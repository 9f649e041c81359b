"""Tiny models whose attention reads the tokens that an indexer chooses, and others that GPUs refuse, for
`test_layer_kinds.py`.
"""

from __future__ import annotations

from typing import Any

from tests.workers.attention_cases import EXPERTS, OTHER_SCALE, YARN, YARN_PAIR
from tests.workers.recurrent_cases import LATENT, ROPE, Case

INDEXER: dict[str, Any] = {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 16}
"""So many heads that hardly any score is zero: transformers leaves to torch which of equal scores counts more."""
CHOICE = {"choice of tokens": {"index_topk": 512}, "number of tokens": {"index_topk": 24}}
HALF = {"partial_rotary_factor": 0.5}
MAIN_ROPE: dict[str, Any] = {"main": ROPE | HALF}
COMPRESS_ROPE: dict[str, Any] = {"compress": YARN | HALF | {"rope_theta": 500.0, "attention_factor": 1.0}}
SPARSE_CASES: dict[str, Case] = {
    "deepseek_v32": Case(
        "DeepseekV32Config",
        LATENT
        | EXPERTS
        | INDEXER
        | {"n_group": 4, "topk_group": 2, "rope_parameters": YARN_PAIR, "attention_bias": True},
        CHOICE | {"groups of experts": {"n_group": 1, "topk_group": 1}} | OTHER_SCALE,
    ),
    "glm_moe_dsa": Case(
        "GlmMoeDsaConfig",
        LATENT | EXPERTS | INDEXER | {"indexer_types": ["full", "shared", "full", "shared"]},
        CHOICE,
    ),
    "axk2": Case(
        "AXK2Config",
        LATENT | EXPERTS | INDEXER | {"n_group": 4, "topk_group": 2, "gated_norm_rank": 6, "attention_bias": True},
        CHOICE | {"groups of experts": {"n_group": 1, "topk_group": 1}},
    ),
    "dots3_note": Case(
        "Dots3NoteTextConfig",
        LATENT
        | EXPERTS
        | INDEXER
        | {
            "head_dim": 20,
            "layer_types": ["sliding_attention", "indexed_attention"] * 2,
            "sliding_window": 24,
            "n_group": 4,
            "topk_group": 2,
            "shared_experts_intermediate_size": 48,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 2,
            "swa_q_lora_rank": 20,
            "swa_kv_lora_rank": 52,
            "swa_head_dim": 24,
            "swa_qk_nope_head_dim": 12,
            "swa_v_head_dim": 16,
        },
        CHOICE
        | {
            "groups of experts": {"n_group": 1, "topk_group": 1},
            "window": {"sliding_window": 4096},
            "rope of layers with windows": {"rope_parameters": ROPE},
        },
    ),
    "hy_v4": Case(
        "HYV4Config",
        LATENT
        | EXPERTS
        | INDEXER
        | {
            "indexer_types": ["full", "shared", "full", "shared"],
            "rope_parameters": YARN_PAIR,
            "hc_mult": 3,
            "hc_magnitude": 1.5,
            "swiglu_limit": 0.5,
        },
        CHOICE
        | OTHER_SCALE
        | {
            "magnitude of writes": {"hc_magnitude": 2.0},
            "bounds of gates": {"swiglu_limit": 10.0},
            "scaled shares": {"routed_scaling_factor": 1.0},
        },
    ),
    "deepseek_v4": Case(
        "DeepseekV4Config",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 32,
            "sliding_window": 12,
            "layer_types": [f"{kind}_attention" for kind in ("compressed_sparse", "heavily_compressed", "sliding")]
            + ["compressed_sparse_attention"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe"],
            "index_topk": 6,
            "index_n_heads": 16,
            "index_head_dim": 16,
            "o_groups": 2,
            "o_lora_rank": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
            "swiglu_limit": 0.5,
            "rope_parameters": MAIN_ROPE | COMPRESS_ROPE,
        },
        {
            "choice of entries": {"index_topk": 512},
            "number of entries": {"index_topk": 9},
            "window": {"sliding_window": 11},
            "streams that are mixed evenly": {"hc_sinkhorn_iters": 1},
            "bounds of gates": {"swiglu_limit": 10.0},
            "scaled shares": {"routed_scaling_factor": 1.0},
            "roots of softplus": {"scoring_func": "sigmoid"},
            "scaled rope": {"rope_parameters": MAIN_ROPE | {"compress": MAIN_ROPE["main"]}},
        },
    ),
    "glm5_next": Case(
        "Glm5NextTextConfig",
        LATENT
        | EXPERTS
        | INDEXER
        | {
            "qk_rope_head_dim": 0,
            "kv_lora_rank": 32,
            "layer_types": [f"{kind}_attention" for kind in ("linear", "indexed", "indexed", "linear")],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "indexer_types": ["full", "full", "shared", "full"],
            "index_kpool": 4,
            "linear_num_heads": 4,
            "linear_head_dim": 12,
            "linear_lower_bound": -3.0,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
            "swiglu_limit": 0.5,
        },
        {
            "choice of pools": {"index_topk": 512},
            "number of pools": {"index_topk": 24},
            "bounded decays": {"linear_lower_bound": None},
            "the bound of decays": {"linear_lower_bound": -0.5},
            "streams that are mixed evenly": {"hc_sinkhorn_iters": 1},
            "bounds of gates": {"swiglu_limit": 10.0},
            "scaled shares": {"routed_scaling_factor": 1.0},
        },
    ),
    "longcat_flash": Case(
        "LongcatFlashConfig",
        LATENT
        | {
            "head_dim": 8,
            "n_routed_experts": 6,
            "zero_expert_num": 3,
            "moe_topk": 3,
            "expert_ffn_hidden_size": 32,
            "routed_scaling_factor": 2.0,
            "pad_token_id": None,
        },
        {"scaled shares": {"routed_scaling_factor": 1.0}, "choice of three experts": {"moe_topk": 2}},
    ),
}
