"""Times the CPU kernels against the torch operations that they replace: `manta bench kernel-times`.

Each line alternates the two in one process and prints medians and their ratio (above 1: the kernel is faster), for
decode attention, linears and experts also how much of its time the hardware alone would need: to read the bytes at the
bandwidth of a plain sum, or to multiply at the rate of torch's largest product. Linears stand against oneDNN's, with
weights in oneDNN's own layout, experts in one call against one after the other, and bfloat16 weights in 12 bits against
plain ones. Figures of shared machines are
noisy: take the ratios.

A rounded KV cache stands against that of twice as many bits. A token's key and value of a head of 64 numbers take 256
bytes in bfloat16, 136 in int8 and 72 in int4, scales included. So by the bytes alone int8 is 1.88 times as fast as
bfloat16, and int4 1.89 times as fast as int8. The part `steps` decodes with the whole model over such caches; its floor
counts the bytes of the weights too.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.floors import Shape, bytes_of
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.kept_weights import LOSSLESS_BITS
from manta.workers.kernels import cpu, cpu_experts, kv_cache, processor
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.cpu_kv_cache import allocate_kv
from manta.workers.kernels.linears import GatedLinear
from manta.workers.kernels.looped_experts import LoopedExperts
from manta.workers.kernels.model_protocol import Model
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.weights import Experts, GatedMlpWeights, Linear, LinearWeight
from manta.workers.models.model_config import HeadShape, kv_head_bytes
from manta.workers.platforms import choose_platform
from manta.workers.platforms.cpu_linears import OneDnnLinear, make_cpu_gated_linear, make_cpu_linear, make_linear
from manta.workers.torch_worker.loader import load_model

MODEL = "qwen2.5-0.5b"
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 14, 2, 64, 16
HIDDEN, INTERMEDIATE = 896, 4864
"""The shape of `MODEL`."""
SCALE = HEAD_DIM**-0.5
HEAD_SHAPE = HeadShape(HEADS, KV_HEADS, HEAD_DIM, SCALE)
LINEARS = {"qkv": (1152, HIDDEN), "output": (HIDDEN, HIDDEN), "down": (HIDDEN, INTERMEDIATE), "head": (151_936, HIDDEN)}
"""Outputs and inputs."""
EXPERTS, CHOSEN, EXPERT_HIDDEN, EXPERT_INNER = 128, 8, 2048, 768
"""Experts of a layer of Qwen3-30B-A3B, of which a token chooses some, and their widths."""
GATED, DOWN = (2 * EXPERT_INNER, EXPERT_HIDDEN), (EXPERT_HIDDEN, EXPERT_INNER)
"""Outputs and inputs of an expert's linears."""
LOSSLESS_ROWS = (1, 4, 6, 8, 16, 32, 64, 512)
CACHES = (("int8", "bfloat16"), ("int4", "int8"))
"""Dtypes of KV caches, each beside that of twice as many bits."""
STEP_ROWS = 32
"""Rows of a decode step of the whole model."""
SLOTS_AT_ONCE = 1 << 15
"""KV slots that are filled together, so that little memory is needed besides the cache."""
CACHE_BYTES = 1 << 29
"""Bytes of the layers' keys and values that are used in turn."""
COLD_BYTES = 1 << 27
"""Bytes of weights that are used in turn, so that no cache holds them."""


