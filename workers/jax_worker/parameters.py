"""Reads a checkpoint into JAX arrays that are sharded over a mesh.

The descriptions of `workers/models/`, which the torch worker reads too, list the tensors. Each device gets its slice of
a tensor from the mapped file. A tensor is whole on a device only if every device needs all of it.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from manta.workers.checkpoints.tensor_files import TensorFiles
from manta.workers.decoders.rope_table import rope_table
from manta.workers.jax_worker.mesh import AXIS, place
from manta.workers.models.families import describe
from manta.workers.models.model_config import ModelConfig, RopeConfig
from manta.workers.models.specs import AttentionSpec, ExpertsSpec, GatedMlpSpec, LayerSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, WeightPart

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


class AttentionArrays(NamedTuple):
    """The weights of a layer's attention."""

    query: LinearArrays
    key: LinearArrays
    value: LinearArrays
    output: LinearArrays
    q_norm: jax.Array | None
    """The norm of query heads [head_dim], or of all of them together [num_heads * head_dim]; `k_norm` is that of key
    heads.
    """
    k_norm: jax.Array | None
    sinks: jax.Array | None
    """A logit of each head, float32 [num_heads]."""


class GatedMlpArrays(NamedTuple):
    gate: LinearArrays
    up: LinearArrays
    down: LinearArrays


class ExpertsArrays(NamedTuple):
    """The weights of a mixture of experts. Each linear has those of all experts, a weight [num_experts, in_features,
    out_features] and a bias [num_experts, out_features].
    """

    router: LinearArrays
    """The linear from hidden states to a logit of each expert, of the usual form."""
    experts: GatedMlpArrays


class Layer(NamedTuple):
    """The weights of one layer; norms are [size], and None where `LayerSpec` has none."""

    input_norm: jax.Array | None
    attention: AttentionArrays
    attention_norm: jax.Array | None
    """The norm after attention; `output_norm` is that after the MLP."""
    mlp_norm: jax.Array | None
    mlp: GatedMlpArrays | ExpertsArrays
    output_norm: jax.Array | None


class Parameters(NamedTuple):
    """The weights of a model, a pytree."""

    embedding: jax.Array
    """The lookup table [padded vocabulary, hidden]."""
    layers: tuple[Layer, ...]
    final_norm: jax.Array
    head: LinearArrays
    """The linear from hidden states to logits of the padded vocabulary."""
    rotary_tables: tuple[jax.Array, ...]
    """Rotary cosines then sines of each of `distinct_ropes`, float32 [max_model_len, head_dim]."""


