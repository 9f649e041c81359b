"""The figures of `make gpu-check`: what the GPU can do, and how near the engine comes to it.

A decode step cannot be faster than reading the weights and the keys and values once at the speed of a copy; a prefill
not faster than its products at the rate of a large one. Every function gives rows of a table; the engine is the one of
`LLM.generate`, in this process, without Ray.
"""

from __future__ import annotations

import gc
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.workloads import PromptSource
from cluster.llm import LLM, ConstraintSpec, SamplingParams
from workers.checkpoints.model_config import ModelConfig, load_model_config

MODELS = ("qwen2.5-0.5b", "llama-3.1-8b")
PROMPT, OUTPUT = 128, 64
PREFILL_PROMPT, PREFILL_COUNT = 2048, 16
LARGE = 8192
"""Side of the measured product."""
COPY_BYTES = 1 << 30
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 100, "maxItems": 100}


class Figure(NamedTuple):
    what: str
    value: str
    bar: str = ""
    """What is asked for, where something is."""


class Device(NamedTuple):
    """Measured here and now."""

    bytes_per_second: float
    """Of a copy, read and written bytes together."""
    operations_per_second: float
    """Of a bfloat16 product of two `LARGE` matrices."""


def measure_device() -> Device:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_seconds = _device_seconds(lambda: target.copy_(source))
    left, right = torch.randn(2, LARGE, LARGE, device="cuda", dtype=torch.bfloat16)
    product_seconds = _device_seconds(lambda: left @ right)
    return Device(2 * COPY_BYTES / copy_seconds, 2 * LARGE**3 / product_seconds)


def _device_seconds(run: Callable[[], object], times: int = 20) -> float:
    """Median, by events on the device, after three runs that warm up."""
    for _ in range(3):
        run()
    seconds = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


