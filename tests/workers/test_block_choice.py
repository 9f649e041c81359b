"""Parts of attention and streams that torch alone computes, against plain loops and transformers' own functions: the
choice of blocks of tokens, biases by distance, tables of n-grams.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4_exp

from manta.workers.decoders.block_choice import choose_blocks
from manta.workers.decoders.distance_attention import attend_with_distances
from manta.workers.decoders.ngram_streams import table_rows
from manta.workers.decoders.sparse_attention import PIECE_BYTES, TokenChoice
from manta.workers.kernels import cpu, reference
from manta.workers.kernels.weights import BlockIndexerWeights
from manta.workers.models.block_indexer import BlockIndexerShape
from manta.workers.models.model_config import HeadShape
from manta.workers.models.ngrams import NgramShape
from manta.workers.torch_worker.embedding_lookup import look_up_pieces
from tests.checkpoints import on_one_thread, reference_logits
from tests.workers.cpu_forms import COMPILED, TORCH, in_form
from tests.workers.test_layer_kinds import folder_of
from tests.workers.test_models import Cache, random_tokens
from tests.workers.test_sparse_attention import BLOCK_SIZE, HIDDEN, NUM_BLOCKS, UNTURNED, Rows, metadata, slot, whole

SHAPE = BlockIndexerShape(num_heads=3, head_dim=8, block_len=3, num_chosen=4)


@pytest.mark.parametrize("piece_bytes", [PIECE_BYTES, 300])
def test_the_best_blocks_are_chosen_and_the_tokens_after_the_last(piece_bytes: int) -> None:
    """Of equal scores the first one's counts. Norms have ones as weights."""
    generator = torch.Generator().manual_seed(0)
    projection, ones = Rows(whole(generator, 4 * SHAPE.head_dim, HIDDEN)), torch.ones(SHAPE.head_dim)
    weights, pieces = BlockIndexerWeights(SHAPE, projection, ones, ones), [(0, 30), (25, 3), (0, 7), (40, 1)]
    step = metadata(*pieces)
    normed = whole(generator, step.num_tokens, HIDDEN)
    keys = whole(generator, NUM_BLOCKS, BLOCK_SIZE, SHAPE.head_dim)
    choice = choose_blocks(weights, normed, UNTURNED, 4, keys, step, 1e-6, reference, piece_bytes)
    assert choice.slots is not None
    assert choice.lens is not None
    projected = projection.forward(normed).view(len(normed), 4, -1)
    flat, row = keys.flatten(0, 1), 0
    assert all(torch.equal(flat[place], key) for place, key in zip(step.slot_mapping, projected[:, 3], strict=True))
    for sequence, (before, length) in enumerate(pieces):
        for position in range(before, before + length):
            seen = [slot(step, sequence, each) for each in range(position + 1)]
            count = len(seen) // SHAPE.block_len
            means = flat[seen[: count * SHAPE.block_len]].view(count, SHAPE.block_len, SHAPE.head_dim).mean(1)
            query, block = (
                each * torch.rsqrt(each.square().mean(-1, keepdim=True) + 1e-6) for each in (projected[row, :3], means)
            )
            scores = (query @ block.T).relu().sum(0).numpy().round(4)
            best = np.sort(np.argsort(-scores, kind="stable")[: SHAPE.num_chosen])
            places = [each * SHAPE.block_len + token for each in best for token in range(SHAPE.block_len)]
            places += range(count * SHAPE.block_len, len(seen))
            assert choice.slots[row, : choice.lens[row]].tolist() == [seen[each] for each in places]
            row += 1


def test_a_step_of_short_sequences_chooses_no_blocks() -> None:
    weights = BlockIndexerWeights(SHAPE, Rows(torch.ones(32, HIDDEN)), torch.ones(8), torch.ones(8))
    step, keys = metadata((0, SHAPE.most_tokens), (3, 2)), torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 8)
    normed = torch.ones(step.num_tokens, HIDDEN)
    assert choose_blocks(weights, normed, UNTURNED, 4, keys, step, 1e-6, reference) == TokenChoice()


