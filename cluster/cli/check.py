"""`manta check`: says whether a model folder and a configuration can be served here, without loading all weights.

The check plans memory with the worker's own code (`workers/checkpoints/memory.py`) and runs a step of the first layer
on the device (`workers/torch_worker/trial.py`), so its answer matches what serving does. `manta serve` calls
`check_quickly` before it starts anything.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from manta.cluster.cli.check_report import SEQUENCE_TOKENS, CheckReport, report_rows
from manta.cluster.cli.invocation import serve_command
from manta.cluster.cli.pooling_check import check_pooling, pooling_rows
from manta.cluster.cli.refusal import Refusal
from manta.cluster.cli.tokenizer_check import check_templates, check_tokenizer, check_vocabulary
from manta.cluster.config import EngineConfig, load_config
from manta.cluster.engine_bytes import draft_bytes, draft_folder, engine_bytes
from manta.cluster.models_folder import with_models_dir
from manta.cluster.text.tokenizer import Tokenizer
from manta.cluster.text.tokenizer_files import resolve_folder
from manta.structured.host import free_memory, num_cores
from manta.structured.logits_processors import LogitsProcessorError, LogitsProcessorRegistry
from manta.structured.visible_text import say, say_lines
from manta.workers.checkpoints.memory import (
    CacheSizes,
    block_needs,
    choose_groups,
    num_elements,
    num_parameters,
    plan_kv_cache,
    plan_max_model_len,
    weight_bytes,
)
from manta.workers.checkpoints.memory_check import check_memory, gib, smaller_weights
from manta.workers.checkpoints.model_folder import load_model_config, resolve_model_folder
from manta.workers.checkpoints.pooling_folder import read_pooling
from manta.workers.checkpoints.stop_tokens import with_tokenizers_eos
from manta.workers.checkpoints.stored_draft_head import about_draft_heads, draft_head
from manta.workers.checkpoints.stored_files import find_file
from manta.workers.kept_weights import check_weights, describe_kept
from manta.workers.kv_cache_dtype import kv_dtype
from manta.workers.kv_groups import LayerGroups, most_states, one_group
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.models.variants import check_block_size, check_draft_model, check_variants, variants_of
from manta.workers.option_support import check_options
from manta.workers.parallel.split import check_num_ranks, experts_of_rank
from manta.workers.step import NUM_FIXED_STATES
from manta.workers.torch_worker.trial import Trial, TrialResult, try_one_layer

if TYPE_CHECKING:
    from manta.workers.checkpoints.weight_tally import WeightTally  # it imports torch


def run_check(config_path: str | None, overrides: dict[str, Any]) -> int:
    """Prints the report. Returns 0 if the model can be served, else 1 after printing the reason."""
    try:
        config = with_models_dir(load_config(config_path, overrides))
    except ValueError as error:
        raise Refusal(str(error)) from error
    for each in config.of_each_model:
        try:
            with in_one_sentence():
                pools = read_pooling(resolve_model_folder(each.engine.model), each.engine.task) is not None
                rows = list(pooling_rows(each.engine) if pools else report_rows(check_model(each.engine)))
        except ModelError as error:
            say("{} cannot be served: {}", each.engine.model, error, file=sys.stderr)
            return 1
        say_lines(rows)
        say("\nIt can be served: {}", serve_command(each.engine.model, config_path))
    return 0


@contextlib.contextmanager
def in_one_sentence() -> Iterator[None]:
    """Turns every exception inside into a `ModelError` of one sentence, with its type and place."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"{text} (unexpected, in {frame.filename} line {frame.lineno})") from error


def check_quickly(engine: EngineConfig) -> None:
    """Checks what needs neither time nor torch: the model's configuration, its files and its length.

    Raises `ModelError`.
    """
    with in_one_sentence():
        _check_quickly(engine)


