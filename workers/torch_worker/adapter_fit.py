"""Compares adapters with a model before its weights are read. Called by the worker and by `manta check`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import torch

from manta.workers.adapters.adapter_bank import AdapterBank
from manta.workers.kernels.adapted_linear import TorchAdaptedLinear
from manta.workers.models.model_config import ModelConfig
from manta.workers.torch_worker.tensor_check import check_tensors


def check_adapters_fit(
    folder: str | pathlib.Path,
    config: ModelConfig,
    adapters: Mapping[str, str],
    max_bytes: int,
    takes_experts: bool = False,
) -> tuple[str, ...]:
    """Reads the adapters in folders by name, and compares each with the model in `folder`, of which only headers are
    read. `takes_experts` says whether routed experts may have adapters. Returns what each adapter is in words. Raises
    `ModelError` naming the first one that is damaged or does not fit.
    """
    if not adapters:
        return ()
    experts = TorchAdaptedLinear if takes_experts else None
    bank = AdapterBank(TorchAdaptedLinear, torch.float32, max_bytes, None, config.head_dim, experts)
    check_tensors(folder, config, bank=bank)
    described = []
    for name, path in adapters.items():
        fitted = bank.read_named(name, path)
        described.append(f"{name}: rank {fitted.rank}, {fitted.num_modules} linears")
    return tuple(described)
