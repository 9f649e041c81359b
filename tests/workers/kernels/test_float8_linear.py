"""Linears with E4M3 weights against the products of what weights and rounded rows stand for, by Triton's kernel and by
`torch._scaled_mm`; and which of the two multiplies what.
"""

from __future__ import annotations

import logging

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from manta.workers.checkpoints.shard import take_inputs, take_rows
from manta.workers.kernels.quantized_reference import round_to_float8
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.triton import library_products
from manta.workers.kernels.triton.library_products import FLOAT8_BLOCK, RECIPES, choose_recipe
from manta.workers.kernels.triton.quantized_linear import TritonQuantizedLinear
from manta.workers.kernels.triton.rounded_rows import round_rows
from tests.workers.kernels.test_quantized_linear import random_rows
from tests.workers.triton_device import DEVICE, NEEDS_GPU, THOROUGH

MOST_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 0.01}
"""Norm of the difference over that of the product: the order of sums, and bfloat16's rounding, which the interpreter
does not do.
"""


def float8_weight(seed: int, out_features: int, in_features: int, block: tuple[int, int] | None) -> QuantizedWeight:
    """With a scale for each output, or for each block of outputs and inputs."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(out_features, in_features, generator=generator).to(torch.float8_e4m3fn)
    height, width = block or (1, in_features)
    scales = torch.rand(-(-out_features // height), in_features // width, generator=generator)
    return QuantizedWeight(values, scales.repeat_interleave(height, 0)[:out_features].contiguous())


def expected(weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    rows = round_to_float8(x, weight.group_size).dequantized(x.shape[1])
    product = rows @ weight.dequantized(torch.float64).T
    product = product if bias is None else product + bias.double()
    if gated:
        gate, up = product.chunk(2, dim=-1)
        product = torch.nn.functional.silu(gate) * up
    return product


def assert_close(y: torch.Tensor, product: torch.Tensor) -> None:
    difference = (y.cpu() - product).norm() / product.norm()
    assert difference < MOST_DIFFERENCE[y.dtype]


float8_weights = st.one_of(
    st.builds(float8_weight, st.integers(0, 2**31), st.integers(1, 200), st.integers(1, 400), st.none()),
    st.builds(
        lambda seed, out_features, groups, width, height: float8_weight(
            seed, out_features, groups * width, (height, width)
        ),
        st.integers(0, 2**31),
        st.integers(1, 200),
        st.integers(2, 4),
        st.sampled_from([32, 64, 96, 128]),
        st.sampled_from([1, 48, 128]),
    ),
)


@settings(max_examples=100 if THOROUGH else 8)
@given(
    float8_weights,
    st.integers(1, 20),
    st.sampled_from(list(MOST_DIFFERENCE)),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_any_weight_gives_the_product(
    weight: QuantizedWeight, num_rows: int, dtype: torch.dtype, has_bias: bool, gated: bool, seed: int
) -> None:
    out_features, in_features = weight.values.shape
    gated = gated and out_features % 2 == 0
    x = torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(seed)).to(dtype)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    linear = TritonQuantizedLinear.of(weight, None if bias is None else bias.to(DEVICE), DEVICE, gated)
    assert_close(linear.forward(x.to(DEVICE)), expected(weight, x, bias, gated))


def test_an_infinite_value_fails_its_row_alone() -> None:
    weight = float8_weight(0, 64, 256, (64, 128))
    x = torch.randn(5, 256)
    x[3, 40] = float("inf")
    y = TritonQuantizedLinear.of(weight, None, DEVICE).forward(x.to(DEVICE)).cpu()
    assert y[3].isnan().all()
    assert y[[0, 1, 2, 4]].isfinite().all()


def test_blocks_of_outputs_keep_one_scale() -> None:
    assert (
        TritonQuantizedLinear.of(float8_weight(0, 256, 512, (128, 128)), None, DEVICE).weight.tensors.num_bytes
        == 256 * 512 + 2 * 4 * 4
    )
    assert (
        TritonQuantizedLinear.of(float8_weight(0, 256, 512, (64, 128)), None, DEVICE).weight.tensors.num_bytes
        == 256 * 512 + 256 * 4 * 4
    )


@pytest.mark.parametrize(("num_rows", "gated"), [(1, True), (17, False), (33, True)])
def test_scaled_mm_gives_the_kernels_product(gated: bool, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library gives it on CPUs too, for any number of rows and a share of the weight."""
    whole = float8_weight(1, 128, 320, None)
    weight = take_inputs("down", take_rows(whole, 64, 128), 160, 320)
    assert isinstance(weight, QuantizedWeight)
    x = random_rows(2, num_rows, 160, torch.bfloat16)
    bias = torch.randn(64, dtype=torch.bfloat16)
    linear = TritonQuantizedLinear.of(weight, bias.to(DEVICE), DEVICE, gated)
    rows = round_rows(x.to(DEVICE), linear.rounding)
    by_triton = linear.multiply(rows).cpu()
    monkeypatch.setattr(library_products, "LEAST_ROWS", 1)
    y = linear.multiply(rows)
    assert y.shape == by_triton.shape
    assert_close(y, expected(weight, x, bias, gated))
    assert_close(y, by_triton.double())
    down = TritonQuantizedLinear.of(float8_weight(3, 32, y.shape[1], None), None, DEVICE)
    rounded = linear.multiply_and_round(rows, down.rounding)
    alone = round_rows(y, down.rounding)
    assert torch.equal(rounded.values.float(), alone.values.float())
    assert torch.equal(rounded.scales, alone.scales)


