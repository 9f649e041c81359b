"""Converts a tiny checkpoint of any served architecture to GGUF as llama.cpp's converter does.

Names come from the package `gguf` (`tensor_mapping.py`), which the converter uses too. What the converter does to
tensors and which keys it writes follow https://github.com/ggml-org/llama.cpp, `conversion/`.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import statistics
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import safetensors
from gguf.constants import MODEL_ARCH_NAMES

from tests import converted_hybrids
from tests.converted_hybrids import num_layers_of
from tests.gguf_files import KindOf, Quantise, add_tensor, add_tokenizer, interleaved

Tensors = dict[str, np.ndarray]

ARCHITECTURES = {
    "Cohere2ForCausalLM": "cohere2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma4ForCausalLM": "gemma4",
    "Glm4ForCausalLM": "glm4",
    "GlmForCausalLM": "chatglm",
    "MiniCPM3ForCausalLM": "minicpm3",
    "Glm4MoeForCausalLM": "glm4moe",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "granite",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    **converted_hybrids.ARCHITECTURES,
}
_INTERLEAVED = ("llama", "granite", "smollm3")
_CONVOLVING = ("lfm2", "lfm2moe")
_ADDS_ONE = ("gemma2", "gemma3")
_SPELLED = {
    "self_attn.sinks": "self_attn.sinks.weight",
    "e_score_correction_bias": "e_score_correction.bias",
    ".expert_bias": ".expert_bias.bias",
    ".correct_output_scale": ".correct_output_scale.weight",
    ".layer_scalar": ".layer_scalar.weight",
    ".experts.gate_up_proj": ".experts.gate_up_proj.weight",
    ".experts.down_proj": ".experts.down_proj.weight",
}
"""Ends of names that the converter changes."""
_AROUND_HEAD = {
    "eh_proj": "eh_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "shared_head.norm": "shared_head_norm",
    "embed_tokens": "embed_tokens",
    "shared_head.head": "shared_head_head",
}
_AROUND_QWENS_HEAD = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head_norm",
}
"""llama.cpp's names of what is around the layer of a draft head."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_LAYER = re.compile(r".*?layers\.\d+\.")
_STREAM = re.compile(r"(model\.altup_\w+)\.(\d+)\.weight")


