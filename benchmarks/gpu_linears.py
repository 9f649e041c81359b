"""Quantised linears in Triton beside cuBLAS's in bfloat16, and beside its products of 8 bits, which could take their
place: the part `linears` of `make gpu-check`.

Each case has as many copies of a weight as the device's cache does not hold, and a result is compared with the product
of the weight that the numbers stand for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu_device import Device, graph_seconds, measure_device
from benchmarks.gpu_rows import Figure, one_line
from manta.workers.kernels.quantized_reference import MOST_FLOAT8, MOST_INT8
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.rounding import round_weight
from manta.workers.kernels.triton.quantized_linear import TritonQuantizedLinear
from manta.workers.kernels.triton.rounded_rows import round_normed, round_rows
from manta.workers.kernels.triton.rows import add_rms_norm

LEAST_BYTES = 256 << 20
"""All copies of a weight: several times what the device's cache holds."""
SHAPES = {"qkv": (6144, 4096), "gate and up": (28_672, 4096), "down": (4096, 14_336)}
"""Outputs and inputs of Llama-3.1-8B's linears."""
ROWS = (1, 32, 128, 256, 512, 2048)
BLOCK = 128


class Form(NamedTuple):
    weight: QuantizedWeight
    most_difference: float
    """Norm of the difference from the dense product over that of the product: twice what rounding the rows adds."""


@torch.inference_mode()
def linear_figures() -> Iterator[Figure]:
    device = measure_device()
    for name, (out_features, in_features) in SHAPES.items():
        dense = torch.randn(out_features, in_features, dtype=torch.bfloat16) * 0.02
        on_device = dense.cuda()
        copies = [on_device.clone() for _ in range(_num_copies(on_device.nbytes))]
        what = f"{name} [{out_features}, {in_features}]"
        rows = [torch.randn(count, in_features, device="cuda", dtype=torch.bfloat16) for count in ROWS]
        dense_seconds = [graph_seconds([functools.partial(F.linear, x, weight) for weight in copies]) for x in rows]
        for x, seconds in zip(rows, dense_seconds, strict=True):
            yield Figure(f"{what}, {len(x)} rows, cuBLAS in bfloat16", f"{seconds * 1e6:.1f} us")
        for form_name, form in _forms(dense).items():
            linears = _linears(form.weight)
            whole = form.weight.dequantized(torch.float32).cuda()
            for x, in_bfloat16 in zip(rows, dense_seconds, strict=True):
                case = f"{what}, {len(x)} rows, {form_name}"
                yield _own_figure(case, linears, x, whole, form.most_difference, in_bfloat16, device)
                try:
                    yield from _library_figures(case, linears, x)
                except RuntimeError as error:  # other products go on
                    yield Figure(f"{case}, by cuBLAS", f"failed: {one_line(str(error))}")
    yield from _norm_figures()


def _forms(dense: torch.Tensor) -> dict[str, Form]:
    values, scales = _rounded(dense, (1, dense.shape[1]), MOST_INT8, torch.int8)
    return {
        "8 bits": Form(round_weight(dense, 8), 0.03),
        "4 bits": Form(round_weight(dense, 4), 0.03),
        "8 bits by output and row": Form(QuantizedWeight(values, scales, has_int8_activations=True), 0.03),
        "E4M3 by output": Form(_float8(dense, (1, dense.shape[1])), 0.06),
        "E4M3 in blocks": Form(_float8(dense, (BLOCK, BLOCK)), 0.06),
    }


def _float8(dense: torch.Tensor, block: tuple[int, int]) -> QuantizedWeight:
    return QuantizedWeight(*_rounded(dense, block, MOST_FLOAT8, torch.float8_e4m3fn))


