"""Reads the metadata of a GGUF file as a configuration in Hugging Face's terms.

The keys are llama.cpp's, https://github.com/ggml-org/ggml, `docs/gguf.md`. What llama.cpp derives from a model's size,
because no key says it, is derived here in the same way (`src/llama-model.cpp`).
"""

from __future__ import annotations

import math
import pathlib
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from manta.workers.checkpoints.gguf_architectures import ARCHITECTURES
from manta.workers.checkpoints.gguf_header import GgufArray, GgufTensor, read_gguf_array
from manta.workers.checkpoints.gguf_keys import judge_unread
from manta.workers.models.dense import FULL, MOST_LAYERS, SLIDING
from manta.workers.models.lfm2 import CONVOLUTION
from manta.workers.models.model_config import ModelError
from manta.workers.models.raw_config import RawConfig, RawValue

_FLOATS = ("F32", "F16", "BF16")
_ROUNDED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
_TYPES = (*_FLOATS, *_ROUNDED)
"""Types of tensors that are served. `formats/gguf_blocks.py` reads those that are rounded."""
_ROPE_DIVISORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
IN_CONFIG = (_ROPE_DIVISORS, _LONG_FACTORS, _SHORT_FACTORS)
"""Tensors that the configuration holds."""
_MOST_DIVISOR_BYTES = 2**20
_PARTLY_ROTATED = ("glm4", "glm4moe", "phi3")
"""Architectures of whose heads only the first dimensions may rotate."""
_CONVOLVING = ("lfm2", "lfm2moe")
"""Architectures whose layers without key heads are convolutions."""
_LARGE_GEMMA_2, _LARGE_GEMMA_3 = 46, 62
"""Numbers of layers of the Gemma models whose queries are scaled by the width of the model."""
_GATED = 2
"""llama.cpp's number for a router with sigmoids."""