def _check_quickly(engine: EngineConfig) -> None:
    folder = resolve_model_folder(engine.model)
    if (pooling := read_pooling(folder, engine.task)) is not None:
        check_pooling(engine, folder, pooling)
        return
    model = load_model_config(folder)
    _check_ranks(engine, model)
    device = "cpu" if engine.device == "auto" else engine.device
    check_variants(model, device)
    check_block_size(model, engine.block_size)
    check_options(engine, device, model)
    if _uses_draft_head(engine):
        check_variants(draft_head(folder, model, draft_folder(engine)), device)
    num_elements(folder)  # raises unless every file is there and complete
    check_templates(folder if engine.tokenizer is None else resolve_folder(engine.tokenizer))
    if engine.max_model_len is not None:
        plan_max_model_len(model, engine.max_model_len, capacity=engine.max_model_len)
    if engine.tokenizer is not None or find_file(folder, "tokenizer.json") is None:
        check_tokenizer(engine, folder, tries=False)


def check_machine(engine: EngineConfig, others: Sequence[EngineConfig] = ()) -> None:
    """Raises `ModelError` if this machine has no such device, or too little memory beside `others`, which start too.
    Imports torch only for `device` "cuda" or `dtype` "float16".
    """
    with in_one_sentence():
        if engine.device in ("cuda", "tpu"):
            check_weights(engine.weights, engine.device)
        if engine.device == "tpu":
            _check_tpu()
        elif engine.device == "cuda" or engine.dtype == "float16":
            _check_gpu(engine)
        elif _runs_on_cpu(engine) and read_pooling(folder := resolve_model_folder(engine.model), engine.task) is None:
            model = load_model_config(folder)
            dtype = _stored_dtype(engine, model)
            weights, kv_bytes = _weights_of(engine, folder, model), engine.num_ranks * (engine.kv_cache_bytes or 0)
            free = max(0, free_memory() - _bytes_beside(engine, others))
            beside = f" beside {', '.join(each.model for each in others)}" if others else ""
            check_memory(weights, kv_bytes, dtype, free, smaller_weights(folder, dtype, model, "cpu"), beside)


def _check_tpu() -> None:
    """Looks for the devices' files, because a process that asks JAX takes the chips from the engine."""
    chips = [*pathlib.Path("/dev").glob("accel[0-9]*"), *pathlib.Path("/dev/vfio").glob("[0-9]*")]
    if not chips and os.environ.get("JAX_PLATFORMS") != "cpu":
        raise ModelError(
            "device tpu: this machine has no TPU; to simulate a mesh on CPUs set JAX_PLATFORMS=cpu and "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N"
        )


def _check_gpu(engine: EngineConfig) -> None:
    from manta.workers.platforms import check_cuda, choose_platform

    if engine.device == "cuda":
        check_cuda()
    elif _runs_on_cpu(engine):
        choose_platform("cpu", engine.num_threads).resolve_dtype(engine.dtype, engine.dtype)


def _runs_on_cpu(engine: EngineConfig) -> bool:
    """Returns whether the model runs in this machine's memory; False if there may be a GPU that was not examined."""
    has_gpu = any(pathlib.Path("/dev").glob("nvidia[0-9]*"))
    return engine.device == "cpu" or (engine.device == "auto" and not has_gpu)


def _bytes_beside(engine: EngineConfig, others: Sequence[EngineConfig]) -> int:
    """Returns the bytes that other engines take of this machine's memory. Engines of the same weights hold them once,
    and `engine` counts its own.
    """
    weights, caches = {_weights_key(engine): 0}, 0
    for other in others:
        if not _runs_on_cpu(other):
            continue
        folder, key = resolve_model_folder(other.model), _weights_key(other)
        if read_pooling(folder, other.task) is not None:
            weights.setdefault(key, engine_bytes(other))
            continue
        weights.setdefault(key, _weights_of(other, folder, load_model_config(folder)))
        caches += other.num_ranks * (other.kv_cache_bytes or 0)
    return sum(weights.values()) + caches


def _weights_key(engine: EngineConfig) -> tuple[object, ...]:
    return engine.model, engine.task, engine.dtype, engine.weights, engine.exact, engine.num_ranks


def _weights_of(engine: EngineConfig, folder: pathlib.Path, model: ModelConfig) -> int:
    dtype = _stored_dtype(engine, model)
    return weight_bytes(folder, dtype, model, engine.weights) + draft_bytes(engine, dtype)


def _stored_dtype(engine: EngineConfig, model: ModelConfig) -> str:
    return model.dtype if engine.dtype == "auto" else engine.dtype


def _check_ranks(engine: EngineConfig, model: ModelConfig) -> None:
    if engine.tensor_parallel_size > 1:
        check_num_ranks(model, engine.tensor_parallel_size, engine.exact, engine.expert_parallel)


