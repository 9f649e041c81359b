"""`manta bench long-contexts`: what a step and a request cost at 8k, 32k and 128k tokens, against floors.

The model has random weights in the shape of Qwen2.5-0.5B, cut to some of its layers (`--layers`); the first line says
how many. The engine is in this process. A model that costs nothing brings a long prompt into the prefix cache, where
random keys and values stand, so a run takes minutes. Then these take turns at each length, with one thread and all:

    prefill       the last chunk of a prompt of this length, in tokens a second
    decode        a step of one row at this context
    warm prefix   from a request to its first token, if all but the last 16 tokens of its prompt are cached

Floors are those of `benchmarks/floors.py`, measured in the same turn with as many threads. A chunk multiplies its
tokens by the weights and its queries by the keys. A decode step reads weights, keys and values.

The part `host` shows what grows with the length beside the model: microseconds of a decode step by who spends them, and
milliseconds of a request on its way from the body to the first step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import torch

from benchmarks.checkpoints import SHAPES, cut_checkpoint
from benchmarks.floors import ELEMENT_BYTES, Rates, Shape, measure_rates
from benchmarks.host import PHASES, FreeModel, Stopwatch
from benchmarks.processes import BenchmarkError
from benchmarks.report import Figure, machine, markdown_head, markdown_row, ratio_of, say_failure
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine import Engine
from manta.cluster.engine.executors.in_process import InProcessExecutor
from manta.cluster.engine.kv_blocks import hash_blocks
from manta.cluster.engine.request import EngineRequest, SequenceOutput
from manta.cluster.protocol.requests import CompletionRequest
from manta.cluster.serve.routing.prefix_index import block_keys
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.host import num_cores
from manta.workers.kernels import processor
from manta.workers.platforms import choose_platform
from manta.workers.sampling_params import SamplingParams

MODEL = "qwen2.5-0.5b"
CONTEXTS = (8192, 32_768, 131_072)
MARGIN = 1024
"""Tokens that a sequence may have beyond the longest context."""
NEW_TOKENS = 16
"""Tokens of a warm prompt that are not cached: one block."""
SPARE_CHUNKS = 32
"""Chunks for which the KV cache has room beside the longest prompt, so that no turn evicts it."""
TOKEN_LIMIT = 30_000
LETTERS = 5
"""Letters of a word of the text that is tokenised."""

T = TypeVar("T")


PREFILL = Figure("prefill", "tok/s")
DECODE = Figure("decode", "ms", False)
WARM = Figure("warm prefix", "ms", False)


class LongEngine:
    """An engine whose prefix cache holds a prompt of the longest context; `shape` is its model's."""

    def __init__(self, folder: pathlib.Path, contexts: Sequence[int], chunk: int) -> None:
        self.shape, self.chunk = Shape(folder), chunk
        longest = max(contexts)
        token_bytes = int(2 * ELEMENT_BYTES * self.shape.kv_width * len(self.shape.attending))
        config = EngineConfig(
            model=str(folder),
            max_num_sequences=2,
            max_num_batched_tokens=chunk,
            max_model_len=longest + MARGIN,
            kv_cache_bytes=token_bytes * (longest + SPARE_CHUNKS * chunk + MARGIN),
            dtype="bfloat16",
        )
        executor = InProcessExecutor(config)
        self.engine = Engine(config, executor=executor)
        self._runner = executor.worker.runner  # type: ignore[attr-defined]
        self._runner.kv_cache.normal_()  # pages that nobody wrote would all be one page of zeros
        self._model = self._runner.model
        self._free = FreeModel(chunk, config.max_num_sequences, self.engine.vocab_size)
        self._num_requests = 0
        self.random = random.Random(0)
        self.prompt = self.tokens(longest)
        self.costs_nothing(True)
        self._ask(self.prompt, 1)
        while self.engine.has_unfinished:
            self.engine.step()

    def costs_nothing(self, is_free: bool) -> None:
        """Puts the free model in the place of the real one, or the real one back."""
        self._runner.model = self._free if is_free else self._model

    def tokens(self, count: int) -> list[int]:
        return self.random.choices(range(10, min(TOKEN_LIMIT, self.engine.vocab_size)), k=count)

    def _ask(self, prompt: list[int], num_tokens: int) -> None:
        self._num_requests += 1
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        request_id = str(self._num_requests)
        self.engine.add_request(EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params))

    def begin(self, prompt: list[int], num_cached: int, num_tokens: int) -> float:
        """Returns the seconds until the first token of a prompt, of which so many tokens are cached."""
        started = time.perf_counter()
        self._ask(prompt, num_tokens)
        outputs: list[SequenceOutput] = []
        while not outputs:
            outputs = self.engine.step()
        seconds = time.perf_counter() - started
        usage = outputs[0].usage
        if usage is None or usage.num_cached_tokens != num_cached:
            raise BenchmarkError(f"{num_cached} tokens of the prompt should have been cached: {usage}")
        return seconds

    def finish(self) -> None:
        self.engine.abort(str(self._num_requests))
        self.engine.step()

    def turn(self, context: int, num_steps: int) -> dict[Figure, float]:
        """One turn at one context."""
        cached = context - self.chunk
        prompt = self.prompt[:cached] + self.tokens(self.chunk)
        values = {PREFILL: self.chunk / self.begin(prompt, cached, num_steps + 2)}
        values[DECODE] = statistics.median(_seconds(self.engine.step) for _ in range(num_steps)) * 1e3
        self.finish()
        cached = context - NEW_TOKENS
        values[WARM] = self.begin(prompt[:cached] + self.tokens(NEW_TOKENS), cached, 2) * 1e3
        self.finish()
        return values

    def floors(self, context: int, rates: Rates) -> dict[Figure, float]:
        rate, bandwidth = rates.bfloat16, rates.bandwidth
        return {
            PREFILL: self.chunk / self.shape.chunk_seconds(context - self.chunk, self.chunk, rate, bandwidth),
            DECODE: self.shape.step_seconds(1, context, rate, bandwidth) * 1e3,
            WARM: self.shape.chunk_seconds(context - NEW_TOKENS, NEW_TOKENS, rate, bandwidth) * 1e3,
        }


