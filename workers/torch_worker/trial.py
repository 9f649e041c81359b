"""Runs a few steps of a model's first layer and its head, so that `manta check` fails if serving would fail.

Weights, dtype, linears, kernels, sampler and sizes are those of serving; only the layers after the first are neither
read nor run. It runs in a separate process (`python -m manta.workers.torch_worker.trial`), because an instruction
that the processor lacks would end the process.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import msgspec
import numpy as np

from manta.structured.masks import NO_MASK, MaskBatch, row_words
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.kv_groups import one_group
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import (
    NUM_FIXED_STATES,
    ZERO_STATE,
    SamplePoint,
    ScheduledSequence,
    SequenceStart,
    StateUse,
    StepInput,
    StepOutput,
)

PROMPT_TOKENS = 48
"""Prompt tokens of each of the two sequences. Linears take another code path for more than 32 rows than in decode
steps.
"""
DECODE_STEPS = 3
"""Number of decode steps; the fastest is reported, because caches are cold in the first one."""
TIMEOUT_S = 600.0
"""Longest time of a trial in seconds. Compiling the kernels for the first time takes about a minute of it."""

_PARAMS = (
    SamplingParams(temperature=0.0, logprobs=1),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1),
)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The model and the arguments of its worker to try."""

    folder: str
    dtype: str
    """The resolved dtype: `bfloat16`, `float16` or `float32`."""
    device: str
    num_threads: int | None
    weights: str
    exact: bool
    kv_cache_dtype: str
    """The dtype of cached keys and values: `int8`, `int4`, or that of the activations."""
    block_size: int


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float = 0.0
    """Seconds of the fastest decode step: one layer, the head and the sampler."""
    kernels: str = ""
    """The form of the kernels, as in `ModelInfo`."""
    advice: str | None = None
    unused_tensors: tuple[str, ...] = ()
    """Tensors of the files that no module of transformers' model takes."""
    runs_in_one_call: bool = False
    """Whether all layers are one call of compiled code, or one graph, and not a call of each kernel."""
    error: str | None = None


def try_one_layer(trial: Trial) -> TrialResult:
    """Runs the trial in a separate process. Raises `ModelError` naming what failed."""
    command = [sys.executable, "-m", "manta.workers.torch_worker.trial", msgspec.json.encode(trial).decode()]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"one step of its first layer did not end within {TIMEOUT_S:.0f} s on {trial.device}"
        ) from error
    if done.returncode != 0:
        ended = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ModelError(
            f"one step of its first layer ended the process ({ended}) on {trial.device} in {trial.dtype}"
            + "".join(f": {line}" for line in last)
        )
    result = msgspec.json.decode(done.stdout.splitlines()[-1], type=TrialResult)
    if result.error is not None:
        raise ModelError(result.error)
    return result


def run(trial: Trial) -> TrialResult:
    """Runs the trial in this process. Errors become `TrialResult.error`."""
    try:
        return _run(trial)
    except ModelError as error:
        return TrialResult(error=str(error))
    except Exception as error:  # serving would raise it too
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return TrialResult(error=f"one step of its first layer failed on {trial.device} in {trial.dtype}: {what}")


def _run(trial: Trial) -> TrialResult:
    from manta.workers.kernels.kv_cache import ROUNDED
    from manta.workers.kernels.layer_caches import allocate_states
    from manta.workers.platforms import choose_platform
    from manta.workers.torch_worker.loader import load_model
    from manta.workers.torch_worker.model_runner import ModelRunner

    config = load_model_config(trial.folder)
    config = config.first_layers(config.num_trial_layers)
    platform = choose_platform(trial.device, trial.num_threads, trial.exact)
    model = load_model(trial.folder, config, trial.dtype, platform, whole=False, weights=trial.weights)
    prompt_len = max(1, min(PROMPT_TOKENS, config.max_position_embeddings - DECODE_STEPS - 1))
    num_blocks = -(-(prompt_len + DECODE_STEPS) // trial.block_size)
    kv_dtype = ROUNDED.get(trial.kv_cache_dtype, platform.torch_dtype(trial.dtype))
    layers = one_group(config.attends)
    kv_cache = platform.allocate_kv(
        config, len(_PARAMS) * num_blocks, trial.block_size, kv_dtype, layers.layers_per_block
    )
    states = allocate_states(config.states, NUM_FIXED_STATES + (1 + DECODE_STEPS) * len(_PARAMS), platform.device)
    sizes = trial.block_size, len(_PARAMS), prompt_len + DECODE_STEPS
    runner = ModelRunner(model, platform, kv_cache, config, *sizes, layers=layers, states=states)
    prompt = [token % config.vocab_size for token in range(prompt_len)]
    prefill = StepInput(
        step_id=0,
        started=[SequenceStart(index, params, 7, prompt, prompt_len) for index, params in enumerate(_PARAMS)],
        scheduled=[
            ScheduledSequence(index, 0, prompt_len, list(range(index * num_blocks, (index + 1) * num_blocks)))
            for index in range(len(_PARAMS))
        ],
        sample_points=[SamplePoint((index + 1) * prompt_len - 1, index, prompt_len) for index in range(len(_PARAMS))],
        states=_state_uses(config, 0, prompt_len),
    )
    everything = np.full((1, row_words(config.vocab_size)), -1, dtype=np.int32)
    runner.execute(prefill)
    _check(runner.sample(MaskBatch(0, [0, NO_MASK], everything, {})))
    seconds = []
    for position in range(prompt_len, prompt_len + DECODE_STEPS):
        decode = StepInput(
            step_id=1 + position - prompt_len,
            scheduled=[ScheduledSequence(index, position, 1, []) for index in range(len(_PARAMS))],
            sample_points=[SamplePoint(index, index, position + 1) for index in range(len(_PARAMS))],
            states=_state_uses(config, 1 + position - prompt_len, position + 1),
        )
        started = time.perf_counter()
        runner.execute(decode)
        output = runner.sample()
        seconds.append(time.perf_counter() - started)
        _check(output)
    return TrialResult(
        seconds=min(seconds),
        kernels=platform.kernel_form,
        advice=platform.advice,
        unused_tensors=tuple(getattr(model, "unused_tensors", ())),
        runs_in_one_call=model.compiled is not None,
    )


def _state_uses(config: ModelConfig, step: int, end: int) -> list[StateUse]:
    """Returns the slots of recurrent states of each sequence in a step; none for a model without."""
    if not config.state_bytes:
        return []
    uses = []
    for index in range(len(_PARAMS)):
        slot = NUM_FIXED_STATES + step * len(_PARAMS) + index
        uses.append(StateUse(slot - len(_PARAMS) if step else ZERO_STATE, [(end, slot)]))
    return uses


def _check(output: StepOutput) -> None:
    for row_error in output.errors.values():
        raise ModelError(f"one step of its first layer gives no token: {row_error.reason}")
    missing = len(_PARAMS) - len(output.token_ids)
    if missing:
        raise ModelError(f"one step of its first layer gives no token for {missing} of {len(_PARAMS)} sequences")


if __name__ == "__main__":
    print(msgspec.json.encode(run(msgspec.json.decode(sys.argv[1], type=Trial))).decode())
