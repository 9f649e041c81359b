"""Describes each option of the configuration as text: its docstring, default and bounds.

The docstrings of fields are read from the source, because Python keeps none at run time. `cluster/cli/flags.py` makes
the help of flags of them, so that help and configuration are one text.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import types
import typing
from typing import Any

import msgspec
from msgspec import Meta


class OptionText(msgspec.Struct, frozen=True):
    """The description of one option."""

    name: str
    """The last part of its key."""
    doc: str
    """The first sentence of its docstring; empty if it has none."""
    default: Any
    values: str
    """The permitted choices, or the bounds of a number. Empty if every value of the type is permitted."""


def option_text(kind: type[msgspec.Struct], key: str) -> OptionText:
    """Returns the text of the option `key`, dotted, below the struct `kind`."""
    *sections, name = key.split(".")
    for section in sections:
        kind = _first_of(typing.get_type_hints(kind)[section])
    annotation = typing.get_type_hints(kind, include_extras=True)[name]
    default = next(field.default for field in msgspec.structs.fields(kind) if field.name == name)
    return OptionText(name, _docstrings(kind).get(name, ""), default, _values(annotation))


def _first_of(annotation: Any) -> Any:
    """The type of a union that is not None."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next(each for each in typing.get_args(annotation) if each is not type(None))
    return annotation


def _values(annotation: Any) -> str:
    annotation = _first_of(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(map(str, typing.get_args(annotation)))
    bounds = [each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Meta)]
    words = []
    for bound in bounds:
        for value, word in ((bound.ge, "at least"), (bound.gt, "more than"), (bound.le, "at most")):
            if value is not None:
                words.append(f"{word} {value:,}")
    return ", ".join(words)


@functools.cache
def _docstrings(kind: type) -> dict[str, str]:
    """The first sentences of the docstrings of a struct's fields, by name; those of the structs it extends too."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if each.__module__ in sys.modules and issubclass(each, msgspec.Struct) and each is not msgspec.Struct:
            (tree,) = ast.parse(inspect.getsource(each)).body
            assert isinstance(tree, ast.ClassDef)
            for field, after in zip(tree.body, tree.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(after, ast.Expr)
                ):
                    found[field.target.id] = _first_sentence(after.value)
    return found


def _first_sentence(node: ast.expr) -> str:
    text = " ".join(str(node.value).split()) if isinstance(node, ast.Constant) else ""
    for end in (". ", "; "):
        text = text.partition(end)[0]
    return text.rstrip(".")
