"""Reads the metadata of a GGUF file as a configuration in Hugging Face's terms.

The keys are llama.cpp's, https://github.com/ggml-org/ggml, `docs/gguf.md`. What llama.cpp derives from a model's size,
because no key says it, is derived here in the same way (`src/llama-model.cpp`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from manta.workers.checkpoints import gguf_hybrids
from manta.workers.checkpoints.gguf_architectures import ARCHITECTURES
from manta.workers.checkpoints.gguf_ends import end_token_ids
from manta.workers.checkpoints.gguf_hybrids import check_gated, chosen_experts, draft_heads, granite_factors
from manta.workers.checkpoints.gguf_keys import judge_unread
from manta.workers.checkpoints.gguf_metadata import GgufFile
from manta.workers.models.dense import FULL, SLIDING
from manta.workers.models.lfm2 import CONVOLUTION
from manta.workers.models.model_config import ModelError

_FLOATS = ("F32", "F16", "BF16")
_ROUNDED = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
    *("NVFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"),
)
_TYPES = (*_FLOATS, *_ROUNDED)
"""Types of tensors that are served. `formats/gguf_blocks.py` reads those that are rounded."""
_ROPE_DIVISORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
IN_CONFIG = (_ROPE_DIVISORS, _LONG_FACTORS, _SHORT_FACTORS)
"""Tensors that the configuration holds."""
_WITHOUT_ROPE = ("granitehybrid", "jamba", "nemotron_h", "nemotron_h_moe")
"""Architectures in which nothing rotates. Their files may name a part of a head of another width."""
_WITHOUT_ATTENTION = ("mamba", "mamba2")
_LATENT = ("deepseek2", "minicpm3")
_DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe")
_PARTLY_ROTATED = ("chatglm", "glm4", "glm4moe", "phi3", *_DELTA_NETS)
"""Architectures of whose heads only the first dimensions may rotate."""
_MIXING = ("lfm2", "lfm2moe", *_WITHOUT_ROPE, *_DELTA_NETS)
"""Architectures whose layers without key heads have no attention."""
_UNEVEN = ("gemma4",)
"""Architectures whose layers have different numbers of key heads, or MLPs of different widths."""
_LAYER_TABLE = "per_layer_token_embd.weight"
_NO_ANGLE = 1e29
"""Least divisor of an angle that does not rotate."""
_LARGE_GEMMA_2, _LARGE_GEMMA_3 = 46, 62
"""Numbers of layers of the Gemma models whose queries are scaled by the width of the model."""


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Returns the content of `config.json`, in Hugging Face's terms.

    Raises `ConfigError` naming a key whose value is not served, and `ModelError` for tensors that are not.
    """
    _check(file)
    config = _shape(file)
    config |= _OWN[file.architecture](file, config)
    return config | {"unused_keys": judge_unread(file.values, file.architecture)}


def _check(file: GgufFile) -> None:
    for name, tensor in file.tensors.items():
        if tensor.kind not in _TYPES:
            raise ModelError(
                f"{file.path}: {name} is of type {tensor.kind}, which is not served; {', '.join(_TYPES)} are"
            )
    for number, path in enumerate(file.paths):
        size, own = path.stat().st_size, [tensor for tensor in file.tensors.values() if tensor.file == number]
        end = max((tensor.start + tensor.num_bytes for tensor in own), default=0)
        if end > size:
            raise ModelError(
                f"{path} is truncated: it has {size} bytes and its header says {end}; copy or download it again"
            )


