"""The tokens that an indexer chooses, and attention to them, against plain loops in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter

from manta.workers.decoders.sparse_attention import PIECE_BYTES, TokenChoice, attend_chosen, choose_tokens
from manta.workers.kernels import cpu, expert_choice, reference
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.weights import IndexerWeights
from manta.workers.models.model_config import ExpertsConfig, HeadShape, IndexerShape

BLOCK_SIZE = 4
NUM_BLOCKS = 64
SHAPE = IndexerShape(num_heads=3, head_dim=8, num_chosen=10)
HIDDEN, RANK = 12, 6


class Rows:
    """A linear that gives the rows that it gets, or those of a weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def forward(self, x: torch.Tensor, step: Any = None) -> torch.Tensor:
        return x @ self._weight.T


def whole(generator: torch.Generator, *shape: int, most: int = 2) -> torch.Tensor:
    """Small whole numbers, of which sums are exact in any order."""
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def metadata(*pieces: tuple[int, int]) -> AttentionMetadata:
    """Sequences of (tokens before, tokens of the step), in scattered blocks."""
    tables = np.random.default_rng(3).permutation(NUM_BLOCKS).astype(np.int32).reshape(4, -1)[: len(pieces)]
    starts, lens = (np.array(each) for each in zip(*pieces, strict=True))
    return AttentionMetadata.build(QueryTokens(starts, lens, tables, BLOCK_SIZE))