class Engine:
    """An `LLM` whose steps are timed."""

    def __init__(self, model: str, **options: Any) -> None:
        self.llm = LLM(model, device="cuda", **options)
        self.config: ModelConfig = load_model_config(pathlib.Path(self.llm.engine.model.folder))
        self.prompts = PromptSource(min(30_000, self.llm.engine.vocab_size))
        self._steps: list[tuple[int, float]] = []
        step = self.llm.engine.step

        def timed() -> list:
            started = time.perf_counter()
            changes = step()
            self._steps.append((len(changes), time.perf_counter() - started))
            return changes

        self.llm.engine.step = timed  # type: ignore[method-assign]

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> float:
        """Seconds of a whole run."""
        self._steps.clear()
        started = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    def step_seconds(self, rows: int) -> float:
        """Median step of the last run in which so many rows gained tokens."""
        full = [seconds for count, seconds in self._steps if count == rows]
        if len(full) < 3:
            raise RuntimeError(f"only {len(full)} steps had all {rows} rows")
        return statistics.median(full[1:])

    def decode_seconds(self, rows: int, prompt: int = PROMPT, **fields: Any) -> float:
        """A decode step of `rows` requests, after a run that warms up."""
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, **{"temperature": 0.0} | fields)
        count = rows // params.n
        for _ in range(2):
            self.generate(self.prompts(count, prompt), params)
        return self.step_seconds(rows)

    def decode_rate(self, rows: int, **fields: Any) -> float:
        """Tokens a second of `rows` requests from the first step in which all gain one; late rows count as lost."""
        self.decode_seconds(rows, **fields)
        first = next(index for index, (count, _) in enumerate(self._steps) if count == rows)
        decoding = self._steps[first + 1 :]
        return sum(count for count, _ in decoding) / sum(seconds for _, seconds in decoding)

    def decode_floor(self, rows: int, device: Device, context: int = PROMPT + OUTPUT // 2) -> float:
        """Seconds to read what a decode step must: every linear's weights once, and each row's keys and values."""
        kv_bytes = rows * context * self.config.kv_bytes_per_token("bfloat16")
        return (2 * self._linear_weights(head=True) + kv_bytes) / device.bytes_per_second

    def prefill_operations(self, num_tokens: int) -> float:
        """Of the linears alone; the head sees one token a prompt."""
        return 2.0 * num_tokens * self._linear_weights(head=False)

    def _linear_weights(self, head: bool) -> int:
        config = self.config
        qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        attention = config.hidden_size * (qkv + config.num_heads * config.head_dim)
        mlp = 3 * config.hidden_size * config.intermediate_size
        return config.num_layers * (attention + mlp) + head * config.vocab_size * config.hidden_size

    def close(self) -> None:
        del self.llm
        gc.collect()
        torch.cuda.empty_cache()


def model_figures(name: str, device: Device) -> Iterator[Figure]:
    """Decode, prefill, constraints and parallel samples of one shape, and transformers beside it."""
    folder = str(benchmark_checkpoint(name))
    started = time.perf_counter()
    engine = Engine(folder, dtype="bfloat16", max_model_len=4096, max_num_batched_tokens=8192)
    yield Figure(f"{name}: load, KV sized, ready", f"{time.perf_counter() - started:.1f} s")
    steps = {}
    for rows in (1, 64, 256):
        steps[rows] = engine.decode_seconds(rows)
        share = engine.decode_floor(rows, device) / steps[rows]
        bar = "0.80" if rows == 1 else ""
        yield Figure(f"{name}: decode step, {rows} rows", f"{steps[rows] * 1e3:.2f} ms, {share:.2f} of the floor", bar)
    seconds = engine.generate(
        engine.prompts(PREFILL_COUNT, PREFILL_PROMPT), SamplingParams(temperature=0, max_tokens=1)
    )
    tokens = PREFILL_COUNT * PREFILL_PROMPT
    rate = engine.prefill_operations(tokens) / seconds / device.operations_per_second
    yield Figure(
        f"{name}: prefill of {tokens} tokens", f"{tokens / seconds:.0f} tok/s, {rate:.2f} of the product", "0.6"
    )
    spec = ConstraintSpec(kind="json_schema", text=json.dumps(SCHEMA), any_whitespace=False)
    for rows in (64, 256):
        free = engine.decode_rate(rows, temperature=1.0)
        bound = engine.decode_rate(rows, temperature=1.0, constraint=spec)
        yield Figure(f"{name}: all of {rows} rows constrained against none, tok/s", f"{bound / free:.2f}", "0.98")
    shared = engine.decode_seconds(64, prompt=2048, temperature=1.0, n=64)
    separate = engine.decode_seconds(64, prompt=2048, temperature=1.0)
    ratio = f"{shared * 1e3:.2f} ms against {separate * 1e3:.2f} ms: {separate / shared:.2f}"
    yield Figure(f"{name}: n = 64 of a 2k prompt against 64 sequences", ratio)
    engine.close()
    yield from _transformers_figures(name, folder, steps)


def _transformers_figures(name: str, folder: str, steps: dict[int, float]) -> Iterator[Figure]:
    """`generate` of transformers, greedy, the same lengths: time of a step from two runs of different length."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()
    for rows in (1, 64):
        prompts = torch.randint(300, 30_000, (rows, PROMPT), device="cuda")
        step = (_generate_seconds(model, prompts, OUTPUT) - _generate_seconds(model, prompts, 8)) / (OUTPUT - 8)
        ratio = f"{step * 1e3:.2f} ms, {step / steps[rows]:.1f} times Manta's"
        yield Figure(f"{name}: transformers' decode step, {rows} rows", ratio)
    del model
    gc.collect()
    torch.cuda.empty_cache()


@torch.inference_mode()
def _generate_seconds(model: Any, prompts: torch.Tensor, count: int) -> float:
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def speculation_figures() -> Iterator[Figure]:
    """The demo model with its draft against the same alone, one request at a time."""
    draft = pathlib.Path(__file__).resolve().parents[1] / "configs" / "demo" / "draft"
    prompt = [{"role": "user", "content": "What can you do?"}]
    params = SamplingParams(temperature=0, max_tokens=100)
    speeds = []
    for speculative in (None, {"proposers": ["draft"], "draft_model": str(draft)}):
        llm = LLM("demo", device="cuda", kv_cache_bytes=1 << 28, speculative=speculative)
        llm.chat(prompt, params, use_tqdm=False)
        started = time.perf_counter()
        num_tokens = sum(
            len(output.outputs[0].token_ids) for _ in range(10) for output in llm.chat(prompt, params, use_tqdm=False)
        )
        speeds.append(num_tokens / (time.perf_counter() - started))
    yield Figure(
        "demo pair: tok/s with drafts over without", f"{speeds[1]:.0f} / {speeds[0]:.0f} = {speeds[1] / speeds[0]:.2f}"
    )
