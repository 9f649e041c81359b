"""The figures of `make gpu-check`: what the GPU can do, and how near the engine comes to it.

A decode step cannot be faster than reading the weights and the keys and values once at the speed of a copy; a prefill
not faster than its products at the rate of a large one. Every function gives rows of a table; the engine is the one of
`LLM.generate`, in this process, without Ray. `python -m benchmarks.gpu_figures PART` runs one part.
"""

from __future__ import annotations

import functools
import json
import logging
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.gpu_attention import attention_figures
from benchmarks.gpu_device import LARGE, Device, measure_device
from benchmarks.gpu_experts import expert_figures
from benchmarks.gpu_linears import linear_figures
from benchmarks.gpu_recurrent import recurrent_figures
from benchmarks.gpu_rows import FIGURE, Figure, one_line
from benchmarks.gpu_smoke import profile_figures, sanitizer_figures, smoke_figures, worker_of
from benchmarks.workloads import PromptSource
from manta.cluster.llm import LLM, ConstraintSpec, SamplingParams
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.models.model_config import ModelConfig

MODELS = ("qwen2.5-0.5b", "llama-3.1-8b")
PROMPT, OUTPUT = 128, 64
PREFILL_PROMPT, PREFILL_COUNT = 2048, 16
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 100, "maxItems": 100}


def device_figures() -> Iterator[Figure]:
    speed, rate = measure_device()
    yield Figure("device: a copy, read and written bytes", f"{speed / 1e12:.2f} TB/s")
    yield Figure(f"device: bfloat16 product of {LARGE}", f"{rate / 1e12:.0f} TFLOP/s")


class Engine:
    """An `LLM` whose steps are timed."""

    def __init__(self, model: str, **options: Any) -> None:
        self.llm = LLM(model, device="cuda", **options)
        self.config: ModelConfig = load_model_config(pathlib.Path(self.llm.engine.model.folder))
        self.prompts = PromptSource(min(30_000, self.llm.engine.vocab_size))
        self._steps: list[tuple[int, float]] = []
        self._num_prompt_steps = 0
        """Steps of the last run after which prompts still waited."""
        step = self.llm.engine.step

        def timed() -> list:
            started = time.perf_counter()
            changes = step()
            self._steps.append((len(changes), time.perf_counter() - started))
            self._num_prompt_steps = len(self._steps) if self.llm.engine.num_waiting else self._num_prompt_steps
            return changes

        self.llm.engine.step = timed  # type: ignore[method-assign]

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Batch sizes whose decode steps were captured."""
        platform = worker_of(self.llm).runner.platform
        return tuple(each.num_sequences for each in platform.graph_layouts if each.tokens_each == 1)

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
        self._decode(rows, prompt, **fields)
        return self.step_seconds(rows)

    def decode_rate(self, rows: int, **fields: Any) -> float:
        """Tokens a second of `rows` requests behind the prompts; late rows count as lost."""
        self._decode(rows, PROMPT, **fields)
        decoding = self._steps[self._num_prompt_steps + 2 :]  # the two after it may still compute prompts
        return sum(count for count, _ in decoding) / sum(seconds for _, seconds in decoding)

    def _decode(self, rows: int, prompt: int, **fields: Any) -> None:
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, **{"temperature": 0.0} | fields)
        for _ in range(2):
            self._num_prompt_steps = 0
            self.generate(self.prompts(rows // params.n, prompt), params)

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


def model_figures(name: str) -> Iterator[Figure]:
    """Decode, prefill, constraints and parallel samples of one shape."""
    device = measure_device()
    folder = str(benchmark_checkpoint(name))
    started = time.perf_counter()
    engine = Engine(folder, dtype="bfloat16", max_model_len=4096, max_num_batched_tokens=8192)
    yield Figure(f"{name}: load, KV sized, graphs captured, ready", f"{time.perf_counter() - started:.1f} s")
    yield Figure(f"{name}: batch sizes captured as graphs", ", ".join(map(str, engine.graph_sizes)) or "failed: none")
    for rows in (1, 64, 256):
        yield from guarded(name, _decode_figures(name, engine, device, rows))
    yield from guarded(name, _prefill_figures(name, engine, device))
    yield from guarded(name, _parallel_figures(name, engine))
    for rows in (64, 256):
        yield from guarded(name, _constraint_figures(name, engine, rows))


def guarded(name: str, figures: Iterator[Figure]) -> Iterator[Figure]:
    """The figures as far as they come, and why no more came; others go on."""
    try:
        yield from figures
    except Exception as error:
        logging.exception("%s", name)
        yield Figure(name, f"failed: {one_line(f'{type(error).__name__}: {error}')}")


def _decode_figures(name: str, engine: Engine, device: Device, rows: int) -> Iterator[Figure]:
    seconds = engine.decode_seconds(rows)
    share = engine.decode_floor(rows, device) / seconds
    bar = "0.80" if rows == 1 else ""
    yield Figure(f"{name}: decode step, {rows} rows", f"{seconds * 1e3:.2f} ms, {share:.2f} of the floor", bar)


def _prefill_figures(name: str, engine: Engine, device: Device) -> Iterator[Figure]:
    params = SamplingParams(temperature=0, max_tokens=1)
    runs = [engine.generate(engine.prompts(PREFILL_COUNT, PREFILL_PROMPT), params) for _ in range(3)]
    seconds, tokens = min(runs[1:]), PREFILL_COUNT * PREFILL_PROMPT  # the first one compiles
    rate = engine.prefill_operations(tokens) / seconds / device.operations_per_second
    what = f"{name}: prefill of {tokens} tokens"
    yield Figure(what, f"{tokens / seconds:.0f} tok/s, {rate:.2f} of the product", "0.6")


def _parallel_figures(name: str, engine: Engine) -> Iterator[Figure]:
    shared = engine.decode_seconds(64, prompt=2048, temperature=1.0, n=64)
    separate = engine.decode_seconds(64, prompt=2048, temperature=1.0)
    ratio = f"{shared * 1e3:.2f} ms against {separate * 1e3:.2f} ms: {separate / shared:.2f}"
    yield Figure(f"{name}: n = 64 of a 2k prompt against 64 sequences", ratio)


def _constraint_figures(name: str, engine: Engine, rows: int) -> Iterator[Figure]:
    spec = ConstraintSpec(kind="json_schema", text=json.dumps(SCHEMA), any_whitespace=False)
    free = engine.decode_rate(rows, temperature=1.0)
    bound = engine.decode_rate(rows, temperature=1.0, constraint=spec)
    yield Figure(f"{name}: all of {rows} rows constrained against none, tok/s", f"{bound / free:.2f}", "0.98")


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


PARTS: dict[str, Callable[[], Iterator[Figure]]] = {
    "smoke": smoke_figures,
    "device": device_figures,
    "attention": attention_figures,
    "linears": linear_figures,
    "experts": expert_figures,
    "recurrent": recurrent_figures,
    "profile": profile_figures,
    "sanitizer": sanitizer_figures,
    **{name: functools.partial(model_figures, name) for name in MODELS},
    "speculation": speculation_figures,
}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    for row in PARTS[sys.argv[1]]():
        print(FIGURE + msgspec.json.encode(row).decode(), flush=True)
