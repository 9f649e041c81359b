"""One rank of one model replica: loads the model on its platform, sizes the KV cache and owns the model runner.

The executor constructs it, in its own process or as an actor, and calls `execute` then `sample` for every step.
"""

from __future__ import annotations

import logging
import pathlib
import time

import msgspec

from structured.logits_processors import LogitsProcessorFactory, LogitsProcessorRegistry
from structured.masks import MaskBatch
from workers.checkpoints.memory import plan_kv_cache, plan_max_model_len, weight_bytes
from workers.checkpoints.model_config import ModelConfig, ModelError, load_model_config, resolve_model_folder
from workers.loader import load_model
from workers.model_info import ModelInfo
from workers.model_runner import ModelRunner
from workers.platforms import choose_platform
from workers.step import StepInput, StepOutput

logger = logging.getLogger(__name__)


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank needs of `cluster.config.EngineConfig`, where each field is documented."""

    model: str
    dtype: str
    device: str
    num_threads: int | None
    max_model_len: int | None
    block_size: int
    kv_cache_bytes: int | None
    kv_cache_fraction: float | None
    max_num_sequences: int
    logits_processors: dict[str, str | None] = {}
    rank: int = 0
    """In [0, num_ranks). Rank 0 draws the tokens; the others answer with a digest alone, and `adopt` the tokens."""
    num_ranks: int = 1
    group_address: str | None = None
    """`host:port` of rank 0's store, where the ranks find each other; None for one rank."""


class Worker:
    """Raises `ModelError` when the model cannot be served within the configured memory or length,
    `LogitsProcessorError` where a configured processor cannot be loaded. `draft` is the model whose keys and values
    others will keep beside this one's.
    """

    def __init__(self, config: WorkerConfig, draft: ModelConfig | None = None) -> None:
        started = time.perf_counter()
        self.processors = LogitsProcessorRegistry(config.logits_processors)
        platform = choose_platform(config.device, config.num_threads)
        folder = resolve_model_folder(config.model)
        model_config = load_model_config(folder)
        dtype = platform.resolve_dtype(config.dtype, model_config.dtype)
        model = load_model(folder, model_config, dtype, platform)
        kv_bytes, num_blocks = plan_kv_cache(
            model_config,
            dtype,
            block_size=config.block_size,
            kv_cache_bytes=config.kv_cache_bytes,
            kv_cache_fraction=config.kv_cache_fraction,
            free_bytes=platform.free_memory(),
            weight_bytes=_weight_bytes(folder, dtype),
            max_num_sequences=config.max_num_sequences,
            max_model_len=config.max_model_len,
            draft=draft,
        )
        max_model_len = plan_max_model_len(model_config, config.max_model_len, num_blocks * config.block_size)
        kv_cache = platform.allocate_kv(model_config, num_blocks, config.block_size, platform.torch_dtype(dtype))
        self.runner = ModelRunner(
            model,
            platform,
            kv_cache,
            model_config,
            config.block_size,
            config.max_num_sequences,
            max_model_len,
            self.processors,
            rank=config.rank,
            num_ranks=config.num_ranks,
        )
        self.info = ModelInfo(
            folder=str(folder),
            vocab_size=model_config.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=model_config.eos_token_ids,
            num_blocks=num_blocks,
            block_size=config.block_size,
            kv_cache_bytes=kv_bytes,
            dtype=dtype,
            platform=platform.name,
            kernels=platform.kernel_form,
            load_seconds=time.perf_counter() - started,
            advice=platform.advice,
        )
        logger.info(
            "loaded %s in %.1f s (%s, %s, kernels %s); KV cache: %d blocks of %d tokens, %.2f GiB; "
            "longest sequence %d tokens",
            folder,
            self.info.load_seconds,
            dtype,
            platform.name,
            platform.kernel_form,
            num_blocks,
            config.block_size,
            kv_bytes / 2**30,
            max_model_len,
        )

        if self.info.advice:
            logger.warning("%s", self.info.advice)

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Raises `LogitsProcessorError` where the name is taken. An actor gets the factory by cloudpickle."""
        self.processors.register(name, factory)

    def execute(self, step: StepInput) -> None:
        self.runner.execute(step)

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        return self.runner.sample(masks)

    def adopt(self, token_ids: dict[int, list[int]]) -> None:
        self.runner.adopt(token_ids)

    def reset(self) -> None:
        self.runner.reset()


def _weight_bytes(folder: pathlib.Path, dtype: str) -> int:
    """0 for the older formats that transformers reads: the KV cache is planned without them then."""
    try:
        return weight_bytes(folder, dtype)
    except ModelError:
        return 0
