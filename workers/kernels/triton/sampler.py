"""The sampler of an accelerator: masks, temperature, filters and Gumbel-max in Triton, over logits that stay on the
device.

`workers/kernels/torch_sampler.py` defines the results and computes log-probabilities. `edits.py` applies edits before
the mask (penalties, biases, bad words). Nothing here waits for the device. A row's vocabulary is cut into chunks, so
that one row keeps a whole GPU busy. A multiply-add is rounded twice, as on a CPU, so the same tokens win.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from manta.structured.masks import LATE as LATE_SLOT
from manta.structured.masks import NO_MASK, MaskBatch
from manta.workers.kernels.torch_sampler import logprobs
from manta.workers.kernels.transfer import place, place_rows
from manta.workers.kernels.triton.edits import edited_rows, edits_of
from manta.workers.kernels.triton.launch import padded_size
from manta.workers.kernels.triton.noise import gumbel_noise
from manta.workers.sampling.noise import noise_keys
from manta.workers.sampling.row_status import INFINITE, LATE, MASKED, NAN, OK, OVERFLOW
from manta.workers.sampling.sampling_state import SamplingState, SequenceState

__all__ = ["draw", "logprobs"]

CHUNK = 1024
"""Tokens of one program, 8 for each thread; an H100's multiprocessor then holds 36 warps."""
SEARCH_CHUNK = 4096
"""Tokens that the single program of a row, with 32 warps, reads at a time when it searches for filter thresholds."""

_NUM_COLUMNS = tl.constexpr(8)
_KEY_LOW, _KEY_HIGH, _INVERSE_TEMPERATURE, _SLOT = (tl.constexpr(column) for column in range(4))
_EDITED, _TOP_K, _TOP_P, _LOG_MIN_P = (tl.constexpr(column) for column in range(4, 8))
"""Columns of the table of sample points, int32; three of them hold the bits of a float32."""

_HAS_NAN, _HAS_INFINITE, _HAS_TOKEN, _HAS_OVERFLOW = (tl.constexpr(1 << bit) for bit in range(4))
_OK, _NAN, _INFINITE = (tl.constexpr(code) for code in (OK, NAN, INFINITE))
_MASKED, _LATE, _OVERFLOW = (tl.constexpr(code) for code in (MASKED, LATE, OVERFLOW))
_LATE_SLOT = tl.constexpr(LATE_SLOT)
_LEAST_KEY = tl.constexpr(-(2**31))
_GREATEST_KEY = tl.constexpr(2**31 - 1)
_NO_TOKEN = tl.constexpr(2**31 - 1)


