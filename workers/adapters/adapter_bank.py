"""The adapters that one rank holds: their values, cut to the rank's share, at each linear of its model.

The loader hands in the linears that take adapters, the worker loads adapters by name, and the model runner asks for the
numbers of those that a step's sequences have. An adapter is known by the digest of its values.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from manta.workers.adapters.adapter_files import read_adapter
from manta.workers.adapters.expert_places import AdapterPiece, ExpertPlace, Join, adapted_experts, stacked_key
from manta.workers.adapters.low_rank_adapter import Adapter, wrong_shape
from manta.workers.checkpoints.formats.head_orders import in_halves
from manta.workers.checkpoints.shard import Shard, in_order, scaled, take_piece
from manta.workers.kernels.adapted_linear import (
    MOST_ADAPTERS,
    HoldsAdapters,
    LinearAdapting,
    LowRank,
    LowRankPart,
    TorchAdaptedLinear,
    adapt,
)
from manta.workers.kernels.weights import Linear
from manta.workers.model_info import AdapterInfo
from manta.workers.models.model_config import ModelError
from manta.workers.models.specs import ExpertsSpec
from manta.workers.models.weight_specs import LinearSpec, Split, WeightPart
from manta.workers.ranks.rank_worker import ReadAdapter

Share = Callable[[str, Sequence[torch.Tensor]], list[torch.Tensor]]
"""Function that returns the tensors of the adapter with a digest in memory that engines share, or as they are."""
_EXPERTS = "experts"
"""The name of a layer's experts in all checkpoints."""


class AdapterPlace(NamedTuple):
    """A linear of the model that takes adapters."""

    spec: LinearSpec
    """Its description, as the model's family gives it."""
    linear: HoldsAdapters

    @property
    def names(self) -> set[str]:
        """The names of the modules that change it, in whichever form the base model's checkpoint stores it."""
        return {form.name for part in self.spec.parts for form in _forms(part)}

    def pieces(self, adapter: Adapter, _: Mapping[str, str]) -> list[AdapterPiece | None]:
        """Returns what an adapter adds to each part; None where it adds nothing."""
        modules = adapter.modules
        found = (next((form for form in _forms(part) if form.name in modules), None) for part in self.spec.parts)
        return [None if form is None else AdapterPiece(form, form.name, modules[form.name]) for form in found]


def _forms(part: WeightPart) -> Iterator[WeightPart]:
    """Yields the forms of a part in which it is no expert's."""
    return (form for form in part.forms() if form.expert is None)


class _Held(NamedTuple):
    number: int
    """Its place in the table of each linear."""
    num_bytes: int


class FittedAdapter(NamedTuple):
    """An adapter in the form in which linears use it, which is not in use yet."""

    digest: str
    rank: int
    num_modules: int
    """Number of the model's modules that it changes."""
    base_model: str
    low_ranks: list[tuple[AdapterPlace | ExpertPlace, LowRank]]

    @property
    def num_bytes(self) -> int:
        return sum(low_rank.num_bytes for _, low_rank in self.low_ranks)