def slot(step: AttentionMetadata, sequence: int, position: int) -> int:
    return int(step.block_tables[sequence, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def indexer(generator: torch.Generator) -> IndexerWeights:
    size = SHAPE.head_dim
    return IndexerWeights(
        SHAPE,
        queries=Rows(whole(generator, SHAPE.num_heads * size, RANK)),
        keys=Rows(whole(generator, size, HIDDEN)),
        key_norm=torch.ones(size),
        key_bias=torch.zeros(size),
        shares=Rows(whole(generator, SHAPE.num_heads, HIDDEN, most=1)),
    )


UNTURNED = torch.cat((torch.ones((64, 4)), torch.zeros((64, 4))), dim=-1)
"""A rotary table that rotates nothing."""


@pytest.mark.parametrize("piece_bytes", [PIECE_BYTES, 500])
def test_the_best_scores_are_chosen_and_of_equal_ones_the_first(piece_bytes: int) -> None:
    """Scores are small whole numbers, so that many are equal, most of them zero."""
    generator = torch.Generator().manual_seed(0)
    weights, pieces = indexer(generator), [(0, 30), (25, 3), (0, 7), (40, 1)]
    step = metadata(*pieces)
    count = step.num_tokens
    normed, latents = whole(generator, count, HIDDEN), whole(generator, count, RANK)
    keys = whole(generator, NUM_BLOCKS, BLOCK_SIZE, SHAPE.head_dim)
    choice = choose_tokens(weights, normed, latents, UNTURNED, 4, keys, step, reference, piece_bytes)
    assert choice.slots is not None
    assert choice.lens is not None
    queries = weights.queries.forward(latents).view(count, SHAPE.num_heads, -1).numpy()
    shares, flat = weights.shares.forward(normed).numpy(), keys.flatten(0, 1).numpy()
    row, num_ties = 0, 0
    for sequence, (before, length) in enumerate(pieces):
        for position in range(before, before + length):
            seen = [slot(step, sequence, each) for each in range(position + 1)]
            scores = shares[row] @ np.maximum(queries[row] @ flat[seen].T, 0)
            best = np.sort(np.argsort(-scores, kind="stable")[: SHAPE.num_chosen])
            assert choice.slots[row, : choice.lens[row]].tolist() == [seen[each] for each in best]
            num_ties += len(seen) > len(best) and scores[best].min() in np.delete(scores, best)
            row += 1
    assert num_ties > 5


def test_a_step_of_short_sequences_chooses_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    weights, step = indexer(generator), metadata((0, SHAPE.num_chosen), (3, 2))
    normed, latents = whole(generator, step.num_tokens, HIDDEN), whole(generator, step.num_tokens, RANK)
    keys = whole(generator, NUM_BLOCKS, BLOCK_SIZE, SHAPE.head_dim)
    assert choose_tokens(weights, normed, latents, UNTURNED, 4, keys, step, reference) == TokenChoice()


def test_what_is_no_number_is_chosen_last() -> None:
    generator = torch.Generator().manual_seed(0)
    weights, step = indexer(generator), metadata((29, 1))
    normed, latents = torch.ones((1, HIDDEN)), whole(generator, 1, RANK)
    keys = whole(generator, NUM_BLOCKS, BLOCK_SIZE, SHAPE.head_dim)
    for position in range(0, 30, 2):
        keys.view(-1, SHAPE.head_dim)[slot(step, 0, position)] = torch.nan
    choice = choose_tokens(weights, normed, latents, UNTURNED, 4, keys, step, reference)
    assert choice.slots is not None
    odd = {slot(step, 0, position) for position in range(1, 30, 2)}
    assert set(choice.slots[0].tolist()) <= odd


@pytest.mark.parametrize("piece_bytes", [PIECE_BYTES, 1])
@pytest.mark.parametrize("kernels", [cpu, reference], ids=["compiled", "torch"])
def test_attention_reads_the_chosen_tokens_alone(kernels: Any, piece_bytes: int) -> None:
    """Others hold no numbers."""
    generator = torch.Generator().manual_seed(1)
    heads = HeadShape(3, 1, 32, 0.3, latent_dim=24)
    step = metadata((20, 2), (6, 1))
    cached = torch.randn((NUM_BLOCKS, BLOCK_SIZE, 1, heads.head_dim), generator=generator)
    row = torch.randn((3, 4 * heads.head_dim), generator=generator)
    chosen = [[0, 3, 4, 7, 8, 11, 13, 17, 19, 20], [1, 2, 5, 6, 9, 12, 14, 18, 20, 21], [*range(7), 0, 0, 0]]
    sequences, lens = [0, 0, 1], [10, 10, 7]
    slots = [[slot(step, seq, each) for each in places] for seq, places in zip(sequences, chosen, strict=True)]
    read = {each for places, length in zip(slots, lens, strict=True) for each in places[:length]}
    flat = cached.view(-1, heads.head_dim)
    flat[[each for each in range(len(flat)) if each not in read]] = torch.nan
    choice = TokenChoice(torch.tensor(slots, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32))
    attended = attend_chosen(row, cached, choice, step, heads, kernels, piece_bytes=piece_bytes).view(
        3, heads.num_heads, -1
    )
    for index, (places, length) in enumerate(zip(slots, lens, strict=True)):
        keys = flat[places[:length]].double().numpy()
        products = row[index].view(4, -1)[:3].double().numpy() @ keys.T * heads.scale
        parts = np.exp(products - products.max(-1, keepdims=True))
        expected = parts / parts.sum(-1, keepdims=True) @ keys
        np.testing.assert_allclose(attended[index].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_groups_that_are_not_searched_have_a_score_of_zero_in_axk2() -> None:
    """Which is chosen rather than a negative one, as transformers' router does."""
    config = transformers.AXK2Config(
        hidden_size=HIDDEN, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, norm_topk_prob=True
    )
    router = AXK2TopkRouter(config)
    generator = torch.Generator().manual_seed(0)
    router.weight.data.copy_(torch.randn(router.weight.shape, generator=generator))
    router.e_score_correction_bias.copy_(torch.randn(8, generator=generator) - 1)
    x = torch.randn((50, HIDDEN), generator=generator)
    with torch.inference_mode():
        logits, expected_shares, expected = router(x)
        sizes = ExpertsConfig(
            num_experts=8,
            num_chosen=3,
            intermediate_size=1,
            scores="sigmoid",
            normalises=True,
            scale=config.routed_scaling_factor,
            num_groups=4,
            num_chosen_groups=2,
            ranks_groups_by=2,
            scores_others_zero=True,
        )
        shares, chosen = expert_choice.route(logits, router.e_score_correction_bias, sizes)
    by_expert, expected_by_expert = torch.zeros((2, 50, 8))
    by_expert.scatter_(1, chosen, shares)
    expected_by_expert.scatter_(1, expected, expected_shares)
    torch.testing.assert_close(by_expert, expected_by_expert)
