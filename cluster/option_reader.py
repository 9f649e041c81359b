"""Reads options as people write them into configuration structs: sizes with units, options left empty, and mistakes,
which it answers with the option that was probably meant.

This module knows options by name only as far as the ending `_bytes`. The structs are in `cluster/config.py`; msgspec
checks types and bounds.
"""

from __future__ import annotations

import difflib
import ipaddress
import pathlib
import re
import reprlib
import types
import typing
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeVar

import msgspec
import yaml

from manta.cluster.struct_fields import field_types

AnyOptions = TypeVar("AnyOptions", bound=msgspec.Struct)

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B", re.ASCII)
MOST_NUMBER = 2**63 - 1
"""Greatest number of an option: what every process and library reads that is told of it."""
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def read_yaml(path: pathlib.Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file. Raises `ValueError` for a file that cannot be read or holds something else,
    and shows the line of a mistake with a mark below the place.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"cannot read the configuration {path}: {getattr(error, 'strerror', error)}") from error
    try:
        loaded = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark, lines = error.problem_mark, [*text.splitlines(), ""]
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        shown = "" if mark is None else f"\n{lines[min(mark.line, len(lines) - 1)]}\n{' ' * mark.column}^"
        raise ValueError(f"{path} is not valid YAML{place}: {error.problem or error.context}{shown}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if loaded is not None and not isinstance(loaded, dict):
        raise ValueError(f"{path} must hold a mapping of options, not a {type(loaded).__name__}")
    return loaded or {}


def check_network(option: str, network: str) -> None:
    """Raises `ValueError` if the value of an option is neither an IP address nor a network."""
    try:
        ipaddress.ip_network(network)
    except ValueError as error:
        message = f"{option}: {network!r} is neither an IP address nor a network"
        raise ValueError(f"{message} ({error}); write 10.0.0.7 or 10.0.0.0/8") from error


def read_options(data: Any, kind: type[AnyOptions]) -> AnyOptions:
    """Returns `data`, as YAML yields it, as a `kind`. An option left empty keeps its default, and one whose name ends
    in `_bytes` may be `512MiB` or `1GB`. Raises `ValueError` naming the option, its value and the bound or choices.
    """
    prepared = _prepared(data, kind, kind, "")
    try:
        return msgspec.convert(prepared, kind)
    except msgspec.ValidationError as error:
        refusal = str(error)
        raise ValueError(refusal.replace("`$.", "`") + _given(prepared, refusal)) from error


def _given(data: Any, refusal: str) -> str:
    """Returns the end of a message of msgspec's, which names the place of a value and not the value: ", which is 'x'".
    Returns nothing for keys of the API, which nobody should see, and for a value that is a group of others.
    """
    place = re.search(r"`\$((?:\.\w+|\[\d+\])+)`$", refusal)
    if place is None or place[1].startswith(".api_keys"):
        return ""
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", place[1]):
        data = data[name] if name else data[int(index)]
    return f", which is {reprlib.repr(data)}" if isinstance(data, str | int | float) else ""


def _prepared(data: Any, kind: Any, root: type, path: str) -> Any:
    """Returns `data` in the form that msgspec accepts."""
    kinds = [each for each in _alternatives(kind) if each is not type(None)]
    (first,) = kinds[:1]
    if _is_struct(first):
        return _prepared_struct(data, first, root, path)
    if typing.get_origin(first) is tuple and isinstance(data, list | tuple):
        return [_prepared(value, typing.get_args(first)[0], root, f"{path}[{n}]") for n, value in enumerate(data)]
    if typing.get_origin(first) is typing.Literal and data is not None:
        return _checked_choice(data, typing.get_args(first), path)
    if path.endswith("_bytes") and isinstance(data, str):
        return _checked_number(_num_bytes(data, path), path)
    return _checked_numbers(data, path)


def _checked_numbers(data: Any, path: str) -> Any:
    """Returns `data`, after a look at the numbers in lists and in objects whose keys are the operator's."""
    if isinstance(data, dict):
        return {key: _checked_numbers(value, _dotted(path, key)) for key, value in data.items()}
    if isinstance(data, list):
        return [_checked_numbers(value, f"{path}[{index}]") for index, value in enumerate(data)]
    return _checked_number(data, path) if isinstance(data, int | float) else data


def _checked_number(number: float, path: str) -> float:
    if not abs(number) <= MOST_NUMBER:
        bound = "a finite number within 2^63 - 1 of zero"
        raise ValueError(f"`{path}` cannot be {reprlib.repr(number)}; it is {bound}")
    return number


def _prepared_struct(data: Any, kind: type, root: type, path: str) -> Any:
    if not isinstance(data, dict):
        return data
    fields = field_types(kind)
    for key in data:
        if key not in fields:
            raise ValueError(f"there is no option `{_dotted(path, key)}`{_meant(str(key), kind, root, path)}")
    return {
        key: _prepared(value, fields[key], root, _dotted(path, key))
        for key, value in data.items()
        if value is not None or type(None) in _alternatives(fields[key])
    }


def _checked_choice(value: Any, choices: tuple[Any, ...], path: str) -> Any:
    if value not in choices:
        raise ValueError(f"`{path}` cannot be {value!r}; it is one of {', '.join(map(str, choices))}")
    return value


def _num_bytes(text: str, path: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"`{path}` cannot be {text!r}; write bytes, or a size such as 512MiB (2^20) or 1GB (10^9)")
    return int(Decimal(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].upper()])


# ---- what was meant ----------------------------------------------------------------------------------------------


def _meant(key: str, kind: type, root: type, path: str) -> str:
    """Returns a suggestion for an unknown `key`: the same name in another section, else the most similar name here or
    elsewhere.
    """
    everywhere = list(_places(root, ""))
    same = [place for place in everywhere if place.rpartition(".")[2] == key]
    here = [_dotted(path, name) for name in field_types(kind)]
    for places in (same, _near(key, here), _near(key, everywhere)):
        if places:
            return f"; did you mean `{places[0]}`?"
    return f"; the options {f'of `{path}`' if path else 'here'} are {', '.join(field_types(kind))}"


def _near(key: str, places: list[str]) -> list[str]:
    names = [place.rpartition(".")[2] for place in places]
    return [places[names.index(name)] for name in difflib.get_close_matches(key, names, n=1, cutoff=0.7)]


def _places(kind: type, path: str) -> Iterator[str]:
    """Yields the dotted key of every option."""
    for name, of_field in field_types(kind).items():
        yield _dotted(path, name)
        for each in _alternatives(of_field):
            if _is_struct(each):
                yield from _places(each, _dotted(path, name))


# ---- types -------------------------------------------------------------------------------------------------------


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Returns the types of a union; any other type alone."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _dotted(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)
