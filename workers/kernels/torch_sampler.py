"""Draws tokens with torch operations: the reference of every other sampler, and what runs if there is no kernel.

Same functions and results as `workers/kernels/cpu_sampler.py`. Parameters come from the host, logits stay on their
device, and nothing here waits for an accelerator. `workers/torch_worker/sampler.py` documents the order of the
processors and calls this module.
"""

from __future__ import annotations

import numpy as np
import torch

from manta.structured.masks import LATE as LATE_SLOT
from manta.structured.masks import MaskBatch
from manta.workers.kernels.transfer import place
from manta.workers.sampling.noise import gumbel_noise, noise_keys
from manta.workers.sampling.row_status import INFINITE, LATE, MASKED, NAN, OK, OVERFLOW
from manta.workers.sampling.sampling_state import SamplingState, SequenceState

NUM_CANDIDATES = 256
"""Most probable tokens that are looked at first; all are sorted only if these do not suffice. One sort of 152k tokens
costs as much as 60 such looks.
"""
LOGPROB_ROWS = 32
"""Rows whose log-probabilities are computed at a time: it takes up to 40 bytes a token, of 152k tokens 200 MB."""


def draw(
    logits: torch.Tensor,
    sequences: list[SequenceState],
    positions: list[int],
    state: SamplingState,
    masks: MaskBatch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a token from each row of `logits` [P, width >= vocab_size], in any dtype of a model.

    `masks` has an entry for each row. They are applied last, and only packed rows are copied to the device. Rows of
    sequences with logits processors have been through `edit` before.

    Returns token ids int64 [P] and statuses uint8 [P], on the device of the logits.
    """
    device = logits.device
    rows = state.table[[sequence.row for sequence in sequences]]
    processed = logits[:, : state.vocab_size].float()
    of_model = invalid(processed)
    plain = [index for index, sequence in enumerate(sequences) if sequence.processors is None]
    if any(edits(sequences[index], positions[index]) for index in plain):
        processed = processed.clone()
        for index in plain:
            edit(processed[index], sequences[index], positions[index])
    if masks is not None:
        processed = apply(processed, masks)
    status = torch.where((processed == -torch.inf).all(1), MASKED, OK)
    status = torch.where(invalid(processed) != OK, OVERFLOW, status)
    status = torch.where(of_model != OK, of_model, status)
    if masks is not None:
        late = place(np.array(masks.slots) == LATE_SLOT, device)
        status = torch.where(late, LATE, status)
    token_ids = processed.argmax(1)
    random = rows["inverse_temperature"] > 0
    if random.any():
        drawn = _draw_random(processed, rows, np.array(positions, dtype=np.int64))
        token_ids = torch.where(place(random, device), drawn, token_ids)
    return torch.where(status == OK, token_ids, 0), status.to(torch.uint8)


def apply(logits: torch.Tensor, masks: MaskBatch) -> torch.Tensor:
    """Returns a copy of `logits` [num_points, vocab_size] with the adjustments of `masks` added, and -inf for tokens
    that a row's bitmask forbids. Only rows with a slot of 0 or more have a bitmask, and only they have adjustments.
    """
    device = logits.device
    slots = np.array(masks.slots)
    constrained = np.flatnonzero(slots >= 0)
    logits = logits.clone()
    for index, (ids, values) in masks.adjustments.items():
        logits[index, place(ids.astype(np.int64), device)] += place(values.copy(), device)
    packed = place(masks.rows[slots[constrained]], device)
    bits = (packed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]] == 1
    rows = place(constrained, device)
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
    return logits


def invalid(logits: torch.Tensor) -> torch.Tensor:
    """`NAN`, `INFINITE` or `OK` for each row of the model's logits [R, V], uint8 [R]."""
    largest = logits.amax(1)  # NaN if the row has one
    status = torch.where(largest == torch.inf, INFINITE, OK)
    return torch.where(largest.isnan(), NAN, status).to(torch.uint8)


def edits(sequence: SequenceState, position: int) -> bool:
    params = sequence.params
    return bool(
        params.allowed_token_ids
        or params.bad_words_token_ids
        or params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or position - sequence.num_prompt_tokens < params.min_tokens
    )


def edit(logits: torch.Tensor, sequence: SequenceState, position: int) -> None:
    """Applies all that comes before the logits processors and the constraint to one row [V], float32, in place."""

    def indices(ids: np.ndarray | list[int]) -> torch.Tensor:
        return place(np.asarray(ids, dtype=np.int64), logits.device)

    params = sequence.params
    if params.allowed_token_ids:
        allowed = indices(sequence.allowed_ids)
        kept = logits[allowed]
        logits.fill_(-torch.inf)
        logits[allowed] = kept
    banned = sequence.banned_by_words(position)
    if position - sequence.num_prompt_tokens < params.min_tokens:
        banned += sequence.stop_ids.tolist()
    if banned:
        logits[indices(banned)] = -torch.inf
    if params.logit_bias:
        logits[indices(sequence.bias_ids)] += place(sequence.bias_values, logits.device)
    if params.repetition_penalty != 1.0:
        seen = indices(np.unique(sequence.tokens[:position]))
        values = logits[seen]
        penalty = float(np.float32(params.repetition_penalty))
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        output = sequence.tokens[sequence.num_prompt_tokens : position]
        ids, counts = np.unique(output, return_counts=True)
        cost = counts.astype(np.float32) * np.float32(params.frequency_penalty) + np.float32(params.presence_penalty)
        logits[indices(ids)] -= place(cost, logits.device)


def _draw_random(logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """Gumbel-max over the kept tokens of every row; the result of a greedy row is not used."""
    device = logits.device
    keys = place(noise_keys(rows["seed"], positions).view(np.int32), device)
    noise = gumbel_noise(keys, torch.arange(logits.shape[1], dtype=torch.int32, device=device))
    scores = logits * place(rows["inverse_temperature"], device)[:, None] + noise
    filtered = np.flatnonzero((rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["log_min_p"] > -np.inf))
    if filtered.size:
        indices = place(filtered, device)
        scores[indices] = scores[indices].masked_fill(~kept_tokens(logits[indices], rows[filtered]), -torch.inf)
    return scores.argmax(1)


def kept_tokens(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Marks the tokens that top_k, then top_p, then min_p keep: processed logits float32 [R, V] to bool [R, V].

    All three keep a prefix of the tokens in order of logit, equal ones in order of id. So the result is given by a
    threshold, and by how many of the tokens equal to it are kept.
    """
    width = logits.shape[1]
    num_candidates = min(width, max(NUM_CANDIDATES, int(rows["top_k"].max())))
    if logits.device.type == "cpu" and num_candidates < width:
        ordered = logits.topk(num_candidates, dim=1).values
        num_kept = _num_kept(logits, ordered, rows)
        if (num_kept[rows["top_k"] == 0] == num_candidates).any():
            ordered = logits.sort(dim=1, descending=True).values
            num_kept = _num_kept(logits, ordered, rows)
    else:  # to find out whether the candidates suffice would mean waiting for the device
        ordered = logits.sort(dim=1, descending=True).values
        num_kept = _num_kept(logits, ordered, rows)
    threshold = ordered.gather(1, num_kept[:, None] - 1)
    equal = logits == threshold
    num_greater = (ordered > threshold).sum(1, keepdim=True)
    return (logits > threshold) | (equal & (equal.cumsum(1) <= num_kept[:, None] - num_greater))


def _num_kept(logits: torch.Tensor, ordered: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Counts the kept ones of the descending `ordered` [R, C]: at least 1, int64 [R]. If it is C, more may be kept."""

    def column(values: np.ndarray) -> torch.Tensor:
        return place(values, logits.device)[:, None]

    inverse_temperature = column(rows["inverse_temperature"])
    top_k = column(np.where(rows["top_k"] > 0, rows["top_k"], logits.shape[1]))
    top_p = column(np.where(rows["top_p"] < 1, rows["top_p"], np.float32(np.inf)))
    largest = ordered[:, :1]
    in_top_k = torch.arange(ordered.shape[1], device=logits.device) < top_k
    weights = ((ordered - largest) * inverse_temperature).exp() * in_top_k
    of_top_k = weights.sum(1, keepdim=True)
    of_all = ((logits - largest) * inverse_temperature).exp().sum(1, keepdim=True)
    total = torch.where(top_k <= ordered.shape[1], of_top_k, of_all)
    in_top_p = weights.cumsum(1) - weights < top_p * total
    in_min_p = ordered * inverse_temperature >= largest * inverse_temperature + column(rows["log_min_p"])
    return (in_top_k & in_top_p & in_min_p).sum(1).clamp(min=1)


def logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of `token_ids` [R] under unmodified logits [R, V], and of the `num_top` best tokens.

    Returns logprobs float32 [R], ranks int64 [R] from 1, top ids int64 [R, N] and top logprobs float32 [R, N]; equal
    ones are ordered by id.
    """
    parts = zip(logits.split(LOGPROB_ROWS), token_ids.split(LOGPROB_ROWS), strict=True)
    own, ranks, top_ids, top = zip(*(_logprobs(*part, num_top) for part in parts), strict=True)
    return torch.cat(own), torch.cat(ranks), torch.cat(top_ids), torch.cat(top)


def _logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    values = logits.float() + 0.0  # turns -0.0 into 0.0, so that their bits sort alike
    log_total = values.logsumexp(1, keepdim=True)
    bits = values.view(torch.int32)
    sortable = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    order = (sortable << 32) | torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    own = order.gather(1, token_ids[:, None])
    ranks = (order > own).sum(1) + 1
    largest = order.topk(min(max(num_top, 1), values.shape[1]), dim=1).values[:, :num_top]
    top_ids = values.shape[1] - 1 - (largest & 0xFFFFFFFF)
    own_logprobs = values.gather(1, token_ids[:, None]) - log_total
    return own_logprobs[:, 0], ranks, top_ids, values.gather(1, top_ids) - log_total
