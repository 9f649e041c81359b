"""The worker of one TPU host in JAX: opens the mesh, loads the model, plans the KV cache, compiles every program and
owns the runner.

It is a `SpeculationTarget` of `workers/ranks/rank_worker.py`. Importing it imports no torch.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Mapping

import jax
from jax.sharding import Mesh

from manta.structured import host
from manta.structured.logits_processors import LogitsProcessorFactory, LogitsProcessorRegistry
from manta.structured.masks import MaskBatch
from manta.structured.visible_logs import logger_of
from manta.workers.checkpoints.memory import block_needs, choose_groups, plan_max_model_len, weight_bytes
from manta.workers.checkpoints.model_folder import resolve_model_folder
from manta.workers.checkpoints.stored_draft_head import draft_head
from manta.workers.jax_worker.draft_runner import JaxDraftRunner
from manta.workers.jax_worker.mesh import is_tpu, open_mesh
from manta.workers.jax_worker.model_state import Limits, ModelState
from manta.workers.jax_worker.parameters import load_parameters
from manta.workers.jax_worker.planning import native_config, open_pools, plan, resolve_dtype
from manta.workers.jax_worker.programs import ProgramCompiler, keep_compiled_programs
from manta.workers.jax_worker.runner import JaxRunner
from manta.workers.jax_worker.step_times import measure_steps
from manta.workers.kv_groups import one_group
from manta.workers.load_meter import LOAD_METER, SPEC_MODEL, TEXT_MODEL
from manta.workers.model_info import ModelInfo
from manta.workers.model_options import ModelOptions
from manta.workers.models.attention_growth import even_context
from manta.workers.models.model_config import ModelError
from manta.workers.models.variants import check_draft_model, check_variants
from manta.workers.option_support import check_options
from manta.workers.parallel.split import check_num_ranks
from manta.workers.phases import Phases
from manta.workers.ranks.rank_sequences import RankSequences
from manta.workers.ranks.rank_worker import ALONE, RankPlace, StepTimes
from manta.workers.sampling.pending_draw import PendingDraw
from manta.workers.step import StepInput, StepOutOfMemory, StepOutput

logger = logger_of(__name__)

SCALAR_BYTES = 512 << 10
"""Most bytes of a step's block tables on a TPU, because the attention kernel keeps them in 1 MiB of scalar memory."""


