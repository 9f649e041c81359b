"""Times the sampler against what one writes with torch operations: `python -m benchmarks.sampler`.

Whole calls, host lists included, on bfloat16 logits; the two alternate in one process. Ratios above 1 say how many
times faster the sampler is. Shared machines are noisy: take the ratios, and the lower quartiles that are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from manta.workers.kernels import cpu_sampler
from manta.workers.sampling.sampling_state import SamplingState
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import SamplePoint, SequenceStart
from manta.workers.torch_worker.sampler import sample

POSITION = 500


def torch_argmax(logits: torch.Tensor) -> list[int]:
    return logits.float().argmax(1).tolist()


def torch_multinomial(logits: torch.Tensor) -> list[int]:
    return torch.multinomial(logits.float().softmax(1), 1)[:, 0].tolist()


def torch_sorted_top_p(logits: torch.Tensor) -> list[int]:
    values, ids = logits.float().sort(dim=1, descending=True)
    mass = values.softmax(1)
    mass = mass.masked_fill(mass.cumsum(1) - mass >= 0.9, 0)
    return ids.gather(1, torch.multinomial(mass, 1))[:, 0].tolist()


def torch_top_k(logits: torch.Tensor) -> list[int]:
    values, ids = logits.float().topk(50, dim=1)
    return ids.gather(1, torch.multinomial(values.softmax(1), 1))[:, 0].tolist()


def torch_log_softmax(logits: torch.Tensor) -> list[list[float]]:
    return logits.float().log_softmax(1).topk(5, dim=1).values.tolist()


CASES: list[tuple[str, dict[str, Any], Callable[[torch.Tensor], list[Any]]]] = [
    ("greedy", {"temperature": 0.0}, torch_argmax),
    ("temperature 1", {}, torch_multinomial),
    ("top-p 0.9", {"top_p": 0.9}, torch_sorted_top_p),
    ("top-k 50", {"top_k": 50}, torch_top_k),
    ("top-k 50, top-p 0.9", {"top_k": 50, "top_p": 0.9}, torch_top_k),
    ("min-p 0.05", {"min_p": 0.05}, torch_multinomial),
    ("penalties, 500 tokens", {"presence_penalty": 1.0, "repetition_penalty": 1.1}, torch_multinomial),
    ("greedy, 5 logprobs", {"temperature": 0.0, "logprobs": 5}, torch_log_softmax),
]


def alternate(first: Callable[[], object], second: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Lower quartiles in seconds of both, called in turn for about `seconds`."""
    times: tuple[list[float], list[float]] = ([], [])
    first()
    second()
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times[0]) < 5:
        for function, record in zip((first, second), times, strict=True):
            start = time.perf_counter()
            function()
            record.append(time.perf_counter() - start)
    return statistics.quantiles(times[0], n=4)[0], statistics.quantiles(times[1], n=4)[0]


def sampler_call(logits: torch.Tensor, fields: dict[str, Any]) -> Callable[[], object]:
    rows, vocab_size = logits.shape
    state = SamplingState(vocab_size)
    tokens = torch.randint(vocab_size, (POSITION,)).tolist()
    for row in range(rows):
        state.start(SequenceStart(row, SamplingParams(**fields), row, tokens, 5))
    points = [SamplePoint(row, row, POSITION) for row in range(rows)]
    return lambda: sample(cpu_sampler, logits, points, state).to_host()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="for each line")
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of the logits")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads, normal logits with standard deviation {options.spread:g}; lower quartiles in µs")
    print(f"{'vocabulary':>10} {'rows':>4}  {'sampling':<22} {'Manta':>8} {'torch':>9}  {'ratio':>6}")
    for vocab_size in (151_936, 32_000):
        for rows in (1, 32):
            logits = (torch.randn(rows, vocab_size) * options.spread).bfloat16()
            for name, fields, torch_version in CASES:
                call = sampler_call(logits, fields)
                ours, peer = alternate(call, lambda f=torch_version, x=logits: f(x), options.seconds)  # type: ignore[misc]
                figures = f"{ours * 1e6:8.0f} {peer * 1e6:9.0f}  {peer / ours:6.1f}"
                print(f"{vocab_size:>10} {rows:>4}  {name:<22} {figures}", flush=True)


if __name__ == "__main__":
    main()
