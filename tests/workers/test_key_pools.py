"""GLM-5.3 Flash's pools of tokens against plain loops in numpy, and what of it is refused. `test_layer_kinds.py`
compares whole models with transformers.
"""

from __future__ import annotations

import json
import pathlib
import re

import numpy as np
import pytest
import torch

from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.decoders.key_pools import choose_pools, write_pools
from manta.workers.decoders.sparse_attention import PIECE_BYTES, TokenChoice
from manta.workers.kernels import cpu
from manta.workers.kernels.weights import IndexerWeights
from manta.workers.models.model_config import IndexerShape, ModelError
from manta.workers.models.raw_config import ConfigError
from manta.workers.models.variants import check_block_size
from tests.checkpoints import reference_logits
from tests.workers.test_layer_kinds import NUM_TOKENS, changed, folder_of, logits_of, rewritten
from tests.workers.test_models import random_tokens
from tests.workers.test_sparse_attention import BLOCK_SIZE, HIDDEN, NUM_BLOCKS, RANK, Rows, metadata, slot, whole

SHAPE = IndexerShape(num_heads=3, head_dim=8, num_chosen=8, pool_len=2)
GLM = "glm5_next"


def indexer(generator: torch.Generator) -> IndexerWeights:
    size = SHAPE.head_dim
    return IndexerWeights(
        SHAPE,
        queries=Rows(whole(generator, SHAPE.num_heads * size, RANK)),
        keys=Rows(whole(generator, 2 * size, HIDDEN)),
        key_norm=torch.ones(size),
        key_bias=torch.zeros(size),
        shares=Rows(whole(generator, SHAPE.num_heads, HIDDEN, most=1)),
        pool_biases=torch.randn((SHAPE.pool_len, size), generator=generator),
    )


def pooled(rows: np.ndarray, biases: np.ndarray) -> np.ndarray:
    """The key of a pool of tokens [pool_len, 2, head_dim]."""
    powers = np.exp(rows[:, 1] + biases)
    return np.asarray((powers * rows[:, 0]).sum(0) / powers.sum(0))


@pytest.mark.parametrize("piece_bytes", [PIECE_BYTES, 300])
def test_the_best_pools_are_chosen_and_the_tokens_after_the_last(piece_bytes: int) -> None:
    """Tokens come in two steps, of which the second may complete a pool of the first, and are written twice, as after a
    draft that was rejected.
    """
    generator = torch.Generator().manual_seed(0)
    weights, biases = indexer(generator), indexer(torch.Generator().manual_seed(0)).pool_biases
    assert biases is not None
    lens = (31, 28, 7, 41)
    rows = torch.randn((4, 41, 2, SHAPE.head_dim), generator=generator)
    cached = torch.full((NUM_BLOCKS, BLOCK_SIZE, 2, SHAPE.head_dim), torch.nan)
    flat, pieces = cached.flatten(0, 1), [(0, 30), (25, 3), (0, 7), (40, 1)]
    last = metadata(*pieces)
    for before in (metadata(*((0, max(1, start)) for start, _ in pieces)), last, last):
        positions = before.positions.tolist()
        sequences = [seq for seq, count in enumerate(before.query_start.diff().tolist()) for _ in range(count)]
        for place, sequence, position in zip(before.slot_mapping.tolist(), sequences, positions, strict=True):
            flat[place] = rows[sequence, position]
        write_pools(weights, cached, before, cpu)
    normed, latents = whole(generator, last.num_tokens, HIDDEN), whole(generator, last.num_tokens, RANK)
    choice = choose_pools(weights, normed, latents, cached, last, cpu, piece_bytes)
    assert choice.slots is not None
    assert choice.lens is not None
    queries = weights.queries.forward(latents).view(last.num_tokens, SHAPE.num_heads, -1).numpy()
    shares, row, length = weights.shares.forward(normed).numpy(), 0, SHAPE.pool_len
    for sequence, (start, count) in enumerate(pieces):
        of_sequence = rows[sequence, : lens[sequence]].numpy()
        for position in range(start, start + count):
            num_pools = (position + 1) // length
            keys = [
                pooled(of_sequence[each * length : (each + 1) * length], biases.numpy()) for each in range(num_pools)
            ]
            scores = [shares[row] @ np.maximum(queries[row] @ key, 0) for key in keys]
            best = np.sort(np.argsort(-np.array(scores, np.float32), kind="stable")[: SHAPE.num_chosen // length])
            places = [each * length + token for each in best for token in range(length)]
            places += range(num_pools * length, position + 1)
            found = choice.slots[row, : choice.lens[row]].tolist()
            assert found == [slot(last, sequence, int(each)) for each in places], (sequence, position)
            row += 1


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "tensor",
    [
        "index_kpool_compress_gate",
        "index_kpool_compress_ape",
        "indexer.k_norm.bias",
        "f_b_proj",
        "hc_ffn_base",
        "hc_attn_scale",
    ],
)
def test_with_another_tensor_the_tokens_differ(tensor: str, tmp_path: pathlib.Path) -> None:
    def other(key: str, stored: torch.Tensor) -> dict[str, torch.Tensor]:
        return {key: stored * 0.5 + 0.1 if tensor in key else stored}

    tokens = random_tokens(NUM_TOKENS)
    logits = logits_of(rewritten(folder_of(GLM), tmp_path / "other", other), tokens)
    assert not torch.equal(logits.argmax(-1), reference_logits(folder_of(GLM), tokens).argmax(-1))


def test_a_step_of_short_sequences_chooses_no_pools() -> None:
    generator = torch.Generator().manual_seed(0)
    weights, step = indexer(generator), metadata((0, SHAPE.num_chosen + 1), (3, 2))
    normed, latents = whole(generator, step.num_tokens, HIDDEN), whole(generator, step.num_tokens, RANK)
    cached = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, SHAPE.head_dim)
    assert choose_pools(weights, normed, latents, cached, step, cpu) == TokenChoice()