def _shape(file: GgufFile) -> dict[str, Any]:
    """Returns the keys that all architectures have."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight")
    norm_eps = "layer_norm_epsilon" if file.architecture == "cohere2" else "layer_norm_rms_epsilon"
    return _heads(file) | {
        "architectures": [ARCHITECTURES[file.architecture].model],
        "vocab_size": embedding.shape[0],
        "hidden_size": file.of_model("embedding_length").whole(),
        "intermediate_size": _inner_width(file),
        "num_hidden_layers": file.num_layers,
        "rms_norm_eps": file.of_model(f"attention.{norm_eps}").number(least=0, most=1),
        "max_position_embeddings": file.of_model("context_length").whole(),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": any(name.endswith((".attn_q.bias", ".attn_qkv.bias")) for name in file.tensors),
        "dtype": _dtype({tensor.kind for tensor in file.tensors.values()}),
        "eos_token_id": end_token_ids(file, embedding.shape[0]),
        "quantization_config": {"quant_method": "gguf"},
    }


def _inner_width(file: GgufFile) -> int | None:
    """Returns the width of all MLPs; None for models without. Layers without an MLP have a width of 0."""
    if file.architecture in _WITHOUT_ATTENTION:
        file.of_model("feed_forward_length").whole(0, least=0, most=0)
        return None
    if file.architecture == "qwen35moe" and file.of_model("feed_forward_length").value is None:
        return file.of_model("expert_feed_forward_length").whole()
    if file.architecture in _UNEVEN:
        return file.of_layers("feed_forward_length")[0]
    return _only(file, "feed_forward_length")


def _only(file: GgufFile, key: str) -> int:
    """Returns the one number above 0 of all layers that have what the key counts."""
    counts = set(file.of_layers(key)) - {0}
    if len(counts) != 1:
        raise file.of_model(key).refused("the same number above 0 for all layers that have one")
    return counts.pop()


def _heads(file: GgufFile) -> dict[str, Any]:
    """Returns the keys of attention's heads and of the rope; none of a model without attention."""
    if file.architecture in _WITHOUT_ATTENTION:
        file.of_model("attention.head_count").whole(0, least=0, most=0)
        return {}
    if file.architecture in _LATENT:
        return gguf_hybrids.latent_heads(file) | {"rope_parameters": _rope(file)}
    hidden_size = file.of_model("embedding_length").whole()
    num_heads = file.of_model("attention.head_count").whole(most=hidden_size)
    head_dim = file.of_model("attention.key_length").whole(hidden_size // num_heads)
    file.of_model("attention.value_length").whole(head_dim, least=head_dim, most=head_dim)
    if not (causal := file.of_model("attention.causal")).flag(True):
        raise causal.refused("left out or true")
    rope = _rope(file)
    if file.architecture in _WITHOUT_ROPE:
        file.ignore("rope.dimension_count")
    else:
        least_rotary = 1 if file.architecture in _PARTLY_ROTATED else head_dim
        rotary_dim = file.of_model("rope.dimension_count").whole(head_dim, least=least_rotary, most=head_dim)
        rope |= {"partial_rotary_factor": rotary_dim / head_dim} if file.architecture in _PARTLY_ROTATED else {}
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": _key_heads(file),
        "head_dim": head_dim,
        "rope_parameters": rope,
    }


def _key_heads(file: GgufFile) -> int:
    """Returns the number of key heads of all layers that have attention. As in llama.cpp, it is that of the heads if
    the file does not say it.
    """
    if file.of_model("attention.head_count_kv").value is None and file.architecture not in _MIXING:
        return _only(file, "attention.head_count")
    counts = file.of_layers("attention.head_count_kv")
    if 0 in counts and file.architecture not in _MIXING:
        raise file.of_model("attention.head_count_kv").refused("a number above 0 for each layer")
    return counts[0] if file.architecture in _UNEVEN else _only(file, "attention.head_count_kv")


def _rope(file: GgufFile) -> dict[str, Any]:
    """Returns the rope parameters. As in llama.cpp, a factor without a type scales linearly, and 0 means no factor."""
    theta = file.of_model("rope.freq_base").number(10000.0)
    kind, factor = file.of_model("rope.scaling.type"), file.of_model("rope.scaling.factor")
    if not factor.value:
        factor = file.of_model("rope.scale_linear")  # the older key
    is_scaled = kind.one_of("none", "linear", "yarn", default="linear") != "none" and factor.number(1.0, least=0) > 0
    has_divisors = _ROPE_DIVISORS in file.tensors
    if is_scaled and factor.number(1.0) != 1 and has_divisors:
        raise factor.refused(f"left out or 1 beside the tensor {_ROPE_DIVISORS}")
    file.ignore(*(f"rope.scaling.{key}" for key in ("original_context_length", "yarn_beta_fast", "yarn_beta_slow")))
    if has_divisors:
        return {"rope_type": "default", "rope_theta": theta, "frequency_divisors": file.floats(_ROPE_DIVISORS)}
    if not is_scaled or (kind.value is None and factor.number(1.0) == 1):
        return {"rope_type": "default", "rope_theta": theta}
    scaling = {
        "rope_type": kind.text("linear"),
        "rope_theta": theta,
        "factor": factor.number(1.0),
        "original_max_position_embeddings": file.of_model("rope.scaling.original_context_length").value,
        "beta_fast": file.of_model("rope.scaling.yarn_beta_fast").value,
        "beta_slow": file.of_model("rope.scaling.yarn_beta_slow").value,
    }
    return {name: value for name, value in scaling.items() if value is not None}


