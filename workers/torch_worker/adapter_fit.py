"""Compares adapters with a model before its weights are read, or without reading them. Called by the worker, by
`manta check`, and for loads while no engine runs.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import torch

from manta.workers.adapters.adapter_bank import AdapterBank
from manta.workers.checkpoints.model_folder import load_model_config, resolve_model_folder
from manta.workers.checkpoints.shard import Shard
from manta.workers.kernels.adapted_linear import TorchAdaptedLinear
from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelConfig
from manta.workers.option_support import check_options
from manta.workers.platforms import choose_platform
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
    bank = _bank(folder, config, torch.float32, max_bytes, None, takes_experts)
    described = []
    for name, path in adapters.items():
        fitted = bank.read_named(name, path)
        described.append(f"{name}: rank {fitted.rank}, {fitted.num_modules} linears")
    return tuple(described)


def bank_without_weights(options: ModelOptions) -> tuple[AdapterBank, int]:
    """Returns a bank that reads adapters as rank 0 of an engine with these options does, on a CPU or a GPU, and the
    bytes that the adapters of the options take there. Needs only the headers of the model's files, and no GPU. Raises
    `ModelError` or `ValueError` if they cannot be served.
    """
    folder = resolve_model_folder(options.model)
    config, num_ranks = load_model_config(folder), options.tensor_parallel_size
    check_options(options, "cuda" if options.device == "cuda" else "cpu", config)
    splits_experts = options.expert_parallel or (options.exact and num_ranks > 1)
    bank = _bank(
        folder,
        config,
        getattr(torch, _dtype_of(options, config)),
        options.max_adapter_bytes,
        Shard(0, num_ranks, config.num_kv_heads) if num_ranks > 1 else None,
        takes_experts=not splits_experts,
    )
    fixed = {each.digest: each.num_bytes for each in map(bank.read, options.adapters.values())}
    return bank, sum(fixed.values())


def _dtype_of(options: ModelOptions, config: ModelConfig) -> str:
    """Returns the dtype of the activations of an engine on any GPU with bfloat16, or on this CPU."""
    if options.device != "cuda":
        return choose_platform("cpu", 1).resolve_dtype(options.dtype, config.dtype)
    if options.dtype != "auto":
        return options.dtype
    return "float32" if config.dtype == "float32" else "bfloat16"


def _bank(
    folder: str | pathlib.Path,
    config: ModelConfig,
    dtype: torch.dtype,
    max_bytes: int,
    shard: Shard | None,
    takes_experts: bool,
) -> AdapterBank:
    """Returns a bank for the model in `folder`, of which only headers are read."""
    experts = TorchAdaptedLinear if takes_experts else None
    bank = AdapterBank(TorchAdaptedLinear, dtype, max_bytes, shard, config.head_dim, experts)
    check_tensors(folder, config, bank=bank)
    return bank
