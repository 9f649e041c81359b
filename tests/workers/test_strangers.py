"""Checkpoints of strangers: damaged files, files elsewhere, and numbers that would be sized by. Each is refused in one
sentence that names the file, as `manta serve` reads it before it starts anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import resource
import shutil
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from manta.cluster.cli.check import check_quickly, in_one_sentence
from manta.cluster.config import EngineConfig
from manta.cluster.text.tokenizer import Tokenizer
from manta.cluster.text.tokenizer_trial import TokenizerTrial, try_tokenizer
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.checkpoints.stop_tokens import with_tokenizers_eos
from manta.workers.models.model_config import ModelError, Quantization, QuantizationRule, WeightFormat
from manta.workers.torch_worker.tensor_check import check_tensors
from tests.checkpoints import checkpoint
from tests.conftest import PROVE

SPARE_BYTES = 2 * 2**30
"""Address space that reading a checkpoint may take. What an attack asks for is more."""
READ = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model.safetensors",
)
"""The files that are read. The weights and their index are those of two forms of the same checkpoint."""
JSON = tuple(name for name in READ if name.endswith(".json"))
VALUES: tuple[Any, ...] = (
    None,
    True,
    -5,
    4 * 10**9,
    10**400,
    1.5,
    float("nan"),
    "x",
    "\ud800",
    [],
    [[]],
    [5],
    {},
    {"a": {}},
)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A checkpoint with a file of every kind. Its weights lie in the file that the index names."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    header = (folder / "model.safetensors").read_bytes()
    names = json.loads(header[8 : 8 + struct.unpack("<Q", header[:8])[0]]).keys() - {"__metadata__"}
    index = {"metadata": {}, "weight_map": dict.fromkeys(sorted(names), "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "special_tokens_map.json").write_text("{}")
    return folder


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Gives this process `SPARE_BYTES` more memory than it has."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refusal(folder: pathlib.Path) -> str | None:
    """The sentence with which a checkpoint is refused, by everything that reads it; None if it is served."""
    engine = EngineConfig(model=str(folder), tokenizer=str(folder))
    try:
        with bounded_memory(), in_one_sentence():
            check_quickly(engine)
            model = load_model_config(folder)
            check_tensors(folder, model)
            with_tokenizers_eos(model.eos_token_ids, Tokenizer(folder).folder, model.vocab_size)
    except ModelError as error:
        return str(error)
    return None


def check_sentence(sentence: str, name: str) -> None:
    assert name in sentence, sentence
    assert "unexpected" not in sentence, sentence
    assert ";" in sentence or " must be " in sentence, f"no remedy: {sentence}"
    assert len(sentence) < 1000, sentence
    sentence.encode()


# ---- damage ----------------------------------------------------------------------------------------------------------


def _text(change: Callable[[bytes], bytes]) -> Callable[[pathlib.Path], None]:
    def damage(path: pathlib.Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


def _instead(make: Callable[[pathlib.Path], object]) -> Callable[[pathlib.Path], None]:
    def damage(path: pathlib.Path) -> None:
        path.unlink()
        make(path)

    return damage


def _socket(path: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):  # paths of sockets are short
        made.bind(path.name)


def _outside(path: pathlib.Path) -> None:
    other = path.parent.parent / f"other-{path.name}"
    path.rename(other)
    path.symlink_to(other)


ANY_FILE: dict[str, Callable[[pathlib.Path], None]] = {
    "a folder": _instead(pathlib.Path.mkdir),
    "a pipe": _instead(os.mkfifo),
    "a socket": _instead(_socket),
    "a loop of links": _instead(lambda path: path.symlink_to(path.name)),
    "a link to nothing": _instead(lambda path: path.symlink_to("nowhere")),
    "a device": _instead(lambda path: path.symlink_to("/dev/zero")),
    "a link out of the folder": _outside,
    "not UTF-8": _text(lambda content: content[:9] + b"\xff\xfe" + content[9:]),
    "larger than memory": lambda path: os.truncate(path, 2**40),
}
ANY_JSON: dict[str, Callable[[pathlib.Path], None]] = {
    "empty": _text(lambda content: b""),
    "truncated": _text(lambda content: content[: len(content) // 2]),
    "a list": _text(lambda content: b"[" + content + b"]"),
    "deep": _text(lambda content: b'{"a":' * 100_000),
    "deep lists": _text(lambda content: b'{"a":' + b"[" * 100_000),
    "a key twice": _text(lambda content: b'{"model_type": 1, "model_type": 2}'),
    "a long number": _text(lambda content: b'{"a": ' + b"1" * 100_000 + b"}"),
    "zeros": _text(lambda content: bytes(1000)),
}


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("damage", ANY_FILE)
@pytest.mark.parametrize("name", READ)
def test_a_damaged_file_is_refused_by_name(name: str, damage: str, folder: pathlib.Path) -> None:
    (folder / "chat_template.jinja").touch()
    ANY_FILE[damage](folder / name)
    sentence = refusal(folder)
    assert sentence is not None
    check_sentence(sentence, name)


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("damage", ANY_JSON)
@pytest.mark.parametrize("name", JSON)
def test_damaged_json_is_refused_by_name(name: str, damage: str, folder: pathlib.Path) -> None:
    ANY_JSON[damage](folder / name)
    sentence = refusal(folder)
    assert sentence is not None
    check_sentence(sentence, name)


def test_a_file_that_is_not_read_may_be_damaged(folder: pathlib.Path) -> None:
    _outside(folder / "special_tokens_map.json")
    assert refusal(folder) is None


# ---- values ----------------------------------------------------------------------------------------------------------


def keys_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values, of which lists and objects of many alike have their first only."""
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for name, item in items[:1] if len(items) > 40 else items:
        yield (*path, name)
        yield from keys_of(item, (*path, name))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> str:
    """The JSON text with another value at a path."""
    copy = json.loads(json.dumps(value))
    target = copy
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = new
    return json.dumps(copy)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_any_value_at_any_key_is_served_or_refused_in_a_sentence(name: str, folder: pathlib.Path) -> None:
    more = {
        "config.json": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}},
        "generation_config.json": {"temperature": 0.6, "eos_token_id": [1]},
        "tokenizer_config.json": {
            "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True, "lstrip": False}},
            "additional_special_tokens": ["<a>", {"content": "<b>"}],
            "chat_template": [{"name": "default", "template": "{{ messages }}"}],
        },
    }
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    whole = json.loads((folder / name).read_text()) | more[name]
    for number, path in enumerate(keys_of(whole)):
        for value in VALUES if PROVE else VALUES[number % 5 :: 5]:
            (folder / name).write_text(changed(whole, path, value))
            sentence = refusal(folder)
            if sentence is not None:
                assert "unexpected" not in sentence, f"{path} {value!r}: {sentence}"
                assert "Error" not in sentence, f"{path} {value!r}: {sentence}"
                assert len(sentence) < 1000, f"{path} {value!r}: {sentence}"


