"""Adapters that are damaged, hostile, of another model or of another kind: each is refused by what is wrong with it."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from manta.workers.adapters.adapter_bank import AdapterBank
from manta.workers.adapters.adapter_files import read_adapter
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.models.model_config import ModelError
from manta.workers.models.raw_config import ConfigError
from manta.workers.platforms import choose_platform
from manta.workers.platforms.cpu_linears import CpuLinearAdapting
from manta.workers.torch_worker.loader import load_model
from tests.adapters import adapters_of
from tests.checkpoints import checkpoint

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
QUERY = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def made() -> pathlib.Path:
    return pathlib.Path(adapters_of(checkpoint("llama")).add("damaged", 9, target_modules=["q_proj", "v_proj"]))


@pytest.fixture(scope="module")
def bank() -> AdapterBank:
    folder = checkpoint("llama")
    found = AdapterBank(CpuLinearAdapting(), torch.float32, 2**20, None)
    load_model(folder, load_model_config(folder), "float32", choose_platform("cpu", 1), bank=found)
    return found


@pytest.fixture
def folder(made: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(made, tmp_path / "adapter"))


def configure(folder: pathlib.Path, **values: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | values))


def retensor(folder: pathlib.Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


KEYS: dict[str, Any] = {
    "r": [0, -1, 10**9, "8", True, None],
    "lora_alpha": [float("inf"), 1e30, "16"],
    "peft_type": ["IA3", None],
    "use_dora": [True],
    "use_rslora": ["yes"],
    "bias": ["all", "lora_only"],
    "lora_bias": [True],
    "modules_to_save": [["lm_head"]],
    "fan_in_fan_out": [True],
    "init_lora_weights": ["pissa", "olora"],
    "trainable_token_indices": [[1, 2]],
    "alora_invocation_tokens": [[5]],
    "layer_replication": [[[0, 2]]],
    "target_parameters": ["mlp.experts", [5]],
    "rank_pattern": [{"q_proj": 0}, {"(": 4}, {"a" * 2000: 4}, ["q_proj"]],
    "alpha_pattern": [{"q_proj": "4"}],
    "target_modules": [[5]],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in KEYS.items() for value in values])
def test_a_key_that_changes_what_is_computed_is_refused_by_its_name(
    folder: pathlib.Path, key: str, value: object
) -> None:
    configure(folder, **{key: value})
    with pytest.raises(ConfigError) as refused:
        read_adapter(str(folder), 2**20)
    assert refused.value.key.startswith(key)


def test_a_parameter_that_no_tensor_is_of_is_refused(folder: pathlib.Path) -> None:
    configure(folder, target_parameters=["mlp.experts.gate_up_proj"])
    with pytest.raises(ModelError, match=r"target parameter mlp\.experts\.gate_up_proj"):
        read_adapter(str(folder), 2**20)


def test_an_unknown_key_and_a_pattern_that_backtracks_are_no_trap(folder: pathlib.Path) -> None:
    configure(folder, rank_pattern={r"(.*a.*)*(.*b.*)*(.*c.*)*\d{3}z": 4, "[qv]_proj": 4})
    read_adapter(str(folder), 2**20)
    configure(folder, use_newest_idea=True)
    with pytest.raises(ModelError, match="use_newest_idea"):
        read_adapter(str(folder), 2**20)


@pytest.mark.parametrize(
    "patterns",
    [
        ["q_proj"],
        ["^q_proj"],
        [r"^model\.layers\.0\.self_attn\.q_proj"],
        ["model.layers.0.self_attn.q_proj"],
        ["(^q|v)_proj"],
        ["elf_attn.q_proj", "_proj", "x.model.layers.0.self_attn.q_proj"],
        ["layers.1.self_attn.q_proj", "[qv]_proj", "v_proj"],
    ],
)
def test_a_pattern_is_for_the_modules_that_peft_finds(folder: pathlib.Path, patterns: list[str]) -> None:
    from peft.utils.other import get_pattern_key

    alphas = {pattern: 3.0 + number for number, pattern in enumerate(patterns)}
    configure(folder, alpha_pattern=alphas)
    for name, module in read_adapter(str(folder), 2**20).modules.items():
        assert module.scale == alphas.get(get_pattern_key([*alphas], name), 16) / 4, name


def test_names_in_a_multimodal_model_are_those_of_peft(folder: pathlib.Path, made: pathlib.Path) -> None:
    """There the text decoder's names differ from the usual ones, and the configuration has them as they are."""

    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.replace("model.layers", "model.language_model.layers", 1)] = tensors.pop(name)

    retensor(folder, rename)
    anchored = r"^model\.language_model\.layers\.0\.self_attn\.q_proj"
    plain = "language_model.layers.1.self_attn.v_proj"
    configure(folder, alpha_pattern={anchored: 3.0, plain: 5.0}, target_modules=[plain, "q_proj", "v_proj"])
    usual, found = (read_adapter(str(each), 2**20).modules for each in (made, folder))
    assert found.keys() == usual.keys()
    changed = {"model.layers.0.self_attn.q_proj": 3 / 4, "model.layers.1.self_attn.v_proj": 5 / 4}
    assert {name: module.scale for name, module in found.items()} == dict.fromkeys(usual, 16 / 4) | changed
    retensor(folder, lambda tensors: tensors.update(load_file(made / WEIGHTS)))
    with pytest.raises(ModelError, match=r"module model\.layers\..* is there twice"):
        read_adapter(str(folder), 2**20)


