"""The worker of one rank in torch, for CPUs and CUDA GPUs: loads the model, sizes the KV cache and owns the model
runner.

It is a `SpeculationTarget` of `workers/ranks/rank_worker.py`. The executor makes it in its own process or in an actor,
and calls `execute` and then `sample` for every step.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Mapping

import torch

from manta.structured.logits_processors import LogitsProcessorFactory, LogitsProcessorRegistry
from manta.structured.masks import MaskBatch
from manta.structured.visible_logs import logger_of
from manta.workers.kept_weights import describe_kept
from manta.workers.kernels.build import library_name
from manta.workers.kernels.layer_caches import LayerStates, allocate_states
from manta.workers.kernels.protocol import DecodeLimits
from manta.workers.kv_cache_dtype import kv_dtype
from manta.workers.model_info import AdapterInfo, ModelInfo
from manta.workers.model_options import ModelOptions
from manta.workers.models.attention_growth import even_context
from manta.workers.models.model_config import DEPENDING_ON_CONTEXT, ModelConfig
from manta.workers.parallel.group import Group, OneRank
from manta.workers.phases import Phases
from manta.workers.platforms import Platform, choose_platform
from manta.workers.prefix_store import StorePlace
from manta.workers.ranks.rank_sequences import RankSequences
from manta.workers.ranks.rank_worker import ALONE, RankPlace, StepTimes
from manta.workers.sampling.pending_draw import PendingDraw
from manta.workers.step import StepInput, StepOutOfMemory, StepOutput
from manta.workers.torch_worker.block_keeper import open_keeper, values_for_store
from manta.workers.torch_worker.cache_plan import CachePlan, plan_cache
from manta.workers.torch_worker.draft_runner import TorchDraftRunner
from manta.workers.torch_worker.model_runner import ModelRunner
from manta.workers.torch_worker.rank_models import (
    ModelSource,
    RankModels,
    choose_models,
    load_adapters,
    load_models,
)
from manta.workers.torch_worker.rank_runner import FollowerRunner, RankRunner
from manta.workers.torch_worker.step_times import measure_steps

logger = logger_of(__name__)


class TorchWorker:
    """Loads a rank's share of a model, with tables for steps that verify `max_draft_tokens` of each sequence.

    `draft_folder` holds a draft model, which is loaded whole beside the share. If `loads_draft_head`, it holds a draft
    head; without a folder that in the model's own checkpoint is loaded. The weights of either take memory before the KV
    cache is planned, and its keys and values are in blocks with the ids of the target's.

    Raises `ModelError` if the model cannot be served within the configured memory or length, and `LogitsProcessorError`
    if a configured processor cannot be loaded.
    """

    def __init__(
        self,
        config: ModelOptions,
        place: RankPlace = ALONE,
        max_draft_tokens: int = 0,
        draft_folder: pathlib.Path | None = None,
        loads_draft_head: bool = False,
    ) -> None:
        phases = Phases()
        self.processors = LogitsProcessorRegistry(config.logits_processors if place.rank == 0 else {})
        platform = choose_platform(config.device, config.num_threads, config.exact)
        sources = choose_models(config, platform, draft_folder, loads_draft_head)
        self.group = _open_group(place, config.tensor_parallel_size, platform)
        phases.end("config")
        values = values_for_store(config, sources.target.folder)
        models = load_models(sources, config, platform, self.group)
        phases.end("weights")
        self.adapters = models.bank
        loaded = load_adapters(models.bank, config.adapters, self.group)
        if loaded:
            phases.end("adapters")
        plan = plan_cache(models, sources.target, config, platform, self.group, max_draft_tokens)
        share = models.target
        kv_cache = platform.allocate_kv(
            share.config, plan.sizes.num_blocks, config.block_size, share.kv_dtype, plan.layers.layers_per_block
        )
        states = allocate_states(share.config.states, plan.sizes.num_state_slots, platform.device)
        phases.end("kv_cache")
        self.runner = self._make_runner(models, kv_cache, states, sources.target.config, config, plan, platform)
        limits = DecodeLimits(
            config.max_num_sequences,
            plan.max_model_len,
            config.block_size,
            max_draft_tokens,
            max_num_tokens=config.max_num_batched_tokens,
            num_groups=len(plan.layers.groups),
            has_states=bool(share.config.state_bytes),
        )
        platform.record_decodes(share.model, self.runner.kv_layers, limits, agree=self.group.least)
        self.keeper = None
        if values is not None:
            content = _block_content(sources.target.config, models, config, plan, kv_cache)
            num_groups = len(plan.layers.groups)
            self.keeper = open_keeper(config, place.rank, values, content, kv_cache, states, num_groups)
        self.draft = None if models.draft is None else TorchDraftRunner(models.draft, self.runner)
        if self.keeper is not None:
            self.keeper.hidden_states = self.runner.hidden_states
        phases.end("runner")
        store = None if self.keeper is None else self.keeper.place
        self.info = _model_info(sources.target, models.dtype, config, plan, platform, phases, store, loaded)
        _log_start(self.info)

    def _make_runner(
        self,
        models: RankModels,
        kv_cache: torch.Tensor,
        states: LayerStates,
        whole: ModelConfig,
        config: ModelOptions,
        plan: CachePlan,
        platform: Platform,
    ) -> ModelRunner:
        make = ModelRunner if self.group.num_ranks == 1 else RankRunner if self.group.rank == 0 else FollowerRunner
        sizes = config.block_size, config.max_num_sequences, plan.max_model_len
        target, processors = models.target.model, self.processors
        return make(target, platform, kv_cache, whole, *sizes, processors, plan.layers, states, models.bank)

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
            sizes = runner.kv_cache.shape[2], runner.sequences.block_size
            has_states = bool(runner.config.state_bytes)
            return measure_steps(runner.model, runner.kv_layers, *sizes, runner.platform, has_states)

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


def _block_content(
    whole: ModelConfig, models: RankModels, options: ModelOptions, plan: CachePlan, kv_cache: torch.Tensor
) -> str:
    """Returns a text of all that the bytes of a block or a snapshot depend on, apart from the checkpoint's values."""
    ropes = [rope for rope in (whole.rope, *whole.layer_ropes) if rope and rope.rope_type in DEPENDING_ON_CONTEXT]
    shapes = kv_cache.shape[:2], kv_cache.shape[3:], kv_cache.dtype, models.target.config.states
    split = options.tensor_parallel_size, options.expert_parallel
    settings = models.dtype, options.weights, options.exact, options.block_size, *split
    return repr((whole.for_context(None), ropes, shapes, plan.layers, settings, library_name(), torch.__version__))