def _dtype(kinds: set[str]) -> str:
    """Returns the dtype to compute in. Norms are float32 in every file, so they do not decide it."""
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


# ---- what an architecture has of its own ---------------------------------------------------------------------------

Config = gguf_hybrids.Config


def _nothing(file: GgufFile, config: Config) -> Config:
    return {}


def _window(file: GgufFile, usual: int | None = None) -> int | None:
    """Returns the sliding window, None for none."""
    return file.of_model("attention.sliding_window").whole(usual or 0, least=0) or None


def _llama(file: GgufFile, config: Config) -> Config:
    """Mistral's and Mixtral's files name this architecture too."""
    window, num_experts = _window(file), file.of_model("expert_count").whole(0, least=0)
    biases = {"mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}
    if num_experts:
        mixture = {"architectures": ["MixtralForCausalLM"], "num_local_experts": num_experts}
        return mixture | chosen_experts(file) | {"sliding_window": window}
    if window:
        return biases | {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return biases


def _qwen3_moe(file: GgufFile, config: Config) -> Config:
    sizes = {
        "num_experts": file.of_model("expert_count").whole(),
        "moe_intermediate_size": file.of_model("expert_feed_forward_length").whole(),
    }
    return sizes | chosen_experts(file) | {"norm_topk_prob": True}


def _beside_pictures(file: GgufFile, config: Config) -> Config:
    """Returns nothing more for a text decoder beside a file with what sees. Text has one position for all sections."""
    file.ignore("rope.dimension_sections", "n_deepstack_layers")
    return {}


def _qwen_3_vl_moe(file: GgufFile, config: Config) -> Config:
    return _beside_pictures(file, config) | _qwen3_moe(file, config)


def _gemma(file: GgufFile, config: Config, num_large_layers: int) -> Config:
    is_large = config["num_hidden_layers"] == num_large_layers
    width = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width if is_large else config["head_dim"],
        "sliding_window": _window(file, 4096),
    }


def _gemma_2(file: GgufFile, config: Config) -> Config:
    return _gemma(file, config, _LARGE_GEMMA_2) | {
        "attn_logit_softcapping": file.of_model("attn_logit_softcapping").number(50.0, least=0),
        "final_logit_softcapping": file.of_model("final_logit_softcapping").number(30.0, least=0),
    }


def _gemma_3(file: GgufFile, config: Config) -> Config:
    local = {"rope_type": "default", "rope_theta": file.of_model("rope.freq_base_swa").number(10000.0)}
    return _gemma(file, config, _LARGE_GEMMA_3) | {
        "final_logit_softcapping": file.of_model("final_logit_softcapping").number(0.0, least=0),
        "rope_parameters": {FULL: config["rope_parameters"], SLIDING: local},
    }


def _gemma_of_kinds(file: GgufFile, config: Config, usual_cap: float) -> Config:
    """Returns the keys that Gemma 3n and Gemma 4 share."""
    is_local = file.of_layers("attention.sliding_window_pattern")
    local = {"rope_type": "default", "rope_theta": file.of_model("rope.freq_base_swa").number(10000.0)}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": file.of_model("final_logit_softcapping").number(usual_cap, least=0),
        "sliding_window": _window(file, 512),
        "layer_types": [SLIDING if each else FULL for each in is_local],
        "rope_parameters": {FULL: config["rope_parameters"], SLIDING: local},
        "num_kv_shared_layers": file.of_model("attention.shared_kv_layers").whole(0, least=0),
    }


def _layer_inputs(file: GgufFile) -> Config:
    size, table = file.of_model("embedding_length_per_layer_input"), file.tensors.get(_LAYER_TABLE)
    if table is None:
        return {"hidden_size_per_layer_input": size.whole(0, least=0, most=0)}
    return {"hidden_size_per_layer_input": size.whole(), "vocab_size_per_layer_input": table.shape[0]}


