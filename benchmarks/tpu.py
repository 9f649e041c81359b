"""Measures a step on a TPU beside its floors: `python -m benchmarks.tpu --output FILE` on a TPU host.

Three parts, each a table: the attention kernel against the loop that the tests prove; the tokens of a small model in
float32 against the CPU platform's; and the time of decode steps and of prefill in bfloat16, with random weights in the
shape of a published model. The floor of a decode step reads the weights and the keys and values once; that of prefill
makes the products at the chip's nominal rate. Elsewhere than on a TPU the figures say nothing about one.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checkpoints import SHAPES, benchmark_checkpoint
from manta.cluster.llm import LLM, SamplingParams
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.jax_worker.attention import attend_by_chunks, attend_by_kernel, page_head_dim
from manta.workers.jax_worker.batch import BatchShape, StepBatch, pack
from manta.workers.jax_worker.jax_worker import JaxWorker
from manta.workers.jax_worker.mesh import TPU
from manta.workers.jax_worker.model_state import ModelState
from manta.workers.model_options import ModelOptions

ROUNDS = 20
ROWS = (1, 32, 256)
CONTEXT = 1024
PREFILL = 2048


class Chip(NamedTuple):
    """Nominal figures of one chip."""

    bytes_per_second: float
    operations_per_second: float
    """Dense bfloat16."""


CHIPS = {
    "TPU v4": Chip(1.2e12, 275e12),
    "TPU v5 lite": Chip(0.82e12, 197e12),
    "TPU v5": Chip(2.77e12, 459e12),
    "TPU v6 lite": Chip(1.64e12, 918e12),
}


def attention_rows() -> Iterator[str]:
    yield "| attention, kernel against loop | largest difference |\n| --- | --- |"
    if jax.default_backend() != TPU:
        yield "| the kernel runs on TPUs only | |"
        return
    random = np.random.default_rng(0)
    lens, starts = np.array([1, 100, 1, 33]), np.array([900, 0, 17, 300])
    shape = BatchShape(256, 8, 64)
    blocks = random.permutation(256).reshape(4, 64).astype(np.int32)
    packed = jnp.asarray(pack(shape, np.zeros(lens.sum(), dtype=np.int32), starts, lens, [blocks]))
    batch = StepBatch.unpack(packed, shape).of_group(0)
    for window in (None, 128):
        for dtype in (jnp.float32, jnp.bfloat16):
            query = jnp.asarray(random.normal(size=(256, 32, 128)), dtype)
            pages = jnp.asarray(random.normal(size=(256, 16, 16, page_head_dim(128, True))), dtype)
            both = [form(query, pages, batch, 0.1, window) for form in (attend_by_kernel, attend_by_chunks)]
            kernel, loop = (np.asarray(each[: lens.sum()], dtype=np.float32) for each in both)
            yield f"| {np.dtype(dtype).name}, window {window} | {np.abs(kernel - loop).max():.2e} |"


def token_rows() -> Iterator[str]:
    yield "\n| tokens of the tiny model in float32 | equal to the CPU platform's |\n| --- | --- |"
    folder = str(benchmark_checkpoint("tiny-llama"))
    prompts = [list(range(10, 10 + length)) for length in (3, 40, 200)]
    params = [SamplingParams(temperature=0, max_tokens=64, ignore_eos=True), SamplingParams(seed=1, max_tokens=64)]
    outputs = []
    for device in ("cpu", "tpu"):
        llm = LLM(folder, device=device, dtype="float32", max_num_sequences=8, max_num_batched_tokens=256)
        requests = [(prompt, each) for prompt in prompts for each in params]
        done = llm.generate([prompt for prompt, _ in requests], [each for _, each in requests])
        outputs.append([list(output.outputs[0].token_ids) for output in done])
    equal = sum(ours == theirs for ours, theirs in zip(*outputs, strict=True))
    yield f"| {len(outputs[0])} requests | {equal} |"


def step_rows(shape: str, num_devices: int) -> Iterator[str]:
    yield f"\n| step, shape of {shape}, bfloat16 | ms | floor, ms | of the floor |\n| --- | --- | --- | --- |"
    folder = benchmark_checkpoint(shape)
    cached = max(max(ROWS) * CONTEXT, PREFILL)
    options = ModelOptions(
        model=str(folder),
        device="tpu",
        dtype="bfloat16",
        tensor_parallel_size=num_devices,
        tpu_chips_per_host=num_devices,
        max_model_len=PREFILL,
        max_num_batched_tokens=PREFILL,
        max_num_sequences=max(ROWS),
        kv_cache_bytes=2 * cached * load_model_config(folder).kv_bytes_per_token("bfloat16"),
    )
    model = JaxWorker(options).runner.model
    chip = CHIPS.get(jax.devices()[0].device_kind)
    weights = sum(each.size for each in jax.tree.leaves(model.parameters.layers)) + model.parameters.head.weight.size
    config = model.config
    for rows in ROWS:
        seconds = _timed(model, np.full(rows, CONTEXT - 1), np.ones(rows, dtype=np.int64))
        num_bytes = 2 * weights + rows * CONTEXT * config.kv_bytes_per_token("bfloat16")
        yield _row(
            f"decode, {rows} rows of {CONTEXT}", seconds, chip and num_bytes / chip.bytes_per_second / num_devices
        )
    seconds = _timed(model, np.zeros(1, dtype=np.int64), np.array([PREFILL]))
    operations = 2 * PREFILL * (weights - model.parameters.head.weight.size)
    yield _row(f"prefill of {PREFILL}", seconds, chip and operations / chip.operations_per_second / num_devices)


def _timed(model: ModelState, starts: np.ndarray, lens: np.ndarray) -> float:
    """Returns the median seconds of the forward pass and the logits of each sequence's last token."""
    blocks_each = -(-(int(starts[0]) + int(lens[0])) // model.limits.block_size)
    tables = (np.arange(len(lens) * blocks_each) % model.num_blocks).reshape(len(lens), -1).astype(np.int32)
    tokens = np.ones(lens.sum(), dtype=np.int32)
    seconds = []
    for _ in range(ROUNDS + 2):
        started = time.perf_counter()
        model.forward(tokens, starts, lens, [tables] * model.limits.num_groups)
        jax.block_until_ready(model.logits(np.cumsum(lens) - 1))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def _row(name: str, seconds: float, floor: float | None) -> str:
    if floor is None:
        return f"| {name} | {seconds * 1e3:.2f} | unknown device | |"
    return f"| {name} | {seconds * 1e3:.2f} | {floor * 1e3:.2f} | {floor / seconds:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, help="file that the tables are appended to")
    parser.add_argument("--devices", type=int, default=1, help="chips that share the model (default: 1)")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b", help="of the steps (default: qwen2.5-0.5b)")
    parser.add_argument("--parts", default="attention,tokens,steps", help="which tables, by commas (default: all)")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, {len(jax.devices())} devices", flush=True)
    parts = {
        "attention": attention_rows,
        "tokens": token_rows,
        "steps": lambda: step_rows(options.shape, options.devices),
    }
    for part in options.parts.split(","):
        for row in parts[part]():
            print(row, flush=True)
            if options.output is not None:
                with options.output.open("a") as file:
                    file.write(row + "\n")


if __name__ == "__main__":
    main()