def draw(
    logits: torch.Tensor,
    sequences: list[SequenceState],
    positions: list[int],
    state: SamplingState,
    masks: MaskBatch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws as `torch_sampler.draw` does."""
    device, vocab_size = logits.device, state.vocab_size
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count = len(sequences)
    rows, before = state.table[[sequence.row for sequence in sequences]], np.array(positions, dtype=np.int64)
    table = _table(rows, before)
    edited, words = logits, logits
    edits = edits_of(rows, sequences, before, masks)
    if edits is not None:
        table[edits.points, _EDITED.value] = np.arange(len(edits.points))
        edited = edited_rows(logits, edits, vocab_size)
    if masks is not None:
        used, table[:, _SLOT.value] = masks.used_rows()
        if used:
            words = place_rows(masks.rows, used, device)
    points = place(table.ravel(), device)
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    best = torch.empty((count, num_chunks), dtype=torch.float32, device=device)
    best_ids = torch.empty((count, num_chunks), dtype=torch.int32, device=device)
    flags = torch.empty((count, num_chunks), dtype=torch.int32, device=device)
    arguments = (logits, edited, words, points, logits.stride(0), vocab_size, words.stride(0))
    constants = {"HAS_EDITED": edits is not None, "HAS_MASKS": words is not logits}
    chunk, search_chunk = (min(size, padded_size(vocab_size, 128)) for size in (CHUNK, SEARCH_CHUNK))
    thresholds = points
    has_filters = bool(_is_filtered(table).any())
    if has_filters:
        thresholds = torch.empty((count, 3), dtype=torch.int32, device=device)
        _find_thresholds[(count,)](
            *arguments, thresholds, **constants, CHUNK=search_chunk, enable_fp_fusion=False, num_warps=32
        )
    _find_best[(count, num_chunks)](
        *arguments, thresholds, best, best_ids, flags, **constants, HAS_FILTERS=has_filters, CHUNK=chunk,
        enable_fp_fusion=False, num_warps=4,
    )  # fmt: skip
    token_ids = torch.empty(count, dtype=torch.int64, device=device)
    status = torch.empty(count, dtype=torch.uint8, device=device)
    _choose[(count,)](
        points, best, best_ids, flags, token_ids, status, num_chunks, CHUNKS=padded_size(num_chunks), num_warps=1
    )
    return token_ids, status


def _table(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns the kernels' table of sample points, int32 [P, 8]. Greedy rows have no filters."""
    is_random = rows["inverse_temperature"] > 0
    table = np.empty((len(rows), _NUM_COLUMNS.value), dtype=np.int32)
    table[:, : _KEY_HIGH.value + 1] = noise_keys(rows["seed"], positions).view(np.int32)
    table[:, _INVERSE_TEMPERATURE.value] = rows["inverse_temperature"].view(np.int32)
    table[:, _SLOT.value] = NO_MASK
    table[:, _EDITED.value] = -1
    table[:, _TOP_K.value] = np.where(is_random, rows["top_k"], 0)
    table[:, _TOP_P.value] = np.where(is_random, rows["top_p"], np.float32(1)).view(np.int32)
    table[:, _LOG_MIN_P.value] = np.where(is_random, rows["log_min_p"], np.float32(-np.inf)).view(np.int32)
    return table


def _is_filtered(table: np.ndarray) -> np.ndarray:
    top_p, log_min_p = (table[:, column.value].view(np.float32) for column in (_TOP_P, _LOG_MIN_P))
    return (table[:, _TOP_K.value] > 0) | (top_p < 1) | (log_min_p > -np.inf)


@triton.jit
def _float(points, row, COLUMN: tl.constexpr):
    return tl.load(points + row * _NUM_COLUMNS + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def _processed(
    logits,
    edited,
    words,
    points,
    row,
    token,
    exists,
    vocab_size,
    num_words,
    raw,
    HAS_EDITED: tl.constexpr,
    HAS_MASKS: tl.constexpr,
):
    """Returns the `raw` logits of a row's tokens with its edits and under its mask; -inf for tokens that
    do not exist.
    """
    values = raw
    if HAS_EDITED:
        place = tl.load(points + row * _NUM_COLUMNS + _EDITED)
        is_own = exists & (token < tl.where(place >= 0, vocab_size, 0))
        own = tl.load(edited + place.to(tl.int64) * vocab_size + token, mask=is_own, other=float("-inf")).to(tl.float32)
        values = tl.where(place >= 0, own, values)
    if HAS_MASKS:
        slot = tl.load(points + row * _NUM_COLUMNS + _SLOT)
        is_masked = exists & (token < tl.where(slot >= 0, vocab_size, 0))
        word = tl.load(words + slot.to(tl.int64) * num_words + token // 32, mask=is_masked, other=-1)
        values = tl.where(((word >> (token % 32)) & 1) == 1, values, float("-inf"))
    return values


@triton.jit
def _sort_key(values):
    """Returns int32 keys that order like float32 values; zeros of either sign are equal."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _measure(
    logits,
    edited,
    words,
    points,
    row,
    logits_stride,
    vocab_size,
    num_words,
    above,
    largest,
    inverse_temperature,
    HAS_EDITED: tl.constexpr,
    HAS_MASKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Returns (number, mass, least key) of the tokens whose key exceeds `above`, and the greatest key of the others.

    Masses are relative to that of the largest logit.
    """
    number = tl.zeros([CHUNK], tl.int32)
    mass = tl.zeros([CHUNK], tl.float32)
    least = tl.full([CHUNK], _GREATEST_KEY, tl.int32)
    greatest_other = tl.full([CHUNK], _LEAST_KEY, tl.int32)
    for first in range(0, vocab_size, CHUNK):
        token = first + tl.arange(0, CHUNK)
        exists = token < vocab_size
        raw = tl.load(logits + row * logits_stride + token, mask=exists, other=float("-inf")).to(tl.float32)
        values = _processed(
            logits, edited, words, points, row, token, exists, vocab_size, num_words, raw, HAS_EDITED, HAS_MASKS
        )
        key = _sort_key(values)
        is_above = exists & (key > above)
        number += is_above.to(tl.int32)
        mass += tl.where(is_above, tl.exp((values - largest) * inverse_temperature), 0.0)
        least = tl.minimum(least, tl.where(is_above, key, _GREATEST_KEY))
        greatest_other = tl.maximum(greatest_other, tl.where(exists & (key <= above), key, _LEAST_KEY))
    return tl.sum(number, axis=0), tl.sum(mass, axis=0), tl.min(least, axis=0), tl.max(greatest_other, axis=0)


@triton.jit
def _search(
    logits,
    edited,
    words,
    points,
    row,
    logits_stride,
    vocab_size,
    num_words,
    low,
    high,
    largest,
    inverse_temperature,
    limit,
    HAS_EDITED: tl.constexpr,
    HAS_MASKS: tl.constexpr,
    BY_MASS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Returns the least key in [low, high] for which the number, or the mass, of the tokens above it is below `limit`.

    Also returns how many tokens with this key are kept, and the mass of all kept tokens. Each pass moves a bound to a
    key that a token has. bfloat16 logits have few different keys, and a dozen passes suffice.
    """
    while low < high:
        middle = low + (high - low) // 2
        number, mass, above, below = _measure(
            logits, edited, words, points, row, logits_stride, vocab_size, num_words, middle.to(tl.int32), largest,
            inverse_temperature, HAS_EDITED, HAS_MASKS, CHUNK,
        )  # fmt: skip
        measured = number.to(tl.float32)
        if BY_MASS:
            measured = mass
        if measured < limit:
            high = tl.maximum(below.to(tl.int64), low)
        else:
            low = above.to(tl.int64)
    number, mass, above, below = _measure(
        logits, edited, words, points, row, logits_stride, vocab_size, num_words, low.to(tl.int32), largest,
        inverse_temperature, HAS_EDITED, HAS_MASKS, CHUNK,
    )  # fmt: skip
    weight = tl.exp((_value_of(low.to(tl.int32)) - largest) * inverse_temperature)
    kept = limit - number.to(tl.float32)
    if BY_MASS:
        kept = tl.ceil((limit - mass) / tl.where(weight > 0.0, weight, 1.0))
    kept = tl.minimum(tl.maximum(kept, 1.0), 1.0e9)
    return low, kept.to(tl.int64), mass + kept * weight


@triton.jit
def _find_thresholds(
    logits,
    edited,
    words,
    points,
    logits_stride,
    vocab_size,
    num_words,
    thresholds,
    HAS_EDITED: tl.constexpr,
    HAS_MASKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Finds what top_k, then top_p, then min_p keep of one row in each program.

    All three keep a prefix of the tokens in order of logit, equal ones by id. So a row keeps the tokens whose key
    exceeds a threshold, and those equal to it up to some id; of these, those whose scaled logit is not below a floor.
    The threshold is found by bisection instead of a sort.
    """
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(points + row * _NUM_COLUMNS + _TOP_K)
    top_p = _float(points, row, _TOP_P)
    log_min_p = _float(points, row, _LOG_MIN_P)
    inverse_temperature = _float(points, row, _INVERSE_TEMPERATURE)
    if (top_k <= 0) & (top_p >= 1.0) & (log_min_p == float("-inf")):
        tl.store(thresholds + row * 3, _LEAST_KEY)
        tl.store(thresholds + row * 3 + 1, _NO_TOKEN)
        tl.store(thresholds + row * 3 + 2, log_min_p.to(tl.int32, bitcast=True))
        return

    best = tl.full([CHUNK], float("-inf"), tl.float32)
    for first in range(0, vocab_size, CHUNK):
        token = first + tl.arange(0, CHUNK)
        exists = token < vocab_size
        raw = tl.load(logits + row * logits_stride + token, mask=exists, other=float("-inf")).to(tl.float32)
        values = _processed(
            logits, edited, words, points, row, token, exists, vocab_size, num_words, raw, HAS_EDITED, HAS_MASKS
        )
        best = tl.maximum(best, values)
    largest = tl.max(best, axis=0)
    highest = _sort_key(largest).to(tl.int64)

    threshold = highest * 0 + _LEAST_KEY
    num_equal = highest * 0 + _NO_TOKEN  # tokens equal to the threshold that are kept
    if top_k > 0:
        threshold, num_equal, total = _search(
            logits, edited, words, points, row, logits_stride, vocab_size, num_words, threshold, highest, largest,
            inverse_temperature, top_k.to(tl.float32), HAS_EDITED, HAS_MASKS, False, CHUNK,
        )  # fmt: skip
    else:
        _, total, _, _ = _measure(
            logits, edited, words, points, row, logits_stride, vocab_size, num_words, _LEAST_KEY, largest,
            inverse_temperature, HAS_EDITED, HAS_MASKS, CHUNK,
        )  # fmt: skip
    if top_p < 1.0:
        of_mass, num_of_mass, _ = _search(
            logits, edited, words, points, row, logits_stride, vocab_size, num_words, threshold, highest, largest,
            inverse_temperature, top_p * total, HAS_EDITED, HAS_MASKS, True, CHUNK,
        )  # fmt: skip
        num_equal = tl.where(of_mass == threshold, tl.minimum(num_equal, num_of_mass), num_of_mass)
        threshold = of_mass

    last_equal = tl.zeros([CHUNK], tl.int32) + _NO_TOKEN
    before = num_equal * 0
    for first in range(0, vocab_size, CHUNK):
        token = first + tl.arange(0, CHUNK)
        exists = token < vocab_size
        raw = tl.load(logits + row * logits_stride + token, mask=exists, other=float("-inf")).to(tl.float32)
        values = _processed(
            logits, edited, words, points, row, token, exists, vocab_size, num_words, raw, HAS_EDITED, HAS_MASKS
        )
        equal = (exists & (_sort_key(values) == threshold.to(tl.int32))).to(tl.int32)
        rank = before + tl.cumsum(equal, axis=0)
        last_equal = tl.where((equal == 1) & (rank == num_equal), token, last_equal)
        before += tl.sum(equal, axis=0)
    tl.store(thresholds + row * 3, threshold.to(tl.int32))
    tl.store(thresholds + row * 3 + 1, tl.min(last_equal, axis=0))
    floor = largest * inverse_temperature + log_min_p
    tl.store(thresholds + row * 3 + 2, floor.to(tl.int32, bitcast=True))


@triton.jit
def _value_of(key):
    """Returns the float32 of a key of `_sort_key`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _find_best(
    logits,
    edited,
    words,
    points,
    logits_stride,
    vocab_size,
    num_words,
    thresholds,
    best,
    best_ids,
    flags,
    HAS_EDITED: tl.constexpr,
    HAS_MASKS: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Applies mask, temperature, filters and noise to a chunk of a row in one pass; stores its best token and its
    flags.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    exists = token < vocab_size
    raw = tl.load(logits + row * logits_stride + token, mask=exists, other=float("-inf")).to(tl.float32)
    has_nan = tl.max((raw != raw).to(tl.int32), axis=0)
    values = _processed(
        logits, edited, words, points, row, token, exists, vocab_size, num_words, raw, HAS_EDITED, HAS_MASKS
    )
    has_infinite = tl.max((raw == float("inf")).to(tl.int32), axis=0)
    has_overflow = tl.max(((values == float("inf")) | (values != values)).to(tl.int32), axis=0)
    has_token = tl.max((values > float("-inf")).to(tl.int32), axis=0)

    inverse_temperature = _float(points, row, _INVERSE_TEMPERATURE)
    scaled = values * inverse_temperature
    key_low = tl.load(points + row * _NUM_COLUMNS + _KEY_LOW)
    key_high = tl.load(points + row * _NUM_COLUMNS + _KEY_HIGH)
    score = tl.where(inverse_temperature > 0.0, scaled + gumbel_noise(token, key_low, key_high), values)
    kept = exists & (values == values)
    if HAS_FILTERS:
        threshold = tl.load(thresholds + row * 3)
        last_equal = tl.load(thresholds + row * 3 + 1)
        floor = tl.load(thresholds + row * 3 + 2).to(tl.float32, bitcast=True)
        key = _sort_key(values)
        kept = kept & ((key > threshold) | ((key == threshold) & (token <= last_equal))) & (scaled >= floor)
    score = tl.where(kept, score, float("-inf"))
    largest = tl.max(score, axis=0)
    place = row * tl.num_programs(1) + chunk
    tl.store(best + place, largest)
    tl.store(best_ids + place, tl.min(tl.where(score == largest, token, _NO_TOKEN), axis=0))
    found = has_nan * _HAS_NAN + has_infinite * _HAS_INFINITE + has_token * _HAS_TOKEN + has_overflow * _HAS_OVERFLOW
    tl.store(flags + place, found)


@triton.jit(do_not_specialize=["num_chunks"])
def _choose(points, best, best_ids, flags, token_ids, status, num_chunks, CHUNKS: tl.constexpr):
    """Stores the best token of a row's chunks, the lowest id among equals, and the row's status."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    exists = chunk < num_chunks
    place = row * num_chunks + chunk
    score = tl.load(best + place, mask=exists, other=float("-inf"))
    ids = tl.load(best_ids + place, mask=exists, other=_NO_TOKEN)
    flag = tl.load(flags + place, mask=exists, other=0)
    has_nan = tl.max(flag & _HAS_NAN, axis=0) > 0
    has_infinite = tl.max(flag & _HAS_INFINITE, axis=0) > 0
    has_token = tl.max(flag & _HAS_TOKEN, axis=0) > 0
    has_overflow = tl.max(flag & _HAS_OVERFLOW, axis=0) > 0
    code = tl.where(has_token, _OK, _MASKED)
    code = tl.where(has_overflow, _OVERFLOW, code)
    code = tl.where(has_infinite, _INFINITE, code)
    code = tl.where(has_nan, _NAN, code)
    code = tl.where(tl.load(points + row * _NUM_COLUMNS + _SLOT) == _LATE_SLOT, _LATE, code)
    largest = tl.max(score, axis=0)
    token = tl.min(tl.where(score == largest, ids, _NO_TOKEN), axis=0)
    tl.store(token_ids + row, tl.where(code == _OK, token, 0).to(tl.int64))
    tl.store(status + row, code.to(tl.uint8))