def alternate(kernel: Callable[[], object], torch_ops: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Median seconds of each, called in turn for about `seconds`."""
    kernel()
    torch_ops()
    times: tuple[list[float], list[float]] = ([], [])
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times[0]) < 5:
        for function, record in zip((kernel, torch_ops), times, strict=True):
            function()  # wakes the threads and settles the caches of this function
            start = time.perf_counter()
            function()
            record.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def read_bandwidth() -> float:
    """Bytes a second that all threads read, from a sum over 512 MiB."""
    data = torch.ones(2**27, dtype=torch.float32)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


def product_rate() -> float:
    """Operations a second of torch's matrix product with the process's threads: the best of five.

    In bfloat16 if the processor has instructions for it. Otherwise in float32, because the kernels widen bfloat16 and
    torch's product would take minutes.
    """
    left, right = torch.randn(2, 2048, 2048)
    if processor.best_form().has_bfloat16:
        left, right = left.bfloat16(), right.bfloat16()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - start)
    return 2 * 2048**3 / best


class AttentionCase:
    """Random queries over a paged cache with shuffled blocks; many layers, so that no cache helps."""

    def __init__(self, starts: list[int], query_lens: list[int], cached: str = "bfloat16") -> None:
        """`cached` is the dtype of the cache: `bfloat16`, `int8` or `int4`."""
        contexts = np.array(starts) + np.array(query_lens)
        max_blocks = -(-int(contexts.max()) // BLOCK_SIZE)
        num_blocks = len(starts) * max_blocks
        tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(len(starts), max_blocks)
        self.metadata = AttentionMetadata.build(QueryTokens(np.array(starts), np.array(query_lens), tables, BLOCK_SIZE))
        head_bytes = kv_head_bytes(cached, HEAD_DIM)
        layer_bytes = 2 * num_blocks * BLOCK_SIZE * KV_HEADS * head_bytes
        num_layers = max(1, min(32, CACHE_BYTES // layer_bytes))
        dtype = kv_cache.ROUNDED.get(cached, torch.bfloat16)
        kv = allocate_kv(num_layers, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype)
        self.layers = [(layer[0], layer[1]) for layer in kv]
        slots = torch.arange(num_blocks * BLOCK_SIZE)
        for cache, some in itertools.product(self.layers[0], slots.split(SLOTS_AT_ONCE)):
            kv_cache.write(cache, some, torch.randn(len(some), KV_HEADS, HEAD_DIM), BLOCK_SIZE)
        kv[1:] = kv[0]
        self.qkv = torch.randn(self.metadata.num_tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM).bfloat16()
        self.kv_bytes = 2 * int(contexts.sum()) * KV_HEADS * head_bytes
        self.layer = 0

    def next_layer(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.layer = (self.layer + 1) % len(self.layers)
        return self.layers[self.layer]

    def kernel(self) -> torch.Tensor:
        return cpu.paged_attention(self.qkv, *self.next_layer(), self.metadata, HEAD_SHAPE)

    def step(self, model: Model, num_layers: int) -> torch.Tensor:
        """Returns the logits of a step of the whole model, whose layers take turns with the caches."""
        caches = list(itertools.islice(itertools.cycle(self.layers), num_layers))
        token_ids = torch.arange(self.metadata.num_tokens)
        return model.compute_logits(model.forward(token_ids, self.metadata, caches))

    def torch_decode(self) -> torch.Tensor:
        """Gathers every sequence's slots and runs SDPA; contexts of equal length, one token each."""
        k_cache, v_cache = self.next_layer()
        batch = self.metadata.num_sequences
        query = self.qkv[:, : HEADS * HEAD_DIM].view(batch, HEADS, 1, HEAD_DIM)
        blocks = self.metadata.block_tables.view(-1)
        key = k_cache.index_select(0, blocks).view(batch, -1, KV_HEADS, HEAD_DIM)[:, : self.metadata.max_context_len]
        value = v_cache.index_select(0, blocks).view(batch, -1, KV_HEADS, HEAD_DIM)[:, : self.metadata.max_context_len]
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        return F.scaled_dot_product_attention(query, key, value, scale=SCALE, enable_gqa=True)

    def torch_prefill(self) -> torch.Tensor:
        """SDPA with its causal kernel on contiguous keys, without any gather: the best that torch does."""
        heads = self.qkv.view(1, -1, HEADS + 2 * KV_HEADS, HEAD_DIM).transpose(1, 2)
        query, key, value = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE, enable_gqa=True)


def report(name: str, times: tuple[float, float], floor: float | None = None) -> None:
    kernel, torch_ops = times
    share = "" if floor is None else f"{floor / kernel:8.0%}"
    print(f"{name:36}{kernel * 1e3:10.4f}{torch_ops * 1e3:10.4f}{torch_ops / kernel:8.2f}{share}", flush=True)