class AdapterBank:
    """Holds adapters of at most `max_bytes` together, with values in `dtype`. `shard` is the rank's share, None for all
    of the model. `head_dim` is the width of the model's heads, which adapters of GGUF files need. `expert_adapting`
    makes linears with a single adapter, for routed experts; None if these take none. `share` puts what is read into
    memory that the engines of a node share; None leaves it here. Not thread-safe, except for `read`.
    """

    def __init__(
        self,
        adapting: LinearAdapting,
        dtype: torch.dtype,
        max_bytes: int,
        shard: Shard | None,
        head_dim: int = 0,
        expert_adapting: LinearAdapting | None = None,
        share: Share | None = None,
    ) -> None:
        self._adapting = adapting
        self._dtype = dtype
        self._max_bytes = max_bytes
        self._shard = shard
        self._head_dim = head_dim
        self._expert_adapting = expert_adapting
        self._share = share
        self._places: list[AdapterPlace] = []
        self._expert_places: list[ExpertPlace] = []
        self._other_modules: frozenset[str] = frozenset()
        self._held: dict[str, _Held] = {}
        """The adapters by their digests."""
        self._free_numbers = list(range(MOST_ADAPTERS))
        self._num_bytes = 0

    # ---- the model -----------------------------------------------------------------------------------------------

    def around(self, linear: Linear, spec: LinearSpec) -> Linear:
        """Returns a linear with adapters that computes what `linear` does, whose description is `spec`."""
        around, adapted = adapt(linear, self._adapting)
        self._places.append(AdapterPlace(spec, adapted))
        return around

    def around_plain(self, linear: Linear, spec: LinearSpec) -> Linear:
        """Does what `around` does for a linear of float32 on any device, with torch."""
        adapted = TorchAdaptedLinear(linear)
        self.beside(adapted, spec)
        return adapted

    def beside(self, adapters: HoldsAdapters, spec: LinearSpec) -> None:
        """Gives `adapters` those of a linear that is no object, whose description is `spec`."""
        self._places.append(AdapterPlace(spec, adapters))

    def joining(self, join: Join, spec: ExpertsSpec) -> Join:
        """Returns a function that joins the experts of a layer as `join` does, and lets them take adapters if they can:
        if a rank has its share of each of them, and no rank gathers what another one computes.
        """
        gathers = self._shard is not None and any(linear.gathers for expert in spec.own for linear in expert)
        if self._expert_adapting is None or spec.held is not None or gathers:
            return join
        return adapted_experts(join, self._expert_adapting, spec, self._expert_places)

    @property
    def _all_places(self) -> Sequence[AdapterPlace | ExpertPlace]:
        return [*self._places, *self._expert_places]

    def note_modules(self, names: Iterable[str]) -> None:
        """Notes the names of all modules of the model, for messages."""
        self._other_modules = frozenset(names)

    # ---- adapters ------------------------------------------------------------------------------------------------

    def number_of(self, digest: str) -> int:
        """Returns the number of an adapter that is held."""
        return self._held[digest].number

    def load(self, name: str, path: str) -> AdapterInfo:
        """Reads the adapter in a folder and holds it. Raises `ModelError` if it is damaged, does not fit the model, or
        would take more memory than is left.
        """
        fitted = self.read_named(name, path)
        if not self.hold(fitted):
            raise ModelError(
                f"adapter {name!r} takes {fitted.num_bytes} bytes, and {self.num_bytes_left} of "
                f"max_adapter_bytes {self._max_bytes} are left for at most {MOST_ADAPTERS} adapters; raise it, or name "
                "fewer adapters"
            )
        return AdapterInfo(path, fitted.digest, fitted.rank, fitted.num_bytes, fitted.base_model)

    def read_named(self, name: str, path: str) -> FittedAdapter:
        """Reads the adapter in a folder as `read` does. The `ModelError` names it."""
        try:
            return self.read(path)
        except ModelError as error:
            raise ModelError(f"adapter {name!r}: {error}") from error

    def read(self, path: str) -> FittedAdapter:
        """Reads the adapter in a folder, in the form for this rank's linears. Raises `ModelError` as `load` does."""
        adapter = read_adapter(path, self._max_bytes)
        places = self._all_places
        known: set[str] = set().union(*(place.names for place in places))
        stacked = {stacked_key(name): name for name, module in adapter.modules.items() if module.num_experts}
        for name, module in adapter.modules.items():
            if (stacked_key(name) if module.num_experts else name) not in known:
                raise ModelError(_why_unknown(adapter, name, self._has(name)))
        found = [(place, place.pieces(adapter, stacked)) for place in places]
        applied = {piece.name for _, pieces in found for piece in pieces if piece is not None}
        for name in adapter.modules.keys() - applied:
            raise ModelError(
                f"{adapter.source} changes {name}, and the same linear under another name too; merge the two"
            )
        low_ranks = [(place, self._low_rank(adapter, place.spec, pieces)) for place, pieces in found if any(pieces)]
        if self._share is not None:
            low_ranks = _shared(self._share, adapter.digest, low_ranks)
        return FittedAdapter(adapter.digest, adapter.rank, len(adapter.modules), adapter.base_model, low_ranks)

    def _has(self, module: str) -> bool:
        """Returns whether the model has a module. Checkpoints store experts one by one or together, so an adapter may
        call them otherwise than this one does.
        """
        experts = any(_EXPERTS in each.split(".") for each in self._other_modules)
        return module in self._other_modules or (experts and _EXPERTS in module.split("."))

    def hold(self, adapter: ReadAdapter) -> bool:
        """Holds an adapter that `read` has returned. Returns False if there is no room for it beside the others."""
        assert isinstance(adapter, FittedAdapter), "it was read here"
        if adapter.digest in self._held:
            return True
        if not self._free_numbers or self._num_bytes + adapter.num_bytes > self._max_bytes:
            return False
        number = heapq.heappop(self._free_numbers)
        for place, low_rank in adapter.low_ranks:
            place.linear.hold(number, low_rank)
        self._held[adapter.digest] = _Held(number, adapter.num_bytes)
        self._num_bytes += adapter.num_bytes
        return True

    @property
    def num_bytes_left(self) -> int:
        """Bytes that more adapters may take."""
        return self._max_bytes - self._num_bytes

    def drop(self, digest: str) -> None:
        """Forgets an adapter that no sequence of the next steps has; harmless if it is not held."""
        held = self._held.pop(digest, None)
        if held is None:
            return
        for place in self._all_places:
            place.linear.drop(held.number)
        heapq.heappush(self._free_numbers, held.number)
        self._num_bytes -= held.num_bytes

    def _low_rank(self, adapter: Adapter, spec: LinearSpec, pieces: Sequence[AdapterPiece | None]) -> LowRank:
        """Returns the rank's share of what an adapter adds to the parts of one linear."""
        firsts: dict[str, int] = {}
        inputs, parts, rank, first_output = [], [], 0, 0
        for of_linear, piece in zip(spec.parts, pieces, strict=True):
            if piece is not None:
                if piece.name not in firsts:
                    firsts[piece.name] = rank
                    inputs.append(self._inputs(adapter, piece, spec))
                    rank += len(inputs[-1])
                b = self._outputs(adapter, piece).to(self._dtype).T.contiguous()
                parts.append(LowRankPart(b, firsts[piece.name], first_output, piece.module.scale))
            first_output += self._num_outputs(of_linear)
        return LowRank(torch.cat(inputs).to(self._dtype).contiguous(), tuple(parts))

    def _inputs(self, adapter: Adapter, piece: AdapterPiece, spec: LinearSpec) -> torch.Tensor:
        a = piece.module.a
        if a.shape[1] != spec.in_features:
            raise wrong_shape(adapter, piece.name, "A", a, f"[rank, {spec.in_features}]")
        if self._shard is None:
            return a
        return self._shard.take(WeightPart(piece.name, spec.out_features, Split.NOTHING), spec.splits_inputs, a)

    def _outputs(self, adapter: Adapter, piece: AdapterPiece) -> torch.Tensor:
        part, module = piece.part, piece.module
        num_rows = part.stored_rows or part.out_features
        if len(module.b) != num_rows:
            raise wrong_shape(adapter, piece.name, "B", module.b, f"[{num_rows}, rank]")
        return self._share_of(part, in_halves(module.b, self._head_dim) if module.is_interleaved else module.b)

    def _num_outputs(self, part: WeightPart) -> int:
        """Returns the number of the rank's outputs of a part."""
        return len(self._share_of(part, torch.empty(part.stored_rows or part.out_features, 0)))

    def _share_of(self, part: WeightPart, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rank's rows of a part, in the order of the linear's outputs."""
        whole = take_piece(part, rows)
        ordered = in_order(part, whole if self._shard is None else self._shard.take(part, False, whole))
        taken = ordered if part.scale == 1 else scaled(ordered, part.scale)
        assert isinstance(taken, torch.Tensor)
        return taken


def _shared(
    share: Share, digest: str, low_ranks: list[tuple[AdapterPlace | ExpertPlace, LowRank]]
) -> list[tuple[AdapterPlace | ExpertPlace, LowRank]]:
    """Returns what an adapter adds to each place, with the tensors that `share` returns for its own ones."""
    own = [tensor for _, each in low_ranks for tensor in (each.a, *(part.b for part in each.parts))]
    tensors = iter(share(digest, own))
    return [
        (place, LowRank(next(tensors), tuple(part._replace(b=next(tensors)) for part in each.parts)))
        for place, each in low_ranks
    ]


def _why_unknown(adapter: Adapter, module: str, is_there: bool) -> str:
    if is_there:
        return (
            f"{adapter.source} changes {module}, which takes no adapters here; linears of attention, of other mixers "
            "and of MLPs do, and those of experts unless ranks have whole ones or on TPUs: embeddings, heads and "
            "routers have to be merged into the model"
        )
    base = f", and names the base model {adapter.base_model}" if adapter.base_model else ""
    return f"{adapter.source} changes {module}, which this model does not have{base}; take the adapter's own base model"
