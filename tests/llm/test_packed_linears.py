"""Packed linears in models that pool: they are used where the model computes the same with it, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manta.workers.platforms.cpu_linears import make_onednn_linear
from manta.workers.pooling.packed_linears import PackedModule, pack_linears


class _Reads(nn.Module):
    """A model whose code reads the weight of a linear, as DeBERTa's does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.reads = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        hidden = nn.functional.linear(hidden, self.first.weight) if self.reads else self.first(hidden)
        output: torch.Tensor = self.head(hidden)
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_linears_are_replaced_and_compute_the_same(dtype: torch.dtype) -> None:
    model, ids = _Reads().to(dtype), torch.arange(12)
    expected = model(ids)
    pack_linears(model, make_onednn_linear, lambda: True)
    if dtype == torch.float32:
        assert isinstance(model.first, PackedModule)
    assert type(model.head) is nn.Linear, "its weight is the embedding's"
    torch.testing.assert_close(model(ids), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


@torch.inference_mode()
def test_a_model_that_reads_a_weight_keeps_its_linears() -> None:
    model, ids = _Reads(), torch.arange(12)
    model.reads = True
    pack_linears(model, make_onednn_linear, lambda: bool(model(ids).isfinite().all()))
    assert type(model.first) is nn.Linear
    pack_linears(model, make_onednn_linear, lambda: False)
    assert type(model.first) is nn.Linear
