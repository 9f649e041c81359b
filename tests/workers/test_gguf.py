"""A GGUF file is a model: its tokens are those of transformers with the weights that the package `gguf` reads from it,
its configuration and tokenizer are those of the checkpoint that was converted, and what is damaged is named.
"""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from manta import LLM, SamplingParams
from manta.cluster.text.tokenizer import Tokenizer
from manta.workers.checkpoints.gguf_config import GgufFile, gguf_config
from manta.workers.checkpoints.gguf_header import read_gguf_header
from manta.workers.checkpoints.memory import KEPT_BLOCK_BITS
from manta.workers.checkpoints.model_folder import load_model_config, resolve_model_folder
from manta.workers.kernels.cpu_quantized_linear import PackedQuantizedLinear
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.models.raw_config import ConfigError, RawConfig
from manta.workers.platforms.cpu_linears import make_linear
from manta.workers.torch_worker import embedding_lookup
from manta.workers.torch_worker.loader import load_model
from manta.workers.torch_worker.tensor_check import check_tensors
from tests.checkpoints import CORPUS, checkpoint
from tests.gguf_files import Vocabulary, dequantized, write_gguf
from tests.pairs import in_turns
from tests.workers.test_quantised_formats import Recorder, expected_of, greedy
from tests.workers.test_quantised_ranks import logits_alone

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
GRID_KINDS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
CODED_KINDS = ("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", *GRID_KINDS)
TERNARY_KINDS = ("TQ1_0", "TQ2_0")
FOUR_BITS = ("Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", *TERNARY_KINDS)
GROUPS_OF_16 = ("Q2_K", "Q3_K", "Q6_K", "NVFP4", "IQ1_M", "IQ2_XS", "IQ2_S")
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
FAMILIES: dict[str, dict] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 64},
}


def original(family: str) -> pathlib.Path:
    return checkpoint(family, **SIZES, **FAMILIES[family])


def mixed(name: str) -> str:
    """As llama.cpp's Q4_K_M: some parts of one linear have more bits than the others."""
    return "Q6_K" if "attn_v" in name or "ffn_down" in name or name == "output.weight" else "Q4_K"


