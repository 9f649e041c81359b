"""One model on the mesh: its parameters, its KV cache and recurrent states, the hidden states of its last step, and its
programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding

from manta.workers.adapter_key import AdapterKey
from manta.workers.jax_worker.attention import AttentionForm, page_dtype, page_head_dim
from manta.workers.jax_worker.batch import BatchShape, pack, padded, size_for, sizes_up_to
from manta.workers.jax_worker.layer_arrays import Parameters
from manta.workers.jax_worker.mesh import is_tpu, on_first_device, place, replicated
from manta.workers.jax_worker.mixers import state_arrays
from manta.workers.jax_worker.programs import NUM_COPIES, ModelPrograms, ProgramCompiler, jitted
from manta.workers.jax_worker.weight_reader import num_kv_heads
from manta.workers.kv_groups import LayerGroups
from manta.workers.models.families import describe
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.recurrent_shapes import StateShape
from manta.workers.models.specs import MixerSpec
from manta.workers.step import SCRATCH_STATE, ZERO_STATE, StateUse

_TILE = 8, 128
"""Rows and columns of a tile of float32 numbers, of which a TPU fills whole ones with an array's last two dimensions.
"""

if TYPE_CHECKING:
    from manta.workers.jax_worker.adapter_pools import AdapterPools


class Limits:
    """The static sizes of all programs of a worker."""

    def __init__(
        self,
        max_num_tokens: int,
        max_num_sequences: int,
        max_model_len: int,
        block_size: int,
        num_groups: int = 1,
        num_state_slots: int = 0,
    ) -> None:
        """`num_groups` are the groups of layers with block tables; 0 for a model without attention. `num_state_slots`
        are the slots of recurrent states; 0 for a model without.
        """
        self.block_size = block_size
        self.num_groups = num_groups
        self.num_state_slots = num_state_slots
        num_sequences, num_blocks = padded(max_num_sequences), -(-max_model_len // block_size)
        others = num_sequences, num_blocks, num_groups, num_state_slots > 0
        self.shapes = [BatchShape(size, *others) for size in sizes_up_to(max_num_tokens)]
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
        heads = config.heads
        form = AttentionForm(mesh, heads.scale, is_tpu(mesh), heads.logit_cap, heads.keys_are_values)
        self._zeros = _zero_pages(config, form, num_blocks, limits.block_size, self._dtype)
        self._state_zeros = _zero_states(config, mesh, limits.num_state_slots)
        self._no_tokens = place(mesh, np.zeros(limits.max_points, dtype=np.int32))
        self.allocate()
        self.programs = ModelPrograms(
            compiler,
            config,
            layers.layers,
            form,
            parameters,
            self.pages,
            self.states,
            shapes=limits.shapes,
            point_sizes=limits.point_sizes,
            vocab_size=vocab_size,
            pools={} if adapters is None else adapters.pools,
            rank_sizes=[] if adapters is None else adapters.rank_sizes,
        )

    def allocate(self) -> None:
        """Allocates the KV cache, the recurrent states and the hidden states, which a failed step may have deleted."""
        self.pages = [self._zeros() for _ in range(self._num_pages)]
        self.states = tuple(tuple(zeros() for zeros in of_layer) for of_layer in self._state_zeros)
        size = (self.limits.shapes[-1].num_tokens, self.config.hidden_size)
        self.hidden = place(self.mesh, np.zeros(size, dtype=self._dtype))

    @property
    def is_whole(self) -> bool:
        """Whether all arrays still exist: a program that fails deletes the arrays donated to it."""
        return not any(each.is_deleted() for each in jax.tree.leaves((self.hidden, self.pages, self.states)))

    def is_ready(self) -> bool:
        """Returns whether the devices have computed the hidden states of the last step."""
        is_ready: bool = self.hidden.is_ready()  # type: ignore[attr-defined]
        return is_ready

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies KV blocks, given as (source, destination) pairs."""
        if not self.pages:
            return  # blocks of a model without attention have no keys and values
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
        states: Sequence[StateUse] = (),
        keys: Sequence[AdapterKey | None] = (),
    ) -> np.ndarray:
        """Starts the forward pass of a batch, with the arguments of `batch.pack`, and returns what the host sends to
        the devices. `drawn` is on the first device. `keys` are the adapters of the sequences, if any has one.
        """
        shape = next(each for each in self.limits.shapes if each.num_tokens >= len(token_ids))
        packed = pack(shape, token_ids, starts, lens, block_tables, sources, states)
        tokens = self._no_tokens if drawn is None else jax.device_put(drawn, replicated(self.mesh))
        arguments = self.parameters, self.pages, self.states, self.hidden, tokens, place(self.mesh, packed)
        if not keys:
            self.pages, self.states, self.hidden = self.programs.forward[shape.num_tokens](*arguments)
            return packed
        assert self.adapters is not None, "the engine refuses adapters that the worker does not hold"
        num_ranks, of_adapters = self.adapters.pack(shape.num_tokens, keys, lens)
        program, sent = self.programs.forward_with_adapters[shape.num_tokens, num_ranks], place(self.mesh, of_adapters)
        self.pages, self.states, self.hidden = program(self.adapters.pools, sent, *arguments)
        return np.concatenate([packed, of_adapters])

    def measured_forward(self, token_ids: np.ndarray, block_tables: np.ndarray) -> None:
        """Starts the forward pass of one sequence's first tokens, whose states nobody reads."""
        count = len(token_ids)
        states = [StateUse(ZERO_STATE, [(count, SCRATCH_STATE)])] if self.limits.num_state_slots else ()
        tables = [block_tables] * self.limits.num_groups
        self.forward(token_ids, np.array([0]), np.array([count]), tables, states=states)

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
    """Returns the configuration of one device's part of the KV cache and the recurrent states, to plan its memory."""
    return msgspec.structs.replace(
        config,
        num_kv_heads=num_kv_heads(config, mesh.size) // mesh.size,
        head_dim=page_head_dim(config.head_dim, is_tpu(mesh)),
        layer_states=tuple(held_state(layer.mixer, mesh, is_tpu(mesh)) for layer in describe(config).layers),
    )


