"""The experts of a layer in two products, beside the floor of their bytes or operations and beside the loop over
experts: the part `experts` of `make gpu-check`.

The calls of one graph choose other experts each, more than the device's cache holds. A floor counts the weights of the
experts that are really chosen, and the copy's speed and the product's rate of the same run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from benchmarks.gpu_device import Device, device_seconds, graph_seconds, measure_device
from benchmarks.gpu_rows import Figure
from manta.workers.checkpoints.formats.compressed_tensors import FP4_CODEBOOK
from manta.workers.kernels import expert_choice
from manta.workers.kernels.looped_experts import LoopedExperts
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.rounding import round_weight
from manta.workers.kernels.triton import expert_products, expert_rows, router
from manta.workers.kernels.triton.experts import GroupedExperts, StackedLinear
from manta.workers.kernels.weights import GatedMlpWeights, LinearWeight
from manta.workers.models.model_config import ExpertsConfig
from manta.workers.platforms.cuda import CudaPlatform

ROWS = (1, 32, 256, 4096)
BFLOAT16, MXFP4, INT8 = "bfloat16", "MXFP4", "int8"


class Shape(NamedTuple):
    name: str
    num_experts: int
    num_chosen: int
    hidden: int
    inner: int
    activation: str
    kind: str

    @property
    def config(self) -> ExpertsConfig:
        return ExpertsConfig(
            num_experts=self.num_experts,
            num_chosen=self.num_chosen,
            intermediate_size=self.inner,
            normalises=True,
        )


SHAPES = (
    Shape("Qwen3-30B-A3B", 128, 8, 2048, 768, "silu", BFLOAT16),
    Shape("Qwen3-30B-A3B", 128, 8, 2048, 768, "silu", INT8),
    Shape("gpt-oss-20b", 32, 4, 2880, 2880, "clamped", MXFP4),
)


@torch.inference_mode()
def expert_figures() -> Iterator[Figure]:
    device, platform = measure_device(), CudaPlatform(torch.device("cuda"))
    for shape in SHAPES:
        one = _expert(shape, platform)
        layer = _layer(shape, [one] * shape.num_experts)
        of_expert = sum(each.num_bytes for each in layer.linears) / shape.num_experts
        for num_rows in ROWS:
            yield from _row_figures(shape, layer, one, of_expert, num_rows, device)
        yield _router_figure(shape)
        del layer
        torch.cuda.empty_cache()


def _expert(shape: Shape, platform: CudaPlatform) -> GatedMlpWeights:
    def linear(outputs: int, inputs: int, gated: bool) -> LinearWeight:
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16) * inputs**-0.5
        quantized = None
        if shape.kind == INT8:
            quantized = round_weight(weight, 8)
        if shape.kind == MXFP4:
            values = torch.tensor(FP4_CODEBOOK, dtype=torch.int8)[torch.randint(16, (outputs, inputs))]
            scales = torch.exp2(torch.randint(-10, -7, (outputs, inputs // 32)).float())
            quantized = QuantizedWeight(values, scales, codebook=FP4_CODEBOOK)
        bias = torch.randn(outputs, device="cuda", dtype=torch.bfloat16) if shape.kind == MXFP4 else None
        return LinearWeight("expert", weight, bias, torch.bfloat16, gated, quantized, activation=shape.activation)

    first = platform.make_linear(linear(2 * shape.inner, shape.hidden, True))
    return GatedMlpWeights(first, platform.make_linear(linear(shape.hidden, shape.inner, False)))


def _layer(shape: Shape, experts: list[GatedMlpWeights]) -> GroupedExperts:
    gated, down = (StackedLinear(each, len(experts)) for each in (experts[0].gated, experts[0].down))
    for index, expert in enumerate(experts):
        gated.put(index, expert.gated)
        down.put(index, expert.down)
    return GroupedExperts(gated, down, shape.activation, scales_inputs=False)


def _row_figures(
    shape: Shape, layer: GroupedExperts, expert: GatedMlpWeights, of_expert: float, num_rows: int, device: Device
) -> Iterator[Figure]:
    """Choices that differ from call to call, so many that their weights do not stay in the device's cache."""
    x = torch.randn(num_rows, shape.hidden, device="cuda", dtype=torch.bfloat16)
    shares = torch.rand(num_rows, shape.num_chosen, device="cuda")
    drawn = [torch.rand(num_rows, shape.num_experts, device="cuda").topk(shape.num_chosen).indices for _ in range(8)]
    num_hit = sum(len(each.unique()) for each in drawn) / len(drawn)
    floor = _floor(shape, num_hit * of_expert, num_rows, device)
    seconds = graph_seconds([functools.partial(layer.forward, x, chosen, shares) for chosen in drawn])
    looped = LoopedExperts([expert] * shape.num_experts)
    loop = device_seconds(lambda: looped.forward(x, drawn[0], shares), times=3)
    expected = looped.forward(x, drawn[0], shares)
    error = ((layer.forward(x, drawn[0], shares) - expected).norm() / expected.norm()).item()
    verdict = "" if error < 0.02 else f"; failed: the results differ by {error:.1%}"
    parts = ", ".join(f"{name} {each * 1e6:.1f}" for name, each in _part_seconds(layer, x, drawn, shares).items())
    value = f"{seconds * 1e6:.1f} us ({parts}), {floor / seconds:.2f} of the floor, "
    value += f"the loop {loop / seconds:.1f} times as long"
    yield Figure(f"experts of {shape.name} in {shape.kind}, {num_rows} rows", value + verdict)


