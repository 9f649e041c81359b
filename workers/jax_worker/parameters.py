"""Reads a checkpoint into JAX arrays that are sharded over a mesh.

The descriptions of `workers/models/`, which the torch worker reads too, list the tensors. Each device gets its slice of
a tensor from the mapped file. A tensor is whole on a device only if every device needs all of it.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from manta.workers.checkpoints.tensor_files import TensorFiles
from manta.workers.decoders.rope_table import rope_table
from manta.workers.jax_worker.mesh import AXIS, place
from manta.workers.models.families import describe
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.specs import GatedMlpSpec, LayerSpec, LinearSpec, NormSpec, Split, WeightPart

DTYPES: dict[str, Any] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
"""The dtypes of a model, by name."""
_STORED = {"F32": DTYPES["float32"], "BF16": DTYPES["bfloat16"], "F16": DTYPES["float16"]}
"""The dtypes of safetensors files that can be read, by their names there."""
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in _STORED.items()}


class LinearArrays(NamedTuple):
    weight: jax.Array
    """The weight [out_features, in_features]."""
    bias: jax.Array | None
    """The bias [out_features], or None."""


class Layer(NamedTuple):
    """The weights of one layer; norms are [size]."""

    input_norm: jax.Array
    query: LinearArrays
    key: LinearArrays
    value: LinearArrays
    output: LinearArrays
    q_norm: jax.Array | None
    k_norm: jax.Array | None
    mlp_norm: jax.Array
    gate: LinearArrays
    up: LinearArrays
    down: LinearArrays


class Parameters(NamedTuple):
    """The weights of a model, a pytree."""

    embedding: jax.Array
    """The lookup table [padded vocabulary, hidden]."""
    layers: tuple[Layer, ...]
    final_norm: jax.Array
    head: LinearArrays
    """The linear from hidden states to logits of the padded vocabulary."""
    cos_sin: jax.Array
    """Rotary cosines then sines, float32 [max_model_len, head_dim]."""


def num_kv_heads(config: ModelConfig, num_devices: int) -> int:
    """Returns the KV heads of all devices together. With fewer heads than devices, several devices hold
    the same head.
    """
    return max(config.num_kv_heads, num_devices)


def load_parameters(
    folder: str | pathlib.Path, config: ModelConfig, dtype: str, mesh: Mesh, max_model_len: int, whole: bool = True
) -> Parameters:
    """Loads the weights of a model. Raises `ModelError` naming a missing, misshapen or unexpected tensor.

    If `whole` is False, `config` may have fewer layers than the checkpoint; the others are not read.
    """
    files = TensorFiles(folder, read_ahead=mesh.size == 1)
    config = files.as_stored(config)
    parameters = _ParameterReader(files, config, DTYPES[dtype], mesh).read(max_model_len)
    if whole:
        files.check_all_used(but=["lm_head.weight"] if config.tie_word_embeddings else [])
    return parameters


class _ParameterReader:
    def __init__(self, files: TensorFiles, config: ModelConfig, dtype: np.dtype, mesh: Mesh) -> None:
        self._files = files
        self._config = config
        self._dtype = dtype
        self._mesh = mesh

    def read(self, max_model_len: int) -> Parameters:
        spec, config = describe(self._config), self._config
        embedding = self._part(spec.embedding, config.hidden_size)
        head = LinearArrays(embedding, None) if spec.is_tied else self._linear(spec.head)
        table = rope_table(config.rope, config.head_dim, max_model_len)
        return Parameters(
            embedding,
            tuple(self._layer(layer) for layer in spec.layers),
            self._norm(spec.final_norm),
            head,
            place(self._mesh, table),
        )

    def _layer(self, spec: LayerSpec) -> Layer:
        attention, mlp = spec.mixer, spec.mlp
        assert spec.input_norm is not None
        assert spec.mlp_norm is not None
        assert isinstance(mlp, GatedMlpSpec)
        query, key, value = (self._linear(attention.qkv, part) for part in range(3))
        gate, up = (self._linear(mlp.gated, part) for part in range(2))
        return Layer(
            self._norm(spec.input_norm),
            query,
            key,
            value,
            self._linear(attention.output),
            None if attention.q_norm is None else self._norm(attention.q_norm),
            None if attention.k_norm is None else self._norm(attention.k_norm),
            self._norm(spec.mlp_norm),
            gate,
            up,
            self._linear(mlp.down),
        )

    def _linear(self, spec: LinearSpec, part: int = 0) -> LinearArrays:
        weight = self._part(spec.parts[part], spec.in_features, spec.splits_inputs)
        return LinearArrays(weight, self._bias(spec.parts[part]) if spec.has_bias else None)

    def _part(self, part: WeightPart, in_features: int, splits_inputs: bool = False) -> jax.Array:
        whole = self._view(f"{part.name}.weight", (part.out_features, in_features))
        rows = self._rows(part)
        axes = (None, AXIS) if splits_inputs else (None if part.split is Split.NOTHING else AXIS, None)
        return self._divided((len(rows), in_features), axes, lambda index: _taken(whole, rows[index[0]])[:, index[1]])

    def _bias(self, part: WeightPart) -> jax.Array:
        """Returns a bias. Where inputs are split, the bias is whole on every device and added once, after the sum."""
        whole, rows = self._view(f"{part.name}.bias", (part.out_features,)), self._rows(part)
        axis = None if part.split is Split.NOTHING else AXIS
        return self._divided((len(rows),), (axis,), lambda index: _taken(whole, rows[index[0]]))

    def _norm(self, spec: NormSpec) -> jax.Array:
        return place(self._mesh, self._view(f"{spec.name}.weight", (spec.size,)).astype(self._dtype))

    def _rows(self, part: WeightPart) -> np.ndarray:
        """Returns the rows of the checkpoint's tensor that the devices hold, in order; -1 is a row of zeros."""
        rows = np.arange(part.out_features)
        if part.split is Split.VOCABULARY:
            padding = -part.out_features % self._mesh.size
            return np.concatenate([rows, np.full(padding, -1)])
        if part.split is Split.KV_HEADS:
            repeats = num_kv_heads(self._config, self._mesh.size) // self._config.num_kv_heads
            return rows.reshape(self._config.num_kv_heads, -1).repeat(repeats, axis=0).reshape(-1)
        return rows

    def _divided(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...], read: Callable[[Any], np.ndarray]
    ) -> jax.Array:
        sharding = NamedSharding(self._mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(shape, sharding, lambda index: read(index).astype(self._dtype))

    def _view(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        mapped, entry = self._files.find(name, shape, _ITEM_BYTES)
        return np.frombuffer(mapped, _STORED[entry.dtype], math.prod(shape), entry.start).reshape(shape)


def _taken(whole: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the given rows of a tensor, as a view of the file if they are contiguous; -1 is a row of zeros."""
    if not len(rows) or (rows[0] >= 0 and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows)))):
        return whole[rows[0] : rows[0] + len(rows)] if len(rows) else whole[:0]
    taken = whole[rows]
    taken[rows < 0] = 0
    return taken
