"""Reads the weight of a linear in any form, unquantised or by one of the readers in `formats/`, and stacks its parts.

To add a format, let `workers/models/quantization.py` accept its `quantization_config` and add its reader to `READERS`.
Readers of integers return a `QuantizedWeight`, which every platform takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from manta.structured.host import give_back_freed_memory
from manta.workers.checkpoints.checkpoint import Checkpoint
from manta.workers.checkpoints.formats.awq import read_awq
from manta.workers.checkpoints.formats.compressed_tensors import read_int, read_mxfp4, read_packed
from manta.workers.checkpoints.formats.deepseek_fp4 import DEEPSEEK_FP4, PAIRS, read_deepseek_fp4
from manta.workers.checkpoints.formats.float8 import read_float8
from manta.workers.checkpoints.formats.gguf_blocks import BLOCK_TYPES, read_gguf, unpacked
from manta.workers.checkpoints.formats.gptq import read_gptq
from manta.workers.checkpoints.formats.mxfp4_experts import read_mxfp4_experts
from manta.workers.checkpoints.formats.stored_part import Reader, StoredPart, StoredTensors
from manta.workers.checkpoints.memory import FLOATING
from manta.workers.checkpoints.shard import Shard, in_order, scaled, take_piece
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.weights import LinearWeight
from manta.workers.models.model_config import ModelError, Quantization, WeightFormat
from manta.workers.models.weight_specs import LinearSpec, Split, TensorSpec, WeightPart

READERS: dict[str, Reader] = {
    "int": read_int,
    "packed": read_packed,
    "mxfp4": read_mxfp4,
    "float8": read_float8,
    "gptq": read_gptq,
    "awq": read_awq,
    "gguf": read_gguf,
    "mxfp4_experts": read_mxfp4_experts,
    "deepseek_fp4": read_deepseek_fp4,
}
"""The reader for each kind of `WeightFormat`."""
MXFP4_EXPERTS = WeightFormat(reader="mxfp4_experts", bits=4, group_size=32)
GGUF = WeightFormat(reader="gguf")
"""The format of every tensor with a GGUF type."""
_GIVEN_BACK_EACH = 1 << 22
"""Numbers of linears between two times that memory which readers have freed is given back. Packed weights lie between
its parts.
"""
_MARKS = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight")
"""Suffixes of tensors that only a quantised linear has. Each one has at least one of them."""


class LinearReader:
    """Reads this rank's share of one linear after another from a checkpoint. Its methods raise `ModelError` naming a
    tensor that is missing or does not fit.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shard: Shard | None,
        quantization: Quantization | None,
        dtype: torch.dtype,
        place_bias: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
        *,
        keeps_float8: bool = False,
        shapes_only: bool = False,
    ) -> None:
        """`dtype` is that of the activations. Without a `shard`, weights are read whole.

        With `keeps_float8`, E4M3 weights stay so where the checkpoint was made for activations that are rounded like
        them. With `shapes_only`, weights have no data, because another process has packed them.
        """
        self.checkpoint = checkpoint
        self._shard = shard
        self._quantization = quantization
        self._dtype = dtype
        self._place_bias = place_bias
        self._keeps_float8 = keeps_float8
        self._shapes_only = shapes_only
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._num_read = 0
        """Numbers of the linears since freed memory was given back."""

    def read(self, spec: LinearSpec, shapes_only: bool | None = None) -> LinearWeight:
        """Returns the weight of a linear. It is valid until the next one is read: it may view the file, or memory that
        is used again. `shapes_only` False gives a weight its data in any case.
        """
        if self._num_read >= _GIVEN_BACK_EACH:
            self._num_read = 0
            give_back_freed_memory()
        self._num_read += spec.out_features * spec.in_features
        shapes_only = self._shapes_only if shapes_only is None else shapes_only
        tensors = self.checkpoint.without_data() if shapes_only else self.checkpoint
        spec = self.stored(spec)
        formats = [self.format_of(part) for part in spec.parts]
        weight: QuantizedWeight | torch.Tensor
        if any(formats):
            parts = zip(spec.parts, formats, strict=True)
            weight = stack([self._part(part, form, spec, tensors) for part, form in parts], self._dtype)
        else:
            weight = self._stack_plain([self._plain(part, spec, tensors) for part in spec.parts])
        bias = self._bias(spec) if spec.has_bias else None
        if isinstance(weight, torch.Tensor):
            return LinearWeight(spec.name, weight, bias, self._dtype, spec.is_gated)
        shape = torch.empty(weight.values.shape, dtype=self._dtype, device="meta")
        return LinearWeight(spec.name, shape, bias, self._dtype, spec.is_gated, weight)

    def stored(self, spec: LinearSpec) -> LinearSpec:
        """Returns a linear with its parts as this checkpoint stores them."""
        return spec._replace(parts=tuple(map(self.as_stored, spec.parts)))

    def as_stored(self, part: WeightPart) -> WeightPart:
        """Returns the part as this checkpoint stores it."""
        other = part.elsewhere
        return other if other is not None and other.weight_name in self.checkpoint else part

    def read_table(self, part: WeightPart, width: int) -> QuantizedWeight | torch.Tensor:
        """Returns a lookup table: a view of the file [num_rows, width], or integers of a GGUF file."""
        format_ = GGUF if self.format_of(part) is GGUF else None
        if format_ is GGUF:
            self.checkpoint.expect_all(part.weight_name)
        return self._part(part, format_, LinearSpec((part,), width), self.checkpoint)

    def unpack_rows(self, part: WeightPart, width: int) -> Callable[[torch.Tensor], QuantizedWeight] | None:
        """Returns a function that unpacks rows of a lookup table by their numbers, from a view of the file; None if the
        table is no tensor of blocks.
        """
        if self.format_of(part) is not GGUF:
            return None
        blocks = self.checkpoint.blocks(part.weight_name, (part.stored_rows or part.out_features, width))
        rows, kind = self._taken(part, False, blocks), BLOCK_TYPES[self.checkpoint.kind_of(part.weight_name)]
        assert isinstance(rows, torch.Tensor)
        return lambda numbers: unpacked(kind, rows[numbers])

    def read_vector(self, name: str, size: int, split: Split) -> torch.Tensor:
        """Returns the rank's share of a tensor [size], as a view of the file."""
        return self.read_tensor(TensorSpec(name, (size,), split))

    def read_tensor(self, spec: TensorSpec) -> torch.Tensor:
        """Returns the rank's share of a tensor of any shape, split along its first dimension, as a view of the file."""
        rows, *others = spec.shape
        part = WeightPart(spec.name, rows, spec.split, first_row=spec.first_row, stored_rows=spec.stored_rows)
        shape = (spec.stored_rows or rows, *others)
        if spec.is_transposed:
            stored = self.checkpoint.view(spec.name, shape[::-1]).T
        else:
            stored = self.checkpoint.view(spec.name, spec.stored_shape or shape).view(shape)
        stored = stored.flatten(1) if others else stored
        taken = self._taken(part, False, stored)
        assert isinstance(taken, torch.Tensor)
        return taken

    def _quantized(
        self, part: WeightPart, spec: LinearSpec, format_: WeightFormat, tensors: StoredTensors
    ) -> QuantizedWeight | torch.Tensor:
        """Reads a whole part of a linear, and returns this rank's share."""
        num_rows = part.stored_rows or part.out_features
        stored = StoredPart(
            part.name,
            num_rows,
            spec.in_features,
            format_,
            self._dtype,
            tensors,
            self._keeps_float8,
            part.expert,
        )
        weight = READERS[format_.reader](stored)
        if not spec.has_bias and stored.has("bias"):
            stored.no_bias()
        return self._taken(part, spec.splits_inputs, weight)

    def _taken(
        self, part: WeightPart, splits_inputs: bool, stored: QuantizedWeight | torch.Tensor
    ) -> QuantizedWeight | torch.Tensor:
        """Returns this rank's share of a part, given the tensor that holds it."""
        whole = take_piece(part, stored)
        taken = in_order(part, whole if self._shard is None else self._shard.take(part, splits_inputs, whole))
        return taken if part.scale == 1 else scaled(taken, part.scale)

    def format_of(self, part: WeightPart) -> WeightFormat | None:
        """Returns the format of a part; None if it is not quantised.

        Raises `ModelError` if configuration and tensors disagree.
        """
        weight = part.weight_name
        if part.expert is not None:
            return None if weight in self.checkpoint else MXFP4_EXPERTS
        kind = self.checkpoint.kind_of(weight) if weight in self.checkpoint else None
        marks = [suffix for suffix in _MARKS if f"{part.name}.{suffix}" in self.checkpoint]
        if self._quantization is None:
            if marks and kind is None:
                raise ModelError(
                    f"config.json has no quantization_config, and the checkpoint has {part.name}.{marks[0]}; add the "
                    "entry, which older tools wrote to a file of its own, such as quantize_config.json"
                )
            return None
        if kind in BLOCK_TYPES:
            return GGUF
        if not marks and kind in FLOATING:
            return None
        format_ = self._quantization.format_of(part.name)
        if format_ is None and marks:
            raise ModelError(
                f"quantization_config leaves {part.name} unquantised, and the checkpoint has {part.name}.{marks[0]}; "
                "take the config.json that belongs to these weights"
            )
        if format_ is not None and format_.reader == "float8" and kind == PAIRS:
            return DEEPSEEK_FP4  # whatever `expert_dtype` says
        return format_

    def _part(
        self, part: WeightPart, format_: WeightFormat | None, spec: LinearSpec, tensors: StoredTensors
    ) -> QuantizedWeight | torch.Tensor:
        if format_ is None:
            return self._plain(part, spec, tensors)
        return self._quantized(part, spec, format_, tensors)

    def _plain(self, part: WeightPart, spec: LinearSpec, tensors: StoredTensors) -> torch.Tensor:
        """Returns the rank's share of an unquantised part, as a view of the file."""
        num_rows = part.stored_rows or part.out_features
        if part.expert is None:
            stored = tensors.view(part.weight_name, (num_rows, spec.in_features))
        else:
            sizes = num_rows * part.expert.step, spec.in_features
            are_rows = part.expert.are_rows_of(tensors.shape_of(part.weight_name), *sizes)
            of_all = (part.expert.num_experts, *(sizes if are_rows else reversed(sizes)))
            own = tensors.view(part.weight_name, of_all)[part.expert.expert]
            stored = part.expert.rows_of(own if are_rows else own.T)
        taken = self._taken(part, spec.splits_inputs, stored)
        assert isinstance(taken, torch.Tensor)
        return taken

    def _stack_plain(self, views: list[torch.Tensor]) -> torch.Tensor:
        """Stacks parts in memory that the next call reuses, because fresh pages would double the time."""
        if len(views) == 1:
            return views[0].to(self._dtype).contiguous()
        shape = (sum(len(view) for view in views), views[0].shape[1])
        if views[0].is_meta:
            return torch.empty(shape, dtype=self._dtype, device="meta")
        num_bytes = math.prod(shape) * self._dtype.itemsize
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return torch.cat(views, out=self._scratch[:num_bytes].view(self._dtype).view(shape))

    def _bias(self, spec: LinearSpec) -> torch.Tensor:
        """Returns the bias as a copy on the device."""
        parts = []
        for part in spec.parts:
            bias = take_piece(part, self._stored_bias(part))
            assert isinstance(bias, torch.Tensor)
            if self._shard is not None:
                bias = self._shard.take_bias(part, spec.splits_inputs, bias)
            ordered = in_order(part, bias)
            assert isinstance(ordered, torch.Tensor)
            parts.append(self._place_bias(ordered.float() * part.scale if part.scale != 1 else ordered, self._dtype))
        return torch.cat(parts)

    def _stored_bias(self, part: WeightPart) -> torch.Tensor:
        num_rows = part.stored_rows or part.out_features
        if part.expert is None:
            return self.checkpoint.view(part.bias_name, (num_rows,))
        of_all = self.checkpoint.view(part.bias_name, (part.expert.num_experts, num_rows * part.expert.step))
        rows: torch.Tensor = part.expert.rows_of(of_all[part.expert.expert])
        return rows


