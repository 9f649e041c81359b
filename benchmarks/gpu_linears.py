"""Linears of 8 and 4 bits in Triton beside cuBLAS's in bfloat16: the part `linears` of `make gpu-check`.

Each case has as many copies of a weight as the device's cache does not hold, and a result is compared with the product
of the weight that the integers stand for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu_device import graph_seconds, measure_device
from benchmarks.gpu_rows import Figure
from workers.kernels.quantized_weight import QuantizedWeight
from workers.kernels.rounding import round_weight
from workers.kernels.triton.quantized_linear import TritonQuantizedLinear

LEAST_BYTES = 256 << 20
"""All copies of a weight: several times what the device's cache holds."""
SHAPES = {"qkv": (6144, 4096), "gate and up": (28_672, 4096), "down": (4096, 14_336)}
"""Outputs and inputs of Llama-3.1-8B's linears."""
ROWS = (1, 32, 256, 2048)
MOST_DIFFERENCE = 0.03
"""Norm of the difference from the dense product over that of the product. Activations of 8 bits come to a third."""


@torch.inference_mode()
def linear_figures() -> Iterator[Figure]:
    device = measure_device()
    for name, (out_features, in_features) in SHAPES.items():
        dense = torch.randn(out_features, in_features, dtype=torch.bfloat16) * 0.02
        rounded = {bits: round_weight(dense, bits) for bits in (8, 4)}
        on_device = dense.cuda()
        copies = [on_device.clone() for _ in range(_num_copies(on_device.nbytes))]
        integers = {bits: _linears(weight) for bits, weight in rounded.items()}
        for num_rows in ROWS:
            x = torch.randn(num_rows, in_features, device="cuda", dtype=torch.bfloat16)
            what = f"{name} [{out_features}, {in_features}], {num_rows} rows"
            seconds = graph_seconds([functools.partial(F.linear, x, weight) for weight in copies])
            yield Figure(f"{what}, cuBLAS in bfloat16", f"{seconds * 1e6:.1f} us")
            products = 2 * num_rows * dense.numel() / device.operations_per_second
            for bits, linears in integers.items():
                own = graph_seconds([functools.partial(linear.forward, x) for linear in linears])
                floor = max(linears[0].num_bytes / device.bytes_per_second, products / 2)  # int8 is twice as fast
                expected = F.linear(x.float(), rounded[bits].dequantized(torch.float32).cuda())
                difference = (linears[0].forward(x).float() - expected).norm() / expected.norm()
                verdict = "" if difference < MOST_DIFFERENCE else f"; failed: the results differ by {difference:.1%}"
                value = f"{own * 1e6:.1f} us, {floor / own:.2f} of the floor, {seconds / own:.2f} times as fast"
                yield Figure(f"{what}, {bits} bits", value + verdict)


def _num_copies(num_bytes: int) -> int:
    return -(-LEAST_BYTES // num_bytes)


def _linears(weight: QuantizedWeight) -> list[TritonQuantizedLinear]:
    """Returns copies of a linear, so many that the device's cache does not hold them."""
    first = TritonQuantizedLinear(weight, None, torch.device("cuda"))
    rest = range(1, _num_copies(first.num_bytes))
    return [first, *(TritonQuantizedLinear(weight, None, torch.device("cuda")) for _ in rest)]
