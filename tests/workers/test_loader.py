"""Configurations and checkpoints: what is read from them in every spelling, and what is refused by name."""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
from typing import Any

import huggingface_hub.constants
import pytest
import safetensors.torch
import torch
import transformers

from manta.workers.checkpoints.model_folder import load_model_config, resolve_model_folder
from manta.workers.decoders.decoder import Decoder
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.models.raw_config import ConfigError
from manta.workers.platforms import choose_platform
from manta.workers.torch_worker.loader import load_model
from manta.workers.torch_worker.tensor_check import check_tensors
from tests.checkpoints import checkpoint, make_checkpoint

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def config_of(folder: pathlib.Path, **changes: Any) -> ModelConfig:
    values = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return load_model_config(folder)


def load(folder: pathlib.Path, dtype: str = "float32") -> Decoder:
    model = load_model(folder, load_model_config(folder), dtype, choose_platform("cpu", None))
    assert isinstance(model, Decoder)
    return model


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A tied tiny Llama to damage."""
    return shutil.copytree(checkpoint("llama3"), tmp_path / "model")


def change_tensors(folder: pathlib.Path, **changes: torch.Tensor | None) -> None:
    """Rewrites the weights with tensors (dots written as __) replaced or, if None, left out."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


# ---- configurations --------------------------------------------------------------------------------------------------


def test_old_and_new_config_spellings_agree(tmp_path: pathlib.Path) -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    old = config_of(tmp_path, rope_theta=500000.0, rope_scaling=llama3 | {"type": "llama3"})
    new = config_of(
        tmp_path,
        torch_dtype=...,
        dtype="bfloat16",
        rope_parameters=llama3 | {"rope_type": "llama3", "rope_theta": 500000.0},
    )
    assert old == new
    assert (new.rope.rope_type, new.rope.theta, new.rope.factor, new.dtype) == ("llama3", 5e5, 8.0, "bfloat16")


def test_context_length_includes_the_rope_scaling(tmp_path: pathlib.Path) -> None:
    assert config_of(tmp_path).max_position_embeddings == 512
    assert config_of(tmp_path, rope_scaling={"type": "linear", "factor": 4.0}).max_position_embeddings == 2048
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert config_of(tmp_path, rope_scaling=yarn).max_position_embeddings == 1024


def test_end_of_sequence_tokens_of_both_files_count(tmp_path: pathlib.Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert config_of(tmp_path, eos_token_id=2).eos_token_ids == (2, 7)
    (tmp_path / "generation_config.json").unlink()
    assert config_of(tmp_path).eos_token_ids == ()


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_end_of_sequence_tokens_beyond_the_vocabulary_are_refused(file: str, tmp_path: pathlib.Path) -> None:
    config_of(tmp_path, eos_token_id=319)
    contents = json.loads((tmp_path / file).read_text()) if file == "config.json" else {}
    (tmp_path / file).write_text(json.dumps(contents | {"eos_token_id": [2, 320]}))
    with pytest.raises(ConfigError) as caught:
        load_model_config(tmp_path)
    assert (caught.value.file, caught.value.key) == (str(tmp_path / file), "eos_token_id[1]")
    assert caught.value.allowed == "an integer from 0 to 319"


def test_recommended_sampling_parameters_are_read(tmp_path: pathlib.Path) -> None:
    recommended = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    others = {"do_sample": True, "max_new_tokens": 7, "num_beams": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended | others))
    assert dict(config_of(tmp_path).sampling_defaults) == recommended
    for key in recommended:
        for value in ("0.6", True, -2, [0.6], 1e30):
            (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
            with pytest.raises(ConfigError) as caught:
                config_of(tmp_path)
            assert caught.value.key == key


def test_sliding_windows_follow_each_familys_rules(tmp_path: pathlib.Path) -> None:
    assert config_of(tmp_path, sliding_window=8).sliding_windows == (None,) * 4
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert config_of(tmp_path, **mistral, sliding_window=8).sliding_windows == (8,) * 4
    assert config_of(tmp_path, **mistral, sliding_window=None).sliding_windows == (None,) * 4
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 3}
    assert config_of(tmp_path, **qwen2, use_sliding_window=False).sliding_windows == (None,) * 4
    assert config_of(tmp_path, **qwen2, use_sliding_window=True).sliding_windows == (None, None, None, 8)
    kinds = ["sliding_attention", "full_attention"] * 2
    windows = config_of(tmp_path, **qwen2, use_sliding_window=True, layer_types=kinds).sliding_windows
    assert windows == (8, None, 8, None)


