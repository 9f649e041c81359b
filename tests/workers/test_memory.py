"""The KV cache that is taken unasked: enough for what may run at a time, and no more than the model's size warrants."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch

from manta.cluster.llm import LLM
from manta.workers.checkpoints.memory import block_needs, plan_kv_cache, weight_bytes
from manta.workers.checkpoints.model_folder import load_model_config, resolve_model_folder
from manta.workers.kv_groups import group_layers, most_states
from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelConfig, StateShape
from manta.workers.step import NUM_FIXED_STATES
from tests.checkpoints import checkpoint

GIB = 2**30
DEMO = load_model_config(resolve_model_folder("demo"))


def shape(num_layers: int, num_kv_heads: int, head_dim: int, positions: int) -> ModelConfig:
    return msgspec.structs.replace(
        DEMO, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, max_position_embeddings=positions
    )


QWEN_05B, QWEN_7B = shape(24, 2, 64, 32768), shape(28, 4, 128, 32768)
WEIGHTS_05B, WEIGHTS_7B = 988_000_000, 15_230_000_000


def plan(
    model: ModelConfig,
    free_bytes: int = 20 * GIB,
    weight_bytes: int = WEIGHTS_05B,
    draft: ModelConfig | None = None,
    **options: Any,
) -> tuple[int, int]:
    """Returns (bytes, tokens)."""
    sizes = plan_kv_cache(
        model, "bfloat16", ModelOptions(**options), free_bytes=free_bytes, weight_bytes=weight_bytes, draft=draft
    )
    return sizes.num_bytes, sizes.num_blocks * 16


def test_the_demo_model_takes_half_a_gibibyte() -> None:
    for free in (4, 20, 500):
        assert plan(DEMO, weight_bytes=8_000_000, free_bytes=free * GIB) == (GIB // 2, 256 * 512)


def test_half_a_billion_parameters_keep_256_sequences() -> None:
    num_bytes, tokens = plan(QWEN_05B)
    assert tokens >= 256 * 1024
    assert num_bytes < 4 * WEIGHTS_05B + 1


def test_a_large_model_takes_only_its_share() -> None:
    num_bytes, tokens = plan(QWEN_7B, weight_bytes=WEIGHTS_7B, free_bytes=48 * GIB)
    assert 0.399 * 48 * GIB < num_bytes <= 0.4 * 48 * GIB
    assert tokens >= 256 * 1024


def test_an_exclusive_devices_cache_takes_its_share() -> None:
    """The weights of 8 billion parameters are a seventh of it; by four times the weights half would lie idle."""
    options = ModelOptions()
    free = {"free_bytes": 120 * GIB, "weight_bytes": WEIGHTS_7B, "most_of_free": 0.9}
    alone = plan_kv_cache(QWEN_7B, "bfloat16", options, shares_memory=False, **free).num_bytes
    shared = plan_kv_cache(QWEN_7B, "bfloat16", options, shares_memory=True, **free).num_bytes
    assert 0.899 * 120 * GIB < alone <= 0.9 * 120 * GIB
    assert shared < 4 * WEIGHTS_7B + 1
    one = ModelOptions(max_num_sequences=1)
    few = plan_kv_cache(DEMO, "bfloat16", one, shares_memory=False, **free).num_bytes
    assert few == plan(DEMO, max_num_sequences=1, weight_bytes=8_000_000)[0], "no more than sequences can fill"


def test_few_sequences_take_what_they_can_use() -> None:
    assert plan(QWEN_05B, max_num_sequences=1, max_model_len=4096)[1] == 4 * 4096
    assert plan(DEMO, max_num_sequences=1, weight_bytes=8_000_000)[1] == 4 * 1024


@pytest.mark.parametrize("length", [1, 15, 17, 1000, 131072])
@pytest.mark.parametrize("max_num_sequences", [1, 2, 256])
def test_the_longest_sequence_has_room_where_possible(length: int, max_num_sequences: int) -> None:
    model = shape(1, 1, 16, length)
    options = {"weight_bytes": 1000, "max_num_sequences": max_num_sequences}
    assert plan(model, **options)[1] >= length
    assert plan(shape(1, 1, 16, 10**6), max_model_len=length, **options)[1] >= length


def test_what_the_user_asks_for_is_taken() -> None:
    assert plan(DEMO, kv_cache_bytes=5 * GIB)[0] == 5 * GIB
    assert plan(DEMO, kv_cache_fraction=0.5)[0] == 10 * GIB
    assert plan(DEMO, kv_cache_bytes=GIB, kv_cache_fraction=0.5)[0] == GIB


def test_a_draft_models_keys_and_values_are_counted() -> None:
    num_bytes, tokens = plan(DEMO, weight_bytes=8_000_000, draft=shape(2, 4, 64, 1024))
    assert tokens == 256 * 512
    assert num_bytes == GIB * 3 // 4


def test_the_engine_takes_what_is_planned() -> None:
    folder = checkpoint("llama")
    info = LLM(str(folder), dtype="float32", max_num_sequences=4).engine.model
    config = load_model_config(folder)
    weights = (folder / "model.safetensors").stat().st_size
    per_token = config.kv_bytes_per_token("float32")
    assert info.max_model_len == config.max_position_embeddings
    assert info.kv_cache_bytes <= max(4 * weights, 4 * 512 * per_token)
    assert info.num_blocks * info.block_size >= 2 * info.max_model_len


def test_quantised_weights_count_as_they_are_stored(tmp_path: pathlib.Path) -> None:
    tensors = {"weight": torch.zeros(8, 4, dtype=torch.int8), "weight_scale": torch.zeros(8, 1)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    assert weight_bytes(tmp_path, "bfloat16") == 32 + 8 * 2


def recurrent(model: ModelConfig, state_bytes: int, num_attending: int) -> ModelConfig:
    """The same model, of whose layers only the first few have attention and the last one a state."""
    states = (None,) * (model.num_layers - 1) + (StateShape(((state_bytes // 4, 1),)),)
    attends = tuple(layer < num_attending for layer in range(model.num_layers))
    return msgspec.structs.replace(model, layer_states=states, layer_attends=attends)


MIB = 1 << 20
HYBRID = recurrent(shape(24, 2, 256, 262_144), 19 * MIB, 6)
"""The sizes of Qwen3.5 with 0.8 billion parameters: a state has the bytes of 1,600 tokens."""


@pytest.mark.parametrize("budget", [600 * MIB, 2 * GIB, 8 * GIB, 100 * GIB])
def test_blocks_and_states_suffice_for_as_many_sequences(budget: int) -> None:
    sizes = plan_kv_cache(
        HYBRID, "bfloat16", ModelOptions(kv_cache_bytes=budget), free_bytes=budget, weight_bytes=WEIGHTS_05B
    )
    most = most_states(0, has_drafts=False)
    num_sequences = (sizes.num_state_slots - NUM_FIXED_STATES) // most
    of_blocks = sizes.num_blocks * 16 // ModelOptions().typical_sequence_tokens
    assert sizes.num_bytes <= budget
    assert num_sequences == 256 or num_sequences <= of_blocks <= 1.5 * num_sequences + 3


def test_a_long_sequence_has_its_blocks_before_others_have_states() -> None:
    options = ModelOptions(kv_cache_bytes=GIB, max_model_len=65_536)
    sizes = plan_kv_cache(HYBRID, "bfloat16", options, free_bytes=GIB, weight_bytes=WEIGHTS_05B)
    assert sizes.num_blocks * 16 >= 65_536
    assert sizes.num_state_slots >= NUM_FIXED_STATES + most_states(0, has_drafts=False)


def test_without_attention_all_memory_is_for_states() -> None:
    model = recurrent(shape(24, 2, 64, 262_144), 19 * MIB, 0)
    layers = group_layers([None] * 24, model.attends)
    options = ModelOptions(kv_cache_bytes=GIB)
    sizes = plan_kv_cache(model, "bfloat16", options, free_bytes=GIB, weight_bytes=WEIGHTS_05B, layers=layers)
    assert sizes.block_bytes == 0
    assert GIB - 6 * 19 * MIB < sizes.num_bytes <= GIB
    assert block_needs(layers.groups, options).longest(sizes.num_blocks, 262_144) == 262_144


def test_ranks_split_a_state_but_for_what_all_of_them_have() -> None:
    state = StateShape(((96, 3), (8, 16, 32)), kept_whole=(32, 0))
    assert state.share(4) == StateShape(((48, 3), (2, 16, 32)), kept_whole=(32, 0))
    assert not state.can_split(3)
    assert state.num_bytes == 4 * (96 * 3 + 8 * 16 * 32)
