"""What of a quantised checkpoint cannot be served is said in one sentence: by its configuration or by its tensors.
And `manta check` says what is quantised how.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest
import safetensors.torch
import torch

from manta import LLM
from manta.cluster.cli.__main__ import main
from manta.cluster.cli.check import check_model
from manta.cluster.config import EngineConfig
from manta.workers.checkpoints.memory import weight_bytes
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.models.model_config import ModelError
from manta.workers.models.raw_config import ConfigError
from manta.workers.torch_worker.tensor_check import check_tensors
from tests.checkpoints import checkpoint
from tests.gguf_files import write_gguf
from tests.quantised_checkpoints import AWQ_CONFIG, Stored, awq, gptq, gptq_config, of_layers, quantised_pair
from tests.workers.test_quantised_formats import FORMATS

PACKED = FORMATS["W4A16"]


def _changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy of compressed-tensors' configuration with changes in its group."""
    copy = json.loads(json.dumps(config))
    for name, value in changes.items():
        copy["config_groups"]["group_0"][name] = value
    return copy


IN_GROUP = "config_groups.group_0"
CONFIGURATIONS: dict[str, tuple[Any, str, Any]] = {
    "another method": ({"quant_method": "bitsandbytes"}, "quant_method", "bitsandbytes"),
    "a text": ("gptq", "", "gptq"),
    "no targets": (_changed(PACKED.config, targets=None), f"{IN_GROUP}.targets", None),
    "no method": ({"bits": 4}, "quant_method", None),
    "three bits": (gptq_config(4, True) | {"bits": 3}, "bits", 3),
    "three bits of one layer": (
        gptq_config(4, True) | {"dynamic": {"+:.*down_proj": {"bits": 3}}},
        "dynamic.+:.*down_proj.bits",
        3,
    ),
    "a broken expression": (gptq_config(4, True) | {"dynamic": {"+:(": {}}}, "dynamic.+:(", {}),
    "marlin": (gptq_config(4, True) | {"checkpoint_format": "marlin"}, "checkpoint_format", "marlin"),
    "group size": (gptq_config(4, True) | {"group_size": 0}, "group_size", 0),
    "awq's gemv": (AWQ_CONFIG | {"version": "gemv"}, "version", "gemv"),
    "awq's bits": (AWQ_CONFIG | {"bits": 8}, "bits", 8),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt", "e5m2"),
    "sparsity": (
        PACKED.config | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config.format",
        "sparse-24-bitmask",
    ),
    "rotations": (
        PACKED.config | {"transform_config": {"config_groups": {"a": {}}}},
        "transform_config",
        {"config_groups": {"a": {}}},
    ),
    "a format that is new": (_changed(PACKED.config, format="int3"), f"{IN_GROUP}.format", "int3"),
    "no groups": (PACKED.config | {"config_groups": {}}, "config_groups", {}),
    "activations only": (_changed(PACKED.config, weights=None), f"{IN_GROUP}.weights", None),
    "five bits": (
        _changed(PACKED.config, weights={"num_bits": 5, "type": "int", "strategy": "channel"}),
        f"{IN_GROUP}.weights.num_bits",
        5,
    ),
    "floats as integers": (
        _changed(PACKED.config, weights={"num_bits": 4, "type": "float", "strategy": "channel"}),
        f"{IN_GROUP}.weights.type",
        "float",
    ),
}
"""A `quantization_config`, and the key and the value in it that are refused."""


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_that_is_not_served_is_named(name: str, tmp_path: pathlib.Path) -> None:
    values, key, value = CONFIGURATIONS[name]
    folder = pathlib.Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": values}))
    with pytest.raises(ConfigError) as caught:
        load_model_config(folder)
    assert (caught.value.key, caught.value.value) == (f"quantization_config.{key}".rstrip("."), value)
    assert caught.value.file == str(folder / "config.json")


