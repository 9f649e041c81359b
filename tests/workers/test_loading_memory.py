"""The memory that loading takes at a time is at most 1.15 times that of the packed weights, whatever form experts have.

Each model is loaded in a process of its own, whose memory is counted as `loading_child.Taken` says. The bytes of packed
weights are worked out from the numbers of weights and the bits that each form keeps.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tests.converted_gguf import convert
from tests.workers import large_mixtures
from tests.workers.large_mixtures import Sizes
from tests.workers.loading_child import Loading, Taken
from tests.workers.test_shared_weights import needs_shared_weights

pytestmark = needs_shared_weights

MOST = 1.15
"""The most memory at a time, as a multiple of the packed weights."""
HIDDEN, INNER = 1024, 512
WEIGHTS = {16: 16, 8: 32, 4: 64}
"""Experts of a layer by the bits of their weights, so that all models have about 100 MB."""
TRIED_FIRST = Sizes(1, 2, HIDDEN, INNER)
"""The sizes of a model of the same form that is loaded first, so that modules are imported and libraries are ready."""
ROOT = pathlib.Path(__file__).resolve().parents[2]


Make = Callable[[pathlib.Path, Sizes], pathlib.Path]
"""Writes a checkpoint of some sizes for a folder, and returns the path to load."""


def qwen3(expert: large_mixtures.Expert = large_mixtures.dense, quantization: dict[str, Any] | None = None) -> Make:
    def make(folder: pathlib.Path, sizes: Sizes) -> pathlib.Path:
        return large_mixtures.write(folder, *large_mixtures.qwen3_moe(sizes, expert, quantization))

    return make


def gpt_oss(is_mxfp4: bool) -> Make:
    def make(folder: pathlib.Path, sizes: Sizes) -> pathlib.Path:
        return large_mixtures.write(folder, *large_mixtures.gpt_oss(sizes, is_mxfp4=is_mxfp4))

    return make


def gguf(kind: str) -> Make:
    def kind_of(name: str) -> str:
        return kind if name.endswith("_exps.weight") else "F32"

    def make(folder: pathlib.Path, sizes: Sizes) -> pathlib.Path:
        return convert(qwen3()(folder, sizes), folder / "model.gguf", kind_of, by_layer=True)

    return make


class Case(NamedTuple):
    make: Make
    bits: float
    """Bits of a packed weight of experts, with its share of scales and offsets."""
    weights: str = "auto"


OTHERS = ["lm_head", "self_attn"]
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [large_mixtures.FP8_BLOCK] * 2,
    "modules_to_not_convert": OTHERS,
}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": large_mixtures.GROUP,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": OTHERS,
}
BITS_OF_OTHERS = {"auto": 16, "int8": 8 + 16 / 128, "int4": 4 + 16 / 32}
"""Bits of a packed weight of other linears, by the option `weights`."""
CASES = {
    "MXFP4 in blocks": Case(gpt_oss(True), 4 + 16 / 32),
    "experts one by one": Case(qwen3(), 16),
    "experts one by one, rounded to int8": Case(qwen3(), 8 + 16 / 128, "int8"),
    "experts one by one, rounded to int4": Case(qwen3(), 4 + 16 / 32, "int4"),
    "experts in one tensor": Case(gpt_oss(False), 16),
    "experts in one tensor, rounded to int4": Case(gpt_oss(False), 4 + 16 / 32, "int4"),
    "FP8 with block scales": Case(qwen3(large_mixtures.in_fp8_blocks, FP8), 16),
    "AWQ": Case(qwen3(large_mixtures.in_awq, AWQ), 4 + 2 * 32 / 32),
    "GGUF, Q4_K": Case(gguf("Q4_K"), 4 + 2 * 32 / 32),
    "GGUF, Q8_0": Case(gguf("Q8_0"), 8 + 16 / 32),
    "GGUF, Q6_K": Case(gguf("Q6_K"), 8 + 32 / 16),
    "GGUF, MXFP4": Case(gguf("MXFP4"), 4 + 16 / 32),
    "GGUF, IQ2_XXS": Case(gguf("IQ2_XXS"), 4 + 32 / 32),
}


class Child:
    """The process that loads."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers.loading_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def load(self, path: pathlib.Path, weights: str) -> Taken:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(Loading(str(path), weights, "bfloat16")) + "\n")
        self.process.stdin.flush()
        return Taken(*json.loads(self.process.stdout.readline()))


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.process.communicate()


@pytest.mark.prove
@pytest.mark.parametrize("name", CASES)
def test_loading_takes_little_more_than_the_packed_weights(name: str, child: Child, tmp_path: pathlib.Path) -> None:
    case = CASES[name]
    child.load(case.make(tmp_path / "first", TRIED_FIRST), case.weights)
    bits = max(each for each in WEIGHTS if each <= case.bits)
    sizes = Sizes(2, WEIGHTS[bits], HIDDEN, INNER)
    path = case.make(tmp_path / "model", sizes)
    packed = (sizes.of_experts * case.bits + sizes.of_others * BITS_OF_OTHERS[case.weights]) / 8
    taken = child.load(path, case.weights)
    assert packed <= taken.kept <= MOST * packed, f"it keeps {taken.kept / packed:.2f} of the packed weights"
    assert taken.peak <= MOST * packed, f"it takes {taken.peak / packed:.2f} of the packed weights"
