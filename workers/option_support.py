"""Which options a device and a model can serve. A worker asks before it loads, `manta check` before anything runs."""

from __future__ import annotations

from manta.workers.adapter_support import check_adapters
from manta.workers.exact import check_exact
from manta.workers.expert_support import check_expert_parallel
from manta.workers.kept_weights import check_weights
from manta.workers.kv_cache_dtype import check_kv_cache
from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelConfig
from manta.workers.prefix_store import check_prefix_store


def check_options(
    options: ModelOptions,
    device: str,
    model: ModelConfig | None = None,
    draft: ModelConfig | None = None,
    why_slow: str | None = None,
    dtype: str | None = None,
) -> None:
    """Raises `ModelError` if the device `cpu`, `cuda` or `tpu`, the model, its draft, the activations' `dtype`, or a
    machine without kernels (`why_slow` says why it has none) cannot serve an option.
    """
    check_weights(options.weights, device, dtype, why_slow)
    check_exact(options, device, model, why_slow)
    check_adapters(options, model)
    check_expert_parallel(options, device, model)
    check_prefix_store(options, device)
    for each in (model, draft):
        check_kv_cache(options, device, each)
