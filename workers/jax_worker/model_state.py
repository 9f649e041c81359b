"""One model on the mesh: its parameters, its KV cache, the hidden states of its last step, and its programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from manta.workers.adapter_key import AdapterKey
from manta.workers.jax_worker.attention import AttentionForm, page_dtype, page_head_dim
from manta.workers.jax_worker.batch import BatchShape, pack, padded, size_for, sizes_up_to
from manta.workers.jax_worker.mesh import AXIS, is_tpu, on_first_device, place, replicated
from manta.workers.jax_worker.parameters import Parameters, num_kv_heads
from manta.workers.jax_worker.programs import NUM_COPIES, ModelPrograms, ProgramCompiler, jitted
from manta.workers.kv_groups import LayerGroups
from manta.workers.models.model_config import ModelConfig

if TYPE_CHECKING:
    from manta.workers.jax_worker.adapter_pools import AdapterPools


class Limits:
    """The static sizes of all programs of a worker."""

    def __init__(
        self, max_num_tokens: int, max_num_sequences: int, max_model_len: int, block_size: int, num_groups: int = 1
    ) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        num_sequences, num_blocks = padded(max_num_sequences), -(-max_model_len // block_size)
        sizes = sizes_up_to(max_num_tokens)
        self.shapes = [BatchShape(size, num_sequences, num_blocks, num_groups) for size in sizes]
        self.point_sizes = sizes_up_to(max_num_sequences, growth=4)  # each has five short programs

    @property
    def max_points(self) -> int:
        """Most sample points of one call of the sampler."""
        return self.point_sizes[-1]


class ModelState:
    """A model with `num_blocks` KV blocks, in which its layers have the places of `layers`. Its logits are `vocab_size`
    wide. `adapters` are those that its sequences may have; without them they have none.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        layers: LayerGroups,
        mesh: Mesh,
        limits: Limits,
        num_blocks: int,
        vocab_size: int,
        compiler: ProgramCompiler,
        adapters: AdapterPools | None = None,
    ) -> None:
        self.config = config
        self.parameters = parameters
        self.mesh = mesh
        self.limits = limits
        self.num_blocks = num_blocks
        self.adapters = adapters
        self._dtype = parameters.embedding.dtype
        self._num_pages = layers.layers_per_block
        form = AttentionForm(mesh, config.heads.scale, is_tpu(mesh), config.heads.logit_cap)
        self._zeros = _zero_pages(config, form, num_blocks, limits.block_size, self._dtype)
        self._no_tokens = place(mesh, np.zeros(limits.max_points, dtype=np.int32))
        self.allocate()
        self.programs = ModelPrograms(
            compiler,
            config,
            tuple(place for place in layers.layers if place is not None),
            form,
            parameters,
            self.pages,
            shapes=limits.shapes,
            point_sizes=limits.point_sizes,
            vocab_size=vocab_size,
            pools={} if adapters is None else adapters.pools,
            rank_sizes=[] if adapters is None else adapters.rank_sizes,
        )

    def allocate(self) -> None:
        """Allocates the KV cache and the hidden states, which a failed step may have deleted."""
        self.pages = [self._zeros() for _ in range(self._num_pages)]
        size = (self.limits.shapes[-1].num_tokens, self.config.hidden_size)
        self.hidden = place(self.mesh, np.zeros(size, dtype=self._dtype))

    @property
    def is_whole(self) -> bool:
        """Whether all arrays still exist: a program that fails deletes the arrays donated to it."""
        return not (self.hidden.is_deleted() or any(each.is_deleted() for each in self.pages))

    def is_ready(self) -> bool:
        """Returns whether the devices have computed the hidden states of the last step."""
        is_ready: bool = self.hidden.is_ready()  # type: ignore[attr-defined]
        return is_ready

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies KV blocks, given as (source, destination) pairs."""
        for first in range(0, len(pairs), NUM_COPIES):
            part = np.full((2, NUM_COPIES), self.num_blocks, dtype=np.int32)
            part[0] = 0
            chosen = np.array(pairs[first : first + NUM_COPIES], dtype=np.int32).T
            part[:, : chosen.shape[1]] = chosen
            self.pages = self.programs.copy_blocks[NUM_COPIES](self.pages, place(self.mesh, part))

    def forward(
        self,
        token_ids: np.ndarray,
        starts: np.ndarray,
        lens: np.ndarray,
        block_tables: Sequence[np.ndarray],
        drawn: jax.Array | None = None,
        sources: tuple[Sequence[int], Sequence[int]] = ((), ()),
        keys: Sequence[AdapterKey | None] = (),
    ) -> np.ndarray:
        """Starts the forward pass of a batch, with the arguments of `batch.pack`, and returns what the host sends to
        the devices. `drawn` is on the first device. `keys` are the adapters of the sequences, if any has one.
        """
        shape = next(each for each in self.limits.shapes if each.num_tokens >= len(token_ids))
        packed = pack(shape, token_ids, starts, lens, block_tables, sources)
        tokens = self._no_tokens if drawn is None else jax.device_put(drawn, replicated(self.mesh))
        arguments = self.parameters, self.pages, self.hidden, tokens, place(self.mesh, packed)
        if not keys:
            self.pages, self.hidden = self.programs.forward[shape.num_tokens](*arguments)
            return packed
        assert self.adapters is not None, "the engine refuses adapters that the worker does not hold"
        num_ranks, of_adapters = self.adapters.pack(shape.num_tokens, keys, lens)
        program = self.programs.forward_with_adapters[shape.num_tokens, num_ranks]
        self.pages, self.hidden = program(self.adapters.pools, place(self.mesh, of_adapters), *arguments)
        return np.concatenate([packed, of_adapters])

    def logits(self, rows: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Returns the logits of `rows` of the hidden states, float32 [P, V], and their statuses, int32 [P], on the
        first device. P is the smallest program size with room for them.
        """
        size = size_for(len(rows), self.limits.point_sizes)
        wanted = np.zeros(size, dtype=np.int32)
        wanted[: len(rows)] = rows
        logits, status = self.programs.logits[size](self.parameters.head, self.hidden, place(self.mesh, wanted))
        return on_first_device(logits), on_first_device(status)


def held_config(config: ModelConfig, mesh: Mesh) -> ModelConfig:
    """Returns the configuration of one device's part of the KV cache, to plan its memory."""
    return msgspec.structs.replace(
        config,
        num_kv_heads=num_kv_heads(config, mesh.size) // mesh.size,
        head_dim=page_head_dim(config.head_dim, is_tpu(mesh)),
    )


def _zero_pages(
    config: ModelConfig, form: AttentionForm, num_blocks: int, block_size: int, dtype: np.dtype
) -> jax.stages.Wrapped:
    """Returns a function that allocates the zeroed pages of one layer of a block on their devices."""
    mesh = form.mesh
    assert isinstance(mesh, Mesh)
    heads = 2 * num_kv_heads(config, mesh.size)
    shape = (num_blocks, block_size, heads, page_head_dim(config.head_dim, form.uses_kernel))
    sharding = NamedSharding(mesh, PartitionSpec(None, None, AXIS, None))
    zeros: jax.stages.Wrapped = jitted(jnp.zeros, shape, page_dtype(dtype, form.uses_kernel), out_shardings=sharding)
    return zeros
