"""Reads `quantization_config`: the formats of a checkpoint's linears as rules.

Plain data; imports no framework. The checkpoint's tensors have the last word: a linear that has only a floating-point
`weight` is unquantised, whatever the rules say.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from manta.workers.models.model_config import Quantization, QuantizationRule, WeightFormat
from manta.workers.models.raw_config import RawConfig, RawValue

EVERYTHING = ""
"""The pattern that matches every name."""
_COMPRESSED = {
    "int-quantized": "int",
    "naive-quantized": "int",
    "pack-quantized": "packed",
    "float-quantized": "float8",
    "mxfp4-pack-quantized": "mxfp4",
}
"""The reader for each format of compressed-tensors."""
_COMPRESSED_BITS = {"int": (8,), "packed": (4, 8), "float8": (8,), "mxfp4": (4,)}
"""The numbers of bits that each of these readers reads."""
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
"""The parts of a weight that share a scale, in compressed-tensors' words."""


def read_quantization(raw: RawConfig) -> Quantization:
    """Reads a `quantization_config`. Raises `ConfigError` for a method, format or number of bits that is not served."""
    method = raw["quant_method"]
    name = method.one_of(*_METHODS)
    return Quantization(method=name, rules=tuple(_METHODS[name](raw)))


def _read_compressed_tensors(raw: RawConfig) -> list[QuantizationRule]:
    if len(raw["transform_config"].object()["config_groups"].object()):
        raise raw["transform_config"].refused("left out (save the checkpoint without it)")
    if len(sparsity := raw["sparsity_config"].object()):
        sparsity["format"].one_of("dense")
    raw.ignore("format")  # that of a group wins
    rules = [QuantizationRule(pattern=_target(name)) for name in _listed(raw["ignore"])]
    groups = raw["config_groups"].object()
    if not len(groups):
        raise raw["config_groups"].refused("an object with a group; without one nothing is quantised")
    named: list[QuantizationRule] = []
    classes: list[QuantizationRule] = []
    for key in groups:
        group = groups[key].object()
        format_ = _compressed_format(group, group["format"] if group["format"].value else raw["format"])
        for target in _listed(group["targets"], must=True):
            rule = QuantizationRule(pattern=_target(target), format=format_)
            (classes if rule.pattern == EVERYTHING else named).append(rule)
    return rules + named + classes


def _compressed_format(group: RawConfig, name: RawValue) -> WeightFormat:
    weights, activations = group["weights"].object(), group["input_activations"].object()
    if len(group["output_activations"].object()):
        raise group["output_activations"].refused("left out; rounded outputs of linears are not served")
    if not len(weights):
        raise group["weights"].refused("an object; a checkpoint that quantises activations only is not served")
    reader = _COMPRESSED[name.one_of(*_COMPRESSED)]
    kind = weights["type"].one_of("int", "float", default="int")
    if name.value == "naive-quantized" and kind == "float":
        reader = "float8"
    weights["type"].one_of("float" if reader in ("float8", "mxfp4") else "int", default="int")
    bits = _bits(weights["num_bits"], *_COMPRESSED_BITS[reader])
    strategy = weights["strategy"].one_of(*_STRATEGIES, default="tensor")
    group_size = _group_size(weights["group_size"]) if strategy in ("group", "tensor_group") else None
    block = _block(weights["block_structure"]) if strategy == "block" else None
    if reader == "float8" and group_size is not None:
        block, group_size = (1, group_size), None
    rounds_to_8 = activations["num_bits"].whole(16) == 8
    rounded = activations["type"].one_of("int", "float", default="int")
    return WeightFormat(
        reader=reader,
        bits=bits,
        group_size=group_size,
        block=block,
        is_symmetric=weights["symmetric"].flag(True),
        has_int8_activations=kind == "int" and rounds_to_8 and rounded == "int" and _is_dynamic(activations["dynamic"]),
        has_float8_activations=rounds_to_8 and rounded == "float",
    )


def _is_dynamic(value: RawValue) -> bool:
    """Returns whether scales of activations are computed at each step: `true`, or `local` for some of them."""
    return value.value == "local" or value.flag(False)


def _listed(names: RawValue, must: bool = False) -> list[RawValue]:
    """Returns the names of a list of layers. If it `must`, it has one."""
    found = [] if names.value is None else list(names.items())
    if must and not found:
        raise names.refused('a list of layers; name them, or all by ["Linear"]')
    return found


