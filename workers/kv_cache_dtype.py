"""The option `kv_cache_dtype`: in which dtype keys and values are cached, and sentences for what cannot round them.

Plain checks, called by the workers and by `manta check`.
"""

from __future__ import annotations

from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ROUNDED_KV_BITS, ModelConfig, ModelError

_REMEDY = "leave kv_cache_dtype out"


def kv_dtype(options: ModelOptions, dtype: str) -> str:
    """Returns the dtype of the KV cache of a model that computes in `dtype`."""
    return dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype


def check_kv_cache(options: ModelOptions, device: str, model: ModelConfig | None = None) -> None:
    """Raises `ModelError` if the device `cpu`, `cuda` or `tpu`, or the model, cannot have the configured KV cache."""
    if options.kv_cache_dtype == "auto":
        return
    if device != "cpu":
        raise ModelError(
            f"kv_cache_dtype {options.kv_cache_dtype} is for CPUs, and the device is {device}; set device to cpu, or "
            f"{_REMEDY}"
        )
    if model is not None and model.has_key_bias:
        bits = ROUNDED_KV_BITS[options.kv_cache_dtype]
        raise ModelError(
            f"kv_cache_dtype {options.kv_cache_dtype} is not for {model.architecture}, whose cached keys hold "
            f"biases too, as those of positions (ALiBi), and {bits} bits are too few for these; {_REMEDY}"
        )
    if model is not None and model.compressed is not None:
        raise ModelError(
            f"kv_cache_dtype {options.kv_cache_dtype} is not for {model.architecture}, whose cached keys lie beside "
            f"compressed ones, which would have the same scale; {_REMEDY}"
        )
    if model is not None and model.indexer is not None:
        raise ModelError(
            f"kv_cache_dtype {options.kv_cache_dtype} is not for {model.architecture}, whose cached latent vectors "
            f"hold the keys of an indexer too, which would have the same scale; {_REMEDY}"
        )
    if model is not None and model.block_indexer is not None:
        raise ModelError(
            f"kv_cache_dtype {options.kv_cache_dtype} is not for {model.architecture}, whose indexer keeps keys of "
            f"tokens in the cache, of which it takes means; {_REMEDY}"
        )
