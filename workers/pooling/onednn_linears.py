"""Linears of a pooling model on a CPU: oneDNN's, with weights in its blocked layout.

torch's own linear reorders a weight at each call. In the shape of MiniLM a product of 400 rows takes three quarters of
its time here (`manta bench embeddings`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from manta.workers.platforms.cpu_linears import OneDnnLinear, has_onednn_layout


class ModuleOfOneDnn(nn.Module):
    """Stands in a transformers model for an `nn.Linear`; the same function, with sums in another order."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        bias = None if linear.bias is None else linear.bias.detach()
        self._linear = OneDnnLinear(linear.weight.detach(), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., out_features] of x [..., in_features]."""
        return self._linear.forward(x)


def give_layout(model: nn.Module, is_the_same: Callable[[], bool]) -> None:
    """Replaces the linears of a model on a CPU. If `is_the_same` then raises, because the model's code reads a weight
    that is not there any more, or returns False, the model gets its own linears back.
    """
    shared = _parameters_of(model, nn.Embedding)
    replaced: list[tuple[nn.Module, str, nn.Linear]] = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and has_onednn_layout(child.weight) and id(child.weight) not in shared:
                setattr(module, name, ModuleOfOneDnn(child))
                replaced.append((module, name, child))
    try:
        fits = is_the_same()
    except Exception:  # the code of each model raises what it likes
        fits = False
    if not fits:
        for module, name, child in replaced:
            setattr(module, name, child)


def _parameters_of(model: nn.Module, kind: type[nn.Module]) -> set[int]:
    return {id(each) for module in model.modules() if isinstance(module, kind) for each in module.parameters()}
