"""Values of configurations' keys for `test_config_keys.py`, and what it refuses: those of families with latent
attention or DeepSeek's experts.
"""

from __future__ import annotations

import math
from typing import Any

HUGE = 10**30
WHOLE = ("7", [7], {"a": 7}, -1, 1.5, math.nan, HUGE, True)
WHOLE_OR_NONE = tuple(value for value in WHOLE if value != 0)
NUMBER = ("7", [7], {"a": 7}, -1, math.nan, math.inf, 1e300, HUGE, True)
FLAG = ("true", [True], {"a": True}, -1, 1, math.nan, HUGE)
CHOICE = ("novel", ["silu"], {"a": "silu"}, -1, 7, math.nan, HUGE, True)
LIST = ("silu", {"a": 1}, -1, 7, math.nan, HUGE, True, [{}], [math.nan])
OBJECT = ("silu", [1], -1, 7, math.nan, HUGE, True)
LEFT_OUT = ("7", [7], {"a": 7}, -1, math.nan, HUGE, 0.5)

BIASES: dict[str, Any] = {"attention_bias": (True, FLAG)}
PART: dict[str, Any] = {"partial_rotary_factor": (0.5, ("7", [7], {"a": 7}, -1, math.nan, HUGE, 2.0, 0.45))}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": (2, (*WHOLE, 64))}
LATENT: dict[str, Any] = {
    "head_dim": (8, WHOLE),
    "qk_head_dim": (16, WHOLE),
    "num_key_value_heads": (4, WHOLE),
    "q_lora_rank": (32, WHOLE),
    "kv_lora_rank": (16, (*WHOLE, 15)),
    "qk_rope_head_dim": (8, (*WHOLE, 7)),
    "qk_nope_head_dim": (8, WHOLE),
    "v_head_dim": (8, WHOLE),
}
DEEPSEEK: dict[str, Any] = EXPERTS | {
    "n_routed_experts": (16, WHOLE),
    "moe_intermediate_size": (32, WHOLE),
    "moe_layer_freq": (1, (*WHOLE, 2)),
    "n_shared_experts": (2, WHOLE_OR_NONE),
    "first_k_dense_replace": (1, WHOLE_OR_NONE),
    "mlp_layer_types": (["dense", "sparse"] * 2, (*LIST, ["dense"], ["novel"] * 4)),
    "n_group": (4, (*WHOLE, 3)),
    "topk_group": (2, (*WHOLE, 5)),
    "routed_scaling_factor": (2.5, NUMBER),
    "num_nextn_predict_layers": (1, WHOLE_OR_NONE),
}
SIGMOID: dict[str, Any] = {
    "norm_topk_prob": (True, FLAG),
    "scoring_func": ("sigmoid", (*CHOICE, "softmax")),
    "topk_method": ("noaux_tc", (*CHOICE, "greedy")),
    "rope_interleave": (True, FLAG),
}
NEIGHBOURS: dict[str, Any] = {"rope_interleave": (True, (*FLAG, False))}
INDEXER: dict[str, Any] = {
    "index_topk": (16, WHOLE),
    "index_n_heads": (8, WHOLE),
    "index_head_dim": (64, (*WHOLE, 15, 6)),
    "layer_types": (["indexed_attention"] * 4, (*LIST, ["full_attention"] * 4)),
    "q_lora_rank": (32, (*WHOLE, None)),
}
OF_LATENTS: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": BIASES
    | LATENT
    | DEEPSEEK
    | {
        "mlp_bias": (False, (*FLAG, True)),
        "norm_topk_prob": (False, (*FLAG, True)),
        "scoring_func": ("softmax", (*CHOICE, "sigmoid")),
        "topk_method": ("group_limited_greedy", (*CHOICE, "noaux_tc")),
        "topk_group": (1, (*WHOLE, 5)),
    },
    "DeepseekV3ForCausalLM": BIASES | LATENT | DEEPSEEK | SIGMOID,
    "DeepseekV32ForCausalLM": BIASES | LATENT | DEEPSEEK | SIGMOID | INDEXER | NEIGHBOURS,
    "GlmMoeDsaForCausalLM": BIASES
    | LATENT
    | DEEPSEEK
    | SIGMOID
    | INDEXER
    | NEIGHBOURS
    | {
        "topk_group": (1, (*WHOLE, 5)),
        "indexer_rope_interleave": (True, (*FLAG, False)),
        "indexer_types": (["full", "shared"] * 2, (*LIST, ["full"], ["novel"] * 4, ["shared"] * 4)),
        "index_topk_pattern": ("FSFS", (7, {"a": 1}, True, "FSF", "FXFS", "SFFF", ["full"], ["shared"] * 4)),
        "index_topk_freq": (2, WHOLE),
        "index_skip_topk_offset": (1, WHOLE_OR_NONE),
    },
    "Glm4MoeLiteForCausalLM": BIASES | LATENT | DEEPSEEK | SIGMOID | {"topk_group": (1, (*WHOLE, 5))},
    "MiniCPM3ForCausalLM": BIASES
    | LATENT
    | {
        "mlp_bias": (False, (*FLAG, True)),
        "scale_emb": (12, NUMBER),
        "scale_depth": (1.4, NUMBER),
        "dim_model_base": (256, WHOLE),
    },
    "Mistral4ForCausalLM": BIASES
    | LATENT
    | DEEPSEEK
    | {
        "moe_layer_freq": None,
        "topk_group": (1, (*WHOLE, 5)),
        "norm_topk_prob": (True, FLAG),
        "rope_interleave": (True, FLAG),
        "partial_rotary_factor": (0.5, ("7", [7], {"a": 7}, -1, math.nan, HUGE, 2.0, 0.45)),
        "rope_scaling": None,
        "rope_theta": None,
        "rope_parameters": ({"rope_type": "default", "rope_theta": 10000.0}, OBJECT),
    },
    "MistralLarge4TextModel": LATENT
    | DEEPSEEK
    | INDEXER
    | {
        "attention_bias": (False, (*FLAG, True)),
        "moe_layer_freq": None,
        "num_nextn_predict_layers": None,
        "topk_group": (1, (*WHOLE, 5)),
        "q_lora_rank": (None, (*WHOLE, 32)),
        "indexer_types": (["full", "shared"] * 2, (*LIST, ["full"], ["novel"] * 4, ["shared"] * 4)),
        "index_topk_pattern": ("FSFS", (7, {"a": 1}, True, "FSF", "FXFS", "SFFF", ["full"], ["shared"] * 4)),
        "index_topk_freq": (2, WHOLE),
        "index_skip_topk_offset": (1, WHOLE_OR_NONE),
        "no_rope_layers": ([1, 0, 1, 0], (*LIST, [1], [2] * 4)),
        "no_rope_layer_interval": (4, WHOLE),
        "kv_source_layers": ([0, 1, 0, 3], (*LIST, [0], [1, 1, 0, 3], [0, 0, 2, 3])),
        "final_logit_softcapping": (30.0, NUMBER),
    },
    "Glm4MoeForCausalLM": BIASES
    | PART
    | DEEPSEEK
    | SIGMOID
    | {"topk_group": (1, (*WHOLE, 5)), "rope_interleave": None, "use_qk_norm": (True, FLAG)},
    "YoutuForCausalLM": BIASES | LATENT | {"mlp_bias": (False, (*FLAG, True)), "rope_interleave": (True, FLAG)},
}
"""The keys of each family, without those that every family reads."""
