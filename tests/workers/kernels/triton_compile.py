"""Compiles every Triton kernel for an H100, and attention for lesser GPUs too, without one: `python -m
tests.workers.kernels.triton_compile` prints a table of what each form takes of a multiprocessor, and fails if one
spills registers.

The host's functions run with tensors on the CPU; in the place of each launch, its kernel is compiled for the arguments.
A process of its own, because Triton's interpreter must be off when triton is imported.

What hides the latency of memory: at 3.35 TB/s and 700 ns an H100 has 2.3 MB on their way, 18 KiB for each of its 132
multiprocessors. The last column says how much of a kernel's data its resident programs ask for at a time.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from manta.structured.masks import MaskBatch, row_words
from manta.workers.checkpoints.formats.compressed_tensors import FP4_CODEBOOK
from manta.workers.kernels.adapted_linear import LowRank, LowRankPart
from manta.workers.kernels.linears import TorchLinear
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.triton import (
    adapted_linear,
    attention,
    attention_tiles,
    chunked_recurrence,
    convolution,
    edits,
    expert_products,
    expert_rows,
    gates,
    launch,
    quantized_linear,
    recurrence,
    rope,
    rounded_rows,
    router,
    rows,
    sampler,
)
from manta.workers.kernels.triton.device_weight import DeviceWeight, WeightTensors
from manta.workers.kernels.triton.metadata import build_metadata
from manta.workers.models.model_config import HeadShape
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import SequenceStart, StateUse
from tests.workers.sampling.test_sampler import CASES, EOS, state_of

H100 = 90
SHARED_BYTES = {H100: 227 << 10, 89: 99 << 10}
"""Compute capability to the shared memory that a program may use: H100, then L4 and RTX 4090."""
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
LAUNCHED = (
    "_attend", "_merge", "_rope_and", "_rms", "_silu", "_find_", "_choose", "_count", "_compute", "_edit_rows",
    "_replace", "_add", "_round_rows", "_round_normed", "_multiply", "_sort_pairs", "_combine", "_route", "_recur",
    "_convolve", "_unit_heads", "_gated_norm", "_gate_each",
)  # fmt: skip
"""Beginnings of the names of kernels that the host launches; the others are called by these."""
KERNEL_MODULES = (
    adapted_linear, attention, chunked_recurrence, convolution, edits, expert_products, expert_rows, gates,
    quantized_linear, recurrence, rope, rounded_rows, router, rows,
    sampler,
)  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
MOST_SPILLED = {H100: 16, 89: 64}
"""Bytes a thread: the compiler may put a few scalars aside so that one program more is resident. Not to be raised."""
MOST_SPILLED_BY_64_LATENT_ROWS = 416
"""Bytes a thread. Their results take half of the registers. Triton 3.6, which torch 2.11 brings, spills nothing but 224
bytes before the loop over keys, where groups share prefixes; 3.9 spills some addresses too.
"""
MOST_SPILLED_BY_CHUNKS = 64
"""Bytes a thread of recurrences in chunks, each of which waits for the one before it: tiles as large as the registers
take help them more than a second program on the multiprocessor.
"""
REGISTERS, WARPS, PROGRAMS = 65_536, {90: 64, 89: 48}, {90: 32, 89: 24}
"""Resources of a multiprocessor, by compute capability."""
SHARED_RESERVED = 1 << 10
"""Bytes that the system takes of a multiprocessor's shared memory for each program, and at least one."""
COLUMNS = (
    "kernel", "for", "dtype", "form", "registers", "spilled", "shared", "warps", "programs", "all warps",
    "KiB at a time",
)  # fmt: skip
"""The last three of all programs that a multiprocessor holds at a time."""
AT_A_TIME = {
    "_attend": lambda c: 2 * c["TILE_KEYS"] * c["PADDED_DIM"],
    "_attend_prefix": lambda c: 2 * c["TILE_KEYS"] * c["PADDED_DIM"],
    "_find_best": lambda c: c["CHUNK"],
    "_find_thresholds": lambda c: c["CHUNK"],
    "_edit_rows": lambda c: c["CHUNK"],
    "_rms_norm": lambda c: c["COLUMNS"],
    "_round_normed": lambda c: c["COLUMNS"],
    "_silu_and_mul": lambda c: 2 * c["COLUMNS"],
}
"""Elements of its first argument's dtype that a program asks for at a time: of attention a tile of keys and values."""
RECURRENT = {
    "delta": (16, 32, 128, 128),
    "kimi": (32, 32, 128, 128),
    "space": (8, 128, 128, 64),
    "wide space": (1, 24, 256, 64),
    "selective": (1, 8192, 16, 1),
    "delta of small keys": (16, 32, 64, 64),
    "space of small keys": (8, 128, 64, 64),
}
"""Groups, heads, key_dim and value_dim of Qwen3-Next, Kimi Linear, Nemotron-H, Falcon-H1 and Falcon Mamba, and of keys
that are short enough for chunks.
"""
CPU = torch.device("cpu")
VOCAB_SIZE = 151_936


