"""The options `adapters` and `adapter_roots`: a sentence for models that serve none.

A plain check, called by the workers and by `manta check` before anything is loaded.
"""

from __future__ import annotations

from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelConfig, ModelError

_MERGED = "merge the adapter into its base model (peft: merge_and_unload, then save_pretrained), or leave adapters out"


def check_adapters(options: ModelOptions, model: ModelConfig | None = None) -> None:
    """Raises `ModelError` if `options` names adapters or folders for them, and the model cannot serve any."""
    if not options.adapters and not options.adapter_roots:
        return
    if model is not None and not model.native:
        raise ModelError(
            f"adapters need a model that Manta computes itself, and {model.architecture} runs through transformers; "
            f"{_MERGED}"
        )
