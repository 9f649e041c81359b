"""DeepSeek-V4's compressed keys and HY 4's and its tensors: what `test_layer_kinds.py` compares with transformers, from
checkpoints with other names, and what is refused.
"""

from __future__ import annotations

import json
import pathlib
import re
import shutil

import pytest
import safetensors.torch
import torch
import transformers

from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.kv_cache_dtype import check_kv_cache
from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelError
from manta.workers.models.raw_config import ConfigError
from manta.workers.models.variants import check_block_size
from manta.workers.parallel.split import check_num_ranks
from manta.workers.torch_worker.tensor_check import check_tensors
from tests.checkpoints import reference_logits
from tests.workers.test_layer_kinds import NUM_TOKENS, changed, folder_of, logits_of, rewritten
from tests.workers.test_models import random_tokens

V4, HY = "deepseek_v4", "hy_v4"


def stored_names(folder: pathlib.Path) -> set[str]:
    with safetensors.torch.safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize(("kind", "published"), [(V4, "attn_sink"), (HY, "learnable_sink_param")])
def test_checkpoints_with_the_names_of_transformers_modules_give_the_same_logits(
    kind: str, published: str, tmp_path: pathlib.Path
) -> None:
    """transformers writes the names of published checkpoints."""
    folder, to = folder_of(kind), tmp_path / "named otherwise"
    assert any(published in name for name in stored_names(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    shutil.copytree(folder, to)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(state, to / "model.safetensors", {"format": "pt"})
    assert not any(published in name for name in stored_names(to))
    check_tensors(to, load_model_config(to))
    tokens = random_tokens(60)
    assert torch.equal(logits_of(to, tokens), logits_of(folder, tokens))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        (HY, "self_attn.linear_gate"),
        (HY, "learnable_sink_param"),
        (V4, "attn_sink"),
        (V4, "compressor.ape"),
        (V4, "hc_ffn_base"),
    ],
)
def test_with_another_tensor_the_tokens_differ(kind: str, tensor: str, tmp_path: pathlib.Path) -> None:
    def other(key: str, stored: torch.Tensor) -> dict[str, torch.Tensor]:
        return {key: stored * 0.5 + 0.1 if tensor in key else stored}

    tokens = random_tokens(NUM_TOKENS)
    logits = logits_of(rewritten(folder_of(kind), tmp_path / "other", other), tokens)
    assert not torch.equal(logits.argmax(-1), reference_logits(folder_of(kind), tokens).argmax(-1))


def test_older_keys_of_deepseek_v4_are_those_of_transformers(tmp_path: pathlib.Path) -> None:
    """As the published configuration has them, whose list of rates ends with those of layers that draft tokens."""
    rope = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
    published = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "compress_ratios": [0, 0, 4, 128, 4, 0],
        "compress_rope_theta": 160000,
        "head_dim": 64,
        "hidden_size": 64,
        "index_head_dim": 32,
        "max_position_embeddings": 1024,
        "n_routed_experts": 8,
        "num_attention_heads": 8,
        "num_hash_layers": 2,
        "num_hidden_layers": 5,
        "num_key_value_heads": 1,
        "qk_rope_head_dim": 16,
        "rope_scaling": rope,
        "rope_theta": 10000,
        "topk_method": "noaux_tc",
        "torch_dtype": "float32",
        "vocab_size": 320,
    }
    stored = json.loads(transformers.DeepseekV4Config(**published).to_json_string())
    found = []
    for name, values in (("published", published), ("stored", stored)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"eos_token_id": 1} | values))
        found.append(load_model_config(tmp_path / name))
    assert found[0] == found[1]
    assert found[0].unused_keys == ()
    assert found[0].compressed is not None
    assert found[0].compressed.rates == (0, 0, 4, 128, 4)


def test_entries_take_the_room_of_their_share_of_tokens() -> None:
    """In float32: 16 numbers of a key, and a quarter of an entry and of an indexer's key, in a multiple of 16."""
    config = load_model_config(folder_of(V4))
    assert config.kv_bytes_per_token("float32") == 4 * 4 * 32
    sparse, heavy = 7 * 4 * (16 + 16), 7 * 2 * 16
    assert config.state_bytes == 4 * (2 * sparse + heavy)


def test_blocks_that_would_part_an_entry_are_refused() -> None:
    config = load_model_config(folder_of(V4))
    check_block_size(config, 12)
    with pytest.raises(ModelError, match="in the rows of 4 tokens, and block_size 6 is no multiple"):
        check_block_size(config, 6)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_rounded_cache_is_refused_where_keys_lie_beside_compressed_ones(dtype: str) -> None:
    options = ModelOptions(model=str(folder_of(V4)), kv_cache_dtype=dtype)
    with pytest.raises(ModelError, match="DeepseekV4ForCausalLM, whose cached keys lie beside compressed ones"):
        check_kv_cache(options, "cpu", load_model_config(folder_of(V4)))


def test_ranks_that_would_part_a_group_of_heads_are_refused() -> None:
    config = load_model_config(folder_of(V4))
    check_num_ranks(config, 2)
    with pytest.raises(
        ModelError, match=r"cannot split the 2 groups of heads .* set tensor_parallel_size to one of 1, 2"
    ):
        check_num_ranks(config, 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", ["full_attention"] * 4),
        ("mlp_layer_types", ["moe"]),
        ("mlp_layer_types", ["dense"] * 4),
        ("scoring_func", "softmax"),
        ("norm_topk_prob", False),
        ("num_key_value_heads", 2),
        ("n_shared_experts", 2),
        ("o_groups", 3),
        ("index_head_dim", 18),
        ("index_head_dim", 4),
        ("mlp_bias", True),
        ("swiglu_limit", 0),
        ("hc_sinkhorn_iters", 0),
        ("hc_mult", 1000),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(key: str, value: object, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):
        load_model_config(changed(folder_of(V4), tmp_path / "changed", {key: value}))


def test_a_table_that_names_other_experts_is_refused(tmp_path: pathlib.Path) -> None:
    folder = rewritten(
        folder_of(V4), tmp_path / "other", lambda name, each: {name: each + 5 if name.endswith("tid2eid") else each}
    )
    with pytest.raises(ModelError, match="tid2eid has numbers that are none of the 8 experts"):
        logits_of(folder, random_tokens(4))
