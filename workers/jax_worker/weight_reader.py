"""Reads single weights of a checkpoint into JAX arrays that are sharded over a mesh: linears, norms and other tensors.

Each device gets its slice of a tensor from the mapped file. A tensor is whole on a device only if every device needs
all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from manta.workers.checkpoints.tensor_files import TensorFiles
from manta.workers.jax_worker.layer_arrays import LinearArrays
from manta.workers.jax_worker.mesh import AXIS
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, TensorSpec, WeightPart

DTYPES: dict[str, Any] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
"""The dtypes of a model, by name."""
_STORED = {"F32": DTYPES["float32"], "BF16": DTYPES["bfloat16"], "F16": DTYPES["float16"]}
"""The dtypes of safetensors files that can be read, by their names there."""
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in _STORED.items()}


def num_kv_heads(config: ModelConfig, num_devices: int) -> int:
    """Returns the KV heads of all devices together. With fewer heads than devices, several devices hold
    the same head.
    """
    return max(config.num_kv_heads, num_devices)


class WeightReader:
    """Reads weights in `dtype`. Its methods raise `ModelError` naming a tensor that is missing or misshapen."""

    def __init__(self, files: TensorFiles, config: ModelConfig, dtype: np.dtype, mesh: Mesh) -> None:
        self._files = files
        self._config = config
        self._dtype = dtype
        self._mesh = mesh

    # ---- linears -----------------------------------------------------------------------------------------------------

    def linear(self, spec: LinearSpec, part: int = 0) -> LinearArrays:
        """Returns a part of a linear."""
        weight = self.part(spec.parts[part], spec.in_features, spec.splits_inputs)
        return LinearArrays(weight, self._bias(spec.parts[part]) if spec.has_bias else None)

    def linears(self, spec: LinearSpec) -> tuple[LinearArrays, ...]:
        """Returns all parts of a linear."""
        return tuple(self.linear(spec, part) for part in range(len(spec.parts)))

    def part(self, part: WeightPart, in_features: int, splits_inputs: bool = False) -> jax.Array:
        """Returns the weight of a part of a linear, [number of its rows on all devices, in_features]."""
        part = self._as_stored(part)
        read, num_rows = self._weight(part, in_features), len(self._rows(part))
        return self._divided((num_rows, in_features), _axes(part, splits_inputs), lambda index: read(*index))

    def _bias(self, part: WeightPart) -> jax.Array:
        """Returns a bias. Where inputs are split, the bias is whole on every device and added once, after the sum."""
        part = self._as_stored(part)
        read = self._stored_bias(part)
        return self._divided((len(self._rows(part)),), _axes(part)[:1], lambda index: read(index[0]))

    def stacked(self, linears: Sequence[LinearSpec], part: int) -> LinearArrays:
        """Returns the same part of the linears of all experts."""
        spec, parts = linears[0], [self._as_stored(linear.parts[part]) for linear in linears]
        reads = [self._weight(each, spec.in_features) for each in parts]
        of_outputs, of_inputs = _axes(parts[0], spec.splits_inputs)
        weight = self._divided(
            (len(parts), spec.in_features, parts[0].out_features),
            (None, of_inputs, of_outputs),
            lambda index: np.stack([read(index[2], index[1]).T for read in reads[index[0]]]),
        )
        if not spec.has_bias:
            return LinearArrays(weight, None)
        biases = [self._stored_bias(each) for each in parts]
        shape, axes = (len(parts), parts[0].out_features), (None, _axes(parts[0])[0])
        bias = self._divided(shape, axes, lambda index: np.stack([each(index[1]) for each in biases[index[0]]]))
        return LinearArrays(weight, bias)

    def _as_stored(self, part: WeightPart) -> WeightPart:
        """Returns the part as this checkpoint stores it."""
        other = part.elsewhere
        return other if other is not None and other.weight_name in self._files else part._replace(elsewhere=None)

    def _weight(self, part: WeightPart, in_features: int) -> Callable[[slice, slice], np.ndarray]:
        """Returns a function from slices of the rows that the devices hold, and of inputs, to the weight there."""
        num_rows = part.stored_rows or part.out_features
        if part.expert is None:
            stored = self._view(part.weight_name, (num_rows, in_features))
        else:
            sizes = num_rows * part.expert.step, in_features
            are_rows = part.expert.are_rows_of(self._files.shape_of(part.weight_name), *sizes)
            of_all = (part.expert.num_experts, *(sizes if are_rows else reversed(sizes)))
            own = self._view(part.weight_name, of_all)[part.expert.expert]
            stored = part.expert.rows_of(own if are_rows else own.T)
        rows = self._rows(part)
        return lambda outputs, inputs: _scaled(_taken(stored, rows[outputs])[:, inputs], part.scale)

    def _stored_bias(self, part: WeightPart) -> Callable[[slice], np.ndarray]:
        """Returns a function from a slice of the rows that the devices hold to the bias there."""
        num_rows = part.stored_rows or part.out_features
        if part.expert is None:
            stored = self._view(part.bias_name, (num_rows,))
        else:
            of_all = (part.expert.num_experts, num_rows * part.expert.step)
            stored = part.expert.rows_of(self._view(part.bias_name, of_all)[part.expert.expert])
        rows = self._rows(part)
        return lambda outputs: _scaled(_taken(stored, rows[outputs]), part.scale)

    # ---- other tensors -----------------------------------------------------------------------------------------------

    def norm(self, spec: NormSpec) -> jax.Array:
        if not spec.is_stored:
            return self._divided((spec.size,), (None,), lambda index: np.ones(spec.size, dtype=np.float32)[index])
        other = None if spec.elsewhere is None else f"{spec.elsewhere}.weight"
        name = other if other is not None and other in self._files else f"{spec.name}.weight"
        weight = self._view(name, (spec.size,))
        if spec.order is not None:
            weight = weight[spec.order.rows(spec.size)]
        if spec.adds_one:
            weight = weight.astype(np.float32) + 1
        part = WeightPart(spec.name, spec.size, spec.split)
        rows = self._rows(part)
        return self._divided((len(rows),), _axes(part)[:1], lambda index: weight[rows[index[0]]])

    def optional_norm(self, spec: NormSpec | None) -> jax.Array | None:
        return None if spec is None else self.norm(spec)

    def tensor(self, spec: TensorSpec) -> jax.Array:
        """Returns a tensor of a recurrent mixer, float32 [rows, others], or [rows] if it has one dimension."""
        rows, *others = spec.shape
        shape = (spec.stored_rows or rows, *others)
        stored = self._view(spec.name, spec.stored_shape or shape).reshape(shape)[spec.first_row :][:rows]
        whole = stored.reshape(rows, -1) if others else stored
        axes = (None if spec.split is Split.NOTHING else AXIS, *(None for _ in whole.shape[1:]))

        def read(index: tuple[slice, ...]) -> np.ndarray:
            numbers = whole[index].astype(np.float32)
            return -np.exp(numbers) if spec.is_log_rate else numbers

        return self._divided(whole.shape, axes, read, np.dtype(np.float32))

    def vector(self, name: str, size: int, axis: str | None = None) -> jax.Array:
        """Returns a tensor float32 [size], split along an axis of the mesh if one is given."""
        whole = self._view(name, (size,))
        return self._divided((size,), (axis,), lambda index: whole[index], np.dtype(np.float32))

    # ---- files -------------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Returns whether the checkpoint has a tensor."""
        return name in self._files

    def _rows(self, part: WeightPart) -> np.ndarray:
        """Returns the rows of the checkpoint's tensor that the devices hold, in order; -1 is a row of zeros."""
        assert part.elsewhere is None
        size = part.out_features
        rows = part.first_row + np.arange(size) if part.piece is None else np.array(part.piece.rows(size))
        if part.order is not None:
            rows = rows[part.order.rows(size)]
        if part.split is Split.VOCABULARY:
            return np.concatenate([rows, np.full(-size % self._mesh.size, -1)])
        if part.split is Split.KV_HEADS:
            repeats = num_kv_heads(self._config, self._mesh.size) // self._config.num_kv_heads
            return rows.reshape(self._config.num_kv_heads, -1).repeat(repeats, axis=0).reshape(-1)
        return rows

    def _divided(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        read: Callable[[Any], np.ndarray],
        dtype: np.dtype | None = None,
    ) -> jax.Array:
        sharding, dtype = NamedSharding(self._mesh, PartitionSpec(*axes)), dtype or self._dtype
        return jax.make_array_from_callback(shape, sharding, lambda index: read(index).astype(dtype))

    def _view(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        mapped, entry = self._files.find(name, shape, _ITEM_BYTES)
        return np.frombuffer(mapped, _STORED[entry.dtype], math.prod(shape), entry.start).reshape(shape)


def _axes(part: WeightPart, splits_inputs: bool = False) -> tuple[str | None, str | None]:
    """Returns the axes of the mesh along which outputs and inputs of a part are split."""
    return (None, AXIS) if splits_inputs else (None if part.split is Split.NOTHING else AXIS, None)


def _taken(whole: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the given rows of a tensor, as a view of the file if they are contiguous; -1 is a row of zeros."""
    if not len(rows) or (rows[0] >= 0 and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows)))):
        return whole[rows[0] : rows[0] + len(rows)] if len(rows) else whole[:0]
    taken = whole[rows]
    taken[rows < 0] = 0
    return taken


def _scaled(weight: np.ndarray, factor: float) -> np.ndarray:
    return weight if factor == 1 else weight.astype(np.float32) * np.float32(factor)