def _target(value: RawValue) -> str:
    """Returns the pattern of a target: `re:EXPRESSION`, the class of all linears, or the name of one."""
    name = value.text()
    if name.startswith("re:"):
        return value.pattern(f"^(?:{name[3:]})")
    return EVERYTHING if name in ("Linear", "LinearBase") else f"^{re.escape(name)}$"


def _read_fp8(raw: RawConfig) -> list[QuantizationRule]:
    raw["fmt"].one_of("e4m3", "float8_e4m3fn", default="e4m3")
    size = raw["weight_block_size"]
    block = None if size.value is None else _block(size)
    format_ = WeightFormat(reader="float8", block=block, has_float8_activations=True)
    return [*_unconverted(raw), QuantizationRule(pattern=EVERYTHING, format=format_)]


def _read_awq(raw: RawConfig) -> list[QuantizationRule]:
    raw.ignore("sym")  # transformers writes that of GPTQ, and `zero_point` decides
    version = raw.first_of("version", "format")
    if version.text("gemm").lower() != "gemm":
        raise version.refused("gemm")
    format_ = WeightFormat(
        reader="awq",
        bits=_bits(raw.first_of("bits", "w_bit"), 4),
        group_size=_group_size(raw.first_of("group_size", "q_group_size")),
        is_symmetric=not raw["zero_point"].flag(True),
    )
    return [*_unconverted(raw), QuantizationRule(pattern=EVERYTHING, format=format_)]


def _read_gptq(raw: RawConfig) -> list[QuantizationRule]:
    layout = raw.first_of("checkpoint_format", "format").one_of("gptq", "gptq_v2", default="gptq")
    usual = WeightFormat(
        reader="gptq",
        bits=_bits(raw["bits"], 4, 8),
        group_size=_group_size(raw["group_size"]),
        is_symmetric=raw["sym"].flag(True),
        zero_point_shift=0 if layout == "gptq_v2" else 1,
    )
    rules, dynamic = _unconverted(raw), raw["dynamic"].object()
    for key in dynamic:
        sign, _, expression = key.partition(":") if key[:2] in ("+:", "-:") else ("+", "", key)
        pattern, changes = dynamic[key].pattern(f"^(?:{expression})"), dynamic[key].object()
        if sign == "-":
            rules.append(QuantizationRule(pattern=pattern))
            continue
        changed = msgspec.structs.replace(
            usual,
            bits=_bits(changes["bits"], 4, 8) if "bits" in changes else usual.bits,
            group_size=_group_size(changes["group_size"]) if "group_size" in changes else usual.group_size,
            is_symmetric=changes["sym"].flag(usual.is_symmetric),
        )
        rules.append(QuantizationRule(pattern=pattern, format=changed))
    return [*rules, QuantizationRule(pattern=EVERYTHING, format=usual)]


def _read_gguf(raw: RawConfig) -> list[QuantizationRule]:
    """Returns no rules, because each tensor of a GGUF file has a type of its own."""
    return []


def _read_mxfp4(raw: RawConfig) -> list[QuantizationRule]:
    """Returns the rule for experts, which are all that gpt-oss's checkpoints quantise."""
    format_ = WeightFormat(reader="mxfp4_experts", bits=4, group_size=32)
    return [*_unconverted(raw), QuantizationRule(pattern=r"\.experts\.", format=format_)]


_METHODS: dict[str, Callable[[RawConfig], list[QuantizationRule]]] = {
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "gguf": _read_gguf,
    "mxfp4": _read_mxfp4,
}


def _unconverted(raw: RawConfig) -> list[QuantizationRule]:
    """Returns the rules for the layers in `modules_to_not_convert`, each a name or consecutive parts of names."""
    names = raw.first_of("modules_to_not_convert", "ignored_layers").texts()
    return [QuantizationRule(pattern=rf"(?:^|\.){re.escape(name.strip('.'))}(?:\.|$)") for name in names]


def _bits(value: RawValue, *served: int) -> int:
    if value.value not in served or isinstance(value.value, bool):
        raise value.refused(" or ".join(map(str, served)))
    return int(value.value)


def _group_size(size: RawValue) -> int | None:
    """Returns the number of inputs that share a scale; None if all inputs of an output do (-1)."""
    return None if size.value in (-1, None) else size.whole()


def _block(size: RawValue) -> tuple[int, int]:
    """Returns the numbers of outputs and inputs of a block."""
    sizes = size.wholes()
    if len(sizes) != 2:
        raise size.refused("a list of two integers")
    return sizes[0], sizes[1]