def _gemma_3n(file: GgufFile, config: Config) -> Config:
    """Files hold standard deviations where configurations have the part of gates that lies below."""
    low_rank = file.tensors.get("blk.0.laurel_l.weight")
    if low_rank is None or _LAYER_TABLE not in file.tensors:
        raise ModelError(f"{file.path} has no tensor blk.0.laurel_l.weight or {_LAYER_TABLE}")
    sparsities = file.numbers_of_layers("activation_sparsity_scale")
    return (
        _gemma_of_kinds(file, config, usual_cap=30.0)
        | _layer_inputs(file)
        | {
            "altup_num_inputs": file.of_model("altup.num_inputs").whole(),
            "altup_active_idx": file.of_model("altup.active_idx").whole(0, least=0),
            "altup_correct_scale": True,
            "laurel_rank": low_rank.shape[0],
            "activation_sparsity_pattern": [statistics.NormalDist().cdf(each) for each in sparsities],
        }
    )


def _gemma_4(file: GgufFile, config: Config) -> Config:
    """The usual keys of heads are those of layers that see everything, and others those of layers with a window."""
    own = _gemma_of_kinds(file, config, usual_cap=0.0)
    width = file.of_model("attention.key_length_swa").whole()
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        file.of_model(key).whole(width, least=width, most=width)
    return (
        own
        | _layer_inputs(file)
        | _experts_beside(file)
        | _key_heads_of_kinds(file, own["layer_types"], own["num_kv_shared_layers"])
        | {
            "head_dim": width,
            "global_head_dim": config["head_dim"],
            "rope_parameters": own["rope_parameters"] | {FULL: _proportional(file, config["rope_parameters"])},
            "use_double_wide_mlp": _doubles_width(file, own["num_kv_shared_layers"]),
        }
    )


def _key_heads_of_kinds(file: GgufFile, kinds: list[str], num_shared: int) -> Config:
    """Layers without a linear to values have the keys for values."""
    counts = list(zip(file.of_layers("attention.head_count_kv"), kinds, strict=True))
    local, full = ({count for count, kind in counts if kind == each} for each in (SLIDING, FULL))
    shares = any(
        kind == FULL and f"blk.{layer}.attn_v.weight" not in file.tensors
        for layer, kind in enumerate(kinds[: len(kinds) - num_shared])
    )
    if len(local) != 1 or len(full) != 1 or not (shares or local == full):
        raise file.of_model("attention.head_count_kv").refused("one number for all layers of a kind")
    (own,), (of_full,) = local, full
    return {"num_key_value_heads": own, "num_global_key_value_heads": of_full, "attention_k_eq_v": shares}


def _doubles_width(file: GgufFile, num_shared: int) -> bool:
    """Returns whether the last layers, which read the keys and values of others, have MLPs of twice the width."""
    widths = file.of_layers("feed_forward_length")
    is_double = bool(num_shared) and widths[-1] == 2 * widths[0]
    expected = widths[:1] * (len(widths) - num_shared) + [widths[0] * (1 + is_double)] * num_shared
    if widths != expected:
        raise file.of_model("feed_forward_length").refused(f"{widths[0]}, or twice as much for the last {num_shared}")
    return is_double


def _proportional(file: GgufFile, rope: Config) -> Config:
    """Returns a rope of which a part rotates, given one whose other angles are divided by a number without a bound."""
    divisors = rope.get("frequency_divisors")
    if divisors is None:
        return rope
    num_rotating = divisors.count(1.0)
    if not num_rotating or any(each < _NO_ANGLE for each in divisors[num_rotating:]):
        raise ModelError(f"{file.path}: {_ROPE_DIVISORS} must have ones, and after them numbers from {_NO_ANGLE:g}")
    part = num_rotating / len(divisors)
    return {"rope_type": "proportional", "rope_theta": rope["rope_theta"], "partial_rotary_factor": part}


def _experts_beside(file: GgufFile) -> Config:
    if not file.layers_with("ffn_gate_inp.weight"):
        file.ignore("expert_count", "expert_used_count", "expert_feed_forward_length")
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": file.of_model("expert_count").whole(),
        "top_k_experts": file.of_model("expert_used_count").whole(),
        "moe_intermediate_size": file.of_model("expert_feed_forward_length").whole(),
    }


def _phi_3(file: GgufFile, config: Config) -> Config:
    return {"sliding_window": _window(file)} | _long_rope(file, config)


def _minicpm_3(file: GgufFile, config: Config) -> Config:
    """The factors of embedding, residuals and logits are the published model's, as in llama.cpp: no key has them."""
    return _long_rope(file, config) | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}


