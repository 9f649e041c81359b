"""Several adapters that act together, each multiplied by a scale, as one adapter: the ranks of all of them side by
side, which PEFT's `add_weighted_adapter` calls `cat`.

A combination has a path of its own, which names the paths of its adapters. So whoever reads an adapter by its path
reads a combination too: ranks, and the workers of other frameworks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch

from manta.workers.adapters.low_rank_adapter import Adapter, LowRankModule, digest_of
from manta.workers.models.model_config import ModelError

_PREFIX = "combined:"


class OtherValues(ModelError):
    """An adapter of a combination has other values by now."""


class CombinedPart(NamedTuple):
    """An adapter of a combination."""

    path: str
    digest: str
    """Hexadecimal digest of its values."""
    scale: float
    """Factor on what it adds."""


def combined_path(parts: Sequence[CombinedPart]) -> str:
    """Returns the path of a combination."""
    return _PREFIX + json.dumps(parts)


def parts_of(path: str) -> list[CombinedPart]:
    """Returns the adapters of the combination with a path; none if it is the path of an adapter."""
    if not path.startswith(_PREFIX):
        return []
    return [CombinedPart(*each) for each in json.loads(path.removeprefix(_PREFIX))]


def combine(path: str, parts: Sequence[CombinedPart], adapters: Sequence[Adapter]) -> Adapter:
    """Returns what adapters add together, each multiplied by its scale. Raises `OtherValues` if one is not the one that
    its part names, and `ModelError` if they change a module and store its values in different forms.
    """
    own: dict[str, list[LowRankModule]] = {}
    for part, adapter in zip(parts, adapters, strict=True):
        if adapter.digest != part.digest:
            raise OtherValues(f"{part.path} has other values by now; load the adapter again")
        for name, module in adapter.modules.items():
            own.setdefault(name, []).append(module._replace(scale=module.scale * part.scale))
    modules = {name: _side_by_side(name, own[name]) for name in sorted(own)}
    bases = {adapter.base_model for adapter in adapters}
    return Adapter(path, bases.pop() if len(bases) == 1 else "", digest_of(modules), modules)


def _side_by_side(name: str, modules: Sequence[LowRankModule]) -> LowRankModule:
    first = modules[0]
    if len(modules) == 1:
        return first
    forms = {(each.is_interleaved, each.num_experts, each.is_of_old_peft) for each in modules}
    if len(forms) > 1 or any(each.a.shape[1] != first.a.shape[1] or len(each.b) != len(first.b) for each in modules):
        raise ModelError(f"the adapters store what they add to {name} in different forms, and cannot act together")
    experts = max(1, first.num_experts)
    a = [each.a.float().unflatten(0, (experts, -1)) for each in modules]
    b = [(each.b.float() * each.scale).unflatten(1, (-1, experts)) for each in modules]
    return first._replace(a=torch.cat(a, 1).flatten(0, 1), b=torch.cat(b, 1).flatten(1), scale=1.0)