def convert(
    folder: pathlib.Path,
    path: pathlib.Path,
    kind_of: KindOf = lambda name: "F32",
    *,
    is_dense: bool = False,
    tensors_each: int = 0,
    as_name: str | None = None,
    by_layer: bool = False,
    quantise: Quantise | None = None,
) -> pathlib.Path:
    """Writes the checkpoint of `folder` to `path`. `kind_of` chooses the types of tensors that are no vectors; if
    `is_dense`, the file has the numbers that their blocks stand for. With `tensors_each`, the model is split into files
    of so many tensors. `as_name` is llama.cpp's name of the architecture, if the text decoder of a multimodal model has
    another one than alone. `by_layer` holds one layer at a time in memory and the rest in a temporary file, for models
    whose layers are converted each by itself. `quantise` makes the blocks in place of the package `gguf`.
    """
    config = json.loads((folder / "config.json").read_text())
    name = as_name or name_of(config)
    (architecture,) = (arch for arch, spelled in MODEL_ARCH_NAMES.items() if spelled == name)
    writer = gguf.GGUFWriter(path, name, use_temp_file=by_layer, split_max_tensors=tensors_each)
    with safetensors.safe_open(folder / "model.safetensors", "pt") as stored:
        _, num_heads = _heads_as_layers(dict.fromkeys(stored.keys(), np.empty(0)), config)
        whole = config | ({"num_hidden_layers": config["num_hidden_layers"] + num_heads} if num_heads else {})
        _add_keys(writer, whole, name)
        if num_heads:
            writer.add_nextn_predict_layers(num_heads)
        add_tokenizer(writer, folder)
        names = gguf.get_tensor_name_map(architecture, num_layers_of(whole))
        for part in _layers(stored.keys()) if by_layer else [stored.keys()]:
            found, _ = _heads_as_layers({key: stored.get_tensor(key).float().numpy() for key in part}, config)
            tensors = _of_architecture(found, whole, name)
            for key, tensor in sorted(tensors.items()):
                if key == "lm_head.weight" and config.get("tie_word_embeddings"):
                    continue
                converted = key if key.startswith("blk.") else names.get_name(key, try_suffixes=(".weight", ".bias"))
                assert converted is not None, key
                add_tensor(writer, converted, tensor, kind_of, is_dense=is_dense, quantise=quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _layers(keys: list[str]) -> list[list[str]]:
    """Returns the names of each layer's tensors, and those of the rest."""
    layers: dict[str, list[str]] = {}
    for key in keys:
        found = _LAYER.match(key)
        layers.setdefault("" if found is None else found[0], []).append(key)
    return list(layers.values())


def _heads_as_layers(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, int]:
    """Returns a checkpoint with its draft head as a further layer, which the converter's `_Qwen35MtpMixin` makes of it,
    and the number of heads.
    """
    layer = config.get("num_hidden_layers")
    names = {f"model.layers.{layer}.{key}": name for key, name in _AROUND_HEAD.items()} | _AROUND_QWENS_HEAD
    found: Tensors = {}
    for key, tensor in tensors.items():
        base, _, suffix = key.rpartition(".")
        if base in names:
            key = f"blk.{layer}.nextn.{names[base]}.{suffix}"
        found[key.replace("mtp.layers.0.", f"model.layers.{layer}.")] = tensor
    return found, int(any(".nextn." in key for key in found))


def name_of(config: dict[str, Any]) -> str:
    """Returns llama.cpp's name of a checkpoint's architecture."""
    return converted_hybrids.name_of(config) or ARCHITECTURES[config["architectures"][0]]


def _of_architecture(tensors: Tensors, config: dict[str, Any], name: str) -> Tensors:
    """Returns the tensors as the converter writes them, under names that the table of names knows."""
    if name in converted_hybrids.OF_KEYS:
        return _merged_experts(converted_hybrids.converted_tensors(tensors, config, name))
    tensors = _merged_experts(tensors)
    if name in _INTERLEAVED:
        for key, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            rotated = {k: v for k, v in tensors.items() if f".self_attn.{key}." in k}
            tensors |= {k: interleaved(v, config[heads]) for k, v in rotated.items()}
    if name in _ADDS_ONE:
        tensors |= {k: v + 1 for k, v in tensors.items() if k.endswith("norm.weight")}
    if name == "gpt-oss":
        tensors = _split_gates(tensors)
    if name == "gemma3n":
        tensors = _merged_streams(tensors)
    if name == "gemma4":
        tensors = _gemma_4s(tensors, config)
    for end, spelled in _SPELLED.items():
        for found in [each for each in tensors if each.endswith(end)]:
            tensors[found.removesuffix(end) + spelled] = tensors.pop(found)
    if name in _CONVOLVING:
        tensors |= {k: v.squeeze(1) for k, v in tensors.items() if k.endswith("conv.conv.weight")}
    return tensors


def _merged_experts(tensors: Tensors) -> Tensors:
    """Returns the experts of a layer as one tensor."""
    merged, experts = {}, {}
    for key, tensor in tensors.items():
        if (found := _EXPERT.fullmatch(key)) is None:
            merged[key] = tensor
        else:
            experts.setdefault(f"{found[1]}.{found[3]}.weight", {})[int(found[2])] = tensor
    stacked = {key: np.stack([each[index] for index in sorted(each)]) for key, each in experts.items()}
    # The table of names has LFM2's without their beginning
    return merged | {
        key.removeprefix("model.") if ".feed_forward." in key else key: each for key, each in stacked.items()
    }


def _merged_streams(tensors: Tensors) -> Tensors:
    """Returns the linears of all residual streams as one tensor."""
    streams = {key: _STREAM.fullmatch(key) for key in sorted(tensors)}
    names = {found[1] for found in streams.values() if found is not None}
    merged = {
        f"{name}.weight": np.stack(
            [tensors[key] for key, each in streams.items() if each is not None and each[1] == name]
        )
        for name in names
    }
    return {key: each for key, each in tensors.items() if streams[key] is None} | merged


def _gemma_4s(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Returns the scales of experts under llama.cpp's names, and what divides the angles of layers that see all."""
    scales = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    num_angles = _of_all(config)["head_dim"] // 2
    num_rotating = int(num_angles * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    divisors = [1.0] * num_rotating + [1e30] * (num_angles - num_rotating)
    found: Tensors = {"rope.freqs.weight": np.array(divisors, dtype=np.float32)}
    for key, tensor in tensors.items():
        end = next((each for each in scales if key.endswith(each)), None)
        found[key if end is None else f"blk.{key.split('.')[2]}.{scales[end]}"] = tensor
    return found


def _of_all(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of Gemma 4's layers that see everything."""
    return config | next(iter(config["per_layer_config"].values()))


def _split_gates(tensors: Tensors) -> Tensors:
    """Returns gpt-oss's experts with gates and what they let through apart, outputs first."""
    split: Tensors = {}
    for key, tensor in tensors.items():
        if key.endswith("experts.gate_up_proj_bias"):
            prefix = key.removesuffix("gate_up_proj_bias")
            split |= {f"{prefix}gate_proj.bias": tensor[:, ::2], f"{prefix}up_proj.bias": tensor[:, 1::2]}
        elif key.endswith("experts.down_proj_bias"):
            split[key.removesuffix("_bias") + ".bias"] = tensor
        elif key.endswith("experts.gate_up_proj"):
            prefix, rows = key.removesuffix("gate_up_proj"), tensor.swapaxes(1, 2)
            split |= {f"{prefix}gate_proj.weight": rows[:, ::2], f"{prefix}up_proj.weight": rows[:, 1::2]}
        elif key.endswith("experts.down_proj"):
            split[f"{key}.weight"] = tensor.swapaxes(1, 2)
        else:
            split[key] = tensor
    return {key: np.ascontiguousarray(tensor) for key, tensor in split.items()}


def _add_keys(writer: gguf.GGUFWriter, config: dict[str, Any], name: str) -> None:
    if name in converted_hybrids.OF_KEYS:
        converted_hybrids.add_keys(writer, config, name)
        return
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    kinds = config.get("layer_types") if name in _CONVOLVING else None
    key_heads = config["num_key_value_heads"]
    writer.add_head_count_kv(key_heads if kinds is None else [key_heads * (kind != "conv") for kind in kinds])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if name == "cohere2":
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    if config.get("sliding_window") and not name.startswith("qwen"):
        writer.add_sliding_window(config["sliding_window"])
    for add in _OWN.get(name, ()):
        add(writer, config)


Add = Callable[[gguf.GGUFWriter, dict[str, Any]], None]


def _add_latents(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """As the converter of MiniCPM3, which names no width of values."""
    writer.kv_data[0].pop("minicpm3.attention.value_length")
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])


def _add_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(config.get("num_experts") or config.get("num_local_experts") or config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])


def _add_mixtrals(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    if "num_local_experts" in config:
        _add_experts(writer, config)


def _add_expert_width(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))


def _add_caps(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _add_granites(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _add_glms(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _add_taps(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_shortconv_l_cache(config["conv_L_cache"])


def _add_dense_layers(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_gemma_3ns(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    pattern, normal = config["activation_sparsity_pattern"], statistics.NormalDist()
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_activation_sparsity_scale([normal.inv_cdf(each) if each else -math.inf for each in pattern])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _add_gemma_4s(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    num_layers, num_shared, wide = (
        config[key] for key in ("num_hidden_layers", "num_kv_shared_layers", "intermediate_size")
    )
    is_local = [kind == "sliding_attention" for kind in config["layer_types"]]
    heads, head_dim = (
        [config["num_key_value_heads"], _of_all(config)["num_key_value_heads"]],
        _of_all(config)["head_dim"],
    )
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern(is_local)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    if config["use_double_wide_mlp"]:
        writer.add_feed_forward_length([wide * (1 + (layer >= num_layers - num_shared)) for layer in range(num_layers)])
    if heads[0] != heads[1]:
        writer.add_head_count_kv([heads[not local] for local in is_local])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_sections(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_rope_dimension_sections([4, 2, 2, 0])


def _add_deepstack(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_num_deepstack_layers(3)


_OWN: dict[str, tuple[Add, ...]] = {
    "gemma3n": (_add_gemma_3ns,),
    "gemma4": (_add_gemma_4s,),
    "qwen2vl": (_add_sections,),
    "qwen3vl": (_add_sections, _add_deepstack),
    "qwen3vlmoe": (_add_sections, _add_deepstack, _add_experts, _add_expert_width),
    "llama": (_add_mixtrals,),
    "qwen3moe": (_add_experts, _add_expert_width),
    "gpt-oss": (_add_experts, _add_expert_width),
    "gemma2": (_add_caps,),
    "granite": (_add_granites,),
    "minicpm3": (_add_latents,),
    "cohere2": (lambda writer, config: writer.add_logit_scale(config["logit_scale"]),),
    "lfm2": (_add_taps,),
    "lfm2moe": (_add_taps, _add_experts, _add_expert_width, _add_dense_layers),
    "glm4moe": (_add_experts, _add_expert_width, _add_glms),
}