def _model_info(
    source: ModelSource,
    dtype: str,
    config: ModelOptions,
    plan: CachePlan,
    platform: Platform,
    phases: Phases,
    prefix_store: StorePlace | None,
    adapters: dict[str, AdapterInfo],
) -> ModelInfo:
    return ModelInfo(
        folder=str(source.folder),
        vocab_size=source.config.vocab_size,
        max_model_len=plan.max_model_len,
        eos_token_ids=source.config.eos_token_ids,
        sampling_defaults=dict(source.config.sampling_defaults),
        num_blocks=plan.sizes.num_blocks,
        block_size=config.block_size,
        groups=plan.layers.groups,
        kv_cache_bytes=plan.sizes.num_bytes,
        num_state_slots=plan.sizes.num_state_slots,
        state_bytes=plan.sizes.state_bytes,
        kv_cache_dtype=kv_dtype(config, dtype),
        dtype=dtype,
        platform=platform.name,
        kernels=platform.kernel_form,
        load_seconds=sum(phases.seconds.values()),
        load_phases=phases.seconds,
        advice=platform.advice,
        weights=describe_kept(config.weights),
        adapters=adapters,
        is_asynchronous=platform.runs_ahead,
        prefix_store=prefix_store,
        even_context=even_context(source.config),
    )


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
    if info.num_state_slots:
        logger.info("recurrent states: %d slots of %.2f MiB", info.num_state_slots, info.state_bytes / 2**20)
    if info.advice:
        logger.warning("%s", info.advice)


def _open_group(place: RankPlace, num_ranks: int, platform: Platform) -> Group:
    if num_ranks == 1:
        return OneRank()
    if place.group_address is None:
        raise ValueError(f"rank {place.rank} of {num_ranks} needs group_address, that of rank 0's store")
    return platform.open_group(place.rank, num_ranks, place.group_address)
