"""Fields of a body that Manta does not have: which are ignored by name, and which are refused.

Clients and agents send fields of their own, most of which change nothing. Three classes are told apart:

- Fields that the body's struct has are known.
- `NOT_SUPPORTED` has fields that are known elsewhere and would change the answer. Their values without effect are
  taken, and others are refused.
- All other fields are unknown. They are ignored, and the answer's header `x-manta-ignored` names them. Refused are
  those that look like a misspelt field, or like a constraint or a limit, because ignoring these gives another answer,
  and any in a struct that says `must_know_fields`.

`decode` of `cluster/http/access/request_admission.py` calls `leave_out_foreign` for a body that its struct does not
take as it is. Wherever else a part of a body is left out, `ignore` notes it.
"""

from __future__ import annotations

import contextvars
import difflib
import functools
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from msgspec import inspect

from manta.cluster.errors import refuse

IGNORED = b"x-manta-ignored"
"""Header of an answer that names what had no effect."""
MAX_NAMES = 16
"""Most names in the header `x-manta-ignored`."""
MAX_FIELDS = 512
"""Most fields of a body that has unknown ones; no body has a hundred known ones."""
MAX_HEADER_BYTES = 512
"""Most bytes of that header."""


class Unsupported(NamedTuple):
    """A field that other servers have and that would change the answer."""

    without_effect: tuple[Any, ...]
    """Values that change nothing, besides null and empty ones."""
    remedy: str = "leave it out"


NOT_SUPPORTED: dict[str, Unsupported] = {
    "best_of": Unsupported((1,), "leave it out, or send n"),
    "documents": Unsupported((), "write them into the messages"),
    "dry_multiplier": Unsupported((0,)),
    "dynatemp_range": Unsupported((0,)),
    "early_stopping": Unsupported(()),
    "echo": Unsupported((), "send it to /v1/completions"),
    "epsilon_cutoff": Unsupported((0,)),
    "eta_cutoff": Unsupported((0,)),
    "kv_transfer_params": Unsupported(()),
    "length_penalty": Unsupported((1,), "leave it out; it belongs to beam search"),
    "lora": Unsupported((), "name the adapter as the model, or send lora to /v1/chat/completions"),
    "lora_request": Unsupported(()),
    "mirostat": Unsupported((0,)),
    "mirostat_mode": Unsupported((0,)),
    "min_length": Unsupported((0,), "send min_tokens"),
    "min_new_tokens": Unsupported((0,), "send min_tokens"),
    "n_predict": Unsupported((-1,), "send max_tokens"),
    "repeat_penalty": Unsupported((1,), "send repetition_penalty"),
    "smoothing_factor": Unsupported((0,)),
    "tfs": Unsupported((1,)),
    "tfs_z": Unsupported((1,)),
    "top_a": Unsupported((0,)),
    "typical": Unsupported((1,)),
    "typical_p": Unsupported((1,)),
    "xtc_probability": Unsupported((0,)),
}
"""Fields of vLLM, SGLang, TGI, llama.cpp and others, at the top of a body."""
SENT_BY_CLIENTS = frozenset({"models", "provider", "prompt_cache_breakpoint", "stream_usage", "user_id"})
"""Unknown fields that clients are known to send, although their names are close to one of Manta's."""
_CONSTRAINTS = frozenset({"schema", "grammar", "json_schema", "regex", "choice", "pattern", "enum", "ebnf"})
_LIMITS_AND_CONSTRAINTS = ("guided_", "max_", "stop")
"""Beginnings of names that bound or constrain an answer."""


class _Ignored:
    """Names the parts of one request's body that have no effect."""

    def __init__(self, refuses: bool) -> None:
        self.names: list[str] = []
        self.known: set[str] = set()
        """The same names, to look for them."""
        self.refuses = refuses
        self.name_of: Callable[[str], str] = str
        """Function that returns the body's name of a field of the OpenAI body that it has become."""


_of_request: contextvars.ContextVar[_Ignored | None] = contextvars.ContextVar("fields without effect", default=None)


def collect_ignored(refuses: bool = False) -> list[str]:
    """Returns a list to which `ignore` adds from now on, in this task and those that it starts. If it `refuses`,
    `ignore` raises `RequestRefused` instead.
    """
    ignored = _Ignored(refuses)
    _of_request.set(ignored)
    return ignored.names


def ignore(path: str, remedy: str = "remove it") -> None:
    """Notes that the part of a body at `path` has no effect, or refuses it, as the request's `collect_ignored` says."""
    ignored = _of_request.get()
    if ignored is None:
        return
    path = ignored.name_of(path)
    if ignored.refuses:
        refuse("unknown_field", path, remedy=remedy)
    if path not in ignored.known:
        ignored.known.add(path)
        ignored.names.append(path)


def rename_ignored(name_of: Callable[[str], str]) -> None:
    """Has `ignore` name what follows by `name_of`, because the body has become one of another API."""
    ignored = _of_request.get()
    if ignored is not None:
        ignored.name_of = name_of