@NEEDS_GPU
@pytest.mark.parametrize("num_rows", [256, 257, 1000])
def test_scaled_mm_knows_blocks_on_hopper(num_rows: int) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only Hopper has products of blocks")
    weight = float8_weight(1, 256, 1024, (128, 128))
    x = random_rows(2, num_rows, 1024, torch.bfloat16)
    linear = TritonQuantizedLinear.of(weight, None, DEVICE)
    rows = round_rows(x.to(DEVICE), linear.rounding)
    assert linear.library is not None
    assert_close(linear.library.multiply(rows), expected(weight, x, None, False))
    assert_close(linear.multiply_by_triton(rows), expected(weight, x, None, False))


BY_OUTPUT, IN_BLOCKS = RECIPES


@pytest.mark.parametrize(
    ("shape", "block", "capability", "recipe"),
    [
        ((6144, 4096), None, (9, 0), BY_OUTPUT),
        ((6144, 4096), None, (12, 0), BY_OUTPUT),
        ((6144, 4096), None, (8, 0), None),
        ((6144, 4088), None, (9, 0), None),
        ((6152, 4096), None, (9, 0), None),
        ((256, 4096), (128, 128), (9, 0), IN_BLOCKS),
        ((256, 4096), (128, 128), (10, 0), None),
        ((256, 4096), (128, 128), (8, 9), None),
        ((256, 4224), (128, 128), (9, 0), None),  # 33 blocks
        ((192, 4096), (128, 128), (9, 0), None),
        ((256, 4096), (64, 128), (9, 0), None),
    ],
)
def test_one_table_says_what_cublas_multiplies(
    shape: tuple[int, int],
    block: tuple[int, int] | None,
    capability: tuple[int, int],
    recipe: library_products.Recipe | None,
) -> None:
    values, (out_features, in_features) = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta"), shape
    scales = torch.empty(1, out_features, device="meta")
    if block is not None:
        is_whole = block[0] == FLOAT8_BLOCK and out_features % FLOAT8_BLOCK == 0
        outputs = out_features // FLOAT8_BLOCK if is_whole else out_features
        scales = torch.empty(in_features // FLOAT8_BLOCK, outputs, device="meta")
    assert choose_recipe(values, scales, capability) == recipe
    assert choose_recipe(values.to(torch.int8), scales, capability) is None


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a CPU has no products of blocks")
def test_a_missing_product_is_left_to_triton(caplog: pytest.LogCaptureFixture) -> None:
    library_products._runs.cache_clear()
    weight = float8_weight(0, 128, 512, (128, 128))
    with caplog.at_level(logging.WARNING):
        linears = [TritonQuantizedLinear.of(weight, None, DEVICE) for _ in range(2)]
    assert [linear.library for linear in linears] == [None, None]
    (record,) = caplog.records
    assert "in blocks of 1 x 128 and 128 x 128 are multiplied by Triton's kernel" in record.message
