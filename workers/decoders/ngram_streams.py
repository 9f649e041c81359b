"""Rows of tables of hashed n-grams, which a layer adds to its residual streams (Qwen4-Exp). Called by the decoder.

A layer with tables keeps a recurrent state besides that of its mixer: the last tokens, and the inputs of a convolution
over what is added. A token is kept as its difference from the end token, so that the zeros before a sequence are end
tokens.
"""

from __future__ import annotations

import itertools

import torch

from manta.workers.decoders.gated_streams import norm_streams
from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.weights import NgramWeights
from manta.workers.models.ngrams import NgramShape

_LEAST_GATE = 1e-6
"""Least magnitude of a gate before its root."""


def ngram_streams(
    weights: NgramWeights,
    shape: NgramShape,
    streams: torch.Tensor,
    token_ids: torch.Tensor,
    step: RecurrentStep,
    states: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    kernels: Kernels,
) -> torch.Tensor:
    """Returns what is added to the streams [num_streams, num_tokens, hidden], and writes the step's states. `token_ids`
    is int64 [num_tokens].
    """
    num_streams, num_tokens, hidden = streams.shape
    tokens = last_tokens(token_ids, shape, states[0], step, kernels)
    rows = table_rows(tokens, weights.multipliers, weights.table_rows, shape.num_tables)
    embedded = weights.table(rows.flatten()).view(num_tokens, -1)
    keys = weights.keys.forward(embedded).view(num_tokens, num_streams, hidden).transpose(0, 1)
    key = norm_streams(keys, weights.key_norm, eps, kernels)
    query = norm_streams(streams, weights.query_norm, eps, kernels)
    products = (key.float() * query.float()).view(-1, 1, hidden)
    gates = kernels.head_products(products, products.new_ones((1, hidden, 1))).view(num_tokens, num_streams)
    gates = gates * hidden**-0.5
    gates = kernels.recurrent.sqrt(gates.abs().clamp(min=_LEAST_GATE)) * gates.sign()
    values = weights.values.forward(embedded).float()
    added = (values * kernels.recurrent.sigmoid(gates).T.unsqueeze(-1)).to(streams.dtype)
    normed = norm_streams(added, weights.conv_norm, eps, kernels).float()
    convolved = kernels.recurrent.convolve(normed, weights.kernel, None, states[1], step, activates=True)
    return added + convolved.to(streams.dtype).view(num_tokens, num_streams, hidden).transpose(0, 1)


def last_tokens(
    token_ids: torch.Tensor, shape: NgramShape, state: torch.Tensor, step: RecurrentStep, kernels: Kernels
) -> list[torch.Tensor]:
    """Returns the tokens [num_tokens] by their distance from each one, 0 to `shape.size - 1`. From an end token on
    there are only end tokens.
    """
    differences = (token_ids - shape.end_token).float().unsqueeze(1)
    tokens, has_ended = [token_ids], torch.zeros_like(token_ids, dtype=torch.bool)
    for distance in range(1, shape.size):
        tap = differences.new_zeros((1, shape.size))
        tap[0, -1 - distance] = 1
        earlier = kernels.recurrent.convolve(differences, tap, None, state, step).squeeze(1).long()
        has_ended = has_ended | (earlier == 0)
        tokens.append(torch.where(has_ended, 0, earlier) + shape.end_token)
    return tokens


def table_rows(
    tokens: list[torch.Tensor], multipliers: tuple[int, ...], rows_of_tables: tuple[int, ...], num_tables: int
) -> torch.Tensor:
    """Returns the row of each table, int64 [num_tokens, num_tables * (len(tokens) - 1)]: the n-gram's hash, the
    exclusive or of its tokens times their multipliers, modulo the table's rows, behind those of the tables before it.
    """
    sizes = torch.tensor(rows_of_tables, device=tokens[0].device)
    firsts = torch.tensor([0, *itertools.accumulate(rows_of_tables[:-1])], device=tokens[0].device)
    mixed, hashes = tokens[0] * multipliers[0], []
    for token, multiplier in zip(tokens[1:], multipliers[1:], strict=True):
        mixed = mixed ^ (token * multiplier)
        hashes.append(mixed)
    by_table = torch.stack(hashes, dim=-1).repeat_interleave(num_tables, dim=-1)
    return by_table.remainder(sizes) + firsts