def distinct_ropes(config: ModelConfig) -> list[RopeConfig | None]:
    """Returns the ropes of a model's layers, each once; None for layers without positions."""
    return list(dict.fromkeys(config.ropes))


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
    files = TensorFiles(folder)
    if mesh.size == 1:
        files.read_ahead()
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
        tables = (rope_table(rope, config.head_dim, max_model_len) for rope in distinct_ropes(config))
        return Parameters(
            embedding,
            tuple(self._layer(layer) for layer in spec.layers),
            self._norm(spec.final_norm),
            head,
            tuple(place(self._mesh, table) for table in tables),
        )

    def _layer(self, spec: LayerSpec) -> Layer:
        return Layer(
            self._optional_norm(spec.input_norm),
            self._attention(spec.attention),
            self._optional_norm(spec.mixer_output_norm),
            self._optional_norm(spec.mlp_norm),
            self._experts(spec.mlp) if isinstance(spec.mlp, ExpertsSpec) else self._mlp(spec.mlp),
            self._optional_norm(spec.mlp_output_norm),
        )

    def _attention(self, spec: AttentionSpec) -> AttentionArrays:
        query, key, value = (self._linear(spec.qkv, part) for part in range(3))
        return AttentionArrays(
            query,
            key,
            value,
            self._linear(spec.output),
            self._optional_norm(spec.q_norm),
            self._optional_norm(spec.k_norm),
            None if spec.sinks is None else self._sinks(spec.sinks),
        )

    def _mlp(self, spec: GatedMlpSpec | None) -> GatedMlpArrays:
        assert spec is not None
        assert spec.gated.is_gated
        gate, up = (self._linear(spec.gated, part) for part in range(2))
        return GatedMlpArrays(gate, up, self._linear(spec.down))

    def _experts(self, spec: ExpertsSpec) -> ExpertsArrays:
        gated, down = [each.gated for each in spec.experts], [each.down for each in spec.experts]
        gate, up = (self._stacked(gated, part) for part in range(2))
        return ExpertsArrays(self._linear(spec.router), GatedMlpArrays(gate, up, self._stacked(down, 0)))

    def _linear(self, spec: LinearSpec, part: int = 0) -> LinearArrays:
        weight = self._part(spec.parts[part], spec.in_features, spec.splits_inputs)
        return LinearArrays(weight, self._bias(spec.parts[part]) if spec.has_bias else None)

    def _part(self, part: WeightPart, in_features: int, splits_inputs: bool = False) -> jax.Array:
        read, num_rows = self._weight(part, in_features), len(self._rows(part))
        return self._divided((num_rows, in_features), _axes(part, splits_inputs), lambda index: read(*index))

    def _bias(self, part: WeightPart) -> jax.Array:
        """Returns a bias. Where inputs are split, the bias is whole on every device and added once, after the sum."""
        whole, rows = self._stored_bias(part), self._rows(part)
        return self._divided((len(rows),), _axes(part)[:1], lambda index: _taken(whole, rows[index[0]]))

    def _stacked(self, linears: Sequence[LinearSpec], part: int) -> LinearArrays:
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
        bias = self._divided(shape, axes, lambda index: np.stack([each[index[1]] for each in biases[index[0]]]))
        return LinearArrays(weight, bias)

    def _as_stored(self, part: WeightPart) -> WeightPart:
        """Returns the part as this checkpoint stores it."""
        other = part.elsewhere
        return other if other is not None and other.weight_name in self._files else part._replace(elsewhere=None)

    def _weight(self, part: WeightPart, in_features: int) -> Callable[[slice, slice], np.ndarray]:
        """Returns a function from slices of the rows that the devices hold, and of inputs, to the weight there."""
        if part.expert is None:
            stored = self._view(part.weight_name, (part.stored_rows or part.out_features, in_features))
        else:
            sizes = part.out_features * part.expert.step, in_features
            are_rows = part.expert.are_rows_of(self._files.shape_of(part.weight_name), *sizes)
            of_all = (part.expert.num_experts, *(sizes if are_rows else reversed(sizes)))
            own = self._view(part.weight_name, of_all)[part.expert.expert]
            stored = part.expert.rows_of(own if are_rows else own.T)
        rows = self._rows(part)
        return lambda outputs, inputs: _taken(stored, rows[outputs])[:, inputs]

    def _stored_bias(self, part: WeightPart) -> np.ndarray:
        if part.expert is None:
            return self._view(part.bias_name, (part.stored_rows or part.out_features,))
        of_all = (part.expert.num_experts, part.out_features * part.expert.step)
        of_expert: np.ndarray = part.expert.rows_of(self._view(part.bias_name, of_all)[part.expert.expert])
        return of_expert

    def _norm(self, spec: NormSpec) -> jax.Array:
        weight = self._view(f"{spec.name}.weight", (spec.size,))
        if spec.adds_one:
            weight = weight.astype(np.float32) + 1
        part = WeightPart(spec.name, spec.size, spec.split)
        rows = self._rows(part)
        return self._divided((len(rows),), _axes(part)[:1], lambda index: weight[rows[index[0]]])

    def _optional_norm(self, spec: NormSpec | None) -> jax.Array | None:
        return None if spec is None else self._norm(spec)

    def _sinks(self, name: str) -> jax.Array:
        sinks = self._view(name, (self._config.num_heads,)).astype(np.float32)
        return jax.make_array_from_callback(
            sinks.shape, NamedSharding(self._mesh, PartitionSpec(AXIS)), lambda index: sinks[index]
        )

    def _rows(self, part: WeightPart) -> np.ndarray:
        """Returns the rows of the checkpoint's tensor that the devices hold, in order; -1 is a row of zeros."""
        assert part.piece is None
        assert part.elsewhere is None
        assert part.scale == 1
        size = part.out_features
        rows = part.first_row + (np.arange(size) if part.order is None else np.array(part.order.rows(size)))
        if part.split is Split.VOCABULARY:
            return np.concatenate([rows, np.full(-size % self._mesh.size, -1)])
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
