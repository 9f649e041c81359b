"""The options `adapters` and `adapter_roots`: sentences for the devices and models that serve none.

Plain checks, called by the workers and by `manta check` before anything is loaded.
"""

from __future__ import annotations

from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelConfig, ModelError

_MERGED = "merge the adapter into its base model (peft: merge_and_unload, then save_pretrained), or leave adapters out"


def check_adapters(options: ModelOptions, device: str, model: ModelConfig | None = None) -> None:
    """Raises `ModelError` if `options` names adapters or folders for them, and the device `cpu`, `cuda` or `tpu` or the
    model cannot serve any.
    """
    if not options.adapters and not options.adapter_roots:
        return
    if device == "tpu":
        raise ModelError(f"adapters are for CPUs and GPUs, and the device is tpu; {_MERGED}")
    if model is not None and not model.native:
        raise ModelError(
            f"adapters need a model that Manta computes itself, and {model.architecture} runs through transformers; "
            f"{_MERGED}"
        )
