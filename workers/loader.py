"""Reads a checkpoint and builds the model: each weight is packed by the platform as it is read.

No more than one weight is held twice. Called by the worker; chooses between the native decoder and transformers.
"""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.nn.functional as F

from workers.checkpoints.checkpoint import Checkpoint, CheckpointHeaders
from workers.checkpoints.memory import weight_files
from workers.checkpoints.model_config import UNQUANTIZED, ModelConfig
from workers.checkpoints.schemes import LinearSource, read_linear
from workers.checkpoints.weights import DecoderWeights, LayerWeights, Linear, LinearWeight, SharedLinears
from workers.models.decoder import Decoder
from workers.models.protocol import Model
from workers.parallel.group import Group
from workers.parallel.layers import parallelise
from workers.parallel.shard import CheckpointShard, shard_config
from workers.platforms import Platform


def load_model(
    folder: str | pathlib.Path,
    config: ModelConfig,
    dtype: str,
    platform: Platform,
    whole: bool = True,
    group: Group | None = None,
) -> Model:
    """The model of a checkpoint in `bfloat16`, `float16` or `float32`, on the platform's device; of a `group` of ranks
    this one's share, which computes together with the others'.

    Raises `ModelError` naming a tensor that is missing, misshapen, or unexpected; and if the model cannot be split over
    so many ranks. If `whole` is False, `config` may have fewer layers than the checkpoint: the others are not read.
    """
    if group is not None and group.num_ranks > 1:
        return _load_share(folder, config, dtype, platform, group)
    if not config.native:
        from workers.models.transformers_fallback import TransformersModel  # seconds to import, and rarely needed

        return TransformersModel(folder, config, platform.torch_dtype(dtype), platform)
    checkpoint = Checkpoint(folder)
    with _shared_linears(folder, config, dtype, platform) as shared:
        weights = _WeightReader(checkpoint, config, platform.torch_dtype(dtype), platform, shared).read()
    if whole:
        _check_all_used(checkpoint, config)
    return Decoder(config, weights, platform)


def _load_share(folder: str | pathlib.Path, config: ModelConfig, dtype: str, platform: Platform, group: Group) -> Model:
    share = shard_config(config, group.num_ranks)
    checkpoint = CheckpointShard(Checkpoint(folder, read_ahead=False), config, group.rank, group.num_ranks)
    with _shared_linears(folder, config, dtype, platform, group) as shared:
        weights = _WeightReader(checkpoint, share, platform.torch_dtype(dtype), platform, shared).read()
    _check_all_used(checkpoint, config)
    return Decoder(share, parallelise(weights, group, config.vocab_size, share.vocab_size), platform)


def _shared_linears(
    folder: str | pathlib.Path, config: ModelConfig, dtype: str, platform: Platform, group: Group | None = None
) -> AbstractContextManager[SharedLinears | None]:
    """By all that packed weights depend on beside the platform. A file that is written to gets another change time."""
    if config.scheme != UNQUANTIZED:
        return nullcontext()
    files = [path.stat() for path in weight_files(pathlib.Path(folder))]
    identities = [(file.st_dev, file.st_ino, file.st_size, file.st_ctime_ns) for file in files]
    rank = "whole" if group is None else f"{group.rank} of {group.num_ranks}"
    return platform.shared_linears(f"{identities} {config} {dtype} {rank}")


def check_tensors(folder: str | pathlib.Path, config: ModelConfig) -> None:
    """Looks in the headers for every tensor that `load_model` would read from a native checkpoint, and reads none.

    Raises `ModelError` as `load_model` does.
    """
    checkpoint = CheckpointHeaders(folder)
    _WeightReader(checkpoint, config, torch.float32, _NoPlatform()).read()
    _check_all_used(checkpoint, config)


def _check_all_used(checkpoint: _Checkpoint, config: ModelConfig) -> None:
    """Raises `ModelError` naming tensors that the model does not have; a tied model may be saved with the head too."""
    checkpoint.check_all_used(but=["lm_head.weight"] if config.tie_word_embeddings else [])


class _Checkpoint(Protocol):
    """`Checkpoint`, or a rank's view of it."""

    def __contains__(self, name: str) -> bool: ...

    def view(self, name: str, shape: tuple[int, ...], kind: torch.dtype = torch.float32) -> torch.Tensor: ...

    def release(self, names: Iterable[str]) -> None: ...

    def check_all_used(self, but: Iterable[str] = ()) -> None: ...