def stack(parts: Sequence[QuantizedWeight | torch.Tensor], dtype: torch.dtype) -> QuantizedWeight | torch.Tensor:
    """Returns one weight with the outputs of all parts. Parts without a common form become a plain weight in `dtype`:
    one is not quantised, or only one is of floats, or their act-orders differ.
    """
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) < len(parts) or len({part.is_float8 for part in quantized}) > 1 or not _have_one_order(quantized):
        return torch.cat([_dense(part, dtype) for part in parts])
    fine = [part.in_groups_of(math.gcd(*(each.group_size for each in quantized))) for part in quantized]
    offsets = None
    if any(part.offsets is not None for part in fine):
        offsets = torch.cat([torch.zeros_like(part.scales) if part.offsets is None else part.offsets for part in fine])
    return QuantizedWeight(
        torch.cat([part.values for part in fine]),
        torch.cat([part.scales for part in fine]),
        max(part.bits for part in fine),
        offsets,
        fine[0].input_order,
        codebook=fine[0].codebook if len({part.codebook for part in fine}) == 1 else None,
        has_int8_activations=all(part.has_int8_activations for part in fine),
    )


def _have_one_order(parts: Sequence[QuantizedWeight]) -> bool:
    first, *others = (part.input_order for part in parts)
    if first is None:
        return all(order is None for order in others)
    return all(order is not None and torch.equal(first, order) for order in others)


def _dense(part: QuantizedWeight | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return part.to(dtype) if isinstance(part, torch.Tensor) else part.dequantized(dtype)