def test_a_token_caches_a_latent_vector_a_key_and_its_weights() -> None:
    """In float32, in the two layers with attention: a latent vector of 32 numbers, and a key of 16 with its weights."""
    assert load_model_config(folder_of(GLM)).kv_bytes_per_token("float32") == 2 * 4 * (32 + 2 * 16)


def test_blocks_that_would_part_a_pool_are_refused() -> None:
    config = load_model_config(folder_of(GLM))
    check_block_size(config, 12)
    with pytest.raises(ModelError, match=r"pools of 4 tokens \(index_kpool\), and block_size 6 is no multiple"):
        check_block_size(config, 6)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("index_kpool", 0),
        ("index_topk", 18),
        ("index_kpool_always_select_tail", False),
        ("index_kpool_compress", False),
        ("mhc", False),
        ("qk_rope_head_dim", 8),
        ("q_lora_rank", None),
        ("layer_types", ["sliding_attention"] * 4),
        ("layer_types", ["linear_attention"]),
        ("indexer_types", ["full", "shared", "full", "full"]),
        ("linear_lower_bound", 1.0),
        ("hidden_act", "gelu"),
        ("swiglu_limit", 0),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(key: str, value: object, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):
        load_model_config(changed(folder_of(GLM), tmp_path / "changed", {key: value}))


def test_published_keys_are_those_of_transformers(tmp_path: pathlib.Path) -> None:
    """The published configuration has an object for delta attention, and another name for layers with attention."""
    folder = folder_of(GLM)
    written = json.loads((folder / "config.json").read_text())
    own = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "linear_lower_bound")
    heads, head_dim, width, bound = (written.pop(key) for key in own)
    published = written | {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "layer_types": [each.replace("indexed", "deepseek_sparse") for each in written["layer_types"]],
        "linear_attn_config": {
            "num_heads": heads,
            "head_dim": head_dim,
            "short_conv_kernel_size": width,
            "gate_lower_bound": bound,
            "kda_layers": [0, 3],
            "full_attn_layers": [1, 2],
        },
        "mhc": True,
        "mla_use_nope": True,
        "index_kpool_compress": True,
        "index_share_for_mtp_iteration": True,
        "indexer_rope_interleave": True,
        "moe_router_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    served, usual = load_model_config(tmp_path), load_model_config(folder)
    assert served.unused_keys == ()
    assert served.wrapper == "Glm5NextForConditionalGeneration"
    assert (served.recurrent, served.layer_attends, served.indexer) == (
        usual.recurrent,
        usual.layer_attends,
        usual.indexer,
    )
