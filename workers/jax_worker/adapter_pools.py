"""The adapters that a mesh holds: the pools of ranks of its linears, and which adapter has which ranks.

Adapters are read by `workers/adapters/`, as on other devices. Importing this imports torch, so only a worker whose
options name adapters, or folders for them, does.
"""

from __future__ import annotations

import heapq
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from manta.workers.adapter_key import AdapterKey
from manta.workers.adapters.adapter_bank import AdapterBank, FittedAdapter
from manta.workers.jax_worker.batch import LEAST_SIZE, padded, size_for
from manta.workers.jax_worker.low_rank import (
    RankPool,
    RankPools,
    Taker,
    TokenAdapter,
    pack_adapters,
    pool_name,
    takers_of,
    write_ranks,
)
from manta.workers.jax_worker.mesh import AXIS, place
from manta.workers.jax_worker.programs import jitted
from manta.workers.jax_worker.weight_reader import DTYPES, num_kv_heads
from manta.workers.kernels.adapted_linear import LowRankPart, TorchAdaptedLinear
from manta.workers.model_info import AdapterInfo
from manta.workers.model_options import ModelOptions
from manta.workers.models.families import describe
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.models.weight_specs import Split
from manta.workers.ranks.rank_worker import ReadAdapter
from manta.workers.torch_worker.tensor_check import check_tensors

MOST_RANKS = 4096
"""Most ranks of all adapters together, because a step may read all of them for each of its tokens."""
LEAST_RANKS = 128
"""Ranks of the smallest program, the width of a TPU's matrix unit."""
_GROWTH = 4
"""Factor between the ranks of programs. Each has a program for every number of tokens."""
_WRITTEN = 16
"""Ranks that one call writes: those of a usual adapter."""


class PooledAdapter(NamedTuple):
    """An adapter that was read, with values as the pools have them, which is not in use yet."""

    digest: str
    rank: int
    num_bytes: int
    """Bytes that its ranks take of each device."""
    base_model: str
    values: dict[str, tuple[np.ndarray, ...]]
    """The values of the linears that it changes, by the names of their pools: the fields of `RankPool` on the host, of
    the adapter's ranks only.
    """