def check_model(engine: EngineConfig) -> CheckReport:
    """Plans memory as the worker does, deducting the weights from the memory that is free now, and runs a step of one
    layer.

    Raises `ModelError`.
    """
    if engine.device == "tpu":
        check_options(engine, "tpu")
        return _check_on_tpu(engine)
    from manta.workers.platforms import choose_platform
    from manta.workers.torch_worker.adapter_fit import check_adapters_fit
    from manta.workers.torch_worker.tensor_check import check_eagle3_tensors, check_tensors

    folder = resolve_model_folder(engine.model)
    model = load_model_config(folder)
    _check_ranks(engine, model)
    parameters = num_parameters(folder, model)
    tokenizer = check_tokenizer(engine, folder)
    check_templates(tokenizer.folder)
    check_vocabulary(tokenizer, model)
    draft, uses_head = _draft_config(engine), _uses_draft_head(engine)
    stored_here = uses_head and draft_folder(engine) is None
    tally = check_tensors(folder, model, engine.weights, with_draft_head=stored_here) if model.native else None
    if draft is not None and draft.eagle3 is not None:
        check_eagle3_tensors(draft_folder(engine) or folder, draft, folder, model)
    try:
        platform = choose_platform(engine.device, engine.num_threads, engine.exact)
        dtype = platform.resolve_dtype(engine.dtype, model.dtype)
    except ValueError as error:
        raise ModelError(str(error)) from error
    check_options(engine, platform.name, model, draft, platform.advice, dtype)
    takes_experts = platform.expert_adapting is not None and not engine.expert_parallel
    adapters = check_adapters_fit(folder, model, engine.adapters, engine.max_adapter_bytes, takes_experts)
    for each in (model, draft):
        if each is not None:
            check_variants(each, platform.name)
    keeps_integers = platform.keeps_integers and engine.weights != "dense"
    keeps_float8 = platform.keeps_float8 and engine.weights == "auto"
    own_bytes = weight_bytes(folder, dtype, model, engine.weights)
    if tally is not None and model.quantization is not None:
        own_bytes = tally.num_bytes(dtype, keeps_integers, keeps_float8)
    weights, free = own_bytes + draft_bytes(engine, dtype), platform.free_memory(lambda: None)
    smaller = smaller_weights(folder, dtype, model, platform.name)
    check_memory(weights, 0, dtype, free, smaller)
    if draft is not None:
        check_draft_model(draft)
    layers = choose_groups(model, draft) if platform.groups_layers else one_group(model.attends)
    sizes = plan_kv_cache(
        model,
        dtype,
        engine,
        free_bytes=free - weights,
        weight_bytes=own_bytes,
        draft=draft,
        layers=layers,
        shares_memory=platform.shares_memory,
        most_of_free=platform.kv_share,
        is_asynchronous=platform.runs_ahead,
        has_drafts=engine.speculative is not None,
    )
    check_memory(weights, sizes.num_bytes, dtype, free, smaller)
    needs, block_bytes, num_blocks = block_needs(layers.groups, engine), sizes.block_bytes, sizes.num_blocks
    longest = needs.longest(num_blocks, model.max_position_embeddings)
    max_model_len = plan_max_model_len(model, engine.max_model_len, longest)
    try:
        LogitsProcessorRegistry(engine.logits_processors)
    except LogitsProcessorError as error:
        raise ModelError(str(error)) from error
    trial = _try_step(engine, folder, dtype)
    return CheckReport(
        folder=engine.model if engine.model.endswith(".gguf") else str(folder),
        architecture=model.architecture,
        native=model.native,
        wrapper=model.wrapper,
        variants=tuple(sorted(each.value for each in variants_of(model))) if model.native else (),
        runs_in_one_call=trial.runs_in_one_call,
        num_parameters=parameters,
        checkpoint_dtype=model.dtype,
        quantized=None if tally is None else _quantized(model, engine, tally, dtype, keeps_integers, keeps_float8),
        unquantized=None if tally is None or tally.stored is None else tally.stored.describe_unquantized() or None,
        dtype=dtype,
        weights=describe_kept(engine.weights),
        adapters=adapters,
        experts=_describe_experts(engine, model),
        device=platform.name,
        num_threads=engine.num_threads or num_cores(),
        weight_bytes=weights,
        kv_cache_bytes=sizes.num_bytes,
        kv_cache_dtype=kv_dtype(engine, dtype),
        kv_bytes_per_token=block_bytes * len(layers.groups) // engine.block_size,
        kv_cache_tokens=num_blocks * engine.block_size // len(layers.groups),
        kv_groups=_describe_groups(layers, engine.block_size, block_bytes),
        states=_describe_states(sizes, engine),
        draft_heads=about_draft_heads(folder, model),
        sequence_bytes=tuple(
            needs.of_sequence(tokens) * block_bytes + 2 * sizes.state_bytes for tokens in SEQUENCE_TOKENS
        ),
        max_model_len=max_model_len,
        model_positions=model.max_position_embeddings,
        free_bytes=free,
        step_seconds=trial.seconds,
        num_trial_layers=model.num_trial_layers,
        kernels=trial.kernels,
        advice=trial.advice,
        unused_tensors=trial.unused_tensors,
        **_of_text_side(engine, model, tokenizer),
    )


