"""Reads the metadata of GGUF files whose models have recurrent states or latent attention.

What a layer is follows from its tensors: one with rates of decay (`ssm_a`) is recurrent. `gguf_config.py` has read the
keys that all architectures share. What llama.cpp's converter writes: https://github.com/ggml-org/llama.cpp,
`conversion/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from manta.workers.checkpoints.gguf_metadata import GgufFile
from manta.workers.models.dense import FULL
from manta.workers.models.recurrent import LINEAR

Config = dict[str, Any]

_RATES = "ssm_a"
_ROUTER = "ffn_gate_inp.weight"
_SOFTMAX, _SIGMOID = 1, 2
"""llama.cpp's numbers for the scores of a router."""
_STRETCH = 0.1
"""The part of DeepSeek's stretch of a scaled rope that files multiply its logarithm by."""


def chosen_experts(file: GgufFile) -> Config:
    return {"num_experts_per_tok": file.of_model("expert_used_count").whole()}


def draft_heads(file: GgufFile) -> Config:
    """Returns the number of layers after the model's last one."""
    return {"num_nextn_predict_layers": file.of_model("nextn_predict_layers").whole(0, least=0)}


def check_gated(file: GgufFile) -> None:
    """Raises `ConfigError` unless the router has sigmoids."""
    file.of_model("expert_gating_func").whole(_SIGMOID, least=_SIGMOID, most=_SIGMOID)


def _expert_width(file: GgufFile) -> int:
    return file.of_model("expert_feed_forward_length").whole()


def _kinds(file: GgufFile) -> list[str]:
    """Returns the kind of each layer."""
    recurrent = file.layers_with(_RATES)
    return [LINEAR if layer in recurrent else FULL for layer in range(file.num_layers)]


def _expansion(file: GgufFile) -> int:
    """Returns the width of a recurrent mixer as a multiple of the hidden size."""
    inner, hidden = file.of_model("ssm.inner_size"), file.of_model("embedding_length").whole()
    if inner.whole() % hidden:
        raise inner.refused(f"a multiple of the hidden size, {hidden}")
    return inner.whole() // hidden


def _has_any(file: GgufFile, part: str) -> bool:
    return bool(file.layers_with(part))


STATE_SPACE_SIZES = ("inner_size", "time_step_rank", "group_count", "state_size", "conv_kernel")
"""Keys of Mamba 2 below `ssm`."""


def _state_space(file: GgufFile) -> dict[str, int]:
    """Returns the sizes of Mamba 2 by what they are."""
    inner, heads = file.of_model("ssm.inner_size"), file.of_model("ssm.time_step_rank").whole()
    if inner.whole() % heads:
        raise inner.refused(f"a multiple of the {heads} heads")
    return {
        "heads": heads,
        "head_dim": inner.whole() // heads,
        "groups": file.of_model("ssm.group_count").whole(1),
        "state_size": file.of_model("ssm.state_size").whole(),
        "width": file.of_model("ssm.conv_kernel").whole(),
    }


