"""Reads a checkpoint and builds the model: each weight is packed by the platform as it is read.

No more than one weight is held twice. Called by the worker; chooses between the native decoder and transformers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.nn.functional as F

from manta.workers.checkpoints.checkpoint import Checkpoint, CheckpointHeaders
from manta.workers.checkpoints.memory import weight_files
from manta.workers.checkpoints.schemes import GGUF, LinearSource, read_linear, read_quantized
from manta.workers.checkpoints.stored_linears import stored_linears
from manta.workers.checkpoints.weight_tally import WeightTally
from manta.workers.decoders.decoder import Decoder
from manta.workers.kept_weights import KEPT_BITS
from manta.workers.kernels.linears import TorchLinear
from manta.workers.kernels.model_protocol import Model
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.weights import (
    AttentionWeights,
    DecoderWeights,
    Embedding,
    GatedMlpWeights,
    LayerWeights,
    Linear,
    LinearWeight,
    SharedLinears,
)
from manta.workers.models.families import describe
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.specs import AttentionSpec, LayerSpec, LinearSpec, NormSpec, Part
from manta.workers.parallel.group import Group
from manta.workers.parallel.shard import CheckpointShard
from manta.workers.parallel.sharded_layers import GatheredHead, VocabularyParallelEmbedding
from manta.workers.parallel.split import shard_config, split_outputs
from manta.workers.platforms import Platform


def load_model(
    folder: str | pathlib.Path,
    config: ModelConfig,
    dtype: str,
    platform: Platform,
    whole: bool = True,
    group: Group | None = None,
    weights: str = "auto",
    exact: bool = False,
) -> Model:
    """The model of a checkpoint in `bfloat16`, `float16` or `float32`, on the platform's device; of a `group` of ranks
    this one's share, which computes together with the others'.

    Raises `ModelError` naming a tensor that is missing, misshapen, or unexpected; and if the model cannot be split over
    so many ranks. `weights` is the option of this name. If `whole` is False, `config` may have fewer layers than the
    checkpoint: the others are not read. With `exact` ranks split no sums.
    """
    if group is not None and group.num_ranks > 1:
        return _load_share(folder, config, dtype, platform, group, weights, exact)
    if not config.native:
        from manta.workers.decoders.transformers_model import TransformersModel  # seconds to import, and rarely needed

        return TransformersModel(folder, config, platform.torch_dtype(dtype), platform, KEPT_BITS[weights])
    checkpoint = Checkpoint(folder)
    with _shared_linears(folder, config, dtype, platform, weights) as shared:
        reader = _WeightReader(checkpoint, config, platform.torch_dtype(dtype), platform, shared, weights=weights)
        decoder_weights = reader.read()
    if whole:
        _check_all_used(checkpoint, config)
    return Decoder(config, decoder_weights, platform)


def _load_share(
    folder: str | pathlib.Path,
    config: ModelConfig,
    dtype: str,
    platform: Platform,
    group: Group,
    weights: str,
    exact: bool,
) -> Model:
    share = shard_config(config, group.num_ranks)
    whole = Checkpoint(folder, read_ahead=False)
    checkpoint = CheckpointShard(whole, config, group.rank, group.num_ranks, exact)
    with _shared_linears(folder, config, dtype, platform, weights, group, exact) as shared:
        reader = _WeightReader(checkpoint, share, platform.torch_dtype(dtype), platform, shared, group, weights, exact)
        own = reader.read()
    _check_all_used(checkpoint, config)
    embedding = VocabularyParallelEmbedding(own.embedding, group, share.vocab_size)
    head = GatheredHead(own.head, group, config.vocab_size)
    return Decoder(share, dataclasses.replace(own, embedding=embedding, head=head), platform)


def _shared_linears(
    folder: str | pathlib.Path,
    config: ModelConfig,
    dtype: str,
    platform: Platform,
    weights: str,
    group: Group | None = None,
    exact: bool = False,
) -> AbstractContextManager[SharedLinears | None]:
    """Shares linears under a name of all that packed weights depend on, files and their change times included."""
    files = [path.stat() for path in weight_files(pathlib.Path(folder))]
    identities = [(file.st_dev, file.st_ino, file.st_size, file.st_ctime_ns) for file in files]
    rank = "whole" if group is None else f"{group.rank} of {group.num_ranks}"
    split = "outputs" if exact else "inputs"
    return platform.shared_linears(f"{identities} {config} {dtype} {weights} {rank} {split}")


def check_tensors(folder: str | pathlib.Path, config: ModelConfig, weights: str = "auto") -> WeightTally:
    """Checks from the file headers that a checkpoint has every tensor that `load_model` needs, and no other. Reads no
    tensor's data.

    For checkpoints that Manta reads itself. `weights` is the option of this name; `dense` counts as `auto`, because a
    tally says both. Returns the memory that the weights take. Raises `ModelError` as `load_model` does.
    """
    rounded = "auto" if weights == "dense" else weights
    checkpoint, tally = CheckpointHeaders(folder), WeightTally()
    reader = _WeightReader(checkpoint, config, _COUNTED, _Counting(tally), weights=rounded)
    reader.read()
    _check_all_used(checkpoint, config)
    if config.quantization is not None:
        spec = describe(config)
        tally.stored = stored_linears(spec.embedding, map(reader.source, spec.linears()), config.num_layers)
    return tally


def _check_all_used(checkpoint: _Checkpoint, config: ModelConfig) -> None:
    """Raises `ModelError` naming tensors that the model does not have; a tied model may be saved with the head too."""
    checkpoint.check_all_used(but=["lm_head.weight"] if config.tie_word_embeddings else [])


_COUNTED = torch.bfloat16
"""The dtype that stands for the activations' while weights are counted. No weight has it as a dtype of its own."""


