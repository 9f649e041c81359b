"""The quantised weights that cuBLAS multiplies, through torch, and from how many rows on: one table, read at load.

Below `LEAST_ROWS` reading the weight is the floor. A row takes two operations for each byte of it, and an H100 does 590
operations in the time of a byte (1,979 T/s in 8 bits, 3.35 TB/s): 295 rows take as long as the bytes. Both ways read
the same bytes. The Triton kernel divides them among all processors, whatever the weight's shape; cuBLAS divides 4,096
outputs into 32 blocks of 128, for 132 processors.

Integers stay with the Triton kernel for any number of rows. `torch._scaled_mm` takes floats only. `torch._int_mm`
refuses 16 rows or fewer, and returns int32 to memory, which another kernel has to scale: 8 bytes an output. Beside the
products of K inputs these take 2,360 / K of the time: 0.58 at 4,096 inputs, 0.16 at 14,336. `make gpu-check` times it
beside the kernel.

Requirements are those of torch 2.13 (`aten/src/ATen/native/cuda/ScaledBlas.cpp`). An H100 with torch 2.11 took both;
for other devices, a small product is tried before the first weight is given to cuBLAS.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from manta.structured.visible_logs import logger_of
from manta.workers.kernels.triton.launch import capability, synchronize
from manta.workers.kernels.triton.rounded_rows import RoundedRows

logger = logger_of(__name__)

FLOAT8_BLOCK = 128
"""Outputs, and inputs, of the blocks of E4M3 weights whose scales cuBLAS knows."""
LEAST_ROWS = 256
"""Least number of rows of a product of cuBLAS, near the 295 where an H100 stops waiting for the weight. Steps of a few
hundred tokens and graphs of decodes stay with the Triton kernel.
"""


class Recipe(NamedTuple):
    """A form of the scales that `torch._scaled_mm` takes with E4M3."""

    name: str
    has_blocks: bool
    """Whether a scale is that of a block of the weight, and of 128 inputs of a row; else of an output, and of a row."""
    least_capability: tuple[int, int]
    end_capability: tuple[int, int] | None
    """The first compute capability that lacks it again, or None."""
    outputs: int
    """The number of outputs is a multiple of this, and that of inputs one of `inputs`."""
    inputs: int


RECIPES = (
    Recipe("by row and output", False, (8, 9), None, 16, 16),
    # Only on Hopper, by cuBLAS 12.9. A column of scales begins at 16 bytes: four blocks of inputs
    Recipe("in blocks of 1 x 128 and 128 x 128", True, (9, 0), (10, 0), FLOAT8_BLOCK, 4 * FLOAT8_BLOCK),
)


class LibraryProduct:
    """`rows @ weight.T + bias` in bfloat16 by `torch._scaled_mm`."""

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`values` is E4M3 [out_features, in_features], and `scales` float32 [1, out_features], or of blocks
        [num_blocks_of_inputs, num_blocks_of_outputs].
        """
        self._weight = values.t()
        self._scales = scales if scales.shape[0] == 1 else scales.t().contiguous().t()
        self._bias = bias

    def takes(self, rows: RoundedRows) -> bool:
        return rows.num_rows >= LEAST_ROWS and rows.dtype == torch.bfloat16

    def multiply(self, rows: RoundedRows) -> torch.Tensor:
        """Returns bfloat16 [num_rows, out_features]."""
        scales = rows.scales.view(-1, 1) if self._scales.shape[0] == 1 else rows.scales.t()
        dtype = torch.bfloat16
        product = torch._scaled_mm(rows.values, self._weight, scales, self._scales, self._bias, out_dtype=dtype)
        return product[: rows.num_rows]


def choose_product(values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> LibraryProduct | None:
    """Returns the product for many rows with a weight on the device, as `LibraryProduct` takes it; None if the Triton
    kernel multiplies any number of rows.
    """
    recipe = choose_recipe(values, scales, capability(values.device))
    return None if recipe is None or not _runs(recipe, values.device) else LibraryProduct(values, scales, bias)


def choose_recipe(values: torch.Tensor, scales: torch.Tensor, device: tuple[int, int]) -> Recipe | None:
    """Returns the recipe for a weight on a device of this compute capability."""
    if values.dtype != torch.float8_e4m3fn:
        return None
    out_features, in_features = values.shape
    for recipe in RECIPES:
        block = FLOAT8_BLOCK if recipe.has_blocks else 1
        num_groups = in_features // FLOAT8_BLOCK if recipe.has_blocks else 1
        has_form = scales.shape == (num_groups, out_features // block)
        is_multiple = out_features % recipe.outputs == 0 and in_features % recipe.inputs == 0
        has_recipe = recipe.least_capability <= device < (recipe.end_capability or (device[0] + 1, 0))
        if has_form and is_multiple and has_recipe:
            return recipe
    return None


@functools.cache
def _runs(recipe: Recipe, device: torch.device) -> bool:
    """Tries a product, and logs why there is none."""
    block = FLOAT8_BLOCK if recipe.has_blocks else 1
    num_groups = recipe.inputs // FLOAT8_BLOCK if recipe.has_blocks else 1
    values = torch.zeros(LEAST_ROWS + recipe.outputs, recipe.inputs, device=device).to(torch.float8_e4m3fn)
    scales = torch.zeros(num_groups, LEAST_ROWS, device=device)
    rows = RoundedRows(values[:LEAST_ROWS], scales, scales, LEAST_ROWS, torch.bfloat16)
    weight_scales = torch.zeros(num_groups, recipe.outputs // block, device=device)
    try:
        LibraryProduct(values[LEAST_ROWS:], weight_scales, None).multiply(rows)
        synchronize(device)
    except (RuntimeError, ValueError) as error:
        logger.warning(
            "E4M3 weights with scales %s are multiplied by Triton's kernel for any number of rows, because torch %s "
            "has no product for them here: %s",
            recipe.name,
            torch.__version__,
            str(error).partition("\n")[0],
        )
        return False
    return True