class Compiled:
    """Stands for a kernel: what would launch it compiles it, once for each form."""

    forms: set[str] = set()
    capability = H100

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._compile

    def _compile(self, *arguments: Any, **named: Any) -> None:
        kernel = self._kernel
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for index, (parameter, name) in enumerate(zip(kernel.params, kernel.arg_names, strict=True)):
            value = values[name]
            is_special = isinstance(value, int) and not parameter.do_not_specialize
            if parameter.is_constexpr or (is_special and value == 1):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
            else:
                signature[name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, torch.Tensor) or (is_special and value % 16 == 0 and name not in constants):
                attributes[(index,)] = [["tt.divisibility", 16]]
        form = f"{kernel.__name__} for {self.capability} {signature} {constants} {options}"
        if form in self.forms:
            return
        self.forms.add(form)
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        target = GPUTarget("cuda", self.capability, 32)
        compiled = triton.compile(source, target=target, options=options)
        registers, spilled = resources(compiled.asm["cubin"])
        shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
        check_instructions(kernel.__name__, signature, constants, self.capability, compiled.asm["ptx"], form)
        assert shared <= SHARED_BYTES[self.capability], f"{form} needs {shared} bytes of shared memory"
        most_spilled = MOST_SPILLED_BY_64_LATENT_ROWS if is_large_latent(constants) else MOST_SPILLED[self.capability]
        if kernel.__name__ == "_recur_chunks":
            most_spilled = MOST_SPILLED_BY_CHUNKS
        assert spilled <= most_spilled, f"{form} spills {spilled} bytes of registers a thread"
        resident = num_resident(self.capability, registers, shared, warps)
        own = {name: value for name, value in constants.items() if name.isupper()}
        first = next(value for value in values.values() if isinstance(value, torch.Tensor))
        at_a_time = AT_A_TIME[kernel.__name__](own) * first.itemsize if kernel.__name__ in AT_A_TIME else 0
        cells = [kernel.__name__, f"sm_{self.capability}", str(first.dtype).removeprefix("torch.")]
        cells += [" ".join(f"{name}={value if isinstance(value, str) else int(value)}" for name, value in own.items())]
        cells += map(str, (registers, spilled, shared, warps, resident, resident * warps))
        cells.append(f"{resident * at_a_time >> 10}" if at_a_time else "")
        print(f"| {' | '.join(cells)} |", flush=True)


def is_large_latent(constants: dict[str, Any]) -> bool:
    return constants.get("TAIL_DIM", 0) > 0 and constants.get("TILE_ROWS", 0) == 64


WIDE_LOADS = {
    "_find_best": 16,
    "_find_thresholds": 8,
    "_edit_rows": 16,
    "_rms_norm": 16,
    "_round_normed": 16,
    "_silu_and_mul": 16,
}
"""Kernels that wait for memory, and the bytes that a thread of theirs reads at a time. The search of thresholds has so
many threads in a program that each looks at 4 logits.
"""