def model_part(engine: LongEngine, contexts: Sequence[int], threads: Sequence[int], turns: int, steps: int) -> None:
    """Prints a row for each figure, context and number of threads."""
    engine.costs_nothing(False)
    values: dict[tuple[Figure, int, int], list[float]] = {}
    floors: dict[tuple[Figure, int, int], list[float]] = {}
    for number in range(turns + 1):  # the first turn warms up, at the first length
        for num_threads in threads if number % 2 else threads[::-1]:
            rates = measure_rates(processor.form(), num_threads)
            choose_platform("cpu", num_threads)  # the threads of torch and of the kernels
            for context in contexts if number else contexts[:1]:
                print(f"turn {number} of {turns}, {num_threads} threads, {context} tokens", file=sys.stderr, flush=True)
                found, floor = engine.turn(context, steps), engine.floors(context, rates)
                for figure in found if number else ():
                    values.setdefault((figure, context, num_threads), []).append(found[figure])
                    floors.setdefault((figure, context, num_threads), []).append(floor[figure])
    markdown_head("", "tokens", "threads", "median", "of floor", "over one thread")
    for figure, context, num_threads in itertools.product((PREFILL, DECODE, WARM), contexts, threads):
        own, floor = values[figure, context, num_threads], floors[figure, context, num_threads]
        share = ratio_of(own, floor, figure.higher_is_better)
        told = f"{share.median:.2f} [{share.low:.2f}, {share.high:.2f}]"
        alone = values.get((figure, context, 1), own)
        gain = "" if num_threads == 1 else f"{ratio_of(own, alone, figure.higher_is_better).median:.2f}"
        median = f"{statistics.median(own):.1f} {figure.unit}"
        markdown_row(figure.name, f"{context:,}", num_threads, median, told, gain)