def test_a_shape_with_too_many_numbers_is_refused_before_they_are_multiplied(folder: pathlib.Path) -> None:
    """The product of a million numbers would hold the interpreter for hours."""
    entry = {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]}
    header = json.dumps({QUERY: entry}).encode()
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ModelError, match="100000 dimensions"):
        read_adapter(str(folder), 2**20)


def without_b(tensors: Tensors) -> None:
    del tensors[QUERY.replace("lora_A", "lora_B")]


def as_integers(tensors: Tensors) -> None:
    tensors[QUERY] = tensors[QUERY].to(torch.int32)


def with_nan(tensors: Tensors) -> None:
    tensors[QUERY][0, 0] = float("nan")


def with_rank_5(tensors: Tensors) -> None:
    tensors[QUERY] = torch.zeros(5, 64)


def with_three_dimensions(tensors: Tensors) -> None:
    tensors[QUERY] = tensors[QUERY][None].clone()


def with_narrow_inputs(tensors: Tensors) -> None:
    tensors[QUERY] = tensors[QUERY][:, :32].clone()


def with_narrow_outputs(tensors: Tensors) -> None:
    name = QUERY.replace("lora_A", "lora_B")
    tensors[name] = tensors[name][:32].clone()


def moved(to: str) -> Callable[[Tensors], None]:
    """Gives the query's halves to another module."""

    def move(tensors: Tensors) -> None:
        for half in ("lora_A", "lora_B"):
            name = QUERY.replace("lora_A", half)
            tensors[name.replace("layers.0.self_attn.q_proj", to)] = tensors.pop(name)

    return move