def attention_rows(seconds: float, bandwidth: float, rate: float) -> None:
    print(f"{'':36}{'kernel ms':>10}{'torch ms':>10}{'ratio':>8}{'of floor':>9}")
    for batch, context in [(1, 96), (1, 256), (1, 1024), (1, 8192), (8, 512), (32, 192), (32, 1024), (64, 544)]:
        case = AttentionCase([context - 1] * batch, [1] * batch)
        times = alternate(case.kernel, case.torch_decode, seconds)
        report(f"decode attention {batch} x {context}", times, case.kv_bytes / bandwidth)
    for length in [128, 1056, 4096]:
        case = AttentionCase([0], [length])
        report(f"prefill attention {length}", alternate(case.kernel, case.torch_prefill, seconds))


def cache_rows(seconds: float, bandwidth: float, rate: float) -> None:
    """Decode attention over a rounded cache, with one of twice as many bits in the place of torch."""
    for cached, wider in CACHES:
        print(f"{'':36}{cached + ' ms':>10}{wider[:4] + ' ms':>10}{'ratio':>8}{'of floor':>9}")
        for batch, context in [(1, 1024), (1, 8192), (32, 1024), (32, 4096), (32, 8192)]:
            shape = [context - 1] * batch, [1] * batch
            rounded, plain = AttentionCase(*shape, cached), AttentionCase(*shape, wider)
            times = alternate(rounded.kernel, plain.kernel, seconds)
            report(f"{cached} cache, decode {batch} x {context}", times, rounded.kv_bytes / bandwidth)


def step_rows(seconds: float, bandwidth: float, rate: float) -> None:
    """A decode step of the whole model over rounded caches, with one of twice as many bits in the place of torch."""
    folder = benchmark_checkpoint(MODEL)
    config, shape = load_model_config(folder), Shape(folder)
    model = load_model(folder, config, "bfloat16", choose_platform("cpu", None))
    weight_bytes = 2 * (shape.layer_elements + shape.head_elements)
    for cached, wider in CACHES:
        print(f"{'':36}{cached + ' ms':>10}{wider[:4] + ' ms':>10}{'ratio':>8}{'of floor':>9}")
        for context in (1024, 8192):
            rows = [context - 1] * STEP_ROWS, [1] * STEP_ROWS
            rounded, plain = AttentionCase(*rows, cached), AttentionCase(*rows, wider)
            steps = [functools.partial(each.step, model, config.num_layers) for each in (rounded, plain)]
            floor = (weight_bytes + config.num_layers * rounded.kv_bytes) / bandwidth
            report(f"{cached} cache, step {STEP_ROWS} x {context}", alternate(steps[0], steps[1], seconds), floor)


def onednn_gated_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return GatedLinear(OneDnnLinear(weight, bias), torch_silu_and_mul)


def in_turn(linears: list[Linear], x: torch.Tensor) -> Callable[[], object]:
    each = itertools.cycle(linears)
    return lambda: next(each).forward(x)


