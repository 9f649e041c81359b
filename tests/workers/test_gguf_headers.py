"""Every value of a GGUF file's header, at its extremes and of the wrong type, is served or refused in words, before a
weight is read and without memory for what the file does not hold.
"""

from __future__ import annotations

import math
import os
import pathlib
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from manta import LLM, SamplingParams
from manta.cluster.text.tokenizer import Tokenizer
from manta.cluster.text.tokenizer_files import TokenizerError
from manta.workers.checkpoints.gguf_values import OF_FILES, OF_MODELS
from manta.workers.checkpoints.model_folder import load_model_config, resolve_model_folder
from manta.workers.models.model_config import ModelError
from manta.workers.torch_worker.tensor_check import check_tensors
from tests.checkpoints import checkpoint
from tests.gguf_files import write_gguf
from tests.gguf_headers import (
    ARRAY,
    BOOL,
    FLOAT32,
    FLOAT64,
    INT32,
    INT64,
    STRING,
    UINT32,
    UINT64,
    Header,
    Tensor,
    Value,
    read_header,
)

NUMBERS = [
    Value(UINT32, 0),
    Value(UINT32, 1),
    Value(INT32, -1),
    Value(UINT32, 2**31),
    Value(UINT64, 2**53),
    Value(UINT64, 2**63),
    Value(UINT64, 2**64 - 1),
    Value(INT64, -(2**63)),
    Value(FLOAT32, 0.0),
    Value(FLOAT32, math.nan),
    Value(FLOAT64, math.inf),
    Value(FLOAT32, -math.inf),
    Value(FLOAT64, 1e300),
    Value(FLOAT64, 1e-300),
    Value(BOOL, True),
]
OTHERS: list[Value | None] = [
    None,
    Value(STRING, ""),
    Value(STRING, "1"),
    Value(ARRAY, (UINT32, [])),
    Value(ARRAY, (UINT32, [1, 2])),
    Value(ARRAY, (STRING, ["", ""])),
    Value(ARRAY, (FLOAT32, [math.nan])),
]
ARRAYS = ("tokens", "scores", "token_type", "merges")
KEYS = [
    *OF_FILES,
    *(f"llama.{key}" for key in OF_MODELS),
    *(f"tokenizer.ggml.{key}" for key in ("model", "pre", *ARRAYS)),
    "general.alignment",
]
BIG = 1 << 62


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Header:
    folder = checkpoint("llama", num_hidden_layers=1, hidden_size=32)
    return read_header(write_gguf(folder, tmp_path_factory.mktemp("header") / "model.gguf", lambda name: "F32"))


def refusal(path: pathlib.Path) -> str | None:
    """Returns the words in which the file or its tokenizer is refused; None if both are read. Its folder is removed."""
    try:
        folder = resolve_model_folder(str(path))
        check_tensors(folder, load_model_config(folder))
        Tokenizer(path)
    except (ModelError, TokenizerError) as error:
        return str(error)
    return None


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path / "cache"))
    return tmp_path


def damaged(header: Header, key: str) -> Iterator[tuple[Value | None, Header]]:
    for value in [*NUMBERS, *OTHERS]:
        yield value, header.with_value(key, value)


@pytest.mark.few(24)
@pytest.mark.parametrize("key", KEYS)
def test_every_value_of_a_key_is_read_or_refused_in_words(key: str, header: Header, cache: pathlib.Path) -> None:
    path = cache / "model.gguf"
    for value, changed in damaged(header, key):
        path.write_bytes(changed.encoded()[0])
        words = refusal(path)
        if words is not None:
            assert str(cache) in words, f"{value}: {words}"


NEVER = [value for value in NUMBERS if value.kind in (FLOAT32, FLOAT64) and not math.isfinite(value.value)]
NEVER += [value for value in NUMBERS if abs(value.value) >= 2**53]
UNREAD = ("tokenizer.ggml.scores",)  # of a vocabulary with merges


@pytest.mark.few(30)
@pytest.mark.parametrize("key", [key for key in KEYS if key not in UNREAD])
def test_no_model_has_such_a_number(key: str, header: Header, cache: pathlib.Path) -> None:
    """NaN, infinities and numbers from 2^53 on, also for keys that this model does not need."""
    path = cache / "model.gguf"
    for value in NEVER:
        path.write_bytes(header.with_value(key, value).encoded()[0])
        assert refusal(path) is not None, value


@pytest.mark.prove
@pytest.mark.parametrize("key", KEYS)
def test_what_is_read_is_served(key: str, header: Header, cache: pathlib.Path) -> None:
    path = cache / "model.gguf"
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    for value, changed in damaged(header, key):
        path.write_bytes(changed.encoded()[0])
        if refusal(path) is None and value != Value(UINT32, 1):  # a context of 1 has no room
            llm = LLM(str(path), dtype="float32", num_threads=1, kv_cache_bytes="1MiB")
            (output,) = llm.generate(["a"], params, use_tqdm=False)
            assert output.outputs[0].finish_reason == "length", value