def _bambas(file: GgufFile) -> Config:
    """Returns Mamba 2 with Bamba's keys, which Granite and Falcon-H1 have too."""
    sizes = _state_space(file)
    return {
        "mamba_n_heads": sizes["heads"],
        "mamba_d_head": sizes["head_dim"],
        "mamba_n_groups": sizes["groups"],
        "mamba_d_state": sizes["state_size"],
        "mamba_d_conv": sizes["width"],
        "mamba_conv_bias": _has_any(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has_any(file, "ssm_in.bias"),
    }


def _granite_hybrid(file: GgufFile, config: Config) -> Config:
    """Bamba's files have this name too. Their heads rotate in part, which the converter does not prepare them for."""
    rotates = file.of_model("rope.scaling.finetuned")
    if rotates.flag(True):
        raise rotates.refused("false: a Bamba model is served from its own checkpoint")
    num_experts = file.of_model("expert_count").whole(0, least=0)
    shared = file.of_model("expert_shared_feed_forward_length").whole(config["intermediate_size"])
    file.ignore("expert_used_count")
    return (
        granite_factors(file, config)
        | _bambas(file)
        | {
            "layer_types": _kinds(file),
            "mamba_expand": _expansion(file),
            "position_embedding_type": "nope",
            "shared_intermediate_size": shared,
            "num_local_experts": num_experts,
            **(chosen_experts(file) if num_experts else {}),
        }
    )


def granite_factors(file: GgufFile, config: Config) -> Config:
    """Returns the factors of Granite's models."""
    return {
        "attention_multiplier": file.of_model("attention.scale").number(config["head_dim"] ** -0.5),
        "embedding_multiplier": file.of_model("embedding_scale").number(1.0),
        "residual_multiplier": file.of_model("residual_scale").number(1.0),
        "logits_scaling": file.of_model("logit_scale").number(1.0),
        "mlp_bias": False,
    }


def _falcon_h1(file: GgufFile, config: Config) -> Config:
    """The converter has multiplied the factors into the weights. Files of the first one, in a fork, have them apart."""
    file.of_model("ssm.has_mup").only(False)
    return _bambas(file) | {
        "mamba_d_ssm": file.of_model("ssm.inner_size").whole(),
        "mamba_rms_norm": _has_any(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": _has_any(file, "ssm_out.bias"),
        "mlp_bias": _has_any(file, "ffn_gate.bias"),
    }


def _jamba(file: GgufFile, config: Config) -> Config:
    layers = range(file.num_layers)
    attention = [layer for layer in layers if layer not in file.layers_with(_RATES)]
    experts = file.layers_with(_ROUTER)
    period, offset = _progression(file, attention)
    own = {"attn_layer_period": period, "attn_layer_offset": offset, "num_experts": 1}
    if experts:
        period, offset = _progression(file, experts)
        own |= {"expert_layer_period": period, "expert_layer_offset": offset}
        own |= {"num_experts": file.of_model("expert_count").whole()} | chosen_experts(file)
    file.ignore("expert_count", "expert_used_count")
    return own | {
        "mamba_d_state": file.of_model("ssm.state_size").whole(),
        "mamba_d_conv": file.of_model("ssm.conv_kernel").whole(),
        "mamba_dt_rank": file.of_model("ssm.time_step_rank").whole(),
        "mamba_expand": _expansion(file),
        "mamba_conv_bias": _has_any(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has_any(file, "ssm_in.bias"),
    }


def _progression(file: GgufFile, layers: Sequence[int]) -> tuple[int, int]:
    """Returns the distance of these layers and the first. Raises `ConfigError` unless they have one distance."""
    num_layers = file.num_layers
    first = layers[0] if layers else 0
    period = layers[1] - first if len(layers) > 1 else max(num_layers - first, first + 1)
    if list(layers) != list(range(first, num_layers, period)) or first >= period:
        raise file.of_model("attention.head_count_kv").refused("the number of layers of one kind at even distances")
    return period, first


def _nemotron_h(file: GgufFile, config: Config) -> Config:
    recurrent, experts, mlps = (set(file.layers_with(part)) for part in (_RATES, _ROUTER, "ffn_up.weight"))
    letters = {**dict.fromkeys(mlps, "-"), **dict.fromkeys(experts, "E"), **dict.fromkeys(recurrent, "M")}
    sizes = _state_space(file)
    return (_nemotron_experts(file) if experts else {}) | {
        "layer_norm_epsilon": config["rms_norm_eps"],
        "rms_norm_eps": None,
        "hybrid_override_pattern": "".join(letters.get(layer, "*") for layer in range(file.num_layers)),
        "mamba_num_heads": sizes["heads"],
        "mamba_head_dim": sizes["head_dim"],
        "n_groups": sizes["groups"],
        "ssm_state_size": sizes["state_size"],
        "conv_kernel": sizes["width"],
        "use_conv_bias": _has_any(file, "ssm_conv1d.bias"),
        "use_bias": _has_any(file, "ssm_in.bias"),
        "mlp_bias": _has_any(file, "ffn_up.bias"),
    }


def _nemotron_experts(file: GgufFile) -> Config:
    check_gated(file)
    return chosen_experts(file) | {
        "n_routed_experts": file.of_model("expert_count").whole(),
        "n_shared_experts": file.of_model("expert_shared_count").whole(1, least=0),
        "moe_intermediate_size": _expert_width(file),
        "moe_shared_expert_intermediate_size": file.of_model("expert_shared_feed_forward_length").whole(),
        "routed_scaling_factor": file.of_model("expert_weights_scale").number(1.0),
        "norm_topk_prob": file.of_model("expert_weights_norm").flag(True),
        "n_group": file.of_model("expert_group_count").whole(1),
        "topk_group": file.of_model("expert_group_used_count").whole(1),
    }


def _mamba(file: GgufFile, config: Config) -> Config:
    has_norms = file.of_model("ssm.dt_b_c_rms").flag(False)
    return _of_mixers(file, config) | {
        "architectures": ["FalconMambaForCausalLM" if has_norms else "MambaForCausalLM"],
        "intermediate_size": file.of_model("ssm.inner_size").whole(),
        "time_step_rank": file.of_model("ssm.time_step_rank").whole(),
        **({"mixer_rms_eps": config["rms_norm_eps"]} if has_norms else {}),
    }


def _mamba_2(file: GgufFile, config: Config) -> Config:
    sizes = _state_space(file)
    return _of_mixers(file, config) | {
        "num_heads": sizes["heads"],
        "head_dim": sizes["head_dim"],
        "n_groups": sizes["groups"],
        "expand": _expansion(file),
    }


def _of_mixers(file: GgufFile, config: Config) -> Config:
    """Returns the keys of models without attention."""
    return {
        "layer_norm_epsilon": config["rms_norm_eps"],
        "rms_norm_eps": None,
        "state_size": file.of_model("ssm.state_size").whole(),
        "conv_kernel": file.of_model("ssm.conv_kernel").whole(),
        "use_conv_bias": _has_any(file, "ssm_conv1d.bias"),
        "use_bias": _has_any(file, "ssm_in.bias"),
    }


def _qwen_3_5(file: GgufFile, config: Config) -> Config:
    """As in llama.cpp, keys and values of a delta net have one width."""
    width, num_values = file.of_model("ssm.state_size").whole(), file.of_model("ssm.time_step_rank").whole()
    num_keys, inner = file.of_model("ssm.group_count"), file.of_model("ssm.inner_size")
    inner.whole(least=width * num_values, most=width * num_values)
    if num_values % num_keys.whole():
        raise num_keys.refused(f"a divisor of the {num_values} value heads")
    file.ignore("full_attention_interval", "rope.dimension_sections")  # text has one position for all sections
    return {
        "layer_types": _kinds(file),
        "linear_conv_kernel_dim": file.of_model("ssm.conv_kernel").whole(),
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "linear_num_key_heads": num_keys.whole(),
        "linear_num_value_heads": num_values,
    }


def _qwen_3_5_moe(file: GgufFile, config: Config) -> Config:
    own = _qwen_3_5(file, config) | chosen_experts(file)
    return own | {
        "num_experts": file.of_model("expert_count").whole(),
        "moe_intermediate_size": _expert_width(file),
        "shared_expert_intermediate_size": file.of_model("expert_shared_feed_forward_length").whole(),
        "norm_topk_prob": file.of_model("expert_weights_norm").flag(True),
    }


def _qwen_3_next(file: GgufFile, config: Config) -> Config:
    dense = [layer for layer in range(file.num_layers) if layer not in file.layers_with(_ROUTER)]
    return _qwen_3_5_moe(file, config) | {"mlp_only_layers": dense}


def latent_heads(file: GgufFile) -> Config:
    """Returns the keys of latent attention. Older files have the widths of whole heads and no others."""
    rank, rotary = file.of_model("attention.kv_lora_rank").whole(), file.of_model("rope.dimension_count").whole()
    query_rank = file.of_model("attention.q_lora_rank")
    suffix = "_mla" if _has_any(file, "attn_k_b.weight") else ""
    key, value = (file.of_model(f"attention.{name}_length{suffix}") for name in ("key", "value"))
    num_heads = file.of_model("attention.head_count").whole()
    if key.whole() <= rotary:
        raise key.refused(f"above the {rotary} dimensions that rotate")
    file.ignore("attention.key_length", "attention.value_length", "attention.head_count_kv")
    return {
        "num_attention_heads": num_heads,
        "kv_lora_rank": rank,
        "q_lora_rank": None if query_rank.value is None else query_rank.whole(),
        "qk_nope_head_dim": key.whole() - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": value.whole(file.of_model("embedding_length").whole() // num_heads),
    }


def _deepseek_2(file: GgufFile, config: Config) -> Config:
    """DeepSeek-V2's and V3's files, and those of Youtu, which has no experts."""
    stretch = file.of_model("rope.scaling.yarn_log_multiplier").number(0.0, least=0) / _STRETCH
    rope = config["rope_parameters"]
    rope |= {"mscale": stretch, "mscale_all_dim": stretch} if rope["rope_type"] == "yarn" else {}
    own: Config = {"rope_parameters": rope}
    if not file.layers_with(_ROUTER):
        file.ignore("leading_dense_block_count", "expert_feed_forward_length", "expert_shared_count")
        return own | {"architectures": ["YoutuForCausalLM"]}
    scores = file.of_model("expert_gating_func").whole(_SOFTMAX, least=_SOFTMAX, most=_SIGMOID)
    num_groups = file.of_model("expert_group_count").whole(1)
    own |= chosen_experts(file) | {
        "n_routed_experts": file.of_model("expert_count").whole(),
        "n_shared_experts": file.of_model("expert_shared_count").whole(0, least=0),
        "moe_intermediate_size": _expert_width(file),
        "first_k_dense_replace": file.of_model("leading_dense_block_count").whole(0, least=0),
        "routed_scaling_factor": file.of_model("expert_weights_scale").number(1.0),
        "norm_topk_prob": file.of_model("expert_weights_norm").flag(False),
        "n_group": num_groups,
        "topk_group": file.of_model("expert_group_used_count").whole(1),
    }
    if scores == _SIGMOID:
        return own | draft_heads(file)
    choice = "greedy" if num_groups == 1 else "group_limited_greedy"
    return own | {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": choice}


OWN: dict[str, Callable[[GgufFile, Config], Config]] = {
    "granitehybrid": _granite_hybrid,
    "falcon-h1": _falcon_h1,
    "jamba": _jamba,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "mamba": _mamba,
    "mamba2": _mamba_2,
    "qwen35": _qwen_3_5,
    "qwen35moe": _qwen_3_5_moe,
    "qwen3next": _qwen_3_next,
    "deepseek2": _deepseek_2,
}
"""The keys that each architecture adds to the common ones, or puts in their place."""