def _describe_experts(engine: EngineConfig, model: ModelConfig) -> str | None:
    if not engine.expert_parallel or model.experts is None:
        return None
    num_ranks, num_experts = engine.tensor_parallel_size, model.experts.num_experts
    if num_ranks == 1:
        return f"all {num_experts} of a layer are on the only rank: expert_parallel has no effect"
    sizes = sorted({len(experts_of_rank(num_experts, rank, num_ranks)) for rank in range(num_ranks)})
    return f"each of {num_ranks} ranks has {' or '.join(map(str, sizes))} of the {num_experts} of a layer, whole"


def _describe_groups(layers: LayerGroups, block_size: int, block_bytes: int) -> str | None:
    if not layers.layers_per_block or all(group.window is None for group in layers.groups):
        return None
    num_layers = collections.Counter(layers.groups[place.group].window for place in layers.layers if place is not None)
    kinds = [
        f"{count} of {len(layers.layers)} layers see {'all' if window is None else f'{window:,}'} positions"
        for window, count in num_layers.items()
    ]
    block = f"a block has {block_size} tokens of {layers.layers_per_block} layers in {gib(block_bytes)}"
    return f"{', '.join(kinds)}; {block}"


def _describe_states(sizes: CacheSizes, engine: EngineConfig) -> str | None:
    if not sizes.num_state_slots:
        return None
    num_slots, most = sizes.num_state_slots - NUM_FIXED_STATES, most_states(0, engine.speculative is not None)
    of_drafts = ""
    if engine.speculative is not None:
        with_drafts = 2 + engine.speculative.max_draft_tokens
        of_drafts = f", {gib(with_drafts * sizes.state_bytes)} with {engine.speculative.max_draft_tokens} drafts"
    num_sequences = min(num_slots // most, engine.max_num_sequences)
    return (
        f"{gib(sizes.state_bytes)} each, of which a decode takes two{of_drafts}; {num_slots:,} for "
        f"{num_sequences:,} sequences at a time, the idle ones for snapshots of prefixes"
    )


def _of_text_side(engine: EngineConfig, model: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the fields of the report about templates, stop tokens and sampling."""
    stops = with_tokenizers_eos(model.eos_token_ids, tokenizer.folder, model.vocab_size)
    defaults = model.sampling_defaults if engine.generation_config == "auto" else ()
    return {
        "has_chat_template": tokenizer.has_chat_template,
        "stop_tokens": ", ".join(f"{each} {tokenizer.token_text(each)}".rstrip() for each in stops) or "none",
        "sampling": ", ".join(f"{name} {value:g}" for name, value in defaults) or None,
        "unused_keys": model.unused_keys,
    }


def _check_on_tpu(engine: EngineConfig) -> CheckReport:
    from manta.workers.jax_worker.trial import try_first_layer
    from manta.workers.torch_worker.adapter_fit import check_adapters_fit

    folder = resolve_model_folder(engine.model)
    model = load_model_config(folder)
    _check_ranks(engine, model)
    tokenizer = check_tokenizer(engine, folder)
    check_templates(tokenizer.folder)
    check_vocabulary(tokenizer, model)
    adapters = check_adapters_fit(folder, model, engine.adapters, engine.max_adapter_bytes)
    trial = try_first_layer(engine, folder, engine.speculative is not None)
    sizes, layers = trial.cache, choose_groups(model, _draft_config(engine))
    needs, block_bytes = block_needs(layers.groups, engine), sizes.block_bytes
    longest = needs.longest(sizes.num_blocks, model.max_position_embeddings)
    return CheckReport(
        folder=engine.model if engine.model.endswith(".gguf") else str(folder),
        architecture=model.architecture,
        native=model.native,
        wrapper=model.wrapper,
        variants=tuple(sorted(each.value for each in variants_of(model))),
        num_parameters=num_parameters(folder, model),
        checkpoint_dtype=model.dtype,
        dtype=trial.dtype,
        weights=None,
        adapters=adapters,
        device=f"{trial.devices} (figures are those of each device)",
        num_threads=engine.num_threads or num_cores(),
        weight_bytes=trial.weight_bytes,
        kv_cache_bytes=sizes.num_bytes,
        kv_cache_dtype=trial.dtype,
        kv_bytes_per_token=block_bytes * len(layers.groups) // engine.block_size,
        kv_cache_tokens=sizes.num_blocks * engine.block_size // len(layers.groups),
        kv_groups=_describe_groups(layers, engine.block_size, block_bytes),
        states=_describe_states(sizes, engine),
        sequence_bytes=tuple(
            needs.of_sequence(tokens) * block_bytes + 2 * sizes.state_bytes for tokens in SEQUENCE_TOKENS
        ),
        max_model_len=plan_max_model_len(model, engine.max_model_len, longest),
        model_positions=model.max_position_embeddings,
        free_bytes=trial.free_bytes,
        step_seconds=trial.seconds,
        num_trial_layers=model.num_trial_layers,
        kernels=trial.kernels,
        advice=None,
        **_of_text_side(engine, model, tokenizer),
    )


def _try_step(engine: EngineConfig, folder: pathlib.Path, dtype: str) -> TrialResult:
    """Runs a step of the first layer of the draft model, if there is one, and of the model. Returns the model's
    result.
    """
    folders = [folder]
    if (draft := draft_folder(engine)) is not None and not _uses_draft_head(engine):
        folders.insert(0, draft)
    for each in folders:
        trial = Trial(
            folder=str(each.resolve()),
            dtype=dtype,
            device=engine.device,
            num_threads=engine.num_threads,
            weights=engine.weights,
            exact=engine.exact,
            kv_cache_dtype=kv_dtype(engine, dtype),
            block_size=engine.block_size,
        )
        result = try_one_layer(trial)
    return result


def _quantized(
    model: ModelConfig, engine: EngineConfig, tally: WeightTally, dtype: str, keeps_integers: bool, keeps_float8: bool
) -> str | None:
    """Returns one line that says what is quantised how, and as what it is kept; None if nothing is."""
    if model.quantization is None or tally.stored is None:
        return None
    if not tally.stored.quantized:
        return f"{model.quantization.method}: no matrix is"
    if keeps_float8 and tally.num_float8:
        kept, remedy = f"in 8-bit floats, {gib(tally.float8_bytes)}", "; activations are rounded to 8 bits"
    elif not tally.kinds:
        kept = f"in {dtype}" if engine.weights in ("auto", "dense") else f"in {engine.weights}"
        remedy = "; `engine.weights: int8` keeps a byte each" if engine.weights == "auto" else ""
    elif keeps_integers:
        kept, remedy = f"as integers, {gib(tally.integer_bytes)}", "; activations are rounded to 8 bits"
    else:
        kept, remedy = f"in {dtype}, as `engine.weights: dense` asks", ""
    return f"{model.quantization.method}: {tally.stored.describe_quantized()}; kept {kept}{remedy}"


def _uses_draft_head(engine: EngineConfig) -> bool:
    return engine.speculative is not None and engine.speculative.uses_draft_head


def _draft_config(engine: EngineConfig) -> ModelConfig | None:
    """Returns the shape of the draft model or the draft head; None if there is none."""
    if _uses_draft_head(engine):
        target = resolve_model_folder(engine.model)
        return draft_head(target, load_model_config(target), draft_folder(engine))
    folder = draft_folder(engine)
    return None if folder is None else load_model_config(folder)