def renamed(to: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(to, tensors.pop(QUERY))


DAMAGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "a missing half": (without_b, "layers.0.self_attn.q_proj has no lora_B"),
    "a half of integers": (as_integers, "lora_A.weight is I32"),
    "what is no number": (with_nan, "q_proj.lora_A.weight holds"),
    "another rank": (with_rank_5, "rank of model.layers.0.self_attn.q_proj is 4"),
    "three dimensions": (with_three_dimensions, "is no matrix"),
    "narrow inputs": (with_narrow_inputs, r"lora_A of .*q_proj has shape \[4, 32\]"),
    "narrow outputs": (with_narrow_outputs, r"lora_B of .*q_proj has shape \[32, 4\]"),
    "a layer that is not there": (moved("layers.40.self_attn.q_proj"), "layers.40.self_attn.q_proj, which this model"),
    "another family's names": (moved("h.0.attn.c_attn"), "h.0.attn.c_attn, which this model does not have"),
    "the head": (moved("X"), "model.X"),
    "DoRA's magnitudes": (renamed(QUERY.replace("lora_A.weight", "lora_magnitude_vector")), "lora_magnitude_vector"),
    "an embedding": (renamed(f"{PREFIX}model.embed_tokens.lora_embedding_A"), "lora_embedding_A"),
    "a saved module": (renamed(f"{PREFIX}lm_head.weight"), "lm_head.weight"),
    "no prefix": (renamed(QUERY.removeprefix(PREFIX)), "q_proj.lora_A.weight is none of"),
    "no tensors": (lambda tensors: tensors.clear(), "holds no tensors"),
    "a target without tensors": (
        lambda tensors: [tensors.pop(name) for name in list(tensors) if "v_proj" in name],
        "target module v_proj",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_file_is_refused_by_what_is_wrong(
    folder: pathlib.Path, bank: AdapterBank, damage: str
) -> None:
    change, named = DAMAGES[damage]
    retensor(folder, change)
    with pytest.raises(ModelError, match=named):
        bank.read(str(folder))


def test_the_head_is_a_module_that_takes_no_adapter(folder: pathlib.Path, bank: AdapterBank) -> None:
    def to_head(tensors: Tensors) -> None:
        tensors[f"{PREFIX}lm_head.lora_A.weight"] = torch.zeros(4, 64)
        tensors[f"{PREFIX}lm_head.lora_B.weight"] = torch.zeros(320, 4)

    retensor(folder, to_head)
    with pytest.raises(ModelError, match="lm_head, which takes no adapters"):
        bank.read(str(folder))


def test_files_that_are_no_adapter_or_lie_elsewhere(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def refused(path: pathlib.Path | str, named: str, max_bytes: int = 2**20) -> None:
        with pytest.raises(ModelError, match=named):
            read_adapter(str(path), max_bytes)

    refused(tmp_path / "nowhere", "no such folder")
    refused(checkpoint("llama"), "holds no adapter_config.json")
    refused(folder, "max_adapter_bytes", 500)
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-10])
    refused(folder, "is truncated")
    (folder / WEIGHTS).write_bytes(b"\x80\x04pickle")
    refused(folder, "not a safetensors file")
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    refused(folder, "a pickle, which is never opened")
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(whole)
    (folder / WEIGHTS).symlink_to(outside)
    refused(folder, "leads out of the model's folder")
    (folder / CONFIG).write_text("{")
    refused(folder, "not valid JSON")


def test_more_bytes_than_fit_are_refused(made: pathlib.Path, folder: pathlib.Path) -> None:
    configure(folder, lora_alpha=3)
    small = AdapterBank(CpuLinearAdapting(), torch.float32, 20_000, None)
    base = checkpoint("llama")
    load_model(base, load_model_config(base), "float32", choose_platform("cpu", 1), bank=small)
    small.load("first", str(made))
    small.load("again", str(made))  # the same values are held once
    with pytest.raises(ModelError, match=r"'second' takes \d+ bytes, and \d+ of max_adapter_bytes 20000 are left"):
        small.load("second", str(folder))


def test_the_digest_is_of_the_values(folder: pathlib.Path, made: pathlib.Path) -> None:
    def digest() -> str:
        return read_adapter(str(folder), 2**20).digest

    first = read_adapter(str(made), 2**20).digest
    assert digest() == first
    configure(folder, base_model_name_or_path="elsewhere", lora_dropout=0.5)
    assert digest() == first, "what is not computed with does not count"
    configure(folder, lora_alpha=17)
    assert digest() != first
    configure(folder, lora_alpha=16)

    def add(tensors: Tensors) -> None:
        tensors[QUERY][0, 0] += 1

    retensor(folder, add)
    assert digest() != first


def test_adapters_of_the_hub_and_behind_urls(
    made: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache has one, and a file system that fsspec knows has others."""
    commit, repository = "0123456789" * 4, tmp_path / "models--somebody--adapter"
    shutil.copytree(made, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    file = pathlib.Path(adapters_of(checkpoint("llama")).convert("damaged", tmp_path / "adapter.gguf"))
    expected = {each: read_adapter(str(each), 2**20).digest for each in (made, file)}
    for path, of in (
        ("somebody/adapter", made),
        (f"somebody/adapter@{commit}", made),
        (made.as_uri(), made),
        (f"{made.as_uri()}/", made),
        (file.as_uri(), file),
    ):
        found = read_adapter(path, 2**20)
        assert (found.source, found.digest) == (path, expected[of])
    for path, named in (
        ("somebody/else", "cannot be reached"),
        ("somebody/else/adapter", "no such folder"),
        ((tmp_path / "nowhere").as_uri(), "nowhere holds no adapter"),
        ("unknown://bucket/adapter", r"unknown://bucket/adapter cannot be read \(ValueError"),
    ):
        with pytest.raises(ModelError, match=named):
            read_adapter(path, 2**20)
    with pytest.raises(ModelError, match="raise max_adapter_bytes"):
        read_adapter(made.as_uri(), 500)
    damaged = pathlib.Path(shutil.copytree(made, tmp_path / "damaged"))
    configure(damaged, r=0)
    with pytest.raises(ModelError, match=f"{damaged.as_uri()}/adapter_config.json"):
        read_adapter(damaged.as_uri(), 2**20)


FILES: dict[str, dict[str, Any]] = {
    "a model": {"general__type": "model"},
    "another kind": {"adapter__type": "control_vector"},
    "an unknown architecture": {"general__architecture": "bert"},
    "an architecture whose linears are multiplied": {"general__architecture": "falcon-h1"},
    "no alpha": {"adapter__lora__alpha": None},
    "an alpha without end": {"adapter__lora__alpha": float("inf")},
    "a part of a prompt": {"adapter__alora__invocation_tokens": "7"},
}


@pytest.mark.parametrize("fault", [*FILES, "rounded", "cut", "a link", "a pipe", "too large"])
def test_a_damaged_or_foreign_gguf_file_is_refused(fault: str, made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    adapters, file = adapters_of(checkpoint("llama")), tmp_path / "adapter.gguf"
    adapters.convert("damaged", file, "Q8_0" if fault == "rounded" else "F32", **FILES.get(fault, {}))
    if fault == "cut":
        os.truncate(file, file.stat().st_size - 64)
    elif fault == "a link":
        (tmp_path / "below").mkdir()
        os.symlink(file, tmp_path / "below" / "adapter.gguf")
        file = tmp_path / "below" / "adapter.gguf"
    elif fault == "a pipe":
        file.unlink()
        os.mkfifo(file)
    with pytest.raises(ModelError):
        read_adapter(str(file), 1000 if fault == "too large" else 2**20)


@pytest.mark.parametrize(
    ("architecture", "part"), [("qwen35", "ssm_out"), ("qwen3next", "attn_qkv"), ("deepseek2", "attn_k_b")]
)
def test_a_linear_in_an_order_of_llamacpps_is_refused_by_its_name(
    architecture: str, part: str, tmp_path: pathlib.Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "adapter.gguf", architecture)
    for key, value in {"general.type": "adapter", "adapter.type": "lora"}.items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", 4.0)
    for half, shape in (("a", (4, 64)), ("b", (64, 4))):
        writer.add_tensor(f"blk.1.{part}.weight.lora_{half}", np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"blk\.1\.{part}\.weight\.lora_a is in an order"):
        read_adapter(str(tmp_path / "adapter.gguf"), 2**20)


def test_an_adapter_has_one_digest_in_each_form(made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The order of rows counts, because it is undone only where the width of heads is known."""
    adapters = adapters_of(checkpoint("llama"))
    first, second = (adapters.convert("damaged", tmp_path / f"{number}.gguf") for number in range(2))
    digests = [read_adapter(each, 2**20).digest for each in (str(made), first, second)]
    assert digests[0] != digests[1] == digests[2]
