"""The worker of one rank in torch, for CPUs and CUDA GPUs: loads the model, sizes the KV cache and owns the model
runner.

It is a `SpeculationTarget` of `workers/ranks/rank_worker.py`. The executor makes it in its own process or in an actor,
and calls `execute` and then `sample` for every step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
from collections.abc import Callable, Iterator, Mapping

import torch

from manta.structured.logits_processors import LogitsProcessorFactory, LogitsProcessorRegistry
from manta.structured.masks import MaskBatch
from manta.workers.checkpoints.memory import plan_kv_cache, plan_max_model_len, weight_bytes
from manta.workers.checkpoints.model_folder import load_model_config, resolve_model_folder
from manta.workers.exact import check_exact
from manta.workers.kept_weights import check_weights, describe_kept
from manta.workers.kernels.model_protocol import LoadedModel
from manta.workers.kernels.protocol import DecodeLimits
from manta.workers.kv_cache_dtype import check_kv_cache, kv_dtype
from manta.workers.model_info import ModelInfo
from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.parallel.group import Group, OneRank
from manta.workers.parallel.split import check_num_ranks, shard_config
from manta.workers.phases import Phases
from manta.workers.platforms import Platform, choose_platform
from manta.workers.ranks.rank_sequences import RankSequences
from manta.workers.ranks.rank_worker import ALONE, RankPlace, StepTimes
from manta.workers.sampling.pending_draw import PendingDraw
from manta.workers.step import StepInput, StepOutOfMemory, StepOutput
from manta.workers.torch_worker.draft_runner import TorchDraftRunner
from manta.workers.torch_worker.largest_step import run_largest_step
from manta.workers.torch_worker.loader import check_tensors, load_model
from manta.workers.torch_worker.model_runner import ModelRunner
from manta.workers.torch_worker.rank_runner import FollowerRunner, RankRunner
from manta.workers.torch_worker.step_times import measure_steps

logger = logging.getLogger(__name__)


class TorchWorker:
    """Loads a rank's share of a model, with tables for steps that verify `max_draft_tokens` of each sequence.

    `draft_folder` holds a draft model, which is loaded whole beside the share. Its weights take memory before the KV
    cache is planned, and its keys and values are in blocks with the ids of the target's. Raises `ModelError` if the
    model cannot be served within the configured memory or length, and `LogitsProcessorError` if a configured processor
    cannot be loaded.
    """

    def __init__(
        self,
        config: ModelOptions,
        place: RankPlace = ALONE,
        max_draft_tokens: int = 0,
        draft_folder: pathlib.Path | None = None,
    ) -> None:
        rank, num_ranks = place.rank, config.tensor_parallel_size
        phases = Phases()
        self.processors = LogitsProcessorRegistry(config.logits_processors if rank == 0 else {})
        platform = choose_platform(config.device, config.num_threads, config.exact)
        check_weights(config.weights, platform.name)
        folder = resolve_model_folder(config.model)
        model_config = load_model_config(folder)
        check_exact(config, platform.name, model_config, platform.advice)
        check_kv_cache(config, platform.name, model_config)
        draft_config = None if draft_folder is None else load_model_config(draft_folder)
        check_kv_cache(config, platform.name, draft_config)
        check_num_ranks(model_config, num_ranks, config.exact)
        share = shard_config(model_config, num_ranks)
        dtype = platform.resolve_dtype(config.dtype, model_config.dtype)
        self.group = _open_group(place, num_ranks, platform)
        phases.end("config")
        dtype = _COMMON_DTYPES[self.group.least(_COMMON_DTYPES.index(dtype))]
        cached = kv_dtype(config, dtype)
        dtypes = platform.torch_dtype(dtype), torch.int8 if cached == "int8" else platform.torch_dtype(dtype)
        model = load_model(
            folder, model_config, dtype, platform, group=self.group, weights=config.weights, exact=config.exact
        )
        draft: LoadedModel | None = None
        if draft_folder is not None and draft_config is not None:
            draft_model = load_model(draft_folder, draft_config, dtype, platform, weights=config.weights)
            draft = LoadedModel(draft_config, draft_model, *dtypes)
        self.group.barrier()  # every rank loads its weights before any measures free memory
        phases.end("weights")
        loaded = LoadedModel(share, model, *dtypes)
        largest_steps = functools.partial(
            _run_largest_steps, loaded, draft, platform, config, max_draft_tokens, draws=rank == 0
        )
        kv_bytes, num_blocks = plan_kv_cache(
            share,
            dtype,
            config,
            free_bytes=_free_memory(platform, largest_steps) // self.group.num_sharing_memory,
            weight_bytes=_weight_bytes(folder, model_config, dtype, platform, config.weights) // num_ranks,
            draft=draft_config,
            shares_memory=platform.shares_memory,
            most_of_free=platform.kv_share,
        )
        block_bytes = kv_bytes // num_blocks
        num_blocks = self.group.least(num_blocks)
        max_model_len = plan_max_model_len(model_config, config.max_model_len, num_blocks * config.block_size)
        kv_cache = platform.allocate_kv(share, num_blocks, config.block_size, loaded.kv_dtype)
        phases.end("kv_cache")
        make_runner = ModelRunner if num_ranks == 1 else RankRunner if rank == 0 else FollowerRunner
        self.runner = make_runner(
            model,
            platform,
            kv_cache,
            model_config,
            config.block_size,
            config.max_num_sequences,
            max_model_len,
            self.processors,
        )
        limits = DecodeLimits(
            config.max_num_sequences,
            max_model_len,
            config.block_size,
            max_draft_tokens,
            max_num_tokens=config.max_num_batched_tokens,
        )
        platform.record_decodes(model, self.runner.kv_layers, limits, agree=self.group.least)
        self.draft = None if draft is None else TorchDraftRunner(draft, self.runner)
        phases.end("runner")
        self.info = ModelInfo(
            folder=str(folder),
            vocab_size=model_config.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=model_config.eos_token_ids,
            num_blocks=num_blocks,
            block_size=config.block_size,
            kv_cache_bytes=num_blocks * block_bytes,
            kv_cache_dtype=cached,
            dtype=dtype,
            platform=platform.name,
            kernels=platform.kernel_form,
            load_seconds=sum(phases.seconds.values()),
            load_phases=phases.seconds,
            advice=platform.advice,
            weights=describe_kept(config.weights),
            is_asynchronous=platform.runs_ahead,
        )
        _log_start(self.info)

    @property
    def runs_ahead(self) -> bool:
        return self.runner.platform.runs_ahead

    @property
    def sequences(self) -> RankSequences:
        return self.runner.sequences

    def measure(self) -> StepTimes:
        """Measures steps on this rank only. Called before anything is cached."""
        runner = self.runner
        with self.group.alone():
            return measure_steps(runner.model, runner.kv_layers, runner.sequences.block_size, runner.platform)

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Registers a factory, which reaches an actor by cloudpickle. Raises `LogitsProcessorError` if the name is
        taken.
        """
        self.processors.register(name, factory)

    def execute(self, step: StepInput) -> None:
        """Starts a step's forward pass. Like `sample`, raises `StepOutOfMemory` if the device runs out of memory."""
        with _named_memory_errors():
            self.runner.execute(step)

    def adopt(self, token_ids: Mapping[int, list[int]]) -> None:
        """Gives a rank other than 0 the tokens that rank 0 drew in the last step, by sequence id. Called before the
        next `execute`.
        """
        assert isinstance(self.runner, FollowerRunner), "rank 0 draws its own tokens"
        self.runner.adopt(token_ids)

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        with _named_memory_errors():
            return self.runner.sample(masks)

    def draw(self, masks: MaskBatch | None = None) -> PendingDraw:
        """Draws without waiting for the device; the caller waits in `PendingDraw.result`. Raises as `sample` does."""
        with _named_memory_errors():
            return self.runner.draw(masks)

    def is_computing(self) -> bool:
        return self.runner.is_computing()

    def reset(self) -> None:
        self.runner.reset()