@pytest.mark.few(5)
@pytest.mark.parametrize(("kind", "family"), in_turns([*KINDS, *CODED_KINDS, *TERNARY_KINDS, "mixed"], list(FAMILIES)))
def test_greedy_tokens_are_those_of_the_dequantised_weights(kind: str, family: str, tmp_path: pathlib.Path) -> None:
    path = write_gguf(original(family), tmp_path / "model.gguf", mixed if kind == "mixed" else lambda name: kind)
    dense = dequantized(path, original(family), tmp_path / "dense")
    assert greedy(path) == expected_of(dense)


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["Q6_K", "NVFP4", "Q4_1", "IQ2_XS"])
def test_rows_of_a_large_table_are_unpacked_from_the_file(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(original("qwen2"), tmp_path / "model.gguf", lambda name: kind)
    kept = greedy(path)
    monkeypatch.setattr(embedding_lookup, "is_large", lambda *_: True)
    looked_up: list[torch.Tensor] = []
    look_up = embedding_lookup.look_up_packed

    def recorded(unpack: Any, dtype: torch.dtype, ids: torch.Tensor) -> torch.Tensor:
        looked_up.append(ids)
        return look_up(unpack, dtype, ids)

    monkeypatch.setattr(embedding_lookup, "look_up_packed", recorded)
    assert greedy(path) == kept
    assert looked_up


def config_of(path: pathlib.Path) -> ModelConfig:
    return load_model_config(resolve_model_folder(str(path)))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_configuration_is_that_of_the_checkpoint(family: str, tmp_path: pathlib.Path) -> None:
    expected = load_model_config(original(family))
    found = config_of(write_gguf(original(family), tmp_path / "model.gguf", lambda name: "F32"))
    differing = {
        name: (getattr(found, name), getattr(expected, name))
        for name in ModelConfig.__struct_fields__
        if getattr(found, name) != getattr(expected, name)
    }
    assert differing.pop("quantization")[1] is None
    assert differing.pop("eos_token_ids") == ((2, 0), (2,)), "<|endoftext|> ends an answer in every GGUF file"
    assert differing.pop("rms_norm_eps", (1.0, 1.0)) == (pytest.approx(expected.rms_norm_eps), expected.rms_norm_eps)
    assert not differing


def test_a_file_without_a_number_of_key_heads_has_one_for_each_head(tmp_path: pathlib.Path) -> None:
    """As files of old converters, which llama.cpp reads so."""
    path = write_gguf(original("llama"), tmp_path / "a.gguf", lambda name: "F32", llama__attention__head_count_kv=None)
    config = json.loads((resolve_model_folder(str(path)) / "config.json").read_text())
    assert config["num_key_value_heads"] == config["num_attention_heads"] > 1


def test_llama3s_frequencies_are_those_of_the_file(tmp_path: pathlib.Path) -> None:
    """The file has divisors instead of the configuration's parameters: as llama.cpp's converter computes them."""
    folder = checkpoint("llama3", **SIZES)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    frequencies = 1 / rope["rope_theta"] ** (torch.arange(0, 64, 2).double() / 64)
    wavelengths = 2 * torch.pi / frequencies
    positions, low, high = (
        rope[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    smooth = ((positions / wavelengths - low) / (high - low)).clamp(0, 1)
    divisors = 1 / ((1 - smooth) / rope["factor"] + smooth)
    path = write_gguf(folder, tmp_path / "model.gguf", lambda name: "F32", rope_divisors=divisors.float().numpy())
    assert divisors.max() > 2
    torch.testing.assert_close(
        logits_alone(resolve_model_folder(str(path))), logits_alone(folder), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_read(kind: str, tmp_path: pathlib.Path) -> None:
    metadata = {
        "llama__rope__scaling__type": kind,
        "llama__rope__scaling__factor": 4.0,
        "llama__rope__scaling__original_context_length": 128,
    }
    rope = config_of(write_gguf(original("llama"), tmp_path / "model.gguf", lambda name: "F32", **metadata)).rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == (kind, 4.0, 128)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"scaling__factor": 4.0}, ("linear", 4.0)),  # llama.cpp's usual type
        ({"scale_linear": 4.0}, ("linear", 4.0)),  # the older key
        ({"scale_linear": 4.0, "scaling__factor": 0.0}, ("linear", 4.0)),
        ({"scale_linear": 4.0, "scaling__type": "yarn"}, ("yarn", 4.0)),
        ({"scaling__factor": 4.0, "scaling__type": "none"}, ("default", 1.0)),
        ({"scaling__factor": 0.0}, ("default", 1.0)),
        ({"scaling__factor": 1.0}, ("default", 1.0)),
    ],
)
def test_a_rope_factor_means_what_it_means_in_llama_cpp(
    metadata: dict[str, Any], expected: tuple[str, float], tmp_path: pathlib.Path
) -> None:
    keys = {f"llama__rope__{key}": value for key, value in metadata.items()}
    config = config_of(write_gguf(original("llama"), tmp_path / "model.gguf", lambda name: "F32", **keys))
    assert (config.rope.rope_type, config.rope.factor) == expected
    assert config.unused_keys == ()


def test_a_rope_factor_beside_divisors_is_refused(tmp_path: pathlib.Path) -> None:
    path = write_gguf(
        original("llama"),
        tmp_path / "model.gguf",
        lambda name: "F32",
        rope_divisors=np.ones(32, dtype=np.float32),
        llama__rope__scaling__factor=4.0,
    )
    with pytest.raises(ModelError, match="beside the tensor rope_freqs"):
        resolve_model_folder(str(path))


def test_every_key_of_llama_cpp_is_read_or_refused_or_known_to_be_harmless(tmp_path: pathlib.Path) -> None:
    """Each key below the architecture that the package `gguf` knows, with a value that nothing expects."""
    path = write_gguf(original("llama"), tmp_path / "model.gguf", lambda name: "F32")
    values, tensors = read_gguf_header(path)
    table = [each for group in vars(gguf.Keys).values() if inspect.isclass(group) for each in vars(group).values()]
    keys = [each.replace("{arch}", "llama") for each in table if isinstance(each, str) and each.startswith("{arch}")]
    assert len(keys) > 80

    def refused_key(key: str) -> str | None:
        try:
            gguf_config(GgufFile((path,), RawConfig(values | {key: 7.5}, str(path)), tensors))
        except ConfigError as error:
            return error.key
        return None

    refused = {key: refused_key(key) for key in keys}
    assert {key: each for key, each in refused.items() if each not in (key, None)} == {}
    harmless = {key.removeprefix("llama.") for key, each in refused.items() if each is None}
    assert harmless == {
        "attention.layer_norm_epsilon",
        "rope.freq_base",  # it is read, and this is a possible value
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",  # means nothing without a scaling
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "tensor_data_layout",
        "vocab_size",
    }


def test_keys_that_llama_cpp_does_not_know_are_named(tmp_path: pathlib.Path) -> None:
    novel = {"llama__novel__scale": 2.0, "novel__key": "a"}
    config = config_of(write_gguf(original("llama"), tmp_path / "model.gguf", lambda name: "F32", **novel))
    assert config.unused_keys == ("llama.novel.scale", "novel.key")


