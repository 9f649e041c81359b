"""Plans what a mesh can hold: the model's family and dtype, its adapters, and the KV cache of each device. Reads no
weights.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from jax.sharding import Mesh

from manta.structured import host
from manta.workers.checkpoints.memory import MOST_OF_FREE, CacheSizes, plan_kv_cache
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.jax_worker.mesh import free_memory, is_tpu
from manta.workers.jax_worker.model_state import held_config
from manta.workers.kv_groups import LayerGroups
from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.models.variants import check_variants

if TYPE_CHECKING:
    from manta.workers.jax_worker.adapter_pools import AdapterPools

TPU_KV_SHARE = 0.9
"""Share of a TPU's free memory for the KV cache; the rest is for the largest step."""
COUNT_BITS = 7
"""Significant bits of the number of KV blocks, and of slots of recurrent states; rounding down to them loses at most
1.6% of the cache.
"""


def native_config(folder: pathlib.Path) -> ModelConfig:
    """Returns the configuration of the model. Raises `ModelError` if its checkpoint is quantised, or if its layers do
    what this worker does not compute.
    """
    config = load_model_config(folder)
    if not config.native:
        raise ModelError(f"device tpu runs no {config.architecture}; use one of the native families, or device cpu")
    check_variants(config, "tpu")
    if config.quantization is not None:
        raise ModelError(
            f"device tpu reads no {config.quantization.method} checkpoints; use one in bfloat16, or device cpu"
        )
    return config


def resolve_dtype(asked: str, of_checkpoint: str) -> str:
    """Returns the model's dtype for the option `dtype`; `auto` turns float16 into bfloat16."""
    if asked != "auto":
        return asked
    return "bfloat16" if of_checkpoint == "float16" else of_checkpoint


def open_pools(
    options: ModelOptions, folder: pathlib.Path, config: ModelConfig, dtype: str, mesh: Mesh
) -> AdapterPools | None:
    """Returns the adapters of the model in `folder`; None if the options name neither adapters nor folders for them.
    Raises `ModelError` as `AdapterPools` does.
    """
    if not options.adapters and not options.adapter_roots:
        return None
    from manta.workers.jax_worker.adapter_pools import AdapterPools  # imports torch, which nothing else here needs

    return AdapterPools(options, folder, config, dtype, mesh)


def plan(
    config: ModelOptions,
    model: ModelConfig,
    draft: ModelConfig | None,
    mesh: Mesh,
    dtype: str,
    weight_bytes: int,
    layers: LayerGroups | None = None,
    unread_bytes: int = 0,
    has_drafts: bool = False,
) -> CacheSizes:
    """Returns the sizes of the cache of each device, whose layers form the groups `layers`. `unread_bytes` are the
    bytes of each device's weights that are not loaded yet. `has_drafts` says whether steps verify drafts.
    """
    shares_memory = not is_tpu(mesh)
    free = free_bytes(mesh)
    sizes = plan_kv_cache(
        held_config(model, mesh),
        dtype,
        config,
        free_bytes=free - unread_bytes,
        weight_bytes=weight_bytes // mesh.size,
        draft=None if draft is None else held_config(draft, mesh),
        layers=layers,
        shares_memory=shares_memory,
        most_of_free=MOST_OF_FREE if shares_memory else TPU_KV_SHARE,
        is_asynchronous=is_tpu(mesh) or config.num_ranks == 1,  # the worker of a single host runs ahead anywhere
        has_drafts=has_drafts,
    )
    # These numbers are part of a compiled program's cache key, so they must not vary with each free byte.
    return sizes._replace(num_blocks=_rounded(sizes.num_blocks), num_state_slots=_rounded(sizes.num_state_slots))


def _rounded(count: int) -> int:
    """Returns the number rounded down to `COUNT_BITS` significant bits."""
    step = 1 << max(0, count.bit_length() - COUNT_BITS)
    return count // step * step


def free_bytes(mesh: Mesh) -> int:
    """Returns the free bytes of each device. Simulated devices share the host's memory."""
    of_device = free_memory(mesh)
    return host.free_memory() // len(mesh.local_devices) if of_device is None else of_device
