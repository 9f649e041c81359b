"""The option `expert_parallel`: sentences for the devices and models that do not have it.

Plain checks, called by the workers and by `manta check` before anything is loaded; `workers/parallel/split.py` checks
the number of ranks.
"""

from __future__ import annotations

from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelConfig, ModelError


def check_expert_parallel(options: ModelOptions, device: str, model: ModelConfig | None = None) -> None:
    """Raises `ModelError` if `options.expert_parallel` is set and the device `cpu`, `cuda` or `tpu` cannot divide
    experts over ranks, or the model has none.
    """
    if not options.expert_parallel:
        return
    if device == "tpu" and options.tensor_parallel_size > 1:
        raise ModelError(
            "expert_parallel is for CPUs and GPUs, and the device is tpu, whose chips split each expert's width; set "
            "expert_parallel to false"
        )
    if model is not None and model.native and model.experts is None:
        raise ModelError(
            f"expert_parallel divides experts, and this {model.architecture} has none; set expert_parallel to false"
        )
