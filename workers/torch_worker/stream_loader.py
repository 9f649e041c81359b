"""Loads the parts of models with several residual streams: alternating updates, shares of results, tables of n-grams,
inputs of each layer, and the choice of blocks of tokens. Called by the loader, which reads and places their weights.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

from manta.workers.kernels.weights import (
    BlockIndexerWeights,
    Embedding,
    LayerInputsWeights,
    LayerInputWeights,
    Linear,
    NgramWeights,
    RowSums,
    SparseGates,
    StreamsWeights,
    UpdatesWeights,
)
from manta.workers.models.block_indexer import BlockIndexerSpec
from manta.workers.models.ngrams import NgramShape, NgramSpec
from manta.workers.models.specs import (
    ExpertsSpec,
    GatedMlpSpec,
    LayerInputSpec,
    LayerInputsSpec,
    StreamsSpec,
    UpdatesSpec,
)
from manta.workers.models.weight_specs import LinearSpec, NormSpec, TensorSpec, WeightPart
from manta.workers.torch_worker.embedding_lookup import look_up_pieces


class Readers(NamedTuple):
    """The functions of a loader that read and place a weight."""

    linear: Callable[[LinearSpec], Linear]
    plain_linear: Callable[[LinearSpec], Linear]
    """Returns a small linear in float32."""
    norm: Callable[[NormSpec], torch.Tensor]
    tensor: Callable[[TensorSpec], torch.Tensor]
    vector: Callable[[str], torch.Tensor]
    """Returns a tensor [hidden] in the model's dtype."""
    table: Callable[[WeightPart, int], Embedding]
    """Returns the lookup of a table, given the width of its rows."""


def load_streams(spec: StreamsSpec | None, read: Readers) -> StreamsWeights | None:
    if spec is None:
        return None
    return StreamsWeights(tuple(map(read.linear, spec.spread)), tuple(map(read.linear, spec.gather)))


def load_layer_inputs(spec: LayerInputsSpec | None, read: Readers) -> LayerInputsWeights | None:
    if spec is None:
        return None
    return LayerInputsWeights(read.table(spec.table, spec.width), read.linear(spec.projection), read.norm(spec.norm))


def load_layer_input(spec: LayerInputSpec | None, read: Readers) -> LayerInputWeights | None:
    if spec is None:
        return None
    return LayerInputWeights(read.linear(spec.gate), read.linear(spec.projection), read.norm(spec.norm))


def load_updates(
    spec: UpdatesSpec | None, mlp: GatedMlpSpec | ExpertsSpec | None, read: Readers, sums_over_ranks: RowSums
) -> UpdatesWeights | None:
    if spec is None:
        return None
    assert isinstance(mlp, GatedMlpSpec)
    left, right = spec.low_rank
    return UpdatesWeights(
        read.norm(spec.router_norm),
        read.plain_linear(spec.router),
        read.plain_linear(spec.prediction),
        read.plain_linear(spec.correction),
        None if spec.output_scale is None else read.vector(spec.output_scale),
        (read.linear(left), read.linear(right)),
        read.norm(spec.low_rank_norm),
        _sparse_gates(mlp.gated, sums_over_ranks) if mlp.gated.gate_sparsity else None,
    )


def _sparse_gates(spec: LinearSpec, sums_over_ranks: RowSums) -> SparseGates:
    deviations = statistics.NormalDist().inv_cdf(spec.gate_sparsity)
    return SparseGates(spec.out_features // 2, deviations, sums_over_ranks)


def load_shares(spec: tuple[LinearSpec, LinearSpec] | None, read: Readers) -> tuple[Linear, Linear] | None:
    return None if spec is None else (read.plain_linear(spec[0]), read.plain_linear(spec[1]))


def load_ngrams(spec: NgramSpec | None, shape: NgramShape | None, read: Readers) -> NgramWeights | None:
    """Returns the tables of a layer. The taps of its convolution get zeros between them, so that it is one over
    neighbouring tokens.
    """
    if spec is None:
        return None
    assert shape is not None
    pieces = tuple(read.table(piece, shape.row_width) for piece in spec.pieces)
    taps = read.tensor(spec.kernel)
    kernel = taps.new_zeros((len(taps), shape.window + 1))
    kernel[:, :: shape.size] = taps
    return NgramWeights(
        table_rows=shape.table_rows(spec.layer),
        multipliers=shape.multipliers(spec.layer),
        table=functools.partial(look_up_pieces, pieces, spec.pieces[0].out_features),
        keys=read.linear(spec.keys),
        values=read.linear(spec.values),
        key_norm=read.norm(spec.key_norm),
        query_norm=read.norm(spec.query_norm),
        conv_norm=read.norm(spec.conv_norm),
        kernel=kernel,
    )


def load_block_indexer(spec: BlockIndexerSpec | None, read: Readers) -> BlockIndexerWeights | None:
    if spec is None:
        return None
    norms = read.norm(spec.query_norm), read.norm(spec.key_norm)
    return BlockIndexerWeights(spec.shape, read.linear(spec.projection), *norms)
