"""What the first minutes on a GPU should show: the same tokens with and without graphs and on the CPU, which kernels a
step spends its time in, and whether compute-sanitizer finds a fault. Parts of `make gpu-check`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.gpu_rows import Figure, one_line
from benchmarks.workloads import PromptSource
from manta.cluster.llm import LLM, SamplingParams

QUESTION = "The capital of France is"
SHOWN_KERNELS = 14
SANITIZER_SECONDS = 240.0
"""Seconds for each tool of compute-sanitizer, under which kernels are about ten times slower."""
GENERATE = "from benchmarks.gpu_smoke import generate_eagerly; generate_eagerly()"


def smoke_figures(model: str = "demo", prompt: str | list[int] = QUESTION, count: int = 20) -> Iterator[Figure]:
    """A greedy answer by graphs, kernel by kernel and on the CPU, in float32."""
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 1 << 26, "max_num_sequences": 4}
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    on_gpu = LLM(model, device="cuda", **options)
    by_graphs = _tokens(on_gpu, prompt, params)
    num_graphs = without_graphs(on_gpu)
    by_kernels = _tokens(on_gpu, prompt, params)
    on_cpu = _tokens(LLM(model, device="cpu", **options), prompt, params)
    yield Figure("smoke: sizes of steps captured as graphs", str(num_graphs) if num_graphs else "failed: none")
    for name, tokens in (("kernel by kernel", by_kernels), ("on the CPU", on_cpu)):
        same = next((i for i, pair in enumerate(zip(by_graphs, tokens, strict=True)) if pair[0] != pair[1]), count)
        verdict = "" if same == count else "failed: "
        yield Figure(f"smoke: {count} greedy tokens by graphs and {name}", f"{verdict}{same} are equal", f"{count}")


def _tokens(llm: LLM, prompt: str | list[int], params: SamplingParams) -> list[int]:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs[0].token_ids


def without_graphs(llm: LLM) -> int:
    """Has steps run kernel by kernel from now on. Returns how many sizes were captured as graphs."""
    platform = worker_of(llm).runner.platform
    captured, platform.graph_layouts = platform.graph_layouts, ()
    return len(captured)


def worker_of(llm: LLM) -> Any:
    """Returns the worker that holds the model in this process."""
    executor: Any = llm.engine.executor
    worker = getattr(executor, "inner", executor).worker
    return getattr(worker, "target", worker)


def profile_figures(name: str = "llama-3.1-8b") -> Iterator[Figure]:
    """Where the device's time goes in a decode step of 32 rows, and in one that computes a prompt beside them."""
    llm = LLM(str(benchmark_checkpoint(name)), device="cuda", max_model_len=4096, max_num_batched_tokens=1024)
    prompts = PromptSource(min(30_000, llm.engine.vocab_size))
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    for number, prompt in enumerate(prompts(32, 512)):
        llm.add_request(str(number), prompt, params)
    while llm.engine.num_waiting:
        llm.step()
    for _ in range(8):
        llm.step()
    yield from _profiled(f"{name}: decode of 32 rows", llm)
    llm.add_request("late", prompts(1, 400)[0], params)
    yield from _profiled(f"{name}: 400 tokens of a prompt beside 32 rows", llm)


def _profiled(what: str, llm: LLM) -> Iterator[Figure]:
    """The kernels of one step, those with the most time first."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        llm.step()
        torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in kernels)
    yield Figure(f"{what}: on the device", f"{total / 1e3:.2f} ms in {sum(each.count for each in kernels)} calls")
    for each in kernels[:SHOWN_KERNELS]:
        share = each.self_device_time_total / total if total else 0.0
        figure = f"{each.self_device_time_total / 1e3:.3f} ms, {share:.1%}, {each.count} times"
        yield Figure(f"{what}: {one_line(each.key)[:60]}", figure)


def sanitizer_figures() -> Iterator[Figure]:
    """Every kernel of a short generation without graphs, under compute-sanitizer."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(program):
        yield Figure("compute-sanitizer", "not measured: it is not installed")
        return
    for tool in ("memcheck", "initcheck"):
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", GENERATE]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SANITIZER_SECONDS)
        except subprocess.TimeoutExpired:
            yield Figure(f"compute-sanitizer, {tool}", f"not done after {SANITIZER_SECONDS:.0f} s")
            continue
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "=========" in line]
        verdict = "no errors" if done.returncode == 0 else f"failed: {one_line(' '.join(lines[:6]))}"
        yield Figure(f"compute-sanitizer, {tool}: a short generation kernel by kernel", verdict, "no errors")


def generate_eagerly(model: str = "demo") -> None:
    """Draws a few tokens with edits, filters and a shared prefix, kernel by kernel."""
    llm = LLM(model, device="cuda", kv_cache_bytes=1 << 26, max_num_sequences=4)
    without_graphs(llm)
    prompts = [list(range(5, 60)), [*range(5, 53), 7]]
    params = [SamplingParams(max_tokens=4, top_p=0.9, repetition_penalty=1.1, logprobs=2), SamplingParams(max_tokens=4)]
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert output.outputs[0].error is None, output.outputs[0].error
