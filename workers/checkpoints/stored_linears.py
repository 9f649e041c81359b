"""Describes how a checkpoint stores its linears and its embedding: which are quantised how, and which are not.

Reads headers only. `manta check` prints it.
"""

from __future__ import annotations

import collections
import re
from typing import NamedTuple

from manta.workers.checkpoints.checkpoint import Checkpoint
from manta.workers.checkpoints.linear_reader import GGUF, LinearReader
from manta.workers.models.model_config import WeightFormat
from manta.workers.models.specs import DecoderSpec
from manta.workers.models.weight_specs import WeightPart

_OF_FLOATS = ("float8", "mxfp4", "deepseek_fp4")
"""Readers of formats whose numbers are no integers."""
_IN_LAYER = re.compile(r"^model\.layers\.\d+\.(.+)$")


class StoredLinears(NamedTuple):
    """The names of matrices, as in the checkpoint. The embedding is one of them."""

    quantized: dict[str, list[str]]
    """Names by form, such as `4 bits in groups of 128` or a GGUF type; the most frequent form first."""
    unquantized: list[str]
    num_layers: int

    def describe_quantized(self) -> str:
        """Returns the number of matrices of each form, and the names in all forms but the most frequent one."""
        (form, names), *others = self.quantized.items()
        rest = [f"{len(each)} of {other} ({self._places(each)})" for other, each in others]
        return ", ".join([f"{len(names)} matrices of {form}", *rest])

    def describe_unquantized(self) -> str:
        return self._places(self.unquantized)

    def _places(self, names: list[str]) -> str:
        """Returns names without their layers, such as `lm_head, mlp.down_proj in 2 of 24 layers`."""
        matches = [_IN_LAYER.match(name) for name in names]
        alone = [name for name, match in zip(names, matches, strict=True) if match is None]
        layers = collections.Counter(match[1] for match in matches if match is not None)
        return ", ".join(
            [*alone, *(f"{part} in {count} of {self.num_layers} layers" for part, count in layers.items())]
        )


def stored_linears(reader: LinearReader, spec: DecoderSpec) -> StoredLinears:
    """Describes the parts of all linears. Raises `ModelError` like `LinearReader.format_of`."""
    quantized: dict[str, list[str]] = collections.defaultdict(list)
    unquantized: list[str] = []
    parts = (spec.embedding, *(part for linear in spec.linears() for part in linear.parts))
    for part in dict.fromkeys(map(reader.as_stored, parts)):
        format_ = reader.format_of(part)
        if format_ is None:
            unquantized.append(part.name)
        else:
            quantized[_form(reader.checkpoint, part, format_)].append(part.name)
    by_frequency = sorted(quantized.items(), key=lambda item: -len(item[1]))
    return StoredLinears(dict(by_frequency), unquantized, len(spec.layers))


def _form(checkpoint: Checkpoint, part: WeightPart, format_: WeightFormat) -> str:
    if format_ is GGUF:
        return checkpoint.kind_of(f"{part.name}.weight")
    kind = f"{format_.bits}-bit floats" if format_.reader in _OF_FLOATS else f"{format_.bits} bits"
    activations = ", made for activations of 8 bits" if format_.has_int8_activations else ""
    return f"{kind} {_scales(checkpoint, part, format_)}{activations}"


def _scales(checkpoint: Checkpoint, part: WeightPart, format_: WeightFormat) -> str:
    if format_.block is not None:
        return "in blocks of {} x {}".format(*format_.block)
    if format_.group_size is not None:
        return f"in groups of {format_.group_size}"
    scales = (f"{part.name}.{suffix}" for suffix in ("weight_scale", "weight_scale_inv"))
    has_one = any(name in checkpoint and set(checkpoint.shape_of(name)) <= {1} for name in scales)
    return "with one scale" if has_one else "by output"
