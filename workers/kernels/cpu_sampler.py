"""The CPU's `SamplerKernels`: thin ctypes calls to `sampler.cpp`, which is compiled at the first call.

Same functions and results as `workers/kernels/torch_sampler.py`, which runs if there is no compiler.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from ctypes import c_int, c_int64, c_void_p

import numpy as np
import torch

from manta.structured.masks import LATE, NO_MASK, MaskBatch
from manta.workers.kernels import build, layout, torch_sampler
from manta.workers.kernels.cpu_linear import DTYPES
from manta.workers.sampling.sampling_state import ROW, SamplingState, SequenceState

CONSTRAINT = np.dtype(
    [
        ("mask", np.uint64),
        ("adjusted_ids", np.uint64),
        ("adjusted_by", np.uint64),
        ("num_adjusted", np.int32),
        ("late", np.int32),
    ],
    align=True,
)
"""Mask and adjustments of one row, laid out like `struct Constraint` in logit_edits.h; uint64 fields are addresses."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is None:
        return None
    sizes = {"a Row's size": ROW.itemsize, "a Constraint's size": CONSTRAINT.itemsize}
    layout.check("sampler.cpp", library.manta_sampler_layout, sizes)
    library.manta_sample.argtypes = [c_int, c_void_p, c_int64, c_int, c_int, *[c_void_p] * 6]
    library.manta_sample.restype = None
    library.manta_logprobs.argtypes = [c_int, c_void_p, c_int64, c_int, c_int, c_void_p, c_int, *[c_void_p] * 4]
    library.manta_logprobs.restype = None
    return library


def draw(
    logits: torch.Tensor,
    sequences: list[SequenceState],
    positions: list[int],
    state: SamplingState,
    masks: MaskBatch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what `torch_sampler.draw` does, and reads packed masks in place, where the grammar workers wrote them."""
    library = _library()
    if library is None:
        return torch_sampler.draw(logits, sequences, positions, state, masks)
    logits = _row_major(logits)
    count = len(sequences)
    token_ids = torch.empty(count, dtype=torch.int64)
    status = torch.empty(count, dtype=torch.uint8)
    rows, places = array("i", [sequence.row for sequence in sequences]), array("q", positions)
    constraints = None if masks is None else _constraints(masks)
    library.manta_sample(
        DTYPES[logits.dtype],
        logits.data_ptr(),
        logits.stride(0),
        count,
        state.vocab_size,
        state.table_address,
        rows.buffer_info()[0],
        places.buffer_info()[0],
        None if constraints is None else constraints.ctypes.data,
        token_ids.data_ptr(),
        status.data_ptr(),
    )
    return token_ids, status


def _constraints(masks: MaskBatch) -> np.ndarray:
    """A table of `CONSTRAINT`, one row for each sample point. Its addresses point into `masks`, which must outlive
    it.
    """
    slots = np.array(masks.slots, dtype=np.int64)
    table = np.zeros(len(slots), dtype=CONSTRAINT)
    table["late"] = slots == LATE
    masked = slots >= 0
    table["mask"][masked] = masks.rows.ctypes.data + slots[masked] * masks.rows.strides[0]
    for index, (ids, values) in masks.adjustments.items():
        if slots[index] > NO_MASK:
            table[index]["adjusted_ids"], table[index]["adjusted_by"] = ids.ctypes.data, values.ctypes.data
            table[index]["num_adjusted"] = len(ids)
    return table


def logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Does what `torch_sampler.logprobs` does."""
    library = _library()
    if library is None:
        return torch_sampler.logprobs(logits, token_ids, num_top)
    logits = _row_major(logits)
    token_ids = token_ids.contiguous()
    count, vocab_size = logits.shape
    num_top = min(num_top, vocab_size)
    own = torch.empty(count, dtype=torch.float32)
    ranks = torch.empty(count, dtype=torch.int64)
    top_ids = torch.empty(count, num_top, dtype=torch.int64)
    top = torch.empty(count, num_top, dtype=torch.float32)
    library.manta_logprobs(
        DTYPES[logits.dtype],
        logits.data_ptr(),
        logits.stride(0),
        count,
        vocab_size,
        token_ids.data_ptr(),
        num_top,
        own.data_ptr(),
        ranks.data_ptr(),
        top_ids.data_ptr(),
        top.data_ptr(),
    )
    return own, ranks, top_ids, top


def _row_major(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