def test_quantised_checkpoints_that_transformers_would_run_are_refused(tmp_path: pathlib.Path) -> None:
    folder = pathlib.Path(shutil.copytree(checkpoint("gpt_neox"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": AWQ_CONFIG}))
    with pytest.raises(ModelError, match="runs through transformers, and its awq checkpoints are not"):
        load_model_config(folder)


LAYER = "model.layers.1.mlp.down_proj"
DAMAGES: dict[str, tuple[str, dict[str, torch.Tensor | None], str]] = {
    "no weights": ("gptq", {"qweight": None}, rf"{LAYER}\.qweight of shape \[12, 64\] is missing"),
    "no zero points of gptq": ("gptq", {"qzeros": None}, rf"{LAYER}\.qzeros of shape \[3, 8\] is missing"),
    "no zero points of awq": ("awq", {"qzeros": None}, rf"{LAYER}\.qzeros of shape \[3, 8\] is missing"),
    "no scale of floats": ("fp8", {"weight_scale": None}, rf"{LAYER}\.weight_scale of shape \[\] is missing"),
    "scales of other blocks": ("blocks", {"weight_scale_inv": torch.ones(2, 3)}, r"has shape \[2, 3\].*for \[2, 2\]"),
    "a tensor is missing": ("gptq", {"scales": None}, rf"{LAYER}\.scales of shape \[3, 64\] is missing"),
    "another shape": (
        "gptq",
        {"qweight": torch.zeros(6, 64, dtype=torch.int32)},
        r"qweight has shape \[6, 64\].*\[12, 64\]",
    ),
    "another dtype": ("gptq", {"qzeros": torch.zeros(3, 8)}, r"qzeros is F32; only I32 is read"),
    "groups that are not there": ("gptq", {"g_idx": torch.full((96,), 7).int()}, "has groups 7 to 7, and there are 3"),
    "groups of two sizes": (
        "gptq",
        {"g_idx": torch.tensor([0] * 40 + [1] * 24 + [2] * 32).int()},
        "has groups of 24 to 40 inputs; all must have 32",
    ),
    "a bias that nobody adds": ("gptq", {"bias": torch.ones(64)}, "bias is not zero, and its architecture has no bias"),
    "scales of another group size": (
        "packed",
        {"weight_scale": torch.ones(64, 6)},
        r"weight_scale has shape \[64, 6\]",
    ),
    "zero points of another shape": (
        "packed, asymmetric",
        {"weight_zero_point": torch.zeros(64, 3, dtype=torch.int32)},
        r"weight_zero_point has shape \[64, 3\].*\[8, 1\]",
    ),
    "another layout": ("awq", {"qweight": torch.zeros(64, 12, dtype=torch.int32)}, r"qweight has shape \[64, 12\]"),
    "a tensor that belongs to nothing": ("awq", {"qscales": torch.ones(3)}, "1 tensors that its architecture does not"),
}
DAMAGED = {
    "gptq": (of_layers(gptq(4, False)), gptq_config(4, False)),
    "awq": (of_layers(awq), AWQ_CONFIG),
    "packed": PACKED[:2],
    "fp8": FORMATS["fp8"][:2],
    "blocks": FORMATS["fp8, blocks that end inside"][:2],
    "packed, asymmetric": FORMATS["W4A16, by output"][:2],
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", DAMAGES)
def test_a_tensor_that_does_not_fit_is_named(name: str, tmp_path: pathlib.Path) -> None:
    kind, changes, words = DAMAGES[name]
    folder, _ = quantised_pair(checkpoint("llama"), tmp_path, *DAMAGED[kind])
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for suffix, tensor in changes.items():
        tensors.pop(f"{LAYER}.{suffix}", None)
        if tensor is not None:
            tensors[f"{LAYER}.{suffix}"] = tensor
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(ModelError, match=words) as refusal:
        LLM(str(folder), kv_cache_bytes="4MiB", num_threads=1)
    if "shape" in str(refusal.value):
        assert f" {path}" in str(refusal.value)
        assert "; copy or download configuration and weights of one model again" in str(refusal.value)


def test_symmetric_awq_needs_no_zero_points(tmp_path: pathlib.Path) -> None:
    folder, _ = quantised_pair(checkpoint("llama"), tmp_path, of_layers(awq), AWQ_CONFIG | {"zero_point": False})
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({n: each for n, each in tensors.items() if not n.endswith(".qzeros")}, path)
    check_tensors(folder, load_model_config(folder))


def test_tensors_without_a_configuration_are_named(tmp_path: pathlib.Path) -> None:
    """Older tools wrote the configuration to a file of its own."""
    folder, _ = quantised_pair(checkpoint("llama"), tmp_path, *DAMAGED["gptq"])
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"no quantization_config, and the checkpoint has .*\.qweight; add the entry"):
        check_tensors(folder, load_model_config(folder))


def test_unused_zero_biases_are_ignored(tmp_path: pathlib.Path) -> None:
    """Older tools stored one for every linear."""
    folder, _ = quantised_pair(checkpoint("llama"), tmp_path, *DAMAGED["gptq"])
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(tensors | {f"{LAYER}.bias": torch.zeros(64)}, path)
    check_tensors(folder, load_model_config(folder))
    LLM(str(folder), kv_cache_bytes="4MiB", num_threads=1)


def test_what_the_configuration_leaves_unquantised_must_be(tmp_path: pathlib.Path) -> None:
    config = AWQ_CONFIG | {"modules_to_not_convert": ["lm_head", "down_proj"]}
    folder, _ = quantised_pair(checkpoint("llama"), tmp_path, of_layers(awq), config)
    with pytest.raises(ModelError, match=r"leaves model\.layers\.0\.mlp\.down_proj unquantised, and .*qweight"):
        check_tensors(folder, load_model_config(folder))


def test_the_tpu_worker_reads_no_quantised_checkpoints(tmp_path: pathlib.Path) -> None:
    planning = pytest.importorskip("manta.workers.jax_worker.planning")
    folder, _ = quantised_pair(checkpoint("llama"), tmp_path, of_layers(awq), AWQ_CONFIG)
    with pytest.raises(ModelError, match="device tpu reads no awq checkpoints; use one in bfloat16, or device cpu"):
        planning.native_config(folder)


@pytest.mark.usefixtures("trials_here")
def test_check_answers_for_a_file_and_a_folder(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = checkpoint("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    path = write_gguf(original, tmp_path / "pens.gguf", lambda name: "Q6_K" if "ffn_down" in name else "Q4_K")
    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"model         {path}" in printed
    assert "quantised     gguf: 14 matrices of Q4_K, 2 of Q6_K (mlp.down_proj in 2 of 2 layers); kept as " in printed
    assert "not quantised" not in printed
    report = check_model(EngineConfig(model=str(path)))
    plain = check_model(EngineConfig(model=str(original)))
    assert report.num_parameters == plain.num_parameters


@pytest.mark.usefixtures("trials_here")
def test_check_counts_represented_parameters(tmp_path: pathlib.Path) -> None:
    """And the memory of what is kept: here all weights in bfloat16."""
    folder, dense = quantised_pair(checkpoint("llama"), tmp_path, of_layers(awq), AWQ_CONFIG)
    report, plain = (
        check_model(EngineConfig(model=str(each), dtype="bfloat16", weights="dense")) for each in (folder, dense)
    )
    assert report.num_parameters == plain.num_parameters
    assert report.quantized is not None
    assert plain.quantized is None
    assert report.weight_bytes == plain.weight_bytes


STORED: dict[str, tuple[str, str]] = {
    "gptq": ("gptq", "21 matrices of 4 bits in groups of 32"),
    "awq": ("awq", "21 matrices of 4 bits in groups of 32"),
    "W8A8": ("compressed-tensors", "21 matrices of 8 bits by output, made for activations of 8 bits"),
    "W8A16, one scale": ("compressed-tensors", "21 matrices of 8 bits with one scale"),
    "W4A16": ("compressed-tensors", "21 matrices of 4 bits in groups of 32"),
    "float8, by output": ("compressed-tensors", "21 matrices of 8-bit floats by output"),
    "fp8": ("fp8", "21 matrices of 8-bit floats with one scale"),
    "fp8, blocks that end inside": ("fp8", "21 matrices of 8-bit floats in blocks of 48 x 48"),
    "mxfp4": ("compressed-tensors", "21 matrices of 4-bit floats in groups of 32"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", STORED)
def test_headers_tell_what_is_quantised_how(name: str, tmp_path: pathlib.Path) -> None:
    method, words = STORED[name]
    folder, _ = quantised_pair(
        checkpoint("llama", hidden_size=128, intermediate_size=192), tmp_path, *FORMATS[name][:2]
    )
    config = load_model_config(folder)
    assert config.quantization is not None
    assert config.quantization.method == method
    stored = check_tensors(folder, config).stored
    assert stored is not None
    assert stored.describe_quantized() == words
    assert stored.describe_unquantized() == "model.embed_tokens, lm_head"


def test_headers_tell_the_forms_of_each_layer(tmp_path: pathlib.Path) -> None:
    def mixed(name: str, weight: torch.Tensor) -> Stored | None:
        if name == "lm_head" or name == "model.layers.0.mlp.up_proj":
            return None
        return gptq(8 if "v_proj" in name else 4, True)(weight)

    config = gptq_config(4, True) | {"dynamic": {r"+:.*\.v_proj": {"bits": 8}, r"-:lm_head": {}}}
    folder, _ = quantised_pair(checkpoint("llama"), tmp_path, mixed, config)
    stored = check_tensors(folder, load_model_config(folder)).stored
    assert stored is not None
    assert stored.describe_quantized() == (
        "17 matrices of 4 bits in groups of 32, 3 of 8 bits in groups of 32 (self_attn.v_proj in 3 of 3 layers)"
    )
    assert stored.describe_unquantized() == "model.embed_tokens, lm_head, mlp.up_proj in 1 of 3 layers"


@pytest.mark.usefixtures("trials_here")
def test_check_says_how_float8_is_kept(tmp_path: pathlib.Path) -> None:
    """Rounded at load they take a byte each; otherwise as much as the model's dtype, also by the quick estimate."""
    folder, dense = quantised_pair(checkpoint("llama"), tmp_path, *FORMATS["fp8"][:2])
    report = check_model(EngineConfig(model=str(folder), weights="int8"))
    assert report.quantized == "fp8: 21 matrices of 8-bit floats with one scale; kept in int8"
    config = load_model_config(dense)
    assert report.weight_bytes == weight_bytes(dense, "float32", config, "int8")
    scales = 4 * 21
    assert weight_bytes(folder, "float32") == weight_bytes(dense, "float32") + scales
