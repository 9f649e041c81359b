"""Linears of a model that pools, with their weights in a layout of the platform's.

torch's own linear reorders a weight at each call. In the shape of MiniLM a product of 400 rows takes three quarters of
its time with weights in oneDNN's layout (`manta bench embeddings`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from manta.workers.kernels.weights import Linear

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear | None]
"""Makes a linear of a weight [out_features, in_features] and a bias [out_features], or returns None."""


class PackedModule(nn.Module):
    """Stands in a transformers model for an `nn.Linear`; the same function, with sums in another order."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., out_features] of x [..., in_features]."""
        return self._linear.forward(x)


def pack_linears(model: nn.Module, make: MakeLinear, is_the_same: Callable[[], bool]) -> None:
    """Replaces the linears of a model. If `is_the_same` then raises, because the model's code reads a weight that is
    not there any more, or returns False, the model gets its own linears back.
    """
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    replaced: list[tuple[nn.Module, str, nn.Linear]] = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and id(child.weight) not in tables:
                bias = None if child.bias is None else child.bias.detach()
                linear = make(child.weight.detach(), bias)
                if linear is not None:
                    setattr(module, name, PackedModule(linear))
                    replaced.append((module, name, child))
    try:
        fits = is_the_same()
    except Exception:  # the code of each model raises what it likes
        fits = False
    if not fits:
        for module, name, child in replaced:
            setattr(module, name, child)