def test_a_sliding_window_is_mistrals(tmp_path: pathlib.Path) -> None:
    path = write_gguf(
        original("mistral"), tmp_path / "model.gguf", lambda name: "F32", llama__attention__sliding_window=24
    )
    config = config_of(path)
    assert config.architecture == "MistralForCausalLM"
    assert config.sliding_windows == (24, 24)


def test_text_and_chats_become_the_same_tokens(tmp_path: pathlib.Path) -> None:
    folder = original("qwen2")
    path = write_gguf(folder, tmp_path / "model.gguf", lambda name: "Q8_0")
    found, expected = Tokenizer(path), transformers.AutoTokenizer.from_pretrained(folder)
    for text in (*CORPUS, "<|im_start|>user\nHello<|im_end|>", "  spaces,\n\nlines and 1234567 digits"):
        ids = expected.encode(text)
        assert found.encode(text) == ids
        assert found.decode(ids, skip_special_tokens=False) == expected.decode(ids)
    messages = [{"role": "user", "content": "Where does the river end?"}]
    dense = dequantized(path, folder, tmp_path / "dense")
    answers = [
        LLM(str(each), dtype="float32", num_threads=1, kv_cache_bytes="4MiB", weights="dense")
        .chat(messages, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)[0]
        .outputs[0]
        .text
        for each in (path, dense)
    ]
    assert answers[0] == answers[1]


