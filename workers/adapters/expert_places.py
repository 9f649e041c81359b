"""The linears of routed experts that take adapters, and which part of an adapter belongs to which expert.

Adapters store experts one by one, or all of a layer in two matrices (PEFT's `target_parameters`), whichever way the
base model's checkpoint stores them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from manta.workers.adapters.low_rank_adapter import Adapter, LowRankModule, wrong_shape
from manta.workers.checkpoints.shard import take_piece
from manta.workers.kernels.adapted_experts import DOWN, GATED, AdaptedExperts, ExpertLinear, HasOneByOne
from manta.workers.kernels.adapted_linear import LinearAdapting
from manta.workers.kernels.weights import Experts, GatedMlpWeights
from manta.workers.models.model_config import ExpertsConfig
from manta.workers.models.specs import ExpertsSpec
from manta.workers.models.weight_specs import LinearSpec, WeightPart

Join = Callable[[Iterable[GatedMlpWeights], ExpertsConfig, str], Experts]
"""Function that makes one object of the experts of a layer (`Platform.join_experts`)."""
_LAYER = re.compile(r"(.*\blayers\.\d+)\.")


class AdapterPiece(NamedTuple):
    """The share of an adapter that changes one part of a linear."""

    part: WeightPart
    """The part, whose outputs are all rows of the module's second half."""
    name: str
    """The module's name in the adapter. Parts of one name have one first half."""
    module: LowRankModule


def stacked_key(name: str) -> str:
    """Returns what tells a layer's parameter of all experts from others, given its name. Versions of a family differ in
    what lies between the layer and its experts.
    """
    layer = _LAYER.match(name)
    return f"{layer[1] if layer else ''} {name.rpartition('.')[2]}"


class ExpertPlace(NamedTuple):
    """A linear of an expert."""

    spec: LinearSpec
    linear: ExpertLinear
    num_experts: int

    @property
    def names(self) -> set[str]:
        """The names of the modules, and the keys of those of all experts together, that change it."""
        apart = {form.name for part in self.spec.parts for form in part.forms() if form.expert is None}
        return {*apart, self._key}

    @property
    def _key(self) -> str:
        leaf = "down_proj" if self.linear.which == DOWN else "gate_up_proj" if self.spec.is_gated else "up_proj"
        return stacked_key(f"{self.spec.parts[0].name}.{leaf}")

    def pieces(self, adapter: Adapter, stacked: Mapping[str, str]) -> list[AdapterPiece | None]:
        """Returns what an adapter adds to each part; None where it adds nothing. `stacked` are the names of its modules
        of all experts together, by their keys. Raises `ModelError` if one has another shape.
        """
        return [self._piece(adapter, stacked, index) for index in range(len(self.spec.parts))]

    def _piece(self, adapter: Adapter, stacked: Mapping[str, str], index: int) -> AdapterPiece | None:
        part = self.spec.parts[index]
        for form in part.forms():
            if form.expert is None and form.name in adapter.modules:
                module = adapter.modules[form.name]
                if len(module.b) != (num_rows := form.stored_rows or form.out_features):
                    raise wrong_shape(adapter, form.name, "B", module.b, f"[{num_rows}, rank]")
                return AdapterPiece(_whole(part), form.name, module._replace(b=_rows(form, module.b)))
        name = stacked.get(self._key)
        if name is None:
            return None
        module, form = self._of_all(adapter, name, index)
        return AdapterPiece(_whole(part), name, module._replace(b=_rows(form, module.b)))

    def _of_all(self, adapter: Adapter, name: str, index: int) -> tuple[LowRankModule, WeightPart]:
        """Returns what a module of all experts adds to this linear, and the place of a part in its outputs."""
        together, part = adapter.modules[name], self.spec.parts[index]
        sizes, found = (self.spec.in_features, self.spec.out_features), (together.a.shape[1], len(together.b))
        if together.num_experts != self.num_experts or found not in (sizes, sizes[::-1]):
            raise wrong_shape(adapter, name, "B", together.b, f"[{sizes[1]}, rank * {self.num_experts}]")
        placed = [(form, form.expert) for form in part.forms() if form.expert is not None]
        has_inputs_first = bool(placed) and placed[0][1].are_rows is False
        has_outputs_first = found != sizes or (
            found == sizes[::-1] and together.is_of_old_peft and not has_inputs_first
        )
        module = together.of_expert(self.linear.expert, has_outputs_first)
        if placed:
            form, rows = placed[0]
            return module._replace(b=rows.rows_of(module.b)), form
        first = sum(each.out_features for each in self.spec.parts[:index])
        return module, part._replace(first_row=first, stored_rows=sizes[1])


def adapted_experts(join: Join, adapting: LinearAdapting, spec: ExpertsSpec, places: list[ExpertPlace]) -> Join:
    """Returns a function that joins experts as `join` does, in a form that takes adapters. It appends their linears to
    `places`.
    """

    def joined(experts: Iterable[GatedMlpWeights], config: ExpertsConfig, activation: str) -> Experts:
        stored = tuple(experts)
        together = join(stored, config, activation)
        each = together.one_by_one() if isinstance(together, HasOneByOne) else stored
        adapted = AdaptedExperts(together, each, adapting, config.scales_inputs)
        for number, expert in enumerate(spec.own):
            for which, linear in ((GATED, expert.gated), (DOWN, expert.down)):
                places.append(ExpertPlace(linear, ExpertLinear(adapted, number, which), len(spec.own)))
        return adapted

    return joined


def _whole(part: WeightPart) -> WeightPart:
    """Returns a part whose tensor has its own rows only."""
    return WeightPart(part.name, part.out_features, part.split, scale=part.scale)


def _rows(part: WeightPart, outputs: torch.Tensor) -> torch.Tensor:
    """Returns the rows of a part of what the checkpoint stores together."""
    taken = take_piece(part, outputs)
    assert isinstance(taken, torch.Tensor)
    return taken
