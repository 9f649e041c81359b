"""What a step should take on a GPU, by bytes, operations and launches: `python -m benchmarks.gpu_model` prints a table
that the first run of `make gpu-check` on the device will confirm or refute. Needs no GPU.

The floor reads the weights and the keys and values once at the device's nominal bandwidth, or makes the products at its
nominal rate. The estimate takes the shares of both that large copies and products reach in practice, and `GAP_S`
between two kernels of a graph. Kernel by kernel the host needs `LAUNCH_S` for each launch, and no step is shorter.
"""

from __future__ import annotations

from typing import NamedTuple

from manta.workers.models.model_config import HeadShape

COPY_SHARE, PRODUCT_SHARE = 0.90, 0.72
"""Attainable shares of an H100's nominal figures, as others report them: a large copy, and cuBLAS products in
bfloat16.
"""
GAP_S = 1.5e-6
"""Seconds between the end of one kernel of a CUDA graph and the start of the next."""
LAUNCH_S = 25e-6
"""Seconds of one launch of a Triton kernel or a linear from Python."""
KERNELS_OF_LAYER, LINEARS_OF_LAYER = 6, 4
"""`tests/workers/kernels/test_triton_launches.py` holds the first. The linears are: query, key and value; output; gate
and up; down.
"""
SAMPLER_KERNELS = 8


class Gpu(NamedTuple):
    name: str
    bytes_per_second: float
    operations_per_second: float
    """Dense bfloat16."""


GPUS = (Gpu("H100", 3.35e12, 989e12), Gpu("H200", 4.8e12, 989e12))


class Shape(NamedTuple):
    """Llama-3.1-8B."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14_336
    vocab: int = 128_256
    heads: HeadShape = HeadShape(32, 8, 128, 128**-0.5)

    @property
    def layer_weights(self) -> int:
        attention = self.hidden * self.heads.head_dim * (2 * self.heads.num_heads + 2 * self.heads.num_kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def kv_bytes_per_token(self) -> int:
        return 4 * self.layers * self.heads.num_kv_heads * self.heads.head_dim


class Step(NamedTuple):
    name: str
    tokens: int
    """Query tokens."""
    rows: int
    """Sequences, each of which draws a token."""
    context: int
    """Keys of each sequence at its end."""


STEPS = (
    Step("decode, 1 row of 1k", 1, 1, 1024),
    Step("decode, 32 rows of 1k", 32, 32, 1024),
    Step("decode, 256 rows of 1k", 256, 256, 1024),
    Step("decode, 31 rows of 1k and one of 100k", 32, 32, (31 * 1024 + 100_000) // 32),
    Step("prompt of 400 beside 32 rows of 1k", 432, 33, 1024),
    Step("prefill of 8k", 8192, 1, 8192),
)


def step_seconds(gpu: Gpu, shape: Shape, step: Step) -> tuple[float, float, float]:
    """Returns (floor, estimate as a graph, estimate kernel by kernel), in seconds."""
    weights = shape.layers * shape.layer_weights
    head = shape.hidden * shape.vocab
    new = step.tokens - step.rows if step.tokens > step.rows else 0
    seen = step.rows * step.context if not new else new * step.context / 2 + step.rows * step.context
    attention = 4 * shape.layers * seen * shape.heads.num_heads * shape.heads.head_dim
    operations = 2 * (step.tokens * weights + step.rows * head) + attention
    num_bytes = 2 * (weights + head) + step.rows * step.context * shape.kv_bytes_per_token
    floor = max(num_bytes / gpu.bytes_per_second, operations / gpu.operations_per_second)
    kernels = shape.layers * (KERNELS_OF_LAYER + LINEARS_OF_LAYER) + SAMPLER_KERNELS
    work = max(
        num_bytes / (COPY_SHARE * gpu.bytes_per_second), operations / (PRODUCT_SHARE * gpu.operations_per_second)
    )
    by_graph = work + kernels * GAP_S
    return floor, by_graph, max(by_graph, kernels * LAUNCH_S)


def main() -> None:
    print("| Llama-3.1-8B, bfloat16 | GPU | floor, ms | as a graph, ms | of the floor | kernel by kernel, ms |")
    print("| --- " * 6 + "|")
    for step in STEPS:
        for gpu in GPUS:
            floor, by_graph, by_kernels = step_seconds(gpu, Shape(), step)
            cells = f"{floor * 1e3:.2f} | {by_graph * 1e3:.2f} | {floor / by_graph:.2f} | {by_kernels * 1e3:.2f}"
            print(f"| {step.name} | {gpu.name} | {cells} |")


if __name__ == "__main__":
    main()