def held_state(mixer: MixerSpec | None, mesh: Mesh, is_padded: bool) -> StateShape | None:
    """Returns the shapes of the arrays of a layer's recurrent state on one device, perhaps as a TPU pads them; None for
    a layer without a state.
    """
    arrays = state_arrays(mixer)
    shapes = [NamedSharding(mesh, each.split).shard_shape((1, *each.shape))[1:] for each in arrays]
    if is_padded:
        shapes = [_padded(shape) for shape in shapes]
    return StateShape(tuple(shapes)) if shapes else None


def _padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    *outer, num_rows, num_columns = shape
    rows, columns = _TILE
    return *outer, -(-num_rows // rows) * rows, -(-num_columns // columns) * columns


def _zero_pages(
    config: ModelConfig, form: AttentionForm, num_blocks: int, block_size: int, dtype: np.dtype
) -> jax.stages.Wrapped:
    """Returns a function that allocates the zeroed pages of one layer of a block on their devices."""
    mesh = form.mesh
    assert isinstance(mesh, Mesh)
    num_cached = 1 if form.keys_are_values else 2 * num_kv_heads(config, mesh.size)
    shape = (num_blocks, block_size, num_cached, page_head_dim(config.head_dim, form.uses_kernel))
    sharding = NamedSharding(mesh, form.page_split)
    zeros: jax.stages.Wrapped = jitted(jnp.zeros, shape, page_dtype(dtype, form.uses_kernel), out_shardings=sharding)
    return zeros


def _zero_states(config: ModelConfig, mesh: Mesh, num_slots: int) -> list[list[jax.stages.Wrapped]]:
    """Returns the functions that allocate the zeroed arrays of each layer's recurrent state on their devices."""
    return [
        [
            jitted(jnp.zeros, (num_slots, *each.shape), np.float32, out_shardings=NamedSharding(mesh, each.split))
            for each in state_arrays(layer.mixer)
        ]
        for layer in describe(config).layers
    ]