@pytest.mark.parametrize("key", ["-5", "1.5", "five", "", "4000000000", "\u0665"])
def test_an_added_token_has_the_id_of_a_token(key: str, folder: pathlib.Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"eos_token": "<e>", "added_tokens_decoder": {key: {"content": "<e>"}}}))
    sentence = refusal(folder)
    assert sentence is not None
    check_sentence(sentence, "tokenizer_config.json")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt_neox", {"num_hidden_layers": 500_000_000}),
        ("gpt2", {"n_layer": 500_000_000}),
        ("gpt_neox", {"num_labels": 500_000_000}),
        ("gpt_neo", {"attention_types": [[["global", "local"], 500_000_000]]}),
        ("mixtral", {"num_local_experts": 500_000_000}),
        ("gpt_neox", {"vocab_size": 2_000_000_000}),
        ("llama", {"vocab_size": 2_000_000_000}),
        ("llama", {"num_hidden_layers": 500_000_000}),
    ],
)
def test_a_number_is_bounded_before_anything_is_sized_by_it(
    family: str, changes: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(checkpoint(family), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with bounded_memory(), pytest.raises(ModelError, match=next(iter(changes))) as caught:
        check_quickly(EngineConfig(model=str(folder)))
    check_sentence(str(caught.value), "config.json")


# ---- tokenizers ------------------------------------------------------------------------------------------------------

_TWICE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
_AT_EACH = {"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "a"}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_TEXT_PIECE = {"Sequence": {"id": "A", "type_id": 0}}
GROWING: dict[str, dict[str, Any]] = {
    "doubling normalizers": {"normalizer": {"type": "Sequence", "normalizers": [_TWICE] * 22}},
    "doubling by lookahead": {"normalizer": {"type": "Sequence", "normalizers": [_AT_EACH] * 22}},
    "nested sequences": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [_TWICE] * 11}] * 2}
    },
    "a long prefix": {"normalizer": {"type": "Prepend", "prepend": "a" * 10_000}},
    "bytes of bytes": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [_BYTES] * 22}},
    "doubling decoders": {"decoder": {"type": "Sequence", "decoders": [_TWICE] * 22}},
    "a text many times": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [_TEXT_PIECE] * 1000,
            "pair": [_TEXT_PIECE, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {},
        }
    },
}