class AdapterPools:
    """Holds adapters for a model on a mesh (`AdapterHolder`): those that `options` name, and with `adapter_roots` as
    many more as `max_adapter_bytes` of each device have room for. Not thread-safe, except for `read`.

    Raises `ModelError` if an adapter of the options is damaged or does not fit the model, if they have no room
    together, or if hosts find different values.
    """

    def __init__(
        self, options: ModelOptions, folder: pathlib.Path, config: ModelConfig, dtype: str, mesh: Mesh
    ) -> None:
        self._mesh = mesh
        self._dtype = DTYPES[dtype]
        self._repeats = num_kv_heads(config, mesh.size) // config.num_kv_heads
        self._kv_heads = config.num_kv_heads
        self._reader = AdapterBank(
            TorchAdaptedLinear, getattr(torch, dtype), options.max_adapter_bytes, None, config.head_dim
        )
        check_tensors(folder, config, bank=self._reader)
        fitted = {name: self._reader.read_named(name, path) for name, path in options.adapters.items()}
        _compare_hosts(fitted)
        changed = {linear.spec for each in fitted.values() for linear, _ in each.low_ranks}
        takers = (taker for layer in describe(config).layers for taker in takers_of(layer))
        self._takers = {each.name: each for each in takers if options.adapter_roots or each.spec in changed}
        """The parts of linears that have pools, by the names of these."""
        self._rank_bytes = sum(map(self._bytes_of_rank, self._takers.values()))
        own = {each.digest: self._pooled(f"adapter {name!r}", each) for name, each in fitted.items()}
        self._num_fixed = sum(each.rank for each in own.values())
        num_ranks = self._num_ranks(options)
        self.rank_sizes = _sizes_up_to(num_ranks)
        """Numbers of ranks that programs have."""
        self._free = list(range(num_ranks))
        """Free places in the pools, a heap."""
        self._held: dict[str, tuple[int, ...]] = {}
        """The places of each adapter's ranks, by its digest."""
        self.pools: RankPools = {name: self._zeros(taker, num_ranks) for name, taker in self._takers.items()}
        self._write = self._compiled_write()
        for each in own.values():
            assert self.hold(each), "there is room for all of them"
        infos = ((name, own[each.digest], options.adapters[name]) for name, each in fitted.items())
        self.loaded = {
            name: AdapterInfo(path, each.digest, each.rank, each.num_bytes, each.base_model)
            for name, each, path in infos
        }
        """The adapters of the options, by name."""

    def _num_ranks(self, options: ModelOptions) -> int:
        """Returns the ranks of each pool, a multiple of `LEAST_SIZE`."""
        most = min(MOST_RANKS, options.max_adapter_bytes // max(1, self._rank_bytes) // LEAST_SIZE * LEAST_SIZE)
        if max(1, self._num_fixed) > most:
            raise ModelError(
                f"adapters have {self._num_fixed} ranks together, each of {self._rank_bytes} bytes of a device, and "
                f"there is room for {most} of at most {MOST_RANKS}; raise max_adapter_bytes, or name fewer adapters"
            )
        return most if options.adapter_roots else padded(self._num_fixed)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def read(self, path: str) -> PooledAdapter:
        """Reads the adapter in a folder. Raises `ModelError` if it is damaged, does not fit the model, or has more
        ranks than there are beside the adapters of the options.
        """
        fitted = self._reader.read(path)
        most = self.rank_sizes[-1] - self._num_fixed
        if fitted.rank > most:
            raise ModelError(
                f"{path} has rank {fitted.rank}, and there is room for {most} ranks; raise max_adapter_bytes, or name "
                "fewer adapters"
            )
        return self._pooled(path, fitted)

    def _pooled(self, what: str, adapter: FittedAdapter) -> PooledAdapter:
        values: dict[str, tuple[np.ndarray, ...]] = {}
        for linear, low_rank in adapter.low_ranks:
            starts = np.cumsum([0, *(part.out_features for part in linear.spec.parts)]).tolist()
            for part in low_rank.parts:
                taker = self._takers.get(pool_name(linear.spec, starts.index(part.first_output)))
                if taker is None:
                    module = linear.spec.parts[0].name
                    raise ModelError(f"{what} changes {module}, which takes no adapters on a TPU; set device to cpu")
                a = low_rank.a[part.first_rank : part.first_rank + len(part.b)]
                scales = np.full(len(part.b), part.scale, dtype=np.float32)
                values[taker.name] = self._array(a), self._outputs(taker, part), scales
        return PooledAdapter(adapter.digest, adapter.rank, adapter.rank * self._rank_bytes, adapter.base_model, values)

    def _outputs(self, taker: Taker, part: LowRankPart) -> np.ndarray:
        """Returns the second half of a part, as the devices hold its outputs."""
        b = self._array(part.b)
        if taker.spec.parts[taker.part].split is Split.KV_HEADS:
            return b.reshape(len(b), self._kv_heads, -1).repeat(self._repeats, axis=1).reshape(len(b), -1)
        return b

    def _array(self, tensor: torch.Tensor) -> np.ndarray:
        """Returns the numbers of a tensor of the pools' dtype, without a copy."""
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.int16)
        return tensor.numpy().view(self._dtype)

    # ---- holding -----------------------------------------------------------------------------------------------------

    def hold(self, adapter: ReadAdapter) -> bool:
        """Gives an adapter that `read` has returned its ranks in the pools. Returns False if too few are free."""
        assert isinstance(adapter, PooledAdapter), "it was read here"
        if adapter.digest in self._held:
            return True
        if adapter.rank > len(self._free):
            return False
        places = tuple(heapq.heappop(self._free) for _ in range(adapter.rank))
        for first in range(0, adapter.rank, _WRITTEN):
            own, written = places[first : first + _WRITTEN], np.full(_WRITTEN, self.rank_sizes[-1], dtype=np.int32)
            written[: len(own)] = own
            self.pools = self._write(self.pools, place(self._mesh, written), self._slice(adapter, first))
        self._held[adapter.digest] = places
        return True

    def drop(self, digest: str) -> None:
        """Gives the ranks of an adapter back that no later step uses; harmless if it is not held."""
        for rank in self._held.pop(digest, ()):
            heapq.heappush(self._free, rank)

    def _slice(self, adapter: PooledAdapter, first: int) -> RankPools:
        """Returns the ranks of an adapter from `first` on, for one call of `write_ranks`. Missing ones are zeros."""
        return {name: self._placed(taker, adapter.values.get(name), first) for name, taker in self._takers.items()}

    def _placed(self, taker: Taker, whole: tuple[np.ndarray, ...] | None, first: int) -> RankPool:
        shapes, arrays = self._shapes(taker, _WRITTEN), []
        for index, each in enumerate(shapes):
            values = np.zeros(each.shape, dtype=each.dtype)
            if whole is not None:
                own = whole[index][first : first + _WRITTEN]
                values[: len(own)] = own
            arrays.append(jax.make_array_from_callback(each.shape, each.sharding, values.__getitem__))
        return RankPool(*arrays)

    def _zeros(self, taker: Taker, num_ranks: int) -> RankPool:
        shapes = self._shapes(taker, num_ranks)
        return RankPool(*(jitted(jnp.zeros, each.shape, each.dtype, out_shardings=each.sharding)() for each in shapes))

    def _shapes(self, taker: Taker, num_ranks: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes, dtypes and shardings of a pool. It is split as the linear's inputs and outputs are."""
        part, splits_inputs = taker.spec.parts[taker.part], taker.spec.splits_inputs
        num_outputs = part.out_features * (self._repeats if part.split is Split.KV_HEADS else 1)
        splits_outputs = part.split is not Split.NOTHING and not splits_inputs

        def array(dtype: np.dtype, *shape: int, is_split: bool = False) -> jax.ShapeDtypeStruct:
            axes = PartitionSpec(*[None] * (len(shape) - 1), AXIS if is_split else None)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self._mesh, axes))

        return (
            array(self._dtype, num_ranks, taker.spec.in_features, is_split=splits_inputs),
            array(self._dtype, num_ranks, num_outputs, is_split=splits_outputs),
            array(np.dtype(np.float32), num_ranks),
        )

    def _bytes_of_rank(self, taker: Taker) -> int:
        """Returns the bytes that a rank takes of each device at one part of a linear."""
        shapes = self._shapes(taker, 1)
        return sum(math.prod(each.sharding.shard_shape(each.shape)) * each.dtype.itemsize for each in shapes)

    def _compiled_write(self) -> jax.stages.Compiled:
        """Returns `write_ranks` compiled, so that no load waits for a compiler between two steps."""
        written = {name: RankPool._make(self._shapes(taker, _WRITTEN)) for name, taker in self._takers.items()}
        shardings = jax.tree.map(lambda each: each.sharding, written)
        function = jax.jit(write_ranks, donate_argnums=0, out_shardings=shardings)
        return function.lower(self.pools, place(self._mesh, np.zeros(_WRITTEN, dtype=np.int32)), written).compile()

    # ---- a step ------------------------------------------------------------------------------------------------------

    def pack(self, num_tokens: int, keys: Sequence[AdapterKey | None], lens: np.ndarray) -> tuple[int, np.ndarray]:
        """Returns the number of ranks of the step's program, and what `pack_adapters` returns for it. `keys` are the
        adapters of the step's sequences, which have `lens` tokens each and are computed as `num_tokens`.
        """
        adapters = [None if key is None else TokenAdapter(self._held[key.digest], key.scale) for key in keys]
        distinct = {adapter.ranks for adapter in adapters if adapter is not None}
        num_ranks = size_for(sum(map(len, distinct)), self.rank_sizes)
        return num_ranks, pack_adapters(num_tokens, num_ranks, adapters, lens)


def _sizes_up_to(num_ranks: int) -> list[int]:
    """Returns the numbers of ranks of programs."""
    sizes, size = [], LEAST_RANKS
    while size < num_ranks:
        sizes.append(size)
        size *= _GROWTH
    return [*sizes, num_ranks]


def _compare_hosts(adapters: Mapping[str, FittedAdapter]) -> None:
    """Raises `ModelError` if hosts find different values under a name."""
    if jax.process_count() == 1 or not adapters:
        return
    digests = np.stack([np.frombuffer(bytes.fromhex(each.digest), dtype=np.uint8) for each in adapters.values()])
    of_hosts = multihost_utils.process_allgather(jnp.asarray(digests))
    for number, name in enumerate(adapters):
        if (of_hosts[:, number] != of_hosts[0, number]).any():
            raise ModelError(f"adapter {name!r} has other values on other hosts; copy it there again")