def _part_seconds(
    layer: GroupedExperts, x: torch.Tensor, drawn: list[torch.Tensor], shares: torch.Tensor
) -> dict[str, float]:
    """Seconds of the layer's kernels, each by itself."""
    gated, down = layer.linears
    size = layer.block_rows(drawn[0].numel(), x.dtype)
    blocks = [expert_rows.sort_pairs(chosen, gated.num_experts, size) for chosen in drawn]
    pairs_of_row = drawn[0].shape[1]
    inner = gated.multiply(x, drawn[0], blocks[0], layer.activation, pairs_of_row)
    results = down.multiply(inner, drawn[0], blocks[0], expert_products.NONE, 1)
    calls: dict[str, list[Callable[[], object]]] = {}
    if len(x) > 1:  # a single row needs no order
        calls["sorting"] = [lambda: expert_rows.sort_pairs(drawn[0], gated.num_experts, size)] * len(drawn)
    calls |= {
        "gates": [
            functools.partial(gated.multiply, x, chosen, each, layer.activation, pairs_of_row)
            for chosen, each in zip(drawn, blocks, strict=True)
        ],
        "down": [
            functools.partial(down.multiply, inner, chosen, each, expert_products.NONE, 1)
            for chosen, each in zip(drawn, blocks, strict=True)
        ],
        "summing": [
            functools.partial(expert_rows.combine, results, chosen, shares, gated.num_experts, has_shares=True)
            for chosen in drawn
        ],
    }
    return {name: graph_seconds(each) for name, each in calls.items()}


def _floor(shape: Shape, weight_bytes: float, num_rows: int, device: Device) -> float:
    """Seconds to read the chosen experts and the rows, or to multiply, whichever takes longer."""
    row_bytes = num_rows * shape.hidden * (2 + 4)
    operations = 6 * num_rows * shape.num_chosen * shape.hidden * shape.inner
    rate = device.operations_per_second * (1 if shape.kind == BFLOAT16 else 2)  # of bytes they are twice as fast
    return max((weight_bytes + row_bytes) / device.bytes_per_second, operations / rate)


def _router_figure(shape: Shape) -> Figure:
    """The choice for one row, in one kernel and by torch's operations."""
    logits = torch.randn(1, shape.num_experts, device="cuda")
    one, many = (
        graph_seconds([functools.partial(each, logits, None, shape.config)] * 20)
        for each in (router.route, expert_choice.route)
    )
    what = f"experts of {shape.name}, choice for 1 row"
    return Figure(what, f"{one * 1e6:.1f} us in one kernel, {many * 1e6:.1f} us by torch")
