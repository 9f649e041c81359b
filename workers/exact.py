"""The option `exact`: the same tokens on every machine. What it needs, and sentences for what cannot have it.

Plain checks, called by the workers and by `manta check`; `workers/parallel/split.py` checks the number of ranks, and
`docs/design.md` says why the rest is exact.
"""

from __future__ import annotations

from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelConfig, ModelError

HEAD_DIM_MULTIPLE = 16
"""Head sizes that the attention kernels take; torch computes others, with sums in an order of its own."""
_OR = "or set exact to false"


def check_exact(
    options: ModelOptions, device: str, model: ModelConfig | None = None, why_slow: str | None = None
) -> None:
    """Raises `ModelError` if `options.exact` is set and the device `cpu`, `cuda` or `tpu`, the model, or a machine
    without kernels (`why_slow` says why it has none) cannot keep its promise.
    """
    if not options.exact:
        return
    if device != "cpu":
        raise ModelError(f"exact is for CPUs, and the device is {device}; set device to cpu, {_OR}")
    if options.weights not in ("int8", "int4"):
        raise ModelError(
            f"exact needs linears of integers, and weights is {options.weights}; set weights to int8 or int4 (layers "
            f"that the checkpoint stores as integers stay as they are), {_OR}"
        )
    if why_slow is not None:
        raise ModelError(f"exact needs the compiled kernels: {why_slow}; {_OR}")
    if model is not None:
        _check_model(model)


def _check_model(model: ModelConfig) -> None:
    if not model.native:
        raise ModelError(
            f"exact needs a model that Manta computes itself, and {model.architecture} runs through transformers; take "
            f"another model, {_OR}"
        )
    attending = [layer for layer, attends in enumerate(model.attends) if attends]
    widths = {model.heads_of(layer).head_dim for layer in attending}
    if model.compressed is not None:
        widths.add(model.compressed.head_dim)
    for head_dim in sorted(widths):
        if head_dim % HEAD_DIM_MULTIPLE:
            raise ModelError(
                f"exact needs heads of a multiple of {HEAD_DIM_MULTIPLE}, and those of this {model.architecture} have "
                f"{head_dim}; take another model, {_OR}"
            )