class GgufFile(NamedTuple):
    """The headers of a model's files."""

    paths: tuple[pathlib.Path, ...]
    values: RawConfig
    """The metadata."""
    tensors: dict[str, GgufTensor]

    @property
    def path(self) -> pathlib.Path:
        """The file with the metadata."""
        return self.paths[0]

    @property
    def architecture(self) -> str:
        return self.values["general.architecture"].one_of(*ARCHITECTURES)

    def of_model(self, key: str) -> RawValue:
        """Returns a value under the architecture's prefix."""
        return self.values[f"{self.architecture}.{key}"]

    def ignore(self, *keys: str) -> None:
        """Notes that other values make these keys below the architecture's prefix meaningless."""
        self.values.ignore(*(f"{self.architecture}.{key}" for key in keys))

    def of_layers(self, key: str) -> list[int]:
        """Returns an integer of each layer. Raises `ConfigError` for a list of another length."""
        value, num_layers = self.of_model(key), self.of_model("block_count").whole(most=MOST_LAYERS)
        if not isinstance(value.value, GgufArray):
            return [value.whole(least=0)] * num_layers
        listed = read_gguf_array(self.path, value.value)
        if len(listed) != num_layers or not all(isinstance(each, int) and each >= 0 for each in listed):
            raise value.refused(f"a list of {num_layers} whole numbers, one for each layer")
        return listed

    def floats(self, name: str) -> list[float]:
        """Returns the values of a small float32 tensor."""
        kind, shape, start, num_bytes, file = self.tensors[name]
        if kind != "F32" or num_bytes > _MOST_DIVISOR_BYTES:
            raise ModelError(
                f"{self.path}: {name} is of type {kind} with {num_bytes} bytes; it must be F32 with at most "
                f"{_MOST_DIVISOR_BYTES}"
            )
        with self.paths[file].open("rb") as opened:
            opened.seek(start)
            return list(struct.unpack(f"<{math.prod(shape)}f", opened.read(num_bytes)))


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
    hidden_size = file.of_model("embedding_length").whole()
    num_heads = file.of_model("attention.head_count").whole(most=hidden_size)
    head_dim = file.of_model("attention.key_length").whole(hidden_size // num_heads)
    file.of_model("attention.value_length").whole(head_dim, least=head_dim, most=head_dim)
    least_rotary = 1 if file.architecture in _PARTLY_ROTATED else head_dim
    rotary_dim = file.of_model("rope.dimension_count").whole(head_dim, least=least_rotary, most=head_dim)
    if not (causal := file.of_model("attention.causal")).flag(True):
        raise causal.refused("left out or true")
    last_token = embedding.shape[0] - 1
    stops = [file.values[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")]
    stop_ids = [each.whole(least=0, most=last_token) for each in stops if each.value is not None]
    norm_eps = "layer_norm_epsilon" if file.architecture == "cohere2" else "layer_norm_rms_epsilon"
    return {
        "architectures": [ARCHITECTURES[file.architecture].model],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.of_model("feed_forward_length").whole(),
        "num_hidden_layers": file.of_model("block_count").whole(),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _key_heads(file),
        "head_dim": head_dim,
        "rms_norm_eps": file.of_model(f"attention.{norm_eps}").number(least=0, most=1),
        "max_position_embeddings": file.of_model("context_length").whole(),
        "rope_parameters": _rope(file)
        | ({"partial_rotary_factor": rotary_dim / head_dim} if file.architecture in _PARTLY_ROTATED else {}),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
        "dtype": _dtype({tensor.kind for tensor in file.tensors.values()}),
        "eos_token_id": list(dict.fromkeys(stop_ids)),
        "quantization_config": {"quant_method": "gguf"},
    }


def _key_heads(file: GgufFile) -> int:
    """Returns the number of key heads of all layers that have attention."""
    counts = {
        count for count in file.of_layers("attention.head_count_kv") if count or file.architecture not in _CONVOLVING
    }
    if len(counts) != 1 or 0 in counts:
        raise file.of_model("attention.head_count_kv").refused("the same number above 0 for all layers with attention")
    return counts.pop()


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

Config = dict[str, Any]


def _nothing(file: GgufFile, config: Config) -> Config:
    return {}


def _window(file: GgufFile, usual: int | None = None) -> int | None:
    """Returns the sliding window, None for none."""
    return file.of_model("attention.sliding_window").whole(usual or 0, least=0) or None


def _chosen_experts(file: GgufFile) -> Config:
    return {"num_experts_per_tok": file.of_model("expert_used_count").whole()}


def _llama(file: GgufFile, config: Config) -> Config:
    """Mistral's and Mixtral's files name this architecture too."""
    window, num_experts = _window(file), file.of_model("expert_count").whole(0, least=0)
    biases = {"mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}
    if num_experts:
        mixture = {"architectures": ["MixtralForCausalLM"], "num_local_experts": num_experts}
        return mixture | _chosen_experts(file) | {"sliding_window": window}
    if window:
        return biases | {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return biases


def _qwen3_moe(file: GgufFile, config: Config) -> Config:
    sizes = {
        "num_experts": file.of_model("expert_count").whole(),
        "moe_intermediate_size": file.of_model("expert_feed_forward_length").whole(),
    }
    return sizes | _chosen_experts(file) | {"norm_topk_prob": True}


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


def _phi_3(file: GgufFile, config: Config) -> Config:
    own: Config = {"sliding_window": _window(file)}
    original = file.of_model("rope.scaling.original_context_length").whole(config["max_position_embeddings"])
    attention_factor = file.of_model("rope.scaling.attn_factor")
    if _LONG_FACTORS not in file.tensors:
        return own
    factors = {"long_factor": file.floats(_LONG_FACTORS), "short_factor": file.floats(_SHORT_FACTORS)}
    rope = config["rope_parameters"] | {"rope_type": "longrope", **factors}
    if attention_factor.value is not None:
        rope |= {"attention_factor": attention_factor.number(least=0)}
    return own | {"rope_parameters": rope, "original_max_position_embeddings": original}


def _gpt_oss(file: GgufFile, config: Config) -> Config:
    return _chosen_experts(file) | {
        "num_local_experts": file.of_model("expert_count").whole(),
        "intermediate_size": file.of_model("expert_feed_forward_length").whole(config["intermediate_size"]),
        "sliding_window": _window(file, 128),
        "rope_parameters": config["rope_parameters"] | {"truncate": False},  # as published, and in no key
    }


def _granite(file: GgufFile, config: Config) -> Config:
    return {
        "attention_multiplier": file.of_model("attention.scale").number(config["head_dim"] ** -0.5),
        "embedding_multiplier": file.of_model("embedding_scale").number(1.0),
        "residual_multiplier": file.of_model("residual_scale").number(1.0),
        "logits_scaling": file.of_model("logit_scale").number(1.0),
        "mlp_bias": False,
    }


def _glm_4_moe(file: GgufFile, config: Config) -> Config:
    num_drafting = file.of_model("nextn_predict_layers").whole(0, least=0)
    router = file.of_model("expert_gating_func")
    router.whole(_GATED, least=_GATED, most=_GATED)
    return _chosen_experts(file) | {
        "num_hidden_layers": config["num_hidden_layers"] - num_drafting,
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


def _cohere_2(file: GgufFile, config: Config) -> Config:
    return {
        "layer_norm_eps": config["rms_norm_eps"],
        "logit_scale": file.of_model("logit_scale").number(1.0),
        "sliding_window": _window(file, 4096),
    }


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
    router = file.of_model("expert_gating_func")
    router.whole(_GATED, least=_GATED, most=_GATED)
    own = _lfm_2(file, config) | _chosen_experts(file)
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
    "gemma2": _gemma_2,
    "gemma3": _gemma_3,
    "phi3": _phi_3,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "glm4moe": _glm_4_moe,
    "cohere2": _cohere_2,
    "lfm2": _lfm_2,
    "lfm2moe": _lfm_2_moe,
}
"""The keys that each architecture adds to the common ones, or puts in their place."""