@contextlib.contextmanager
def _named_memory_errors() -> Iterator[None]:
    """Turns torch's out-of-memory error into `StepOutOfMemory`, because the engine handles it and imports no torch."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise StepOutOfMemory(str(error)) from error


_COMMON_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes in order of preference if ranks differ: all take the first one that any rank takes, because a processor
without bfloat16 supports only float32.
"""


def _log_start(info: ModelInfo) -> None:
    logger.info(
        "loaded %s in %.1f s (%s, weights %s, %s, kernels %s); KV cache: %d blocks of %d tokens in %s, %.2f GiB; "
        "longest sequence %d tokens",
        info.folder,
        info.load_seconds,
        info.dtype,
        info.weights or "as stored",
        info.platform,
        info.kernels,
        info.num_blocks,
        info.block_size,
        info.kv_cache_dtype,
        info.kv_cache_bytes / 2**30,
        info.max_model_len,
    )
    if info.advice:
        logger.warning("%s", info.advice)


def _open_group(place: RankPlace, num_ranks: int, platform: Platform) -> Group:
    if num_ranks == 1:
        return OneRank()
    if place.group_address is None:
        raise ValueError(f"rank {place.rank} of {num_ranks} needs group_address, that of rank 0's store")
    return platform.open_group(place.rank, num_ranks, place.group_address)


def _free_memory(platform: Platform, largest_steps: Callable[[], None]) -> int:
    try:
        return platform.free_memory(largest_steps)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"beside its weights there is no memory for its largest step ({error}); "
            "lower max_num_batched_tokens or max_num_sequences"
        ) from error


def _run_largest_steps(
    model: LoadedModel,
    draft: LoadedModel | None,
    platform: Platform,
    config: ModelOptions,
    max_draft_tokens: int,
    draws: bool,
) -> None:
    sizes = (config.block_size, config.max_num_batched_tokens)
    run_largest_step(model, platform, *sizes, config.max_num_sequences * (1 + max_draft_tokens), draws=draws)
    if draft is not None:
        run_largest_step(draft, platform, *sizes, config.max_num_sequences, draws=True)


def _weight_bytes(folder: pathlib.Path, model: ModelConfig, dtype: str, platform: Platform, weights: str) -> int:
    """Returns the bytes of the weights; 0 for older formats that transformers reads, whose size is not known before
    loading.
    """
    if model.quantization is not None:
        keeps = platform.keeps_integers and weights != "dense", platform.keeps_float8 and weights == "auto"
        return check_tensors(folder, model).num_bytes(dtype, *keeps)
    try:
        return weight_bytes(folder, dtype, model, weights)
    except ModelError:
        return 0
