"""Mixtures of experts that are large enough for the memory of their weights to be measured, with random weights."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import safetensors.torch
import torch

from tests.checkpoints import make_tokenizer

Tensors = dict[str, torch.Tensor]
FP8_BLOCK = 128
GROUP = 32


class Sizes(NamedTuple):
    layers: int
    experts: int
    hidden: int = 512
    inner: int = 256

    @property
    def of_experts(self) -> int:
        """The number of weights of all experts."""
        return self.layers * self.experts * 3 * self.hidden * self.inner

    @property
    def of_others(self) -> int:
        """The number of weights of attention and of the head."""
        return self.layers * 4 * _HEADS * _HEAD_DIM * self.hidden + _COMMON["vocab_size"] * self.hidden


_HEADS, _HEAD_DIM = 4, 64
_COMMON: dict[str, Any] = {
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "head_dim": _HEAD_DIM,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}


def _floats(*shape: int) -> torch.Tensor:
    """Returns numbers of about 0.01, made fast."""
    return torch.randint(0x3B00, 0x3D00, shape, dtype=torch.int16).view(torch.bfloat16)


def _bytes(*shape: int, least: int = 0, end: int = 256) -> torch.Tensor:
    return torch.randint(least, end, shape, dtype=torch.uint8)


def _attention(prefix: str, hidden: int) -> Tensors:
    inner = _HEADS * _HEAD_DIM
    found = {f"{prefix}.self_attn.{each}_proj.weight": _floats(inner, hidden) for each in "qkv"}
    norms = {f"{prefix}.{each}.weight": _floats(hidden) for each in ("input_layernorm", "post_attention_layernorm")}
    return found | norms | {f"{prefix}.self_attn.o_proj.weight": _floats(hidden, inner)}


Expert = Callable[[str, int, int], Tensors]
"""The name of an expert's linear, its outputs and its inputs, to its tensors."""


def dense(name: str, outputs: int, inputs: int) -> Tensors:
    return {f"{name}.weight": _floats(outputs, inputs)}


def in_fp8_blocks(name: str, outputs: int, inputs: int) -> Tensors:
    blocks = -(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK)
    weight = _bytes(outputs, inputs, end=0x40).view(torch.float8_e4m3fn)
    return {f"{name}.weight": weight, f"{name}.weight_scale_inv": torch.rand(blocks)}


def in_awq(name: str, outputs: int, inputs: int) -> Tensors:
    def words(rows: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, (rows, outputs // 8), dtype=torch.int32)

    scales = torch.rand(inputs // GROUP, outputs).half()
    return {f"{name}.qweight": words(inputs), f"{name}.qzeros": words(inputs // GROUP), f"{name}.scales": scales}


def qwen3_moe(sizes: Sizes, expert: Expert = dense, quantization: dict[str, Any] | None = None) -> tuple[dict, Tensors]:
    """Experts that are stored one by one."""
    config = _COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "moe_intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_experts": sizes.experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if quantization is not None:
        config["quantization_config"] = quantization
    tensors = _ends(sizes.hidden)
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}"
        tensors |= _attention(prefix, sizes.hidden)
        tensors |= {f"{prefix}.self_attn.{each}_norm.weight": _floats(_HEAD_DIM) for each in "qk"}
        tensors[f"{prefix}.mlp.gate.weight"] = _floats(sizes.experts, sizes.hidden)
        for number in range(sizes.experts):
            own = f"{prefix}.mlp.experts.{number}"
            for each in ("gate_proj", "up_proj"):
                tensors |= expert(f"{own}.{each}", sizes.inner, sizes.hidden)
            tensors |= expert(f"{own}.down_proj", sizes.hidden, sizes.inner)
    return config, tensors


def gpt_oss(sizes: Sizes, *, is_mxfp4: bool) -> tuple[dict, Tensors]:
    """Experts of a layer in one tensor: transposed in bfloat16, or in blocks."""
    config = _COMMON | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_local_experts": sizes.experts,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "layer_types": ["full_attention"] * sizes.layers,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    if is_mxfp4:
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    tensors = _ends(sizes.hidden)
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}"
        tensors |= _attention(prefix, sizes.hidden)
        tensors |= {f"{prefix}.self_attn.{each}_proj.bias": _floats(_HEADS * _HEAD_DIM) for each in "qkv"}
        tensors |= {f"{prefix}.self_attn.o_proj.bias": _floats(sizes.hidden)}
        tensors |= {f"{prefix}.self_attn.sinks": _floats(_HEADS)}
        tensors |= {f"{prefix}.mlp.router.weight": _floats(sizes.experts, sizes.hidden)}
        tensors |= {f"{prefix}.mlp.router.bias": _floats(sizes.experts)}
        for each, outputs, inputs in (
            ("gate_up_proj", 2 * sizes.inner, sizes.hidden),
            ("down_proj", sizes.hidden, sizes.inner),
        ):
            name = f"{prefix}.mlp.experts.{each}"
            tensors[f"{name}_bias"] = _floats(sizes.experts, outputs)
            if is_mxfp4:
                groups = inputs // GROUP
                tensors[f"{name}_blocks"] = _bytes(sizes.experts, outputs, groups, GROUP // 2)
                tensors[f"{name}_scales"] = _bytes(sizes.experts, outputs, groups, least=119, end=123)
            else:
                tensors[name] = _floats(sizes.experts, inputs, outputs)
    return config, tensors


def _ends(hidden: int) -> Tensors:
    vocabulary = {
        f"{name}.weight": _floats(_COMMON["vocab_size"], hidden) for name in ("model.embed_tokens", "lm_head")
    }
    return vocabulary | {"model.norm.weight": _floats(hidden)}


def write(folder: pathlib.Path, config: dict[str, Any], tensors: Tensors) -> pathlib.Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    make_tokenizer(folder)
    return folder