def test_kv_bytes_per_token_counts_every_layer(tmp_path: pathlib.Path) -> None:
    config = config_of(tmp_path, head_dim=32)
    assert config.kv_bytes_per_token("bfloat16") == 2 * 4 * 2 * 32 * 2
    assert config.kv_bytes_per_token("float32") == 2 * config.kv_bytes_per_token("bfloat16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, 'hidden_act must be silu or swish or gelu .*, not "relu"'),
        ({"rope_scaling": {"rope_type": "novel"}}, r"\.rope_type must be default .*, not .novel"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, r"rope_scaling\.short_factor must be a list, not null"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor must be a number .*, not null"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be left",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config\.w_bit must be 4, not null"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype must be bfloat16 or float16 or float32"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of the 4 attention heads, not 3"),
        ({"num_hidden_layers": ...}, "num_hidden_layers"),
        ({"hidden_size": "64"}, "hidden_size must be an integer from 1 to 2147483647, not .64"),
        ({"architectures": ...}, "architectures must be a list with the name of an architecture"),
    ],
)
def test_unsupported_configurations_are_named(changes: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(tmp_path, **changes)


def test_a_broken_config_json_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load_model_config(tmp_path)


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_is_taken_as_it_is(folder: pathlib.Path) -> None:
    assert resolve_model_folder(str(folder)) == folder


def test_names_that_lead_to_no_model_say_why(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        resolve_model_folder(str(tmp_path))
    with pytest.raises(ModelError, match="no folder /no/such/folder"):
        resolve_model_folder("/no/such/folder")
    with pytest.raises(ModelError, match="neither a folder nor a Hugging Face hub id"):
        resolve_model_folder("not a/name")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="cannot be reached"):
        resolve_model_folder("manta-tests/not-there")


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named_with_its_shape(folder: pathlib.Path) -> None:
    change_tensors(folder, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight of shape \[96, 64\] is missing"):
        load(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: pathlib.Path) -> None:
    change_tensors(folder, model__layers__2__self_attn__k_proj__weight=torch.zeros(64, 64))
    with pytest.raises(ModelError, match=r"layers\.2\.self_attn\.k_proj\.weight has shape \[64, 64\].* \[32, 64\]"):
        load(folder)


def test_tensors_that_the_architecture_lacks_are_named(folder: pathlib.Path) -> None:
    change_tensors(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    with pytest.raises(ModelError, match=r"1 tensors .* model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(folder)


def test_stored_buffers_and_copied_heads_are_ignored(folder: pathlib.Path) -> None:
    rows = torch.randn(2, 64)
    expected = load(folder).compute_logits(rows)
    table = safetensors.torch.load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(
        folder, lm_head__weight=table.clone(), model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8)
    )
    torch.testing.assert_close(load(folder).compute_logits(rows), expected)


@pytest.mark.parametrize("changed", [0, 319])
def test_a_head_unlike_the_embedding_is_used_although_they_are_tied(changed: int, folder: pathlib.Path) -> None:
    """As transformers does. One number of one row makes it another head."""
    head = safetensors.torch.load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    head[changed, 5] += 3
    change_tensors(folder, lm_head__weight=head)
    check_tensors(folder, load_model_config(folder))
    tokens = [5, 7, 300]
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = reference.model(torch.tensor([tokens])).last_hidden_state[0]
        expected = reference.lm_head(hidden)
        found = load(folder).compute_logits(hidden)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(expected, hidden @ reference.model.embed_tokens.weight.T)


def test_an_integer_weight_is_refused(folder: pathlib.Path) -> None:
    change_tensors(folder, model__norm__weight=torch.zeros(64, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is I8"):
        load(folder)


def test_damaged_or_absent_files_are_named(folder: pathlib.Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1000])
    with pytest.raises(ModelError, match="truncated"):
        load(folder)
    path.write_bytes(b"\x10" + bytes(7) + b"no JSON, no JSON")
    with pytest.raises(ModelError, match="not a safetensors file"):
        load(folder)
    path.write_bytes((1 << 60).to_bytes(8, "little") + content[8:])
    with pytest.raises(ModelError, match="not a safetensors file"):
        load(folder)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="not a safetensors file"):
        load(folder)
    path.unlink()
    with pytest.raises(ModelError, match=r"holds no model\.safetensors"):
        load(folder)


def test_a_missing_shard_is_named(tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=1, max_shard_size="50KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load(folder)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_converted_from_every_stored_dtype(stored: str, dtype: str, tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint("qwen2", tmp_path, dtype=stored, num_hidden_layers=1)
    rows = torch.randn(3, 64)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    expected = rows @ tensors["model.embed_tokens.weight"].float().T
    logits = load(folder, dtype).compute_logits(rows.to(getattr(torch, dtype)))
    assert logits.dtype == getattr(torch, dtype)
    assert (logits.float() - expected).norm() / expected.norm() < (1e-6 if dtype == "float32" else 1e-2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_leaves_the_file_out_of_memory(tmp_path: pathlib.Path) -> None:
    """Every weight is held once, packed; of the file only embedding rows in use are resident."""
    folder = make_checkpoint("llama", tmp_path, vocab_size=320, hidden_size=512, intermediate_size=2048)
    model = load(folder)
    path = folder / "model.safetensors"
    lines = pathlib.Path("/proc/self/smaps").read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.endswith(str(path)))
    resident = next(int(line.split()[1]) * 1024 for line in lines[start:] if line.startswith("Rss:"))
    assert model.compute_logits(torch.zeros(1, 512)).shape == (1, 320)
    assert resident < 0.25 * path.stat().st_size


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU on this machine")
def test_a_missing_device_is_refused_with_remedy() -> None:
    with pytest.raises(ModelError, match=r"device 'cuda' is not .*set device to cpu or auto"):
        choose_platform("cuda", None)
