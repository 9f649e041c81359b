"""Extreme numbers in every numeric option, and in every number of the files that describe a model.

Each is refused by a `ValueError` that names the field, or it is taken as it stands: nothing is rounded, nothing
overflows, and no other error reaches the operator. A case is a function of its seed.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
import random
import shutil
import struct
import tempfile
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from manta.cluster.config import ServeConfig, load_config
from manta.workers.checkpoints.memory import read_header, weight_bytes
from manta.workers.checkpoints.model_folder import load_model_config
from tests.checkpoints import checkpoint

EDGES = (0, 1, 2**31, 2**53, 2**63, 2**64, 10**20, 10**400)
NUMBERS: tuple[Any, ...] = (
    *sorted({sign * edge + step for edge in EDGES for sign in (1, -1) for step in (-1, 0, 1)}),
    *(0.5, -0.5, 1e-7, 5e-324, 1e308, math.nan, math.inf, -math.inf),
)
LONGEST_MESSAGE = 600


def refused(name: str, call: Callable[[], object]) -> bool:
    """Returns whether the call refuses the field. Raises `AssertionError` if it does so without its name or at length,
    or fails in another way.
    """
    try:
        call()
    except ValueError as error:
        text = str(error)
        assert name in text, f"{name} is not named: {text}"
        assert len(text) < LONGEST_MESSAGE, f"{len(text)} characters for {name}: {text[:200]}"
        return True
    except Exception as error:
        raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    return False


def _is_sane(number: Any) -> bool:
    """Returns whether an operator's number is finite and fits what processes send each other."""
    return abs(number) < 2**63


# ---- options ---------------------------------------------------------------------------------------------------------


def numeric_options(group: type = ServeConfig, path: str = "") -> Iterator[str]:
    """The dotted paths of all options that may be numbers."""
    hints = typing.get_type_hints(group)
    for field in msgspec.structs.fields(group):
        kinds = set(_kinds(hints[field.name]))
        if kinds & {int, float} and bool not in kinds:
            yield path + field.name
        if tuple in _origins(hints[field.name]):  # what is in a list has no dotted path
            continue
        key = "someone." if typing.get_origin(hints[field.name]) is dict else ""
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                yield from numeric_options(kind, f"{path}{field.name}.{key}")


def _kinds(hint: Any) -> Iterator[Any]:
    if arguments := typing.get_args(hint):
        for each in arguments:
            yield from _kinds(each)
    else:
        yield hint


def _origins(hint: Any) -> set[Any]:
    return {typing.get_origin(hint), *(typing.get_origin(each) for each in typing.get_args(hint))}


@functools.cache
def options() -> tuple[str, ...]:
    return tuple(numeric_options())


def check_option(rng: random.Random) -> None:
    path, number = rng.choice(options()), rng.choice(NUMBERS)
    name = path.rpartition(".")[2]
    found: list[ServeConfig] = []
    given = {"engine.model": "a", path: number}
    if refused(name if "someone" not in path else "key_limits", lambda: found.append(load_config(None, given))):
        return
    value: Any = found[0]
    for part in path.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    assert _is_sane(number), f"{path} takes {number!r}"
    assert value in (number, float(number)), f"{path}={number!r} became {value!r}"
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(found[0]), type=ServeConfig)  # to another process
    assert sent == found[0]


# ---- a model's files -------------------------------------------------------------------------------------------------


def numbers_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all numbers in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from numbers_of(item, (*path, name))
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def with_number(value: Any, path: tuple[Any, ...], number: Any) -> Any:
    changed = json.loads(json.dumps(value))
    target = changed
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = number
    return changed


UNREAD = frozenset(
    [
        *("initializer_range", "pretraining_tp", "bos_token_id", "pad_token_id"),
        *("attention_dropout", "residual_dropout", "max_window_layers"),
    ]
)
"""Numbers of a configuration that change nothing: dropout is for training, and windows are off in these models."""
FAMILIES = ("llama", "qwen2", "qwen3", "seed_oss")


def check_config(rng: random.Random) -> None:
    """`config.json` and `generation_config.json`, read as `manta check` reads them."""
    source = checkpoint(rng.choice(FAMILIES))
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        for file in source.iterdir():
            shutil.copy(file, folder / file.name)
        config = json.loads((source / "config.json").read_text())
        path, number = rng.choice(sorted(numbers_of(config), key=str)), rng.choice(NUMBERS)
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(with_number(config, path, number)))
        name = str([each for each in path if isinstance(each, str)][-1])

        def read() -> None:
            model = load_model_config(folder)
            weight_bytes(folder, "float32", model)
            msgspec.msgpack.encode(model)  # it is sent to other processes

        if not refused("/config.json: ", read) and name not in UNREAD:
            assert _is_sane(number), f"{name} takes {number!r}"


def check_safetensors(rng: random.Random) -> None:
    """The header of a file of weights: its length, shapes and offsets."""
    whole = next(checkpoint("llama").glob("*.safetensors")).read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    path, number = rng.choice(sorted(numbers_of(header), key=str)), rng.choice(NUMBERS)
    text = json.dumps(with_number(header, path, number)).encode()
    told = (
        len(text)
        if rng.random() < 0.8
        else rng.choice([each for each in NUMBERS if 0 <= each < 2**64 and each % 1 == 0])
    )
    with tempfile.TemporaryDirectory() as made:
        file = pathlib.Path(made) / "model.safetensors"
        file.write_bytes(struct.pack("<Q", told) + text + whole[8 + length :])
        if not refused("model.safetensors", lambda: read_header(file)):
            for entry in read_header(file).values():
                assert all(type(size) is int and size >= 0 for size in entry.shape), f"{path} takes {number!r}"


CHECKS: dict[str, Callable[[random.Random], None]] = {
    "options": check_option,
    "config.json": check_config,
    "safetensors": check_safetensors,
}