def linear_rows(seconds: float, bandwidth: float, rate: float) -> None:
    print(f"{'':36}{'kernel ms':>10}{'torch ms':>10}{'ratio':>8}{'of floor':>9}")
    for name, (out_features, in_features) in {**LINEARS, "gate and up": (2 * INTERMEDIATE, HIDDEN)}.items():
        count = max(2, COLD_BYTES // (2 * out_features * in_features))
        weights = [torch.randn(out_features, in_features).bfloat16() for _ in range(count)]
        is_gated = name == "gate and up"
        ours = [(make_cpu_gated_linear if is_gated else make_cpu_linear)(weight, None) for weight in weights]
        theirs = [(onednn_gated_linear if is_gated else OneDnnLinear)(weight, None) for weight in weights]
        for rows in [1, 8, 32, 64] if name == "head" else [1, 8, 32, 64, 256, 2048]:
            x = torch.randn(rows, in_features).bfloat16()
            operations = 2 * rows * out_features * in_features
            floor = max(2 * out_features * in_features / bandwidth, operations / rate)
            report(f"{name} {rows} x {in_features}", alternate(in_turn(ours, x), in_turn(theirs, x), seconds), floor)


def lossless_rows(seconds: float, bandwidth: float, rate: float) -> None:
    """bfloat16 weights in 12 bits, with plain ones in the place of torch."""
    print(f"{'':36}{'kernel ms':>10}{'plain ms':>10}{'ratio':>8}{'of floor':>9}")
    for name, (out_features, in_features) in {**LINEARS, "gate and up": (2 * INTERMEDIATE, HIDDEN)}.items():
        size, is_gated = out_features * in_features, name == "gate and up"
        weights = [torch.randn(out_features, in_features).bfloat16() for _ in range(max(2, COLD_BYTES // (2 * size)))]
        make = functools.partial(make_cpu_gated_linear if is_gated else make_cpu_linear, bias=None)
        ours, plain = ([make(weight, lossless=each) for weight in weights] for each in (True, False))
        for rows in LOSSLESS_ROWS:
            x = torch.randn(rows, in_features).bfloat16()
            floor = max(size * bytes_of(LOSSLESS_BITS) / bandwidth, 2 * rows * size / rate)
            report(f"{name} {rows} x {in_features}", alternate(in_turn(ours, x), in_turn(plain, x), seconds), floor)


def expert_rows(seconds: float, bandwidth: float, rate: float) -> None:
    """A layer of experts in one call, with one expert after the other in the place of torch."""
    print(f"{'':36}{'kernel ms':>10}{'loop ms':>10}{'ratio':>8}{'of floor':>9}")
    for name, bits in {"bfloat16": None, "int8": 8, "int4": 4}.items():
        experts = [GatedMlpWeights(expert_linear(GATED, bits, True), expert_linear(DOWN, bits)) for _ in range(EXPERTS)]
        fused, looped = cpu_experts.fuse(experts), LoopedExperts(experts)
        if fused is None:
            sys.exit("no kernels were compiled: install a C++ compiler")
        bytes_of_one = 3 * EXPERT_INNER * EXPERT_HIDDEN * bytes_of(bits)
        for rows in [1, 32, 512]:
            x, shares = torch.randn(rows, EXPERT_HIDDEN).bfloat16(), torch.rand(rows, CHOSEN)
            choices = [torch.rand(rows, EXPERTS).topk(CHOSEN).indices for _ in range(8)]
            num_hit = statistics.mean(len(each.unique()) for each in choices)
            times = alternate(chosen(fused, x, choices, shares), chosen(looped, x, choices, shares), seconds)
            report(f"experts {name}, {rows} rows", times, num_hit * bytes_of_one / bandwidth if rows < 512 else None)


def expert_linear(sizes: tuple[int, int], bits: int | None, gated: bool = False) -> Linear:
    weight = torch.randn(*sizes).bfloat16()
    return make_linear(LinearWeight("expert", weight, None, torch.bfloat16, gated, rounded_to=bits))


def chosen(
    experts: Experts, x: torch.Tensor, choices: list[torch.Tensor], shares: torch.Tensor
) -> Callable[[], object]:
    each = itertools.cycle(choices)
    return lambda: experts.forward(x, next(each), shares)


def torch_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


PARTS = {
    "caches": cache_rows,
    "steps": step_rows,
    "attention": attention_rows,
    "linears": linear_rows,
    "lossless": lossless_rows,
    "experts": expert_rows,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="manta bench kernel-times", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=1.0, help="time of each line")
    options = parser.parse_args(arguments)
    if unknown := [part for part in options.parts.split(",") if part not in PARTS]:
        parser.error(f"--parts {unknown[0]}: use some of {', '.join(PARTS)}")
    torch.manual_seed(0)
    with torch.inference_mode():
        bandwidth, rate = read_bandwidth(), product_rate()
        print(f"{torch.get_num_threads()} threads, reads {bandwidth / 1e9:.0f} GB/s, products {rate / 1e12:.2f} T/s")
        for part in options.parts.split(","):
            PARTS[part](options.seconds, bandwidth, rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