class _Checkpoint(Protocol):
    """`Checkpoint`, or a rank's view of it."""

    def __contains__(self, name: str) -> bool: ...

    def view(self, name: str, shape: tuple[int, ...], kind: torch.dtype = torch.float32) -> torch.Tensor: ...

    def shape_of(self, name: str) -> tuple[int, ...]: ...

    def kind_of(self, name: str) -> str: ...

    def has_blocks(self, name: str) -> bool: ...

    def stored(self, name: str, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor: ...

    def blocks(self, name: str, shape: tuple[int, ...]) -> torch.Tensor: ...

    def whole_shape(self, name: str, shape: tuple[int, int]) -> tuple[int, int]: ...

    def cut(self, name: str, weight: QuantizedWeight | torch.Tensor) -> QuantizedWeight | torch.Tensor: ...

    def release(self, names: Iterable[str]) -> None: ...

    def check_all_used(self, but: Iterable[str] = ()) -> None: ...


class _WeightPlatform(Protocol):
    """The members of a `Platform` that concern weights."""

    keeps_float8: bool

    def make_linear(self, weight: LinearWeight) -> Linear: ...

    def place_weight(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    def place_embedding(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    def tied_head(self, table: torch.Tensor) -> Linear | None: ...


class _Counting:
    """Takes weights, counts them and keeps none: for headers without data."""

    keeps_float8 = True

    def __init__(self, tally: WeightTally) -> None:
        self._tally = tally

    def make_linear(self, weight: LinearWeight) -> Linear:
        self._tally.add_linear(weight)
        return TorchLinear(weight.weight, weight.bias)

    def place_weight(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        weight = view.to(dtype)
        self._tally.add(weight, is_in_dtype=dtype == _COUNTED)
        return weight

    place_embedding = place_weight

    def tied_head(self, table: torch.Tensor) -> None:
        """Gives no head, so that a tied one is read like any other linear."""


class _WeightReader:
    """Reads the weights that a family describes. Of a `group`, linears whose inputs are split end in a sum over it;
    with `exact` none are, and linears gather over it.
    """

    def __init__(
        self,
        checkpoint: _Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        platform: _WeightPlatform,
        shared: SharedLinears | None = None,
        group: Group | None = None,
        weights: str = "auto",
        exact: bool = False,
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.dtype = dtype
        self.platform = platform
        self._shared = shared
        self._group = group
        self._weights = weights
        self._exact = exact
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._unreleased: list[str] = []
        """Tensors that the linear under way has read."""

    def read(self) -> DecoderWeights:
        spec = describe(self.config)
        if self._group is not None and self._exact:
            spec = split_outputs(spec, self._group.num_ranks)
        embedding, tied_head = self._embedding(spec.embedding)
        # The head before the layers: it is the largest weight, and is held twice while it is packed.
        head = (tied_head if spec.is_tied else None) or self._linear(spec.head, is_head=True)
        layers = [self._layer(layer) for layer in spec.layers]
        return DecoderWeights(embedding, layers, self._norm(spec.final_norm), head)

    def _embedding(self, part: Part) -> tuple[Embedding, Linear | None]:
        """The lookup table, and the head that the platform makes of it if the two are tied."""
        if self.checkpoint.has_blocks(f"{part.name}.weight"):
            return self._quantized_embedding(part), None
        view = self.checkpoint.view(f"{part.name}.weight", (part.out_features, self.config.hidden_size))
        table = self.platform.place_embedding(view, self.dtype)
        is_rounded = KEPT_BITS[self._weights].head is not None
        return functools.partial(_embed, table, self.dtype), None if is_rounded else self.platform.tied_head(table)

    def _quantized_embedding(self, part: Part) -> Embedding:
        """Keeps the integers, of which a lookup dequantises its rows."""
        weight = read_quantized(self.source(LinearSpec((part,), self.config.hidden_size)), part, GGUF)
        assert isinstance(weight, QuantizedWeight)
        place = self.platform.place_weight
        kept = dataclasses.replace(
            weight,
            values=place(weight.values, torch.int8),
            scales=place(weight.scales, torch.float32),
            offsets=None if weight.offsets is None else place(weight.offsets, torch.float32),
        )
        self._release()
        return functools.partial(_embed_quantized, kept, self.dtype)

    def _layer(self, spec: LayerSpec) -> LayerWeights:
        return LayerWeights(
            self._norm(spec.input_norm),
            self._attention(spec.attention),
            self._norm(spec.mlp_norm),
            GatedMlpWeights(self._linear(spec.mlp.gated), self._linear(spec.mlp.down)),
        )

    def _attention(self, spec: AttentionSpec) -> AttentionWeights:
        return AttentionWeights(
            qkv=self._linear(spec.qkv),
            output=self._linear(spec.output),
            q_norm=None if spec.q_norm is None else self._norm(spec.q_norm),
            k_norm=None if spec.k_norm is None else self._norm(spec.k_norm),
        )

    def _linear(self, spec: LinearSpec, is_head: bool = False) -> Linear:
        """The parts packed as one linear."""
        weight = self._kept(read_linear(self.source(spec)), is_head)
        linear = (self._shared or self.platform).make_linear(weight)
        self._release()
        if spec.splits_inputs and self._group is not None:
            linear = self._group.row_parallel(linear, spec.out_features, self.dtype)
        if spec.gathers and self._group is not None:
            in_features = spec.in_features // self._group.num_ranks
            linear = self._group.column_parallel(linear, in_features, spec.out_features, self.dtype)
        return linear

    def source(self, spec: LinearSpec) -> LinearSource:
        keeps_float8 = self.platform.keeps_float8 and self._weights == "auto"
        return LinearSource(spec, self.config.quantization, self.dtype, self, keeps_float8)

    def _release(self) -> None:
        self.checkpoint.release(self._unreleased)
        self._unreleased.clear()

    def _kept(self, weight: LinearWeight, is_head: bool) -> LinearWeight:
        """Applies the option `weights`. What the checkpoint stores as integers stays as it is, unless it is `dense`."""
        if weight.quantized is not None:
            dense = self._weights == "dense"
            return dataclasses.replace(weight, weight=weight.dense(), quantized=None) if dense else weight
        bits = KEPT_BITS[self._weights]
        return dataclasses.replace(weight, rounded_to=bits.head if is_head else bits.layers)

    def _norm(self, spec: NormSpec) -> torch.Tensor:
        """A copy in the model's dtype."""
        return self.platform.place_weight(self.checkpoint.view(f"{spec.name}.weight", (spec.size,)), self.dtype)

    # ---- `schemes.Tensors` ---------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.shape_of(name)

    def kind_of(self, name: str) -> str:
        return self.checkpoint.kind_of(name)

    def has_blocks(self, name: str) -> bool:
        return self.checkpoint.has_blocks(name)

    def stored(self, name: str, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        tensor = self.checkpoint.stored(name, shape, kind)
        self._unreleased.append(name)
        return tensor

    def blocks(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self._unreleased.append(name)
        return self.checkpoint.blocks(name, shape)

    def part(self, part: Part, in_features: int) -> torch.Tensor:
        name = f"{part.name}.weight"
        view = self.checkpoint.view(name, (part.out_features, in_features))
        self._unreleased.append(name)
        return view

    def whole_shape(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        return self.checkpoint.whole_shape(name, shape)

    def cut(self, name: str, weight: QuantizedWeight | torch.Tensor) -> QuantizedWeight | torch.Tensor:
        return self.checkpoint.cut(name, weight)

    def stacked(self, linear: LinearSpec, suffix: str, row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Stacks the parts of a linear in memory that the next call reuses: fresh pages would double the time. If
        another process has packed the values, the result has a shape only.
        """
        views = self._views(linear, suffix, row_shape, dtype)
        if self._shared is not None and self._shared.are_packed:
            views = [view.to("meta") for view in views]
        if len(views) == 1:
            return views[0].to(dtype).contiguous()
        shape = (linear.out_features, *row_shape)
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device=views[0].device)
        return torch.cat(views, out=self._scratch[:num_bytes].view(dtype).view(shape))

    def copied(self, linear: LinearSpec, suffix: str, row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        views = self._views(linear, suffix, row_shape, dtype)
        return torch.cat([self.platform.place_weight(view, dtype) for view in views])

    def _views(
        self, linear: LinearSpec, suffix: str, row_shape: tuple[int, ...], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        views = []
        for part in linear.parts:
            name, shape = f"{part.name}.{suffix}", (part.out_features, *row_shape)
            self._unreleased.append(name)
            views.append(self.checkpoint.view(name, shape, dtype))
        return views


def _embed(table: torch.Tensor, dtype: torch.dtype, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 [num_tokens] -> [num_tokens, hidden] in `dtype`; the table may be in another one."""
    return F.embedding(token_ids, table).to(dtype)


def _embed_quantized(table: QuantizedWeight, dtype: torch.dtype, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 [num_tokens] -> [num_tokens, hidden] in `dtype`."""
    offsets = None if table.offsets is None else table.offsets[token_ids]
    rows = QuantizedWeight(table.values[token_ids], table.scales[token_ids], table.bits, offsets)
    return rows.dequantized(dtype)