@pytest.mark.parametrize("piece_bytes", [PIECE_BYTES, 1])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("form", [COMPILED[0], TORCH])
def test_biases_are_those_of_the_distance(form: str, window: int | None, piece_bytes: int) -> None:
    generator = torch.Generator().manual_seed(2)
    heads, step, rank = HeadShape(4, 2, 16, 0.4), metadata((20, 3), (0, 5)), 3
    caches = [torch.randn((NUM_BLOCKS, BLOCK_SIZE, 2, 16), generator=generator) for _ in range(2)]
    qkv = torch.randn((8, 8 * 16), generator=generator)
    numbers, profiles = torch.randn((8, 4, rank), generator=generator), torch.randn((rank, 9), generator=generator)
    options = (caches[0], caches[1]), step, heads, window, cpu, piece_bytes
    with in_form(form):
        attended = attend_with_distances(qkv, numbers, profiles, *options).view(8, 4, 16)
    keys, values = (cache.flatten(0, 1) for cache in caches)
    for row, (sequence, position) in enumerate([(0, 20), (0, 21), (0, 22), *((1, each) for each in range(5))]):
        first = 0 if window is None else max(0, position - window + 1)
        seen = [slot(step, sequence, each) for each in range(first, position + 1)]
        for head in range(4):
            logits = keys[seen, head // 2] @ qkv[row].view(8, 16)[head] * heads.scale
            for index, distance in enumerate(range(position - first, -1, -1)):
                logits[index] += numbers[row, head] @ profiles[:, distance] if distance < 9 else 0
            torch.testing.assert_close(attended[row, head], logits.softmax(0) @ values[seen, head // 2])


def test_hashes_and_tables_of_n_grams_are_those_of_transformers() -> None:
    shape = NgramShape(
        layers=(0, 2),
        size=4,
        num_tables=2,
        width=24,
        least_rows=1000,
        rows_multiple=8,
        num_pieces=5,
        seed=1234,
        num_tokens=248320,
        end_token=7,
        conv_width=4,
    )
    primes = [qwen4_exp._find_nth_prime_after(999, count) for count in range(1, 13)]
    assert [*shape.table_rows(0), *shape.table_rows(2)] == primes
    for number, layer in enumerate(shape.layers):
        expected = qwen4_exp._build_layer_multipliers(248320, 4, number, 1234)
        assert shape.multipliers(layer) == tuple(expected.tolist())
    pieces = shape.piece_rows(2)
    assert sum(pieces) == -(-sum(primes[6:]) // 8) * 8
    tokens = [torch.tensor([248319, 5]), torch.tensor([3, 248000]), torch.tensor([9, 9]), torch.tensor([7, 1])]
    rows = table_rows(tokens, shape.multipliers(0), shape.table_rows(0), 2)
    for row, of_token in enumerate(rows.tolist()):
        mixed, found = 0, []
        for distance, factor in enumerate(shape.multipliers(0)):
            mixed ^= int(tokens[distance][row]) * factor
            found += [mixed] * (2 if distance else 0)
        firsts = [sum(primes[:table]) for table in range(6)]
        assert of_token == [each % size + first for each, size, first in zip(found, primes, firsts, strict=False)]


def test_rows_come_from_the_pieces_that_hold_them() -> None:
    """In the order that is asked for. The last piece is shorter, and one is not touched."""
    table = torch.randn((10, 3))

    def untouched(rows: torch.Tensor) -> torch.Tensor:
        raise AssertionError(rows)

    pieces = [table[:4].__getitem__, untouched, table[8:].__getitem__]
    rows = torch.tensor([9, 0, 3, 9, 8, 0])
    assert torch.equal(look_up_pieces(pieces, 4, rows), table[rows])


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["inkling", "inkling2", "inkling2_loop", "qwen4_exp", "dots3_note", "rwkv"])
def test_a_long_prompt_in_one_step_has_the_logits_of_transformers(kind: str) -> None:
    """Ten times as long as windows, distances and choices."""
    tokens = random_tokens(450, seed=5)
    expected = reference_logits(folder_of(kind), tokens)
    cache = Cache(folder_of(kind))
    cache.block_tables = cache.block_tables.reshape(1, -1)
    with torch.inference_mode(), on_one_thread():
        logits = cache.run((0, tokens))[0]
    assert (logits - expected).abs().max() <= 1e-4 * (expected.max() - expected.min())
