"""Converts the tensors and keys of models with recurrent states or latent attention as llama.cpp's converter does.

What it does to tensors and which keys it writes follow https://github.com/ggml-org/llama.cpp, `conversion/`:
`mamba.py`, `granite.py`, `falcon_h1.py`, `jamba.py`, `nemotron.py`, `qwen.py` and `deepseek.py`. Called by
`converted_gguf.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np

from tests.gguf_files import interleaved

Tensors = dict[str, np.ndarray]
Config = dict[str, Any]

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "FalconH1ForCausalLM": "falcon-h1",
    "FalconMambaForCausalLM": "mamba",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "JambaForCausalLM": "jamba",
    "Mamba2ForCausalLM": "mamba2",
    "MambaForCausalLM": "mamba",
    "NemotronHForCausalLM": "nemotron_h_moe",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
}
_MAMBA_2 = ("granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe", "mamba2")


def name_of(config: Config) -> str | None:
    """Returns llama.cpp's name of a checkpoint's architecture; None for another kind of model."""
    name = ARCHITECTURES.get(config["architectures"][0])
    return "nemotron_h" if name == "nemotron_h_moe" and "moe" not in config["layers_block_type"] else name


def num_layers_of(config: Config) -> int:
    """Returns the number of layers, of which some configurations list the kinds alone."""
    return config.get("num_hidden_layers") or len(config["layers_block_type"])


# ---- tensors --------------------------------------------------------------------------------------------------------


def converted_tensors(tensors: Tensors, config: Config, name: str) -> Tensors:
    """Returns the tensors as the converter writes them, under names that the table of names knows, or llama.cpp's own.
    Experts of a layer are one tensor.
    """
    own: Callable[[Tensors, Config], Tensors] = _OF_TENSORS.get(name, lambda tensors, config: tensors)
    tensors = own(tensors, config)
    if name in _MAMBA_2:
        tensors = _of_mamba_2(tensors, config)
    found: Tensors = {}
    for key, tensor in tensors.items():
        if key.endswith(".A_log"):
            tensor = -np.exp(tensor)
        if ".conv1d.weight" in key:
            tensor = tensor.squeeze(1)
        found[key.replace(".dt_bias", ".dt_proj.bias")] = np.ascontiguousarray(tensor)
    return found


def _of_mamba_2(tensors: Tensors, config: Config) -> Tensors:
    groups = config.get("mamba_n_groups") or config["n_groups"]
    changes: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        ".A_log": lambda each: each[:, None],
        ".D": lambda each: each[:, None],
        ".mamba.norm.weight": lambda each: each.reshape(groups, -1),
        ".mixer.norm.weight": lambda each: each.reshape(groups, -1),
    }

    def changed(key: str, tensor: np.ndarray) -> np.ndarray:
        return next((change(tensor) for end, change in changes.items() if key.endswith(end)), tensor)

    return {key: changed(key, tensor) for key, tensor in tensors.items()}


def _granite(tensors: Tensors, config: Config) -> Tensors:
    found, has_experts = {}, config["num_local_experts"] > 0
    for key, tensor in tensors.items():
        block = f"blk.{key.split('.')[2]}" if key.startswith("model.layers.") else ""
        if key.endswith("block_sparse_moe.input_linear.weight"):
            gate, up = np.split(tensor, 2, axis=1)
            found |= {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}
        elif key.endswith("shared_mlp.input_linear.weight"):
            end = "_shexp.weight" if has_experts else ".weight"
            gate, up = np.split(tensor, 2)
            found |= {f"{block}.ffn_gate{end}": gate, f"{block}.ffn_up{end}": up}
        elif key.endswith("shared_mlp.output_linear.weight") and not has_experts:
            found[f"{block}.ffn_down.weight"] = tensor
        else:
            found[key] = _interleaved(key, tensor, config)
    return found


def _interleaved(key: str, tensor: np.ndarray, config: Config) -> np.ndarray:
    for end, heads in ((".q_proj.weight", "num_attention_heads"), (".k_proj.weight", "num_key_value_heads")):
        if key.endswith(end):
            return interleaved(tensor, config[heads])
    return tensor


def _falcon_h1(tensors: Tensors, config: Config) -> Tensors:
    inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = (inner, inner, shared, shared, config["mamba_n_heads"])
    parts = np.concatenate([np.full(size, each) for size, each in zip(sizes, config["ssm_multipliers"], strict=True)])
    attention, gate_and_down = config["attention_in_multiplier"], config["mlp_multipliers"]
    factors: dict[str, Any] = {
        "down_proj.weight": gate_and_down[1],
        "gate_proj.weight": gate_and_down[0],
        "k_proj.weight": config["key_multiplier"] * attention,
        "q_proj.weight": attention,
        "v_proj.weight": attention,
        "o_proj.weight": config["attention_out_multiplier"],
        "out_proj.weight": config["ssm_out_multiplier"],
        "in_proj.weight": (config["ssm_in_multiplier"] * parts)[:, None],
        "lm_head.weight": config["lm_head_multiplier"],
        "embed_tokens.weight": config["embedding_multiplier"],
    }

    def factor(key: str) -> Any:
        return next((each for end, each in factors.items() if key == end or key.endswith(f".{end}")), 1.0)

    return {key: (tensor * factor(key)).astype(np.float32) for key, tensor in tensors.items()}


def _jamba(tensors: Tensors, config: Config) -> Tensors:
    return {key.replace(".feed_forward.experts.", ".mlp.experts."): tensor for key, tensor in tensors.items()}


def _nemotron_h(tensors: Tensors, config: Config) -> Tensors:
    def renamed(key: str) -> str:
        key = re.sub(r"backbone\.(layers\.\d+)\.mixer\.experts\.", r"model.\1.mlp.experts.", key)
        return key.replace("e_score_correction_bias", "e_score_correction.bias")

    return {renamed(key): _interleaved(key, tensor, config) for key, tensor in tensors.items()}


def _qwen(tensors: Tensors, config: Config) -> Tensors:
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    found: Tensors = {}
    for key, tensor in tensors.items():
        block = f"blk.{key.split('.')[2]}" if key.startswith("model.layers.") else ""
        if key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
            found[key] = tensor + 1
        elif key.endswith("experts.gate_up_proj"):
            gate, up = np.split(tensor, 2, axis=1)
            prefix = key.removesuffix("gate_up_proj")
            found |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        elif key.endswith("experts.down_proj"):
            found[f"{key}.weight"] = tensor
        elif key.endswith("in_proj_qkvz.weight"):
            width, repeats = config["linear_value_head_dim"], num_values // num_keys
            by_head = tensor.reshape(num_keys, -1, tensor.shape[1])
            cuts = np.cumsum([config["linear_key_head_dim"]] * 2 + [repeats * width])
            *mixed, gate = (each.reshape(-1, tensor.shape[1]) for each in np.split(by_head, cuts, axis=1))
            found |= {f"{block}.attn_qkv.weight": np.concatenate(mixed), f"{block}.attn_gate.weight": gate}
        else:
            found[key] = tensor
    return found


def _tiled(tensors: Tensors, config: Config) -> Tensors:
    """Returns delta nets with their value heads in the order that ggml repeats key heads in."""
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width, num_rows = config["linear_value_head_dim"], 2 * num_keys * config["linear_key_head_dim"]

    def tiled(tensor: np.ndarray, axis: int = 0) -> np.ndarray:
        moved = np.moveaxis(tensor, axis, 0)
        heads = moved.reshape(num_keys, num_values // num_keys, -1, *moved.shape[1:]).swapaxes(0, 1)
        return np.moveaxis(heads.reshape(moved.shape), 0, axis)

    def changed(key: str, tensor: np.ndarray) -> np.ndarray:
        if ".in_proj_qkv." in key or ".conv1d." in key:
            return np.concatenate((tensor[:num_rows], tiled(tensor[num_rows:])))
        if any(part in key for part in (".in_proj_z.", ".in_proj_b.", ".in_proj_a.", ".A_log", ".dt_bias")):
            return tiled(tensor)
        return tiled(tensor, axis=1) if ".out_proj." in key else tensor

    assert num_values > num_keys
    assert width == config["linear_key_head_dim"]
    return _qwen({key: changed(key, each) if ".linear_attn." in key else each for key, each in tensors.items()}, config)


def _deepseek(tensors: Tensors, config: Config) -> Tensors:
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    found: Tensors = {}
    for key, tensor in tensors.items():
        if key.endswith("kv_b_proj.weight"):
            by_head = tensor.reshape(config["num_attention_heads"], plain + value, -1)
            found[key.replace("kv_b_proj", "k_b_proj")] = by_head[:, :plain].swapaxes(1, 2)
            found[key.replace("kv_b_proj", "v_b_proj")] = by_head[:, plain:]
        else:
            found[key.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    return found


_OF_TENSORS: dict[str, Callable[[Tensors, Config], Tensors]] = {
    "granitehybrid": _granite,
    "falcon-h1": _falcon_h1,
    "jamba": _jamba,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen3next": _qwen,
    "qwen35": _tiled,
    "qwen35moe": _tiled,
    "deepseek2": _deepseek,
}

# ---- keys -----------------------------------------------------------------------------------------------------------


def add_keys(writer: gguf.GGUFWriter, config: Config, name: str) -> None:
    """Writes the keys of a model."""
    writer.add_context_length(2**20 if name.startswith("mamba") else config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(num_layers_of(config))
    writer.add_vocab_size(config["vocab_size"])
    norm_eps = config.get("layer_norm_epsilon") or config["rms_norm_eps"]
    writer.add_layer_norm_rms_eps(norm_eps)
    if name.startswith("nemotron"):
        writer.add_layer_norm_eps(norm_eps)
    OF_KEYS[name](writer, config)


def _add_heads(writer: gguf.GGUFWriter, config: Config, attends: list[bool] | None = None) -> None:
    key_heads = config["num_key_value_heads"]
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(key_heads if attends is None else [key_heads * each for each in attends])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))


_BAMBA = ("mamba_d_conv", "mamba_d_state", "mamba_n_heads", "mamba_d_head", "mamba_n_groups")


def _add_state_space(writer: gguf.GGUFWriter, config: Config, keys: tuple[str, ...] = _BAMBA) -> None:
    width, size, heads, head_dim, groups = (config[key] for key in keys)
    writer.add_ssm_conv_kernel(width)
    writer.add_ssm_state_size(size)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(heads * head_dim)
    writer.add_ssm_time_step_rank(heads)


def _add_granite_hybrid(writer: gguf.GGUFWriter, config: Config) -> None:
    attends = [kind in ("attention", "full_attention") for kind in config["layer_types"]]
    _add_heads(writer, config, attends)
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"] if config["num_local_experts"] else 0)
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_rope_scaling_finetuned(False)
    _add_state_space(writer, config)


def _add_falcon_h1(writer: gguf.GGUFWriter, config: Config) -> None:
    _add_heads(writer, config)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    _add_state_space(writer, config)


def _add_jamba(writer: gguf.GGUFWriter, config: Config) -> None:
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    _add_heads(writer, config, [layer % period == offset for layer in range(config["num_hidden_layers"])])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_dt_rank"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])


def _add_nemotron_h(writer: gguf.GGUFWriter, config: Config) -> None:
    kinds, has_experts = config["layers_block_type"], "moe" in config["layers_block_type"]
    _add_heads(writer, config, [kind in ("attention", "full_attention") for kind in kinds])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_scaling_finetuned(False)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    width = config["moe_intermediate_size" if has_experts else "intermediate_size"]
    writer.add_feed_forward_length([width * (kind in ("moe", "mlp")) for kind in kinds])
    _add_state_space(writer, config, ("conv_kernel", "ssm_state_size", "mamba_num_heads", "mamba_head_dim", "n_groups"))
    if has_experts:
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])


def _add_mamba(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["intermediate_size"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["time_step_rank"])
    writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")


def _add_mamba_2(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    _add_state_space(writer, config, ("conv_kernel", "state_size", "num_heads", "head_dim", "n_groups"))


def _add_delta_nets(writer: gguf.GGUFWriter, config: Config) -> None:
    _add_heads(writer, config)
    head_dim, rope = config["head_dim"], config["rope_parameters"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(1 + config["layer_types"].index("full_attention"))
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _add_qwen_3_next(writer: gguf.GGUFWriter, config: Config) -> None:
    _add_delta_nets(writer, config)
    writer.add_feed_forward_length(config["intermediate_size"])


def _add_qwen_3_5(writer: gguf.GGUFWriter, config: Config) -> None:
    _add_delta_nets(writer, config)
    writer.add_rope_dimension_sections([2, 1, 1, 0])
    if "num_experts" not in config:
        writer.add_feed_forward_length(config["intermediate_size"])


def _add_deepseek(writer: gguf.GGUFWriter, config: Config) -> None:
    rank, rotary, rope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["rope_parameters"]
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotary)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    is_gated = config["model_type"] == "deepseek_v3"
    scores = gguf.ExpertGatingFuncType.SIGMOID if is_gated else gguf.ExpertGatingFuncType.SOFTMAX
    writer.add_expert_gating_func(scores)
    if is_gated:
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config["n_group"] is not None and config["n_group"] > 1:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    writer.add_rope_dimension_count(rotary)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


OF_KEYS: dict[str, Callable[[gguf.GGUFWriter, Config], None]] = {
    "granitehybrid": _add_granite_hybrid,
    "falcon-h1": _add_falcon_h1,
    "jamba": _add_jamba,
    "nemotron_h": _add_nemotron_h,
    "nemotron_h_moe": _add_nemotron_h,
    "mamba": _add_mamba,
    "mamba2": _add_mamba_2,
    "qwen35": _add_qwen_3_5,
    "qwen35moe": _add_qwen_3_5,
    "qwen3next": _add_qwen_3_next,
    "deepseek2": _add_deepseek,
}
"""Writes the keys of each architecture that not all have."""