def with_tokenizer(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize("attack", GROWING)
def test_a_tokenizer_that_multiplies_texts_is_refused(attack: str, folder: pathlib.Path) -> None:
    sentence = refusal(with_tokenizer(folder, **GROWING[attack]))
    assert sentence is not None
    check_sentence(sentence, "tokenizer.json: its " + next(iter(GROWING[attack])))


@pytest.mark.parametrize(
    "vocabulary", [{"a": 4 * 10**9}, {"a": 0, "b" * 100_000: 1}], ids=["a large id", "a long token"]
)
def test_a_vocabulary_is_bounded(vocabulary: dict[str, int], folder: pathlib.Path) -> None:
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    sentence = refusal(with_tokenizer(folder, model=model, added_tokens=[]))
    assert sentence is not None
    check_sentence(sentence, "tokenizer.json: it has a token of")


def test_a_tokenizer_is_tried_before_a_check_reads_it(folder: pathlib.Path) -> None:
    try_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError) as caught:
        try_tokenizer(folder)
    check_sentence(str(caught.value), "tokenizer.json")


def test_a_tokenizer_that_passed_is_tried_again_only_if_its_files_change(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path / "cache"))
    TokenizerTrial(folder).wait()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no such program"))
    TokenizerTrial(folder).wait()
    (folder / "README.md").write_text("no part of it")
    TokenizerTrial(folder).wait()
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(FileNotFoundError):
        TokenizerTrial(folder)


def test_a_tokenizer_that_failed_is_tried_again(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path / "cache"))
    (folder / "tokenizer.json").write_text("{}")
    for _ in range(2):
        trial = TokenizerTrial(folder)  # another's work goes on here
        with pytest.raises(ModelError):
            trial.wait()


@pytest.mark.prove
def test_a_tokenizer_that_takes_forever_is_refused(folder: pathlib.Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(?:a|aa|aaa)+$(?<=b)"}, "behavior": "Isolated", "invert": False}
    with pytest.raises(ModelError, match="s of processor time for"):
        try_tokenizer(with_tokenizer(folder, pre_tokenizer=split))


# ---- patterns --------------------------------------------------------------------------------------------------------


def test_a_pattern_of_layers_ends_soon() -> None:
    """Python's own matcher takes hours for it."""
    rule = QuantizationRule(pattern=r"^(?:(?:[a-z_.]|[a-z0-9_.])+)+!$", format=WeightFormat(reader="float8"))
    name = "model.layers.17.self_attn.q_proj.and.more.of.it"
    assert Quantization(method="fp8", rules=(rule,)).format_of(name) is None


# ---- files elsewhere -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../other.safetensors", "sub/../../other.safetensors", "{parent}/other.safetensors"])
def test_an_index_names_files_of_its_own_folder(name: str, folder: pathlib.Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "other.safetensors")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    weights = dict.fromkeys(index["weight_map"], name.format(parent=folder.parent))
    path.write_text(json.dumps(index | {"weight_map": weights}))
    (folder / "sub").mkdir()
    sentence = refusal(folder)
    assert sentence is not None
    check_sentence(sentence, "other.safetensors")


def test_only_the_cache_has_folders_that_stand_for_gguf_files(folder: pathlib.Path) -> None:
    index = {"file": "/etc/passwd", "size": os.stat("/etc/passwd").st_size, "tensors": {}}
    (folder / "gguf_tensors.json").write_text(json.dumps(index))
    sentence = refusal(folder)
    assert sentence is not None
    check_sentence(sentence, "gguf_tensors.json")


def test_a_snapshot_of_the_hub_is_served_from_its_blobs(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    repository = tmp_path / "models--someone--something"
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert refusal(snapshot) is None
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(folder / "config.json")
    sentence = refusal(snapshot)
    assert sentence is not None
    check_sentence(sentence, "config.json")