class _WeightPlatform(Protocol):
    """The methods of a `Platform` that take weights."""

    def make_linear(self, weight: LinearWeight) -> Linear: ...

    def place_weight(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    def place_embedding(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    def tied_head(self, table: torch.Tensor) -> Linear | None: ...


class _NoPlatform:
    """Takes weights and keeps none: for headers without data."""

    def make_linear(self, weight: LinearWeight) -> Linear:
        return lambda x: x

    def place_weight(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return view

    place_embedding = place_weight

    def tied_head(self, table: torch.Tensor) -> None:
        """So that it is read like any other linear."""


class _WeightReader:
    """Reads a decoder's weights by the names that they have in Hugging Face's checkpoints of the native families."""

    def __init__(
        self,
        checkpoint: _Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        platform: _WeightPlatform,
        shared: SharedLinears | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.dtype = dtype
        self.platform = platform
        self._shared = shared
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._unreleased: list[str] = []
        """Tensors that the linear under way has read."""

    def read(self) -> DecoderWeights:
        config = self.config
        view = self.checkpoint.view("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        table = self.platform.place_embedding(view, self.dtype)
        embedding = functools.partial(_embed, table, self.dtype)
        # The head before the layers: it is the largest weight, and is held twice while it is packed.
        head = self._head(table)
        layers = [self._layer(f"model.layers.{index}") for index in range(config.num_layers)]
        final_norm = self._vector("model.norm.weight", config.hidden_size)
        return DecoderWeights(embedding, layers, final_norm, head)

    def _head(self, table: torch.Tensor) -> Linear:
        """`table` is the placed embedding, with which a tied head may share its memory."""
        config = self.config
        is_tied = config.tie_word_embeddings
        if is_tied and (head := self.platform.tied_head(table)) is not None:
            return head
        name = "model.embed_tokens" if is_tied else "lm_head"
        return self._linear([(name, config.vocab_size)], config.hidden_size, bias=False)

    def _layer(self, prefix: str) -> LayerWeights:
        config = self.config
        hidden, head_dim = config.hidden_size, config.head_dim
        query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = [(f"{attention}.q_proj", query_size), (f"{attention}.k_proj", kv_size), (f"{attention}.v_proj", kv_size)]
        gate_up = [(f"{mlp}.{name}_proj", config.intermediate_size) for name in ("gate", "up")]
        return LayerWeights(
            input_norm=self._vector(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._linear(qkv, hidden, config.qkv_bias),
            q_norm=self._vector(f"{attention}.q_norm.weight", head_dim) if config.qk_norm else None,
            k_norm=self._vector(f"{attention}.k_norm.weight", head_dim) if config.qk_norm else None,
            attention_output=self._linear([(f"{attention}.o_proj", hidden)], query_size, config.output_bias),
            mlp_norm=self._vector(f"{prefix}.post_attention_layernorm.weight", hidden),
            gated=self._linear(gate_up, hidden, config.mlp_bias, gated=True),
            down=self._linear([(f"{mlp}.down_proj", hidden)], config.intermediate_size, config.mlp_bias),
        )

    def _linear(self, parts: list[tuple[str, int]], in_features: int, bias: bool, gated: bool = False) -> Linear:
        """The linears `parts` (name, out_features), which have the same input, packed as one in this order."""
        source = LinearSource(tuple(parts), in_features, bias, gated, self.config.scheme, self.dtype, self)
        linear = (self._shared or self.platform).make_linear(read_linear(source))
        self.checkpoint.release(self._unreleased)
        self._unreleased.clear()
        return linear

    def _vector(self, name: str, size: int) -> torch.Tensor:
        """A copy in the model's dtype."""
        return self.platform.place_weight(self.checkpoint.view(name, (size,)), self.dtype)

    # ---- `schemes.Tensors` ---------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint

    def stacked(self, parts: list[tuple[str, int]], row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Of several parts in memory that the next call reuses: fresh pages would double the time. Shapes alone where
        another process has packed the values.
        """
        views = self._views(parts, row_shape, dtype)
        if self._shared is not None and self._shared.are_packed:
            views = [view.to("meta") for view in views]
        if len(views) == 1:
            return views[0].to(dtype).contiguous()
        shape = (sum(rows for _, rows in parts), *row_shape)
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device=views[0].device)
        return torch.cat(views, out=self._scratch[:num_bytes].view(dtype).view(shape))

    def copied(self, parts: list[tuple[str, int]], row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        views = self._views(parts, row_shape, dtype)
        return torch.cat([self.platform.place_weight(view, dtype) for view in views])

    def _views(
        self, parts: list[tuple[str, int]], row_shape: tuple[int, ...], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        self._unreleased += [name for name, _ in parts]
        return [self.checkpoint.view(name, (rows, *row_shape), dtype) for name, rows in parts]


def _embed(table: torch.Tensor, dtype: torch.dtype, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 [num_tokens] -> [num_tokens, hidden] in `dtype`; the table may be in another one."""
    return F.embedding(token_ids, table).to(dtype)
