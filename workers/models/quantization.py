"""Reads `quantization_config`: the formats of a checkpoint's linears as rules.

Plain data; imports no framework. The checkpoint's tensors have the last word: a linear that has only a floating-point
`weight` is unquantised, whatever the rules say.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from manta.workers.models.model_config import ModelError, Quantization, QuantizationRule, WeightFormat

EVERYTHING = ""
"""The pattern that matches every name."""
_SERVED = "compressed-tensors, fp8, gptq and awq checkpoints are served, GGUF files, and unquantised checkpoints"
_EXPERTS_ONLY = "mxfp4 is used for experts only, and experts are not served yet; use another checkpoint of the model"
_COMPRESSED = {
    "int-quantized": "int",
    "naive-quantized": "int",
    "pack-quantized": "packed",
    "float-quantized": "float8",
    "mxfp4-pack-quantized": "mxfp4",
}
"""The reader for each format of compressed-tensors."""


def read_quantization(raw: Any) -> Quantization:
    """Reads a `quantization_config`. Raises `ModelError` for a method, format or number of bits that is not served."""
    if not isinstance(raw, dict):
        raise ModelError(f"quantization_config must be an object with quant_method, not {raw!r}; {_SERVED}")
    method = str(raw.get("quant_method", "unnamed"))
    if method == "mxfp4":
        raise ModelError(_EXPERTS_ONLY)
    read = _METHODS.get(method)
    if read is None:
        raise ModelError(f"{method} quantisation is not served; {_SERVED}")
    return Quantization(method=method, rules=tuple(read(raw)))


def _read_compressed_tensors(raw: dict[str, Any]) -> list[QuantizationRule]:
    transforms, sparsity = raw.get("transform_config") or {}, raw.get("sparsity_config") or {}
    for name, is_used in (
        ("transform_config", bool(transforms.get("config_groups"))),
        ("sparsity_config", bool(sparsity) and sparsity.get("format") != "dense"),
    ):
        if is_used:
            raise ModelError(f"{name} of compressed-tensors is not served; save the checkpoint without it")
    rules = [QuantizationRule(pattern=_target(name)) for name in raw.get("ignore") or []]
    groups = raw.get("config_groups") or {}
    if not groups:
        raise ModelError("quantization_config of compressed-tensors names no config_groups, so nothing is quantised")
    named: list[QuantizationRule] = []
    classes: list[QuantizationRule] = []
    for group in groups.values():
        format_ = _compressed_format(group, group.get("format") or raw.get("format") or "")
        for target in _targets(group):
            rule = QuantizationRule(pattern=_target(target), format=format_)
            (classes if rule.pattern == EVERYTHING else named).append(rule)
    return rules + named + classes


def _compressed_format(group: dict[str, Any], name: str) -> WeightFormat:
    weights = group.get("weights")
    if not weights:
        raise ModelError("a config_group of compressed-tensors quantises activations only; it must quantise weights")
    reader = _COMPRESSED.get(name)
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    if reader is None:
        raise ModelError(f"format {name!r} of compressed-tensors is not served; {', '.join(_COMPRESSED)} are")
    if name == "naive-quantized" and kind == "float":
        reader = "float8"
    if reader in ("int", "packed") and kind == "int":
        _bits("compressed-tensors", bits, (8,) if reader == "int" else (4, 8))
    elif (reader, kind, bits) not in (("float8", "float", 8), ("mxfp4", "float", 4)):
        raise ModelError(f"{name} of compressed-tensors with {bits} bits of type {kind} is not served")
    activations = group.get("input_activations") or {}
    group_size = _group_size(weights.get("group_size")) if strategy in ("group", "tensor_group") else None
    block = tuple(weights["block_structure"]) if strategy == "block" else None
    if reader == "float8" and group_size is not None:
        block, group_size = (1, group_size), None
    return WeightFormat(
        reader=reader,
        bits=bits,
        group_size=group_size,
        block=block,
        is_symmetric=bool(weights.get("symmetric", True)),
        has_int8_activations=kind == "int"
        and activations.get("num_bits") == 8
        and activations.get("type", "int") == "int"
        and bool(activations.get("dynamic")),
        has_float8_activations=activations.get("num_bits") == 8 and activations.get("type") == "float",
    )


def _targets(group: dict[str, Any]) -> list[str]:
    targets = group.get("targets")
    if not targets or not isinstance(targets, list):
        raise ModelError(
            f"targets of a config_group of compressed-tensors must be a list of layers, not {targets!r}; "
            'name them, or all by ["Linear"]'
        )
    return targets


def _target(name: str) -> str:
    """Returns the pattern of a target: `re:EXPRESSION`, the class of all linears, or the name of one."""
    if name.startswith("re:"):
        return f"^(?:{name[3:]})"
    return EVERYTHING if name in ("Linear", "LinearBase") else f"^{re.escape(name)}$"


def _read_fp8(raw: dict[str, Any]) -> list[QuantizationRule]:
    kind = raw.get("fmt") or "e4m3"
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(f"fp8 of format {kind!r} is not served; e4m3 is")
    block = raw.get("weight_block_size")
    format_ = WeightFormat(reader="float8", block=tuple(block) if block else None, has_float8_activations=True)
    return [*_unconverted(raw), QuantizationRule(pattern=EVERYTHING, format=format_)]


def _read_awq(raw: dict[str, Any]) -> list[QuantizationRule]:
    version = str(raw.get("version", "gemm")).lower()
    if version != "gemm":
        raise ModelError(f"version {version!r} of awq is not served; gemm is")
    format_ = WeightFormat(
        reader="awq",
        bits=_bits("awq", raw.get("bits", raw.get("w_bit")), (4,)),
        group_size=_group_size(raw.get("group_size", raw.get("q_group_size"))),
        is_symmetric=not raw.get("zero_point", True),
    )
    return [*_unconverted(raw), QuantizationRule(pattern=EVERYTHING, format=format_)]


def _read_gptq(raw: dict[str, Any]) -> list[QuantizationRule]:
    bits, layout = _bits("gptq", raw.get("bits"), (4, 8)), raw.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise ModelError(f"checkpoint_format {layout!r} of gptq is not served; gptq and gptq_v2 are")
    usual = WeightFormat(
        reader="gptq",
        bits=bits,
        group_size=_group_size(raw.get("group_size")),
        is_symmetric=bool(raw.get("sym", True)),
        zero_point_shift=0 if layout == "gptq_v2" else 1,
    )
    rules = _unconverted(raw)
    for pattern, changes in (raw.get("dynamic") or {}).items():
        sign, _, expression = pattern.partition(":") if pattern[:2] in ("+:", "-:") else ("+", "", pattern)
        if sign == "-":
            rules.append(QuantizationRule(pattern=f"^(?:{expression})"))
            continue
        changed = msgspec.structs.replace(
            usual,
            bits=_bits("gptq", changes.get("bits", usual.bits), (4, 8)),
            group_size=_group_size(changes["group_size"]) if "group_size" in changes else usual.group_size,
            is_symmetric=changes.get("sym", usual.is_symmetric),
        )
        rules.append(QuantizationRule(pattern=f"^(?:{expression})", format=changed))
    return [*rules, QuantizationRule(pattern=EVERYTHING, format=usual)]


def _read_gguf(raw: dict[str, Any]) -> list[QuantizationRule]:
    """Returns no rules, because each tensor of a GGUF file has a type of its own."""
    return []


_METHODS: dict[str, Callable[[dict[str, Any]], list[QuantizationRule]]] = {
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "gguf": _read_gguf,
}


def _unconverted(raw: dict[str, Any]) -> list[QuantizationRule]:
    """Returns the rules for the layers in `modules_to_not_convert`, each a name or consecutive parts of names."""
    names = raw.get("modules_to_not_convert") or raw.get("ignored_layers") or []
    return [QuantizationRule(pattern=rf"(?:^|\.){re.escape(name.strip('.'))}(?:\.|$)") for name in names]


def _bits(method: str, bits: Any, served: tuple[int, ...]) -> int:
    if bits not in served:
        raise ModelError(f"{method} weights of {bits!r} bits are not served; {' and '.join(map(str, served))} bits are")
    return int(bits)


def _group_size(size: Any) -> int | None:
    """Returns the number of inputs that share a scale; None if all inputs of an output do (-1)."""
    if size in (-1, None):
        return None
    if not isinstance(size, int) or size < 1:
        raise ModelError(f"group_size of quantization_config must be a positive integer or -1, not {size!r}")
    return size
