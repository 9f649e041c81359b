"""Quantises the linears of a tiny checkpoint, and writes beside it the checkpoint that the numbers stand for.

compressed-tensors' formats are written by the package itself. GPTQ and AWQ have no package for a CPU: they are written
here as their tools do (GPTQModel's `pack_original`, AutoAWQ's `WQLinear_GEMM`), each from numbers known before packing.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import safetensors.torch
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

GROUP = 32


class Stored(NamedTuple):
    """One linear: its tensors by suffix, and the weight that they stand for, float32 [out_features, in_features]."""

    tensors: dict[str, torch.Tensor]
    weight: torch.Tensor


Quantise = Callable[[str, torch.Tensor], Stored | None]
"""The name of a linear and its weight to how it is stored; None leaves it as it is."""


def quantised_pair(
    folder: pathlib.Path, at: pathlib.Path, quantise: Quantise, config: dict[str, Any]
) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes the checkpoint of `folder` quantised, with this `quantization_config`, and dequantised; returns both."""
    quantised, dense = at / "quantised", at / "dense"
    shutil.copytree(folder, dense)
    meant = write_quantised(folder, quantised, quantise, config)
    safetensors.torch.save_file(meant, dense / "model.safetensors", {"format": "pt"})
    return quantised, dense


def write_quantised(
    folder: pathlib.Path, quantised: pathlib.Path, quantise: Quantise, config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Writes the checkpoint of `folder` with this `quantization_config`; returns what its tensors stand for."""
    shutil.copytree(folder, quantised, dirs_exist_ok=True)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    stored, meant = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        part = name.removesuffix(".weight")
        done = quantise(part, weight.float()) if part.endswith(("_proj", "lm_head")) and weight.dim() == 2 else None
        if done is not None:
            del stored[name]
            stored |= {f"{part}.{suffix}": tensor.contiguous() for suffix, tensor in done.tensors.items()}
            meant[name] = done.weight.contiguous()
    assert stored.keys() != tensors.keys() or any(tensors[name].dtype != stored[name].dtype for name in tensors)
    safetensors.torch.save_file(stored, quantised / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return meant


def of_layers(quantise: Callable[[torch.Tensor], Stored]) -> Quantise:
    """Quantises every linear but the head."""
    return lambda name, weight: None if name == "lm_head" else quantise(weight)


# ---- compressed-tensors ----------------------------------------------------------------------------------------------


def compressed(format_: str, scheme: QuantizationScheme) -> Callable[[torch.Tensor], Stored]:
    """Stores a weight by the package's own compressor; what it stands for is what its decompressor returns."""
    compressor, args = BaseCompressor.get_value_from_registry(format_), scheme.weights

    def quantise(weight: torch.Tensor) -> Stored:
        scales, zero_points = _parameters(weight, args)
        state = {"weight": weight, "weight_scale": scales}
        if not args.symmetric:
            state["weight_zero_point"] = zero_points.to(torch.int8)
        tensors = compressor.compress(state, scheme)
        return Stored(tensors, compressor.decompress(tensors, scheme)["weight"].float())

    return quantise


def _parameters(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points from the least and the largest number of each tensor, output, group or block."""
    if args.strategy == "tensor":
        groups = weight.reshape(1, -1)
    elif args.strategy == "block":
        rows, columns = args.block_structure
        blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        groups = blocks.transpose(1, 2).flatten(2)
    elif args.strategy == "group":
        groups = weight.unflatten(1, (-1, args.group_size))
    else:
        groups = weight[:, None]
    scales, zero_points = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    return (scales.view(1), zero_points.view(1)) if args.strategy == "tensor" else (scales, zero_points)


def compressed_config(
    format_: str, scheme: QuantizationScheme, ignore: tuple[str, ...] = ("lm_head",)
) -> dict[str, Any]:
    group = json.loads(scheme.model_dump_json()) | {"targets": ["Linear"], "format": format_}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


def scheme(activations: dict[str, Any] | None = None, **weights: Any) -> QuantizationScheme:
    inputs = None if activations is None else QuantizationArgs(**activations)
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=inputs)


# ---- integers in groups ----------------------------------------------------------------------------------------------


class Integers(NamedTuple):
    """Unsigned numbers [out, in], scales and zero points [out, num_groups], and the group of each input."""

    numbers: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor
    groups: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        return (self.numbers - self.zero_points[:, self.groups]) * self.scales[:, self.groups]


def integers(weight: torch.Tensor, bits: int, symmetric: bool, order_seed: int | None = None) -> Integers:
    """`order_seed` puts inputs into groups at random, as act-order does."""
    in_features = weight.shape[1]
    groups = torch.arange(in_features) // GROUP
    if order_seed is not None:
        groups = groups[torch.randperm(in_features, generator=torch.Generator().manual_seed(order_seed))]
    grouped = [weight[:, groups == each] for each in range(-(-in_features // GROUP))]
    least = torch.stack([group.amin(1) for group in grouped], dim=1).clamp(max=0)
    largest = torch.stack([group.amax(1) for group in grouped], dim=1).clamp(min=0)
    most, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scales = (2 * torch.maximum(-least, largest) / most).half().float()
        zero_points = torch.full_like(scales, middle)
    else:
        scales = ((largest - least) / most).half().float()
        zero_points = (-least / scales).round().clamp(0, most)
    numbers = (weight / scales[:, groups] + zero_points[:, groups]).round().clamp(0, most)
    return Integers(numbers, scales, zero_points, groups)


def _packed_rows(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[rows, columns] -> int32 words [rows / (32 / bits), columns]; number `order[i]` of a word has its i-th bits."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    words = torch.zeros((numbers.shape[0] // per_word, numbers.shape[1]), dtype=torch.int64)
    for place in range(per_word):
        words |= numbers[order[place] :: per_word].long() << (bits * place)
    return words.to(torch.int32)


def packed_in_act_order(weight: torch.Tensor) -> Stored:
    """compressed-tensors' 4 bits with the group of each input; the package packs, and chooses no order itself."""
    made = integers(weight, 4, symmetric=False, order_seed=7)
    tensors = {
        "weight_packed": pack_to_int32((made.numbers - 8).to(torch.int8), 4),
        "weight_zero_point": pack_to_int32((made.zero_points - 8).to(torch.int8), 4, packed_dim=0),
        "weight_scale": made.scales,
        "weight_shape": torch.tensor(weight.shape),
        "weight_g_idx": made.groups.int(),
    }
    return Stored(tensors, made.weight)


def gptq(
    bits: int, symmetric: bool, act_order: int | None = None, version: int = 1
) -> Callable[[torch.Tensor], Stored]:
    """As GPTQModel packs; version 1 subtracts 1 from the zero points' words."""

    def quantise(weight: torch.Tensor) -> Stored:
        made = integers(weight, bits, symmetric, act_order)
        qzeros = _packed_rows(made.zero_points, bits).T
        if version == 1:
            qzeros = (qzeros.long() - sum(1 << place for place in range(0, 32, bits))).to(torch.int32)
        tensors = {
            "qweight": _packed_rows(made.numbers.T, bits),
            "qzeros": qzeros,
            "scales": made.scales.T.half(),
            "g_idx": made.groups.int(),
        }
        return Stored(tensors, made.weight)

    return quantise


def gptq_config(bits: int, symmetric: bool, act_order: bool = False, version: int = 1) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "sym": symmetric,
        "desc_act": act_order,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }


_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(weight: torch.Tensor) -> Stored:
    made = integers(weight, 4, symmetric=False)
    tensors = {
        "qweight": _packed_rows(made.numbers, 4, _AWQ_ORDER).T,
        "qzeros": _packed_rows(made.zero_points, 4, _AWQ_ORDER).T,
        "scales": made.scales.T.half(),
    }
    return Stored(tensors, made.weight)


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def fp8(block: tuple[int, int] | None) -> Callable[[torch.Tensor], Stored]:
    """As DeepSeek's and Qwen's checkpoints with blocks; else one scale for the weight."""

    def quantise(weight: torch.Tensor) -> Stored:
        rows, columns = block or tuple(weight.shape)
        num_rows, num_columns = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        scales = torch.zeros(num_rows, num_columns)
        for row in range(num_rows):
            for column in range(num_columns):
                part = weight[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
                scales[row, column] = part.abs().max() / 448
        spread = scales.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)[
            :, : weight.shape[1]
        ]
        numbers = (weight / spread).to(torch.float8_e4m3fn)
        stored = {"weight_scale_inv": scales} if block else {"weight_scale": scales.view(())}
        return Stored({"weight": numbers, **stored}, numbers.float() * spread)

    return quantise


def fp8_config(block: tuple[int, int] | None) -> dict[str, Any]:
    config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return config | ({"weight_block_size": list(block), "modules_to_not_convert": ["lm_head"]} if block else {})