def _rounded(
    dense: torch.Tensor, block: tuple[int, int], most: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the numbers [out_features, in_features] of a weight, and their scales by output and group."""
    height, width = block
    blocks = dense.float().view(dense.shape[0] // height, height, dense.shape[1] // width, width)
    scales = blocks.abs().amax((1, 3), keepdim=True) / most
    scaled = blocks / scales
    numbers = (scaled if dtype.is_floating_point else scaled.round()).to(dtype).view(dense.shape)
    return numbers, scales[:, 0, :, 0].repeat_interleave(height, 0)


def _own_figure(
    what: str,
    linears: list[TritonQuantizedLinear],
    x: torch.Tensor,
    whole: torch.Tensor,
    most_difference: float,
    in_bfloat16: float,
    device: Device,
) -> Figure:
    """Rounding and multiplying in Triton."""

    def run(linear: TritonQuantizedLinear) -> torch.Tensor:
        return linear.multiply_by_triton(round_rows(x, linear.rounding))

    seconds = graph_seconds([functools.partial(run, linear) for linear in linears])
    products = 2 * x.shape[0] * whole.numel() / device.operations_per_second
    floor = max(
        linears[0].weight.tensors.num_bytes / device.bytes_per_second, products / 2
    )  # of bytes they are twice as fast
    expected = F.linear(x.float(), whole)
    difference = (run(linears[0]).float() - expected).norm() / expected.norm()
    verdict = "" if difference < most_difference else f"; failed: the results differ by {difference:.1%}"
    value = f"{seconds * 1e6:.1f} us, {floor / seconds:.2f} of the floor, {in_bfloat16 / seconds:.2f} times as fast"
    return Figure(what, value + verdict)


def _library_figures(what: str, linears: list[TritonQuantizedLinear], x: torch.Tensor) -> Iterator[Figure]:
    """The products of cuBLAS beside Triton's, both of rounded rows. `library_products.py` says from how many rows on
    `_scaled_mm` is used, and why `_int_mm` is not.
    """
    rows = round_rows(x, linears[0].rounding)
    own = graph_seconds([functools.partial(linear.multiply_by_triton, rows) for linear in linears])
    libraries = [linear.library for linear in linears if linear.library is not None]
    if libraries:
        seconds = graph_seconds([functools.partial(each.multiply, rows) for each in libraries])
        expected = linears[0].multiply_by_triton(rows).float()
        difference = (libraries[0].multiply(rows).float() - expected).norm() / expected.norm()
        verdict = "" if difference < 0.01 else f"; failed: the results differ by {difference:.1%}"
        value = f"{seconds * 1e6:.1f} us, {own / seconds:.2f} times as fast as Triton's product{verdict}"
        yield Figure(f"{what}, by _scaled_mm", value)
    elif linears[0].rounding.dtype == torch.float8_e4m3fn:
        yield Figure(f"{what}, by _scaled_mm", "failed: torch has no product for it here")
    if linears[0].rounding.has_one_scale and x.shape[0] > 16:  # `_int_mm` refuses fewer
        calls = [functools.partial(torch._int_mm, rows.values, linear.weight.tensors.values.t()) for linear in linears]
        seconds = graph_seconds(calls)
        value = (
            f"{seconds * 1e6:.1f} us without scales, {own / seconds:.2f} times as fast as Triton's product with them"
        )
        yield Figure(f"{what}, by _int_mm", value)


def _norm_figures(hidden: int = 4096) -> Iterator[Figure]:
    """The norm that rounds its rows beside the norm and the rounding."""
    rounding = TritonQuantizedLinear.of(
        _float8(torch.randn(BLOCK, hidden), (1, hidden)), None, torch.device("cuda")
    ).rounding
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    for num_rows in ROWS:
        x, residual = torch.randn(2, num_rows, hidden, device="cuda", dtype=torch.bfloat16)
        one = graph_seconds([functools.partial(round_normed, x, residual, weight, 1e-5, rounding)] * 10)
        two = graph_seconds([lambda: round_rows(add_rms_norm(x, residual, weight, 1e-5), rounding)] * 10)  # noqa: B023
        value = f"{one * 1e6:.1f} us in one pass, {two * 1e6:.1f} us in two"
        yield Figure(f"residual, norm and rounding of [{num_rows}, {hidden}]", value)


def _num_copies(num_bytes: int) -> int:
    return -(-LEAST_BYTES // num_bytes)


def _linears(weight: QuantizedWeight) -> list[TritonQuantizedLinear]:
    """Returns copies of a linear, so many that the device's cache does not hold them."""
    first = TritonQuantizedLinear.of(weight, None, torch.device("cuda"))
    rest = range(1, _num_copies(first.weight.tensors.num_bytes))
    return [first, *(TritonQuantizedLinear.of(weight, None, torch.device("cuda")) for _ in rest)]