def check_instructions(
    name: str, signature: dict[str, str], constants: dict[str, Any], capability: int, ptx: str, form: str
) -> None:
    """Fails where a kernel reads memory in smaller pieces than it could, or leaves the tensor cores of the device."""
    if name in WIDE_LOADS:
        assert widest_load(ptx) >= WIDE_LOADS[name], (
            f"{form} reads no more than {widest_load(ptx)} bytes a thread at a time"
        )
    if name in ("_recur_within", "_recur_chunks"):
        assert "wgmma" not in ptx, f"{form} uses products of warp groups, which Triton compiles wrongly for it"
    if name in ("_multiply", "_multiply_quantized_experts"):
        product = r"(mma|wgmma)\S*\.s32\.s8"
        if signature["weights"] == POINTERS[torch.float8_e4m3fn]:  # widened to float16, exactly, for few rows
            columns = constants["OUTPUTS"] * (1 + constants["IS_GATED"])
            product = (
                r"wgmma\S*\.e4m3\.e4m3" if columns >= 64 and constants["ROWS"] >= 16 else r"mma\S*\.f32\.f16\.f16\.f32"
            )
        assert re.search(product, ptx), f"{form} does not multiply on tensor cores"
    if name == "_multiply_experts" and signature["x"] != POINTERS[torch.float32]:
        product = "wgmma.mma_async" if constants["ROWS"] >= 64 else r"mma\S*\.f32\.b?f16"
        assert re.search(product, ptx), f"{form} does not multiply on tensor cores"
    if name in ("_attend", "_attend_prefix"):
        assert re.search(r"cp\.async\.c[ag]\.shared\.global .*, 0x10", ptx), f"{form} copies less than 16 bytes"
        is_large = constants["TILE_ROWS"] >= 64 and signature["qkv"] != POINTERS[torch.float32]
        if capability == H100 and is_large and constants["PADDED_DIM"] >= 64:
            assert "wgmma.mma_async" in ptx, f"{form} does not use the warp group's tensor cores"