def test_a_file_that_ends_anywhere_is_refused(header: Header, cache: pathlib.Path) -> None:
    whole, ends = header.encoded()
    path = cache / "model.gguf"
    for end in sorted({end + near for end in [*ends, len(whole)] for near in (-1, 0, 1) if end + near < len(whole)}):
        path.write_bytes(whole[:end])
        words = refusal(path)
        assert words is not None, end
        assert "copy or download it again" in words


def with_tensor(header: Header, **changes: object) -> Header:
    first = header.tensors[0]._replace(**changes)  # type: ignore[arg-type]
    return header._replace(tensors=[first, *header.tensors[1:]])


TABLE: dict[str, tuple[Callable[[Header], Header], str]] = {
    "outside": (lambda header: with_tensor(header, offset=1 << 40), "is truncated: it has"),
    "far outside": (lambda header: with_tensor(header, offset=2**64 - 32), "is truncated: it has"),
    "between": (lambda header: with_tensor(header, offset=4), "the offset 4 of tensor '.*' is no multiple of 32"),
    "overlapping": (
        lambda header: with_tensor(header, offset=header.tensors[1].offset),
        "tensors '.*' and '.*' overlap",
    ),
    "twice": (lambda header: with_tensor(header, name=header.tensors[1].name), "two tensors of the name"),
    "huge": (lambda header: with_tensor(header, dims=(BIG, BIG, BIG, BIG)), "tensors '.*' and '.*' overlap"),
    "empty": (lambda header: with_tensor(header, dims=(0, 4)), "has a dimension of 0"),
    "without dimensions": (lambda header: with_tensor(header, dims=()), r"has shape \[\]"),
    "with five": (lambda header: with_tensor(header, dims=(1, 1, 1, 1, 1)), "has 5 dimensions, more than 4"),
    "no type": (lambda header: with_tensor(header, kind=999), "is of type 999, which ggml does not have"),
    "half a block": (
        lambda header: with_tensor(header, kind=8, dims=(33, 1)),
        r"has shape \[1, 33\], and Q8_0 has blocks of 32",
    ),
    "misnamed": (lambda header: with_tensor(header, name="x" * 70_000), "a text of 70000 bytes, more than 65535"),
    "twice the key": (
        lambda header: header._replace(values=[*header.values, header.values[0]]),
        "two keys of the name 'general.architecture'",
    ),
    "a value of no type": (
        lambda header: header.with_value("general.x", Value(13, 0)),
        "is of type 13, which the format does not have",
    ),
    "an array of arrays": (
        lambda header: header.with_value("general.x", Value(ARRAY, (ARRAY, []))),
        "is of type 9, which the format does not have",
    ),
    "divisors in rows": (
        lambda header: header._replace(tensors=[*header.tensors, Tensor("rope_freqs.weight", (2, 1), 0, 0)]),
        "overlap",
    ),
}


@pytest.mark.parametrize("damage", list(TABLE))
def test_a_damaged_table_is_refused(damage: str, header: Header, cache: pathlib.Path) -> None:
    change, words = TABLE[damage]
    path = cache / "model.gguf"
    path.write_bytes(change(header).encoded()[0])
    with pytest.raises(ModelError, match=words):
        resolve_model_folder(str(path))


@pytest.mark.parametrize("alignment", [0, 1, 4, 7, 24, 2**31, "32", True, 32.0])
def test_a_wrong_alignment_is_refused(alignment: object, header: Header, cache: pathlib.Path) -> None:
    kinds = {bool: BOOL, int: UINT32, str: STRING, float: FLOAT32}
    path = cache / "model.gguf"
    path.write_bytes(header.with_value("general.alignment", Value(kinds[type(alignment)], alignment)).encoded()[0])
    with pytest.raises(ModelError, match=r"general\.alignment is .* and no power of 2 from 8"):
        resolve_model_folder(str(path))


def test_another_alignment_is_read(header: Header, cache: pathlib.Path) -> None:
    path = cache / "model.gguf"
    path.write_bytes(header.with_value("general.alignment", Value(UINT32, 64)).encoded(alignment=64)[0])
    offsets = {tensor.offset % 64 for tensor in header.tensors}
    assert (refusal(path) is None) == (offsets == {0})


@pytest.mark.parametrize("place", [8, 16, "text", "array"])
def test_a_count_costs_no_memory(place: int | str, header: Header, cache: pathlib.Path) -> None:
    """The number of tensors, that of values, the length of a text, and that of an array."""
    if isinstance(place, int):
        content = bytearray(header.encoded()[0])
        content[place : place + 8] = BIG.to_bytes(8, "little")
    else:
        kind = Value(STRING, "mark") if place == "text" else Value(ARRAY, (STRING, ["mark"]))
        content = bytearray(header.with_value("general.x", kind).encoded()[0])
        length = content.index(b"mark") - 8
        content[length : length + 8] = BIG.to_bytes(8, "little")
    path = cache / "model.gguf"
    path.write_bytes(content)
    os.truncate(path, 1 << 30)  # sparse
    refusal(path)
    tracemalloc.start()
    try:
        assert refusal(path) is not None
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