class JaxWorker:
    """A worker on a mesh of `tensor_parallel_size` devices; see `TorchWorker` for arguments and errors. Each of several
    hosts makes one with its own `place`.
    """

    keeper = None

    def __init__(
        self,
        config: ModelOptions,
        place: RankPlace = ALONE,
        max_draft_tokens: int = 0,
        draft_folder: pathlib.Path | None = None,
        loads_draft_head: bool = False,
    ) -> None:
        check_options(config, "tpu")
        phases = Phases()
        draws, num_hosts = place.rank == 0, config.num_ranks
        keep_compiled_programs()
        self.processors = LogitsProcessorRegistry(config.logits_processors if draws else {})
        folder = resolve_model_folder(config.model)
        model_config = native_config(folder).for_context(config.max_model_len)
        if loads_draft_head:  # raises: no TPU computes draft heads
            check_variants(draft_head(folder, model_config, draft_folder), "tpu")
        draft_config = None if draft_folder is None else native_config(draft_folder).for_context(config.max_model_len)
        check_num_ranks(model_config, config.tensor_parallel_size)
        mesh = open_mesh(config.tensor_parallel_size, num_hosts, place)
        phases.end("config")
        dtype, positions = resolve_dtype(config.dtype, model_config.dtype), model_config.max_position_embeddings
        longest = min(config.max_model_len or positions, positions)
        self.adapters = open_pools(config, folder, model_config, dtype, mesh)
        if self.adapters is not None:
            phases.end("adapters")
        LOAD_METER.begin(*([TEXT_MODEL] if draft_folder is None else [TEXT_MODEL, SPEC_MODEL]))
        LOAD_METER.enter(TEXT_MODEL)
        parameters = load_parameters(folder, model_config, dtype, mesh, longest)
        draft_parameters = None
        if draft_folder is not None and draft_config is not None:
            check_draft_model(draft_config)
            check_num_ranks(draft_config, config.tensor_parallel_size)
            longest = min(longest, draft_config.max_position_embeddings)
            LOAD_METER.enter(SPEC_MODEL)
            draft_parameters = load_parameters(draft_folder, draft_config, dtype, mesh, longest)
        phases.end("weights")
        layers, whole = choose_groups(model_config, draft_config), weight_bytes(folder, dtype)
        sizes = plan(config, model_config, draft_config, mesh, dtype, whole, layers, has_drafts=max_draft_tokens > 0)
        fitting = block_needs(layers.groups, config).longest(sizes.num_blocks, positions)
        max_model_len = plan_max_model_len(model_config, config.max_model_len, fitting)
        largest = config.max_num_batched_tokens, config.max_num_sequences, max_model_len, config.block_size
        num_tables = len(layers.groups) if layers.layers_per_block else 0
        limits = Limits(*largest, num_tables, sizes.num_state_slots)
        _check_tables(limits, mesh)
        self.sequences = RankSequences(
            model_config.vocab_size,
            config.block_size,
            config.max_num_sequences,
            max_model_len,
            self.processors,
            draws,
            len(layers.groups),
        )
        compiler = ProgramCompiler(config.num_threads or host.num_cores())
        others = (sizes.num_blocks, model_config.vocab_size, compiler)
        model = ModelState(model_config, parameters, layers, mesh, limits, *others, self.adapters)
        self.runner = JaxRunner(model, self.sequences, compiler, draws, num_hosts > 1)
        self.draft: JaxDraftRunner | None = None
        if draft_config is not None and draft_parameters is not None:
            in_first = one_group(draft_config.attends), mesh, Limits(*largest)
            self.draft = JaxDraftRunner(ModelState(draft_config, draft_parameters, *in_first, *others), self.runner)
        phases.end("kv_cache")
        compiler.compile(folder.name)
        phases.end("programs")
        self.runs_ahead = num_hosts == 1
        """Whether calls return before the devices are done: False with several hosts, which get the drawn tokens from
        the engine.
        """
        self.info = ModelInfo(
            folder=str(folder),
            vocab_size=model_config.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=model_config.eos_token_ids,
            sampling_defaults=dict(model_config.sampling_defaults),
            num_blocks=sizes.num_blocks,
            block_size=config.block_size,
            groups=layers.groups,
            kv_cache_bytes=sizes.num_bytes,
            num_state_slots=sizes.num_state_slots,
            state_bytes=sizes.state_bytes,
            kv_cache_dtype=dtype,
            dtype=dtype,
            platform="tpu" if is_tpu(mesh) else "cpu",
            kernels=f"{'pallas' if is_tpu(mesh) else 'xla'}, {mesh.size} devices",
            load_seconds=sum(phases.seconds.values()),
            load_phases=phases.seconds,
            adapters={} if self.adapters is None else self.adapters.loaded,
            is_asynchronous=is_tpu(mesh),
            even_context=even_context(model_config),
        )
        logger.info("loaded %s in %.1f s on %s", folder, self.info.load_seconds, mesh)

    def execute(self, step: StepInput) -> None:
        with _named_memory_errors():
            self.runner.execute(step)

    def is_computing(self) -> bool:
        return self.runner.is_computing()

    def draw(self, masks: MaskBatch | None = None) -> PendingDraw:
        """Draws without waiting for the devices. The caller waits in `PendingDraw.result`, before the next draw."""
        with _named_memory_errors():
            return self.runner.draw(masks)

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        with _named_memory_errors():
            return self.runner.draw(masks).result()

    def adopt(self, token_ids: Mapping[int, list[int]]) -> None:
        self.runner.adopt(token_ids)

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Registers a factory. Raises `LogitsProcessorError` if the name is taken."""
        self.processors.register(name, factory)

    def reset(self) -> None:
        self.runner.reset()

    def measure(self) -> StepTimes:
        return measure_steps(self.runner.model)


@contextlib.contextmanager
def _named_memory_errors() -> Iterator[None]:
    """Turns JAX's out-of-memory error into `StepOutOfMemory`, because the engine handles it and imports no JAX."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise StepOutOfMemory(str(error)) from error
        raise


def _check_tables(limits: Limits, mesh: Mesh) -> None:
    """Raises `ModelError` if the attention kernel has no room for a step's block tables."""
    shape = limits.shapes[-1]
    num_bytes = 4 * shape.num_sequences * shape.num_blocks
    if is_tpu(mesh) and limits.num_groups and num_bytes > SCALAR_BYTES:
        raise ModelError(
            f"the block tables of {shape.num_sequences} sequences of {shape.num_blocks} blocks take {num_bytes} bytes, "
            f"and a TPU's scalar memory has room for {SCALAR_BYTES}; raise block_size, or lower max_num_sequences or "
            "max_model_len"
        )
