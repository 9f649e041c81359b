"""Runs a step of a model's first layers on this host's devices, so that `manta check` fails if serving would fail."""

from __future__ import annotations

import pathlib
import time
from typing import NamedTuple

import jax
import numpy as np

from manta.workers.checkpoints.memory import CacheSizes, choose_groups, weight_bytes
from manta.workers.jax_worker.mesh import is_tpu, open_mesh
from manta.workers.jax_worker.model_state import Limits, ModelState
from manta.workers.jax_worker.parameters import load_parameters
from manta.workers.jax_worker.planning import free_bytes, native_config, open_pools, plan, resolve_dtype
from manta.workers.jax_worker.programs import ProgramCompiler, keep_compiled_programs
from manta.workers.kv_groups import one_group
from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelError
from manta.workers.step import NUM_FIXED_STATES

TOKENS = 8
"""Number of tokens of the step."""


class MeshTrial(NamedTuple):
    """The result of a trial. Bytes are those of each device."""

    devices: str
    """Number and kind of the devices."""
    dtype: str
    free_bytes: int
    weight_bytes: int
    cache: CacheSizes
    kernels: str
    seconds: float
    """Seconds of the first layers, among which is one of every kind, and the head."""


def try_first_layer(options: ModelOptions, folder: pathlib.Path, has_drafts: bool = False) -> MeshTrial:
    """Runs the trial. With several hosts, only this host's devices are tried. `has_drafts` says whether steps would
    verify drafts.

    Raises `ModelError` if the model does not fit, and what `open_mesh` and `load_parameters` raise.
    """
    config = native_config(folder)
    keep_compiled_programs()
    mesh = open_mesh(min(options.tensor_parallel_size, options.tpu_chips_per_host))
    dtype = resolve_dtype(options.dtype, config.dtype)
    pools = open_pools(options, folder, config, dtype, mesh)
    free = free_bytes(mesh)
    whole = weight_bytes(folder, dtype)
    weights = whole // options.tensor_parallel_size
    if weights >= free:
        raise ModelError(
            f"its weights take {weights} bytes of each device in {dtype}, and {free} are free; raise "
            "tensor_parallel_size, or take a smaller model"
        )
    groups = choose_groups(config, None)
    cache = plan(options, config, None, mesh, dtype, whole, groups, weights, has_drafts)
    first = config.first_layers(config.num_trial_layers)
    layers = one_group(first.attends)
    parameters = load_parameters(folder, first, dtype, mesh, TOKENS, whole=False)
    num_slots = NUM_FIXED_STATES if first.state_bytes else 0
    limits = Limits(TOKENS, 1, TOKENS, options.block_size, min(1, layers.layers_per_block), num_slots)
    compiler = ProgramCompiler(1)
    model = ModelState(first, parameters, layers, mesh, limits, 1, first.vocab_size, compiler, pools)
    compiler.compile(folder.name)
    kind = mesh.devices.flat[0].device_kind
    kernels = "pallas" if is_tpu(mesh) else "xla"
    seconds = min(_step_seconds(model) for _ in range(3))
    return MeshTrial(f"{mesh.size} x {kind}", dtype, free, weights, cache, kernels, seconds)


def _step_seconds(model: ModelState) -> float:
    started = time.perf_counter()
    token_ids = np.arange(TOKENS, dtype=np.int32) % model.config.vocab_size
    model.measured_forward(token_ids, np.zeros((1, 1), dtype=np.int32))
    logits, _ = jax.block_until_ready(model.logits(np.array([TOKENS - 1])))
    if not np.isfinite(np.asarray(logits)[0]).all():
        raise ModelError("one step of its first layers gives logits that are not finite")
    return time.perf_counter() - started