def host_part(engine: LongEngine, contexts: Sequence[int], steps: int) -> None:
    """Prints what a decode step and a request cost beside the model at each context."""
    engine.costs_nothing(True)
    watch = Stopwatch(engine.engine)
    print()
    markdown_head("host, us a decode step", *PHASES, "rest", "together")
    for context in contexts:
        cached = context - NEW_TOKENS
        engine.begin(engine.prompt[:cached] + engine.tokens(NEW_TOKENS), cached, steps + 2)
        watch.take()
        phases, whole = [], []
        for _ in range(steps):
            whole.append(_seconds(engine.engine.step))
            phases.append(watch.take())
        engine.finish()
        medians = [statistics.median(column) for column in zip(*phases, strict=True)]
        together = statistics.median(whole)
        figures = [*medians, together - sum(medians), together]
        markdown_row(f"{context:,} tokens", *(f"{each * 1e6:.0f}" for each in figures))
    print()
    markdown_head("host, ms a request", "body", "tokenise", "route", "to the engine", "until the first token", "text")
    tokenizer = Tokenizer(engine.engine.model.folder)
    for context in contexts:
        markdown_row(f"{context:,} tokens", *request_costs(engine, tokenizer, context))


def request_costs(engine: LongEngine, tokenizer: Tokenizer, context: int) -> list[str]:
    """Returns the milliseconds of each part of a request whose prompt is cached, and the length of its text."""
    words = ["".join(engine.random.choices("etaoinshrdlu", k=LETTERS)) for _ in range(context // 2)]
    body = json.dumps({"model": "m", "prompt": " ".join(words), "max_tokens": 1}).encode()
    cached = context - NEW_TOKENS
    prompt = engine.prompt[:cached] + engine.tokens(NEW_TOKENS)
    request = EngineRequest(request_id="r", prompt_token_ids=prompt, params=SamplingParams())
    block_size = engine.engine.config.block_size

    def carry() -> None:
        msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest)

    parts: list[Callable[[], object]] = [
        lambda: msgspec.json.decode(body, type=CompletionRequest),
        lambda: tokenizer.encode_batch([" ".join(words)]),
        lambda: block_keys(hash_blocks(prompt, len(prompt) // block_size, block_size)),
        carry,
    ]
    seconds = [statistics.median(_seconds(part) for _ in range(3)) for part in parts]
    seconds.append(engine.begin(prompt, cached, 2))
    engine.finish()
    return [*(f"{each * 1e3:.1f}" for each in seconds), f"{len(body):,} B"]


def _seconds(call: Callable[[], T]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all was measured, 1 where the engine did something else than was to be measured."""
    parser = argparse.ArgumentParser(
        prog="manta bench long-contexts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="model,host", help="of model, host (default: both)")
    parser.add_argument("--contexts", type=_numbers, default=list(CONTEXTS), help="tokens (default: 8k, 32k and 128k)")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a chunk (default: 2048)")
    parser.add_argument("--threads", type=_numbers, default=sorted({1, num_cores()}), help="default: one and all cores")
    parser.add_argument("--layers", type=int, default=4, help="of the model's 24 (default: 4)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="decode steps of a turn (default: 12)")
    parser.add_argument("--model", metavar="FOLDER", help="default: random weights in the shape of Qwen2.5-0.5B, cut")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in ("model", "host")]:
        parser.error(f"--parts {unknown[0]}: use model, host or both")
    if options.chunk % NEW_TOKENS or min(options.contexts) <= options.chunk:
        parser.error(f"--chunk {options.chunk}: use a multiple of {NEW_TOKENS} below every context")
    print(machine(), file=sys.stderr)
    if options.model:
        folder, told = pathlib.Path(options.model), pathlib.Path(options.model).name
    else:
        folder = cut_checkpoint(MODEL, options.layers, 2 * max(CONTEXTS))
        told = f"{MODEL}, {options.layers} of {SHAPES[MODEL][2]['num_hidden_layers']} layers"
    print(f"{told}, bfloat16, chunks of {options.chunk:,} tokens, kernels {processor.form().name}\n", flush=True)
    try:
        with torch.inference_mode():
            engine = LongEngine(folder, options.contexts, options.chunk)
            if "model" in parts:
                model_part(engine, options.contexts, options.threads, options.turns, options.steps)
            if "host" in parts:
                host_part(engine, options.contexts, options.steps)
    except BenchmarkError as error:
        say_failure(f"manta bench long-contexts: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