def widest_load(ptx: str) -> int:
    """Returns the most bytes that one thread loads from global memory by one instruction."""
    sizes = [1]
    for vector, bits in re.findall(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.[bfus](\d+)", ptx):
        sizes.append(int(vector or 1) * int(bits) // 8)
    return max(sizes)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, which has what does not fit in them."""
    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def num_resident(capability: int, registers: int, shared: int, warps: int) -> int:
    """Programs that a multiprocessor holds at a time. A warp's registers come in units of 256."""
    of_warp = -(-registers * 32 // 256) * 256
    of_shared = (SHARED_BYTES[capability] + SHARED_RESERVED) // (shared + SHARED_RESERVED)
    return min(REGISTERS // (of_warp * warps), of_shared, WARPS[capability] // warps, PROGRAMS[capability])


def stand_in() -> None:
    """Puts `Compiled` in the place of every kernel that the host launches."""
    for module in KERNEL_MODULES:
        for name, value in list(vars(module).items()):
            is_own = isinstance(value, triton.runtime.jit.JITFunction) and value.__module__ == module.__name__
            if is_own and name.startswith(LAUNCHED):
                setattr(module, name, Compiled(value))
    attention.num_processors = lambda device: 132  # type: ignore[assignment]
    for module in (quantized_linear, expert_products):
        module.num_processors = lambda device: 132  # type: ignore[attr-defined]
    attention_tiles.shared_bytes = lambda device: SHARED_BYTES[Compiled.capability]  # type: ignore[assignment]


def attend(lengths: list[tuple[int, int]], shape: tuple[int, int, int], dtype: torch.dtype, **case: Any) -> None:
    num_heads, num_kv_heads, head_dim = shape
    starts, counts = np.array(lengths).T
    width = -(-int((starts + counts).max()) // 16)
    tables = np.arange(len(lengths) * width, dtype=np.int32).reshape(len(lengths), width)
    tables[:, : case.get("shared", 0)] = tables[0, : case.get("shared", 0)]
    metadata = build_metadata(QueryTokens(starts, counts, tables, 16), CPU)
    kv = torch.zeros(2, 8, 16, num_kv_heads, head_dim, dtype=dtype)
    qkv = torch.zeros(metadata.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    heads = HeadShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5, case.get("cap", 0.0))
    sinks = torch.zeros(num_heads) if case.get("has_sinks") else None
    seen = metadata.in_chunks(case["chunk"]) if "chunk" in case else metadata
    attention.paged_attention(qkv, kv[0], kv[1], seen, heads, case.get("window"), sinks)
    weight = torch.zeros(head_dim, dtype=dtype) if "window" in case else None
    rope.rope_and_cache(qkv, torch.zeros(16, head_dim), metadata, kv[0], kv[1], heads, weight, weight)


def attend_latent(lengths: list[tuple[int, int]], shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Does as `attend`, with heads that share 100 blocks of latent vectors and rotated keys."""
    num_heads, latent_dim, rotated_dim = shape
    width = latent_dim + rotated_dim
    starts, counts = np.array(lengths).T
    tables = np.arange(len(lengths) * 200, dtype=np.int32).reshape(len(lengths), 200)
    tables[:, :100] = tables[0, :100]
    metadata = build_metadata(QueryTokens(starts, counts, tables, 16), CPU)
    cache = torch.zeros(8, 16, 1, width, dtype=dtype)
    row = torch.zeros(metadata.num_tokens, (num_heads + 1) * width, dtype=dtype)
    heads = HeadShape(num_heads, 1, width, width**-0.5, latent_dim=latent_dim)
    attention.paged_attention(row, cache, cache, metadata, heads)
    rope.rope_and_cache(row, torch.zeros(16, width), metadata, cache, cache, heads)


def multiply(bits: int, group: int, num_rows: int, dtype: torch.dtype, gated: bool = False) -> None:
    """A linear of 4,096 inputs; one scale an output, and a row of activations, if the group has all of them."""
    out_features, in_features = 4096, 4096
    values = torch.zeros(out_features, in_features, dtype=torch.int8)
    scales = torch.zeros(out_features, in_features // group)
    weight = QuantizedWeight(
        values,
        scales,
        bits,
        offsets=scales if bits == 4 else None,
        has_half_scales=bits == 4,
        has_int8_activations=group == in_features,
    )
    multiply_and_round(weight, num_rows, dtype, gated)


def multiply_float8(block: int | None, num_rows: int, dtype: torch.dtype, gated: bool = False) -> None:
    """A linear of 4,096 inputs, with a scale for each output or for each block."""
    out_features, in_features = 4096, 4096
    values = torch.zeros(out_features, in_features, dtype=torch.float8_e4m3fn)
    weight = QuantizedWeight(values, torch.zeros(out_features, in_features // (block or in_features)))
    multiply_and_round(weight, num_rows, dtype, gated)


def multiply_and_round(weight: QuantizedWeight, num_rows: int, dtype: torch.dtype, gated: bool) -> None:
    """Rounds rows in each pass, multiplies them, and rounds the results of a gate."""
    linear = quantized_linear.TritonQuantizedLinear.of(weight, None, CPU, gated)
    x, norm = (
        torch.zeros(num_rows, weight.values.shape[1], dtype=dtype),
        torch.zeros(weight.values.shape[1], dtype=dtype),
    )
    linear.multiply_by_triton(rounded_rows.round_rows(x, linear.rounding))
    rounded_rows.round_normed(x, None, norm, 1e-5, linear.rounding)
    rounded_rows.round_normed(x, x.clone(), norm, 1e-5, linear.rounding)
    if gated:
        rounded_rows.round_rows(torch.zeros(num_rows, 28_672, dtype=dtype), down_rounding(linear), is_gated=True)


def down_rounding(linear: quantized_linear.TritonQuantizedLinear) -> rounded_rows.RowRounding:
    """The rounding of 14,336 inputs in the groups of a linear, or in one."""
    rounding, in_features = linear.rounding, 14_336
    group = in_features if rounding.num_groups == 1 else rounding.group
    return rounding._replace(in_features=in_features, group=group)


class ExpertShape(NamedTuple):
    num_experts: int
    num_chosen: int
    hidden: int
    inner: int
    activation: str


QWEN3_30B, GPT_OSS_20B = ExpertShape(128, 8, 2048, 768, "silu"), ExpertShape(32, 4, 2880, 2880, "clamped")


def experts(shape: ExpertShape, num_rows: int, form: QuantizedWeight | None, dtype: torch.dtype) -> None:
    """The two products of a layer's experts, with biases as gpt-oss has them. `form` is a weight of 64 outputs and 64
    inputs whose kind the experts' weights have; None: they are plain.
    """
    chosen = torch.zeros(num_rows, shape.num_chosen, dtype=torch.int64)
    size = expert_products.block_rows(chosen.numel(), shape.num_experts, dtype, form is not None)
    blocks = expert_rows.sort_pairs(chosen, shape.num_experts, size)
    has_bias = shape.activation == "clamped"
    gate = expert_products.Activation(shape.activation, is_gated=True)
    sizes = (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)
    of_rows = (num_rows, shape.hidden, shape.num_chosen), (chosen.numel(), shape.inner, 1)
    for (num, width, pairs), (outputs, inputs), activation in zip(
        of_rows, sizes, (gate, expert_products.NONE), strict=True
    ):
        x = torch.zeros(num, width, dtype=dtype)
        bias = torch.zeros(shape.num_experts, outputs, dtype=dtype) if has_bias else None
        if form is None:
            weight = torch.empty(shape.num_experts, outputs, inputs, dtype=dtype)
            y = expert_products.multiply(x, blocks, weight, bias, activation, pairs)
            continue
        group = form.group_size if form.scales.shape[1] > 1 else inputs
        whole = dataclasses.replace(
            form,
            values=form.values[:1, :1].expand(outputs, inputs),
            scales=form.scales[:1, :1].expand(outputs, inputs // group),
            offsets=None if form.offsets is None else form.offsets[:1, :1].expand(outputs, inputs // group),
        )
        form_, tensors = DeviceWeight.of(whole, None, CPU)
        stacked = WeightTensors(
            *(None if each is None else each.expand(shape.num_experts, *each.shape) for each in tensors)  # type: ignore[arg-type]
        )
        weights = DeviceWeight(form_, stacked._replace(bias=bias))
        rows_ = rounded_rows.round_rows(x, form_.rounding)
        y = expert_products.multiply_quantized(rows_, blocks, weights, activation, pairs)
    expert_rows.combine(y, chosen, torch.zeros(chosen.shape), shape.num_experts, has_shares=True)


def expert_forms() -> list[QuantizedWeight | None]:
    """Plain weights, int8 and int4 as they are rounded at load, MXFP4, and E4M3 by output and in blocks."""
    numbers, groups = torch.zeros(256, 256, dtype=torch.int8), torch.ones(256, 8)
    float8 = numbers.to(torch.float8_e4m3fn)
    return [
        None,
        QuantizedWeight(numbers, torch.ones(256, 2), has_half_scales=True),
        QuantizedWeight(numbers, groups, bits=4, has_half_scales=True),
        QuantizedWeight(numbers, groups, bits=4, offsets=groups),
        QuantizedWeight(numbers, groups, codebook=FP4_CODEBOOK),
        QuantizedWeight(float8, torch.ones(256, 1)),
        QuantizedWeight(float8, torch.ones(256, 2)),
    ]


def compile_experts() -> None:
    for num_rows in (1, 32, 256, 4096):
        for form in expert_forms():
            experts(QWEN3_30B, num_rows, form, torch.bfloat16)
            if form is None or form.codebook is not None:
                experts(GPT_OSS_20B, num_rows, form, torch.bfloat16)
    for num_rows in (1, 4096):
        experts(QWEN3_30B, num_rows, None, torch.float32)
        experts(QWEN3_30B, num_rows, None, torch.float16)


def adapt(dtype: torch.dtype) -> None:
    """A linear of queries, keys and values with an adapter of rank 16, for both sizes of blocks of rows."""
    linear = adapted_linear.TritonAdaptedLinear(TorchLinear(torch.zeros(6144, 4096, dtype=dtype)), CPU)
    places = (0, 4096), (4096, 1024), (5120, 1024)
    parts = (
        LowRankPart(torch.zeros(16, num_outputs, dtype=dtype), 16 * index, first, 1.0)
        for index, (first, num_outputs) in enumerate(places)
    )
    linear.hold(0, LowRank(torch.zeros(48, 4096, dtype=dtype), tuple(parts)))


def recur(lens: list[int], shape: tuple[int, int, int, int], kind: str, dtype: torch.dtype) -> None:
    """A recurrence with `shape` key heads, heads, key_dim and value_dim, its convolution, gates and norms."""
    num_groups, num_heads, key_dim, value_dim = shape
    num_tokens = sum(lens)
    uses = [StateUse(0, [(num_tokens, 2 + index)]) for index, num_tokens in enumerate(lens)]
    tables = np.zeros((len(lens), 1 + max(lens) // 16), dtype=np.int32)
    counts = np.array(lens)
    step = build_metadata(QueryTokens(0 * counts, counts, tables, 16, may_share=False, states=uses), CPU).states
    assert step is not None
    decays = torch.zeros(num_tokens, num_heads, *([key_dim] if kind == "kimi" else []))
    keys, values = torch.zeros(num_tokens, num_groups, key_dim), torch.zeros(num_tokens, num_heads, value_dim)
    beta = torch.zeros(num_tokens, num_heads) if "delta" in kind or kind == "kimi" else None
    rates = torch.zeros(num_heads, key_dim) if kind == "selective" else None
    states = torch.zeros(2, num_heads, key_dim, value_dim)
    recurrence.recur(RecurrentInputs(keys, keys, values, decays, beta, rates, dtype), states, step)
    channels = num_heads * value_dim
    x, windows = torch.zeros(num_tokens, channels), torch.zeros(2, channels, 3)
    convolution.convolve(x, torch.zeros(channels, 4), None, windows, step, activates=True)
    gates.unit_heads(keys, 1.0, 1e-6)
    gates.gated_norm(values, x, torch.zeros(value_dim), 1e-6)
    gates.softplus(x, torch.zeros(channels))
    gates.sigmoid(x)


def draw(names: list[str], dtype: torch.dtype) -> None:
    starts = [SequenceStart(i, SamplingParams(**CASES[name]), 5, [1, 2], 1, (EOS,)) for i, name in enumerate(names)]
    state = state_of(VOCAB_SIZE, starts)
    sequences = [state.sequences[start.sequence_id] for start in starts]
    allowed = MaskBatch(0, [0] * len(names), np.zeros((1, row_words(VOCAB_SIZE)), dtype=np.int32), {})
    for masks in (None, allowed):
        sampler.draw(torch.zeros(len(names), VOCAB_SIZE, dtype=dtype), sequences, [2] * len(names), state, masks)


def main() -> None:
    assert not launch.INTERPRETED
    stand_in()
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in ((32, 8, 128), (14, 2, 64), (8, 2, 96), (8, 4, 256)):
            for Compiled.capability in SHARED_BYTES:
                attend([(2000, 1)] * 64, shape, dtype, shared=100)
                attend([(0, 500), (30, 1)], shape, dtype)
            Compiled.capability = H100
            attend([(100, 1)], shape, dtype)
            attend([(100, 1)] * 64, shape, dtype)
            attend([(100, 5), (30, 1)], shape, dtype)
            attend([(0, 500), (30, 1)], shape, dtype, window=100)
            for variant in ({"cap": 50.0}, {"has_sinks": True}):
                attend([(2000, 1)] * 64, shape, dtype, shared=100, **variant)
                attend([(0, 500), (30, 1)], shape, dtype, **variant)
                attend([(0, 500), (30, 1)], shape, dtype, window=100, **variant)
        for capability in SHARED_BYTES if dtype.itemsize == 2 else ():
            Compiled.capability = capability
            for shape in ((128, 512, 64), (16, 512, 64), (20, 512, 64)):
                attend_latent([(2000, 1)] * 8, shape, dtype)
                attend_latent([(2000, 5), (2000, 500), (30, 1)], shape, dtype)
            attend([(2000, 1)] * 8, (32, 4, 512), dtype)
            attend([(0, 500), (30, 1)], (32, 4, 512), dtype)
        Compiled.capability = H100
        attend([(0, 500), (30, 1)], (40, 8, 128), dtype, chunk=8192)
        x, weight = torch.zeros(3, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
        rows.rms_norm(x, weight, 1e-5)
        rows.add_rms_norm(x, x.clone(), weight, 1e-5)
        rows.silu_and_mul(torch.zeros(3, 28_672, dtype=dtype))
        adapt(dtype)
        for num_rows in (1, 40, 2048):
            for bits, group in ((8, 128), (8, 4096), (4, 32), (4, 128)):
                multiply(bits, group, num_rows, dtype, gated=num_rows > 1)
            for block in (None, 128):
                multiply_float8(block, num_rows, dtype, gated=num_rows > 1)
    for kind, sizes in RECURRENT.items():
        recur([1, 1, 1], sizes, kind, torch.float32)
        for dtype in (torch.bfloat16, torch.float32):
            recur([200, 1, 7], sizes, kind, dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for names in (["greedy"], ["temperature", "top_p"], ["logit_bias", "top_k_top_p_min_p"], ["everything"]):
            draw(names, dtype)
    compile_experts()
    print(f"{len(Compiled.forms)} forms compiled by triton {triton.__version__}")


if __name__ == "__main__":
    main()
