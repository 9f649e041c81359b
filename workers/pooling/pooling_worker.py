"""The worker of a model that pools: loads the model on its device and answers steps.

An engine has one. `cluster/engine/pooling_engine.py` calls it, and the trial of `manta check`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from manta.workers.checkpoints.model_folder import read_json_object, resolve_model_folder
from manta.workers.checkpoints.pooling_folder import read_pooling
from manta.workers.model_info import ModelInfo
from manta.workers.model_options import ModelOptions
from manta.workers.models.dense import read_dtype
from manta.workers.models.model_config import ModelError
from manta.workers.phases import Phases
from manta.workers.platforms import Platform, choose_platform
from manta.workers.pooling.pooling_model import PooledText, PoolingModel
from manta.workers.pooling_options import check_exact_pooling, check_pooling_options


class PoolingWorker:
    """Raises `ModelError` if the model cannot be loaded, or if an option has a value that it cannot have here."""

    def __init__(self, config: ModelOptions) -> None:
        check_pooling_options(config)
        phases = Phases()
        folder = resolve_model_folder(config.model)
        pooling = read_pooling(folder, config.task)
        if pooling is None:
            raise ModelError(f"{folder} generates text, and does not pool")
        platform = choose_platform(config.device, config.num_threads)
        check_exact_pooling(config, platform.name)
        dtype = pooling_dtype(config.dtype, read_dtype(read_json_object(folder, "config.json")), platform)
        phases.end("config")
        self._model = PoolingModel(folder, pooling, dtype, platform, config.exact)
        phases.end("weights")
        longest = self._model.max_tokens
        if config.max_model_len is not None and config.max_model_len > longest:
            raise ModelError(f"max_model_len {config.max_model_len} exceeds the {longest} tokens of the model")
        self.info = ModelInfo(
            folder=str(folder),
            vocab_size=self._model.vocab_size,
            max_model_len=config.max_model_len or longest,
            eos_token_ids=(),
            num_blocks=0,
            block_size=config.block_size,
            kv_cache_bytes=0,
            kv_cache_dtype=dtype,
            dtype=dtype,
            platform=platform.name,
            kernels=_kernels(config.exact, self._model.is_packed),
            load_seconds=sum(phases.seconds.values()),
            load_phases=phases.seconds,
            pooling=pooling,
        )

    def run(self, texts: Sequence[PooledText], between: Callable[[], None] | None = None) -> np.ndarray:
        """Returns float32 [num_texts, dimension]. `between` is called between two layers, and may call this method
        again.
        """
        return self._model.run(texts, between).numpy()


def pooling_dtype(requested: str, checkpoint: str, platform: Platform) -> str:
    """Returns the dtype of a model that pools. `auto` takes what the platform makes of the checkpoint's, except that
    float16, in which few CPUs compute, becomes float32: bfloat16 would round vectors more coarsely than the checkpoint
    does. Raises `ValueError` for a dtype that the platform does not have.
    """
    if requested == "auto" and checkpoint == "float16":
        return "float32"
    return platform.resolve_dtype(requested, checkpoint)


def _kernels(is_exact: bool, is_packed: bool) -> str:
    """Returns what computes a step, for display."""
    if is_exact:
        return "transformers, each text by itself"
    return "transformers" if is_packed else "transformers, texts of one length together"