def _long_rope(file: GgufFile, config: Config) -> Config:
    """Returns a rope with factors for short and long contexts, if the file has them."""
    original = file.of_model("rope.scaling.original_context_length").whole(config["max_position_embeddings"])
    attention_factor = file.of_model("rope.scaling.attn_factor")
    if _LONG_FACTORS not in file.tensors:
        return {}
    factors = {"long_factor": file.floats(_LONG_FACTORS), "short_factor": file.floats(_SHORT_FACTORS)}
    rope = config["rope_parameters"] | {"rope_type": "longrope", **factors}
    if attention_factor.value is not None:
        rope |= {"attention_factor": attention_factor.number(least=0)}
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


def _gpt_oss(file: GgufFile, config: Config) -> Config:
    return chosen_experts(file) | {
        "num_local_experts": file.of_model("expert_count").whole(),
        "intermediate_size": file.of_model("expert_feed_forward_length").whole(config["intermediate_size"]),
        "sliding_window": _window(file, 128),
        "rope_parameters": config["rope_parameters"] | {"truncate": False},  # as published, and in no key
    }


def _glm_4_moe(file: GgufFile, config: Config) -> Config:
    check_gated(file)
    return (
        draft_heads(file)
        | chosen_experts(file)
        | {
            "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
            "n_routed_experts": file.of_model("expert_count").whole(),
            "n_shared_experts": file.of_model("expert_shared_count").whole(1),
            "moe_intermediate_size": file.of_model("expert_feed_forward_length").whole(),
            "first_k_dense_replace": file.of_model("leading_dense_block_count").whole(1, least=0),
            "routed_scaling_factor": file.of_model("expert_weights_scale").number(1.0),
            "norm_topk_prob": file.of_model("expert_weights_norm").flag(True),
            "n_group": file.of_model("expert_group_count").whole(1),
            "topk_group": file.of_model("expert_group_used_count").whole(1),
        }
    )


def _cohere_2(file: GgufFile, config: Config) -> Config:
    return {
        "layer_norm_eps": config["rms_norm_eps"],
        "logit_scale": file.of_model("logit_scale").number(1.0),
        "sliding_window": _window(file, 4096),
    }


def _granite(file: GgufFile, config: Config) -> Config:
    """Returns the keys of Granite's dense models. Those of Granite 4 have this name too. Their converter, which is that
    of its hybrids, also writes the sizes of states that they do not have, and says that their heads rotate.
    """
    if not (rotates := file.of_model("rope.scaling.finetuned")).flag(True):
        raise rotates.refused("true or left out")
    file.ignore(*(f"ssm.{name}" for name in gguf_hybrids.STATE_SPACE_SIZES))
    width = file.of_model("expert_shared_feed_forward_length").whole(config["intermediate_size"])
    return granite_factors(file, config) | {"intermediate_size": width}


def _lfm_2(file: GgufFile, config: Config) -> Config:
    heads = file.of_layers("attention.head_count_kv")
    return {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": [FULL if count else CONVOLUTION for count in heads],
        "conv_L_cache": file.of_model("shortconv.l_cache").whole(least=2),
        "block_auto_adjust_ff_dim": False,
        "tie_embedding": config["tie_word_embeddings"],
    }


def _lfm_2_moe(file: GgufFile, config: Config) -> Config:
    check_gated(file)
    own = _lfm_2(file, config) | chosen_experts(file)
    return own | {
        "num_experts": file.of_model("expert_count").whole(),
        "moe_intermediate_size": file.of_model("expert_feed_forward_length").whole(),
        "num_dense_layers": file.of_model("leading_dense_block_count").whole(0, least=0),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in file.tensors),
    }


_OWN: dict[str, Callable[[GgufFile, Config], Config]] = {
    **dict.fromkeys(ARCHITECTURES, _nothing),
    "llama": _llama,
    "mistral": _llama,
    "qwen3moe": _qwen3_moe,
    "qwen2vl": _beside_pictures,
    "qwen3vl": _beside_pictures,
    "qwen3vlmoe": _qwen_3_vl_moe,
    "gemma2": _gemma_2,
    "gemma3": _gemma_3,
    "gemma3n": _gemma_3n,
    "gemma4": _gemma_4,
    "phi3": _phi_3,
    "minicpm3": _minicpm_3,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "glm4moe": _glm_4_moe,
    "cohere2": _cohere_2,
    "lfm2": _lfm_2,
    "lfm2moe": _lfm_2_moe,
    **gguf_hybrids.OWN,
}
"""The keys that each architecture adds to the common ones, or puts in their place."""