def test_a_sentencepiece_vocabulary_begins_with_bos(tmp_path: pathlib.Path) -> None:
    """Llama 2's kind: pieces with scores, bytes for what has none, BOS unless the file says otherwise."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello"]
    tokens, types = pieces + words, [2, 3, 3, *[6] * 256, *[1] * len(words)]
    vocabulary = Vocabulary(tokens, types, scores=[-float(index) for index in range(len(tokens))])
    path = write_gguf(original("llama"), tmp_path / "model.gguf", lambda name: "F32", vocabulary=vocabulary)
    tokenizer = Tokenizer(path)
    assert [tokens[token] for token in tokenizer.encode("hello")] == ["<s>", "▁hello"]
    assert [tokens[token] for token in tokenizer.encode("é", add_special_tokens=False)] == ["▁", "<0xC3>", "<0xA9>"]


def test_weights_stay_in_the_file(tmp_path: pathlib.Path) -> None:
    path = write_gguf(original("llama"), tmp_path / "model.gguf", lambda name: "Q8_0")
    folder = resolve_model_folder(str(path))
    assert not list(folder.glob("*.safetensors"))
    made = (folder / "config.json").stat().st_mtime_ns
    assert resolve_model_folder(str(path)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    write_gguf(original("qwen2"), path, lambda name: "Q4_0")
    os.utime(path, ns=(1, 1))
    again = resolve_model_folder(str(path))
    assert again != folder
    assert load_model_config(again).architecture == "Qwen2ForCausalLM"
    path.unlink()
    with pytest.raises(ModelError, match=r"model\.gguf has gone or changed"):
        check_tensors(again, load_model_config(again))
    other = write_gguf(original("llama"), tmp_path / "other.gguf", lambda name: "Q8_0")
    assert resolve_model_folder(str(other)).is_dir()
    assert not again.exists()


def _truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def _cut_header(path: pathlib.Path) -> None:
    os.truncate(path, 100)


def _empty(path: pathlib.Path) -> None:
    os.truncate(path, 0)


def _other_magic(path: pathlib.Path) -> None:
    with path.open("r+b") as file:
        file.write(b"GGML")


def _lfs(path: pathlib.Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 988097824\n")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_truncate, r"is truncated: it has \d+ bytes and its header says \d+; copy or download it again"),
        (
            _cut_header,
            r"model\.gguf is no whole GGUF file \(its header goes on after its 100 bytes\); copy or download",
        ),
        (_empty, r"is no whole GGUF file \(it is empty\)"),
        (_other_magic, r"is no whole GGUF file .*it begins with b'GGML'"),
        (_lfs, "is a Git LFS pointer"),
    ],
)
def test_a_damaged_file_is_named(damage: Callable[[pathlib.Path], None], words: str, tmp_path: pathlib.Path) -> None:
    path = write_gguf(original("llama"), tmp_path / "model.gguf", lambda name: "Q8_0")
    damage(path)
    with pytest.raises(ModelError, match=words):
        resolve_model_folder(str(path))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general__architecture": "bert"}, 'general.architecture must be llama or .*, not "bert"'),
        ({"split__count": 3}, "is one of 3 files of a model, and its name says 1"),
        ({"llama__expert_count": 8}, "expert_used_count must be an integer from 1 to"),
        ({"llama__rope__dimension_count": 32}, "rope.dimension_count must be 64, not 32"),
        ({"llama__rope__scaling__attn_factor": 2.0}, "attn_factor must be left out or 1, not 2"),
        ({"llama__attention__value_length": 32}, "attention.value_length must be 64, not 32"),
        ({"llama__attention__causal": False}, "attention.causal must be left out or true, not false"),
        ({"llama__rope__scaling__type": "longrope"}, "scaling.type must be none or linear or yarn"),
        ({"tokenizer__ggml__eot_token_id": 320}, "eot_token_id must be an integer from 0 to 319"),
        (
            {"llama__attention__head_count_kv": [2, 1]},
            r"head_count_kv must be the same number above 0 for all layers",
        ),
        ({"llama__block_count": "two"}, r"block_count must be an integer .*, not .two"),
    ],
)
def test_what_is_not_served_is_named(metadata: dict, words: str, tmp_path: pathlib.Path) -> None:
    path = write_gguf(original("llama"), tmp_path / "model.gguf", lambda name: "F32", **metadata)
    with pytest.raises(ModelError, match=words):
        resolve_model_folder(str(path))


def test_unfitting_types_and_shapes_are_named(tmp_path: pathlib.Path) -> None:
    def unread(name: str) -> str:
        return "Q8_1" if name == "blk.1.ffn_up.weight" else "Q8_0"

    path = write_gguf(original("llama"), tmp_path / "model.gguf", unread)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight is of type Q8_1, which is not served; F32, "):
        resolve_model_folder(str(path))
    path = write_gguf(original("llama"), tmp_path / "wide.gguf", lambda name: "Q8_0", llama__feed_forward_length=512)
    folder = resolve_model_folder(str(path))
    with pytest.raises(ModelError, match=r"gate_proj\.weight has shape \[256, 256\].* asks for \[512, 256\]"):
        check_tensors(folder, load_model_config(folder))


def test_without_the_package_the_remedy_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(original("llama"), tmp_path / "model.gguf", lambda name: "F32")
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    with pytest.raises(ModelError, match="needs the package gguf: pip install gguf"):
        resolve_model_folder(str(path))


def test_a_window_for_some_layers_is_refused(tmp_path: pathlib.Path) -> None:
    path = write_gguf(
        original("qwen2"), tmp_path / "model.gguf", lambda name: "F32", qwen2__attention__sliding_window=8
    )
    with pytest.raises(ModelError, match="sliding_window must be left out or 0, not 8"):
        resolve_model_folder(str(path))


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", [*KINDS[3:], *CODED_KINDS, *TERNARY_KINDS])
def test_linears_are_kept_as_integers_in_their_range(kind: str, tmp_path: pathlib.Path) -> None:
    path = write_gguf(original("llama"), tmp_path / "model.gguf", lambda name: kind)
    folder, dense = resolve_model_folder(str(path)), dequantized(path, original("llama"), tmp_path / "dense")
    platform, expected = Recorder(), Recorder()
    load_model(folder, load_model_config(folder), "float32", platform)
    load_model(dense, load_model_config(dense), "float32", expected)
    for linear, plain in zip(platform.linears, expected.linears, strict=True):
        weight = linear.quantized
        assert weight is not None
        assert weight.bits == (4 if kind in FOUR_BITS else 8)
        assert weight.least_bits == (4 if kind in (*FOUR_BITS, *CODED_KINDS) else 8)
        assert weight.group_size == (16 if kind in GROUPS_OF_16 else 256 if kind in TERNARY_KINDS else 32)
        assert -(1 << (weight.bits - 1)) <= int(weight.values.min())
        assert int(weight.values.max()) < 1 << (weight.bits - 1)
        torch.testing.assert_close(weight.dequantized(torch.float32), plain.weight, atol=1e-6, rtol=1e-5)
        packed = make_linear(linear)
        if isinstance(packed, PackedQuantizedLinear):  # where there is a C++ compiler
            bits = packed.packed.nbytes * 8 / weight.values.numel()
            assert 0.7 * KEPT_BLOCK_BITS[kind] < bits < 1.02 * KEPT_BLOCK_BITS[kind]


def test_the_tests_writer_stores_its_input(tmp_path: pathlib.Path) -> None:
    path = write_gguf(original("llama"), tmp_path / "model.gguf", mixed)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["blk.0.attn_v.weight"] == "Q6_K"
    assert kinds["blk.0.attn_q.weight"] == "Q4_K"
    assert kinds["blk.0.attn_norm.weight"] == "F32"
