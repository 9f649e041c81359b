"""The options of an engine that a model that pools does not have. Imports no framework."""

from __future__ import annotations

from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelError

_OPTIONS_OF_GENERATION: tuple[tuple[str, object], ...] = (
    ("weights", "auto"),
    ("kv_cache_dtype", "auto"),
    ("tensor_parallel_size", 1),
    ("expert_parallel", False),
    ("prefix_store_bytes", 0),
    ("adapters", {}),
    ("adapter_roots", ()),
)
"""Options that mean nothing for a model that pools, and their only values."""


def check_pooling_options(config: ModelOptions) -> None:
    """Raises `ModelError` naming an option that a model that pools does not have."""
    for name, only in _OPTIONS_OF_GENERATION:
        if getattr(config, name) != only:
            raise ModelError(f"{name} {getattr(config, name)} is not there for a model that pools; leave it out")
    if config.device == "tpu":
        raise ModelError("device tpu is not there for a model that pools; set device to cpu or cuda")


def check_exact_pooling(config: ModelOptions, device: str) -> None:
    """Raises `ModelError` if `exact` is set and the device, which is `cpu` or `cuda`, is none on which a text that runs
    by itself always gets the same bits.
    """
    if config.exact and device != "cpu":
        raise ModelError(f"exact is for CPUs, and the device is {device}; set device to cpu, or exact to false")
