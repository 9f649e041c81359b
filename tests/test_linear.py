"""The CPU's packed linears against float32 products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from workers.kernels import cpu_linear
from workers.layers import make_cpu_gated_linear, make_cpu_linear


@pytest.mark.parametrize(
    ("out_features", "in_features"), [(64, 64), (200, 96), (1152, 896), (50, 2048), (70, 4864), (33, 40)]
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_any_number_of_rows(out_features: int, in_features: int, bias: bool, dtype: torch.dtype) -> None:
    """One row, a block of the dot-product kernel, whole and partial tiles, more rows than a streamed call has, and rows
    so long that they pass in parts.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    offset = torch.randn(out_features, generator=generator).to(dtype) if bias else None
    linear = make_cpu_linear(weight, offset)
    x = torch.randn(600, in_features, generator=generator).to(dtype)
    expected = x.double() @ weight.double().T + (offset.double() if offset is not None else 0)
    for num_rows in (0, 1, 2, 3, 5, 6, 7, 13, 16, 17, 31, 32, 33, 48, 50, 100, 140, 512, 600):
        y = linear(x[:num_rows])
        assert y.dtype == dtype
        assert y.shape == (num_rows, out_features)
        # Half a unit in bfloat16's last place of 8 bits, and what the order of summation adds
        rtol, atol = (2**-8, 1e-2) if dtype == torch.bfloat16 else (1e-4, 1e-4)
        torch.testing.assert_close(y.double(), expected[:num_rows], rtol=rtol, atol=atol)


@pytest.mark.parametrize(("out_features", "in_features"), [(32, 64), (80, 96), (4864, 896), (10, 64), (48, 40)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gated_products_of_any_number_of_rows(
    out_features: int, in_features: int, bias: bool, dtype: torch.dtype
) -> None:
    """Whole and partial panels, and sizes that the kernel leaves to a linear and a separate gate."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2 * out_features, in_features, generator=generator).to(dtype)
    offset = torch.randn(2 * out_features, generator=generator).to(dtype) if bias else None
    gated = make_cpu_gated_linear(weight, offset)
    x = torch.randn(530, in_features, generator=generator).to(dtype)
    gate, up = (x.double() @ weight.double().T + (offset.double() if offset is not None else 0)).chunk(2, dim=-1)
    expected = F.silu(gate) * up
    for num_rows in (0, 1, 3, 6, 7, 16, 17, 33, 100, 150, 530):
        y = gated(x[:num_rows])
        assert y.dtype == dtype
        assert y.shape == (num_rows, out_features)
        # Of a separate gate both factors are rounded too
        rtol, atol = (3 * 2**-8, 5e-2) if dtype == torch.bfloat16 else (1e-4, 1e-2)
        torch.testing.assert_close(y.double(), expected[:num_rows], rtol=rtol, atol=atol)


def test_a_gate_far_from_zero_is_finite_and_not_a_number_stays_in_its_row() -> None:
    gated = make_cpu_gated_linear(torch.randn(64, 32).bfloat16(), None)
    for num_rows in (3, 20, 40):
        x = torch.randn(num_rows, 32).bfloat16()
        x[0] *= 1e9
        x[1, 5] = float("nan")
        y = gated(x)
        assert y.isnan().any(-1).tolist() == [row == 1 for row in range(num_rows)]
        assert y[0].isfinite().all()


def test_the_weight_may_be_overwritten_after_packing() -> None:
    weight = torch.randn(128, 64).bfloat16()
    x = torch.randn(3, 64).bfloat16()
    linear = make_cpu_linear(weight, None)
    before = linear(x)
    weight.zero_()
    torch.testing.assert_close(linear(x), before)


def test_a_batch_with_leading_dimensions_and_strides() -> None:
    weight = torch.randn(96, 64).bfloat16()
    linear = make_cpu_linear(weight, None)
    x = torch.randn(2, 5, 128).bfloat16()[..., ::2]
    torch.testing.assert_close(linear(x), linear(x.reshape(10, 64)).view(2, 5, 96))


def test_not_a_number_stays_in_its_row() -> None:
    linear = make_cpu_linear(torch.randn(96, 64).bfloat16(), None)
    for num_rows in (3, 20, 40):
        x = torch.randn(num_rows, 64).bfloat16()
        x[1, 5] = float("nan")
        failed = linear(x).isnan().any(-1)
        assert failed.tolist() == [row == 1 for row in range(num_rows)]


def test_inputs_that_the_kernel_does_not_take_are_left_to_onednn() -> None:
    assert cpu_linear.pack(torch.zeros(64, 40, dtype=torch.bfloat16), None) is None
    assert cpu_linear.pack(torch.zeros(64, 64), None) is None