def ignored_header(names: Sequence[str]) -> bytes:
    """Returns the value of the header `x-manta-ignored`: names with percent escapes, and how many more do not fit."""
    shown: list[str] = []
    num_bytes = 0
    for name in names[:MAX_NAMES]:
        escaped = urllib.parse.quote(name[:MAX_HEADER_BYTES], safe="[].:=")
        num_bytes += len(escaped) + 2
        if num_bytes > MAX_HEADER_BYTES - 16:  # room for the count
            break
        shown.append(escaped)
    rest = len(names) - len(shown)
    return ", ".join([*shown, *([f"+{rest}"] if rest else [])]).encode()


def leave_out_foreign(kind: Any, body: Any) -> None:
    """Removes from a decoded JSON `body` what a struct of type `kind` does not have, and notes it by `ignore`. Raises
    `RequestRefused` for what must not be ignored. A `kind` with a function `leave_out` removes more by itself before.
    """
    if isinstance(body, dict) and (leave_out := getattr(kind, "leave_out", None)) is not None:
        leave_out(body)
    elsewhere = getattr(kind, "fields_elsewhere", {})
    if isinstance(body, dict) and len(body) > MAX_FIELDS:  # each unknown one is compared with all known ones
        refuse("over_limit", "", len(body), MAX_FIELDS, "leave out what is not known", unit="fields")
    for place in list(_foreign_fields(_type_of(kind), body, "", "")):
        if place.advice_path in elsewhere:
            refuse("unknown_field", place.path, remedy=elsewhere[place.advice_path])
        if place.must_be_known:
            refuse("unknown_field", place.path, remedy="remove it")
        judge_foreign(place.path, place.key, place.value, place.known, is_of_body=place.path == place.key)
        del place.container[place.key]


class _Place(NamedTuple):
    """A field that the struct around it does not have."""

    container: dict[str, Any]
    key: str
    path: str
    advice_path: str
    """The path without indices, as in `fields_elsewhere`."""
    known: tuple[str, ...]
    """Fields that the struct has."""
    must_be_known: bool
    """Whether nothing in the struct may be ignored, because it constrains an answer or ends one."""

    @property
    def value(self) -> Any:
        return self.container[self.key]


def judge_foreign(path: str, key: str, value: Any, known: Sequence[str], is_of_body: bool) -> None:
    """Notes a field that is ignored, or raises `RequestRefused`. `is_of_body` says whether it is an option of the whole
    request, as opposed to a field of a message or a tool. `known` are the fields that could stand in its place.
    """
    if is_of_body and (unsupported := NOT_SUPPORTED.get(key)) is not None:
        if value not in unsupported.without_effect and not _is_nothing(value):
            shown = value if isinstance(value, int | float | str) else None
            refuse("unsupported", path, shown, unsupported.without_effect or None, unsupported.remedy)
        return
    if not _is_nothing(value):
        is_refused = key in _CONSTRAINTS or key.startswith(_LIMITS_AND_CONSTRAINTS)
        near = _nearest(key, known) if is_of_body or is_refused else None
        is_misspelt = near is not None and is_of_body and key not in SENT_BY_CLIENTS
        if is_misspelt or is_refused:
            refuse("unknown_field", path, remedy=f"did you mean {near}?" if near else "remove it")
    ignore(path)


def _nearest(key: str, known: Sequence[str]) -> str | None:
    """Returns the known name that is most like a key; None if none is much like it. It takes 0.2 ms for a body."""
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.8)), None)


def _is_nothing(value: Any) -> bool:
    """Returns whether a value asks for nothing in any field."""
    return value is None or value is False or value in ("", "none", [], {})


@functools.cache
def _type_of(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _foreign_fields(kind: inspect.Type, value: Any, path: str, advice_path: str) -> Iterator[_Place]:
    """Yields every field of the objects in `value` that the struct for it does not have. What fits no type is skipped,
    because converting it raises an error that names it.
    """
    options = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if isinstance(value, list):
        for option in options:
            if isinstance(option, inspect.CollectionType):
                for index, item in enumerate(value):
                    yield from _foreign_fields(option.item_type, item, f"{path}[{index}]", advice_path)
        return
    if not isinstance(value, dict):
        return
    for option in options:
        if isinstance(option, inspect.StructType) and _is_for(option, value):
            known = {field.encode_name: field.type for field in option.fields}
            for key in value:
                below, advice = _below(path, key), _below(advice_path, key)
                if key in known:
                    yield from _foreign_fields(known[key], value[key], below, advice)
                elif key != option.tag_field:
                    must_know = getattr(option.cls, "must_know_fields", False)
                    yield _Place(value, key, below, advice, tuple(known), must_know)


def _is_for(struct: inspect.StructType, value: dict[str, Any]) -> bool:
    """Returns whether an object is to become this struct, of those of a union."""
    return struct.tag_field is None or value.get(struct.tag_field) == struct.tag


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
