"""Describes each option of the configuration as text: its docstring, type, default and bounds.

The docstrings of fields are read from the source, because Python keeps none at run time. `cluster/cli/flags.py` makes
the help of flags from them, and `cluster/cli/options_page.py` a page of the manual, so that there is one text.
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

from manta.cluster.struct_fields import field_types

_TYPE_NAMES = {bool: "true or false", int: "integer", float: "number", str: "text"}


class OptionText(msgspec.Struct, frozen=True):
    """The description of one option."""

    name: str
    """Last part of the option's key."""
    full_doc: str
    """The option's docstring in one line; empty if it has none."""
    default: Any
    type_name: str
    """Type of the option's values, as the manual names it."""
    values: str
    """Permitted choices, or bounds of a number; empty if every value of the type is permitted."""

    @property
    def doc(self) -> str:
        """First sentence of the option's docstring."""
        text = self.full_doc
        for end in (". ", "; "):
            text = text.partition(end)[0]
        return text.rstrip(".")


def option_text(kind: type[msgspec.Struct], key: str) -> OptionText:
    """Returns the text of the option `key`, dotted, below the struct `kind`."""
    *sections, name = key.split(".")
    for section in sections:
        kind = _first_of(field_types(kind)[section])
    annotation = _annotations(kind)[name]
    field = next(field for field in msgspec.structs.fields(kind) if field.name == name)
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return OptionText(name, _docstrings(kind).get(name, ""), default, _type_name(annotation), _values(annotation))


def group_of(kind: type[msgspec.Struct], name: str) -> type[msgspec.Struct] | None:
    """Returns the struct of the options below the field `name`, which may be a mapping of names to such structs or a
    list of them; None if the field is an option itself.
    """
    found = _first_of(field_types(kind)[name])
    if typing.get_origin(found) is dict:
        found = typing.get_args(found)[1]
    elif typing.get_origin(found) is tuple:
        found = typing.get_args(found)[0]
    return found if isinstance(found, type) and issubclass(found, msgspec.Struct) else None


@functools.cache
def _annotations(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Returns the types of a struct's fields, with their bounds."""
    return typing.get_type_hints(kind, include_extras=True)


def _type_name(annotation: Any) -> str:
    """Returns the name of a type in words: `integer`, `list of text`, `integer or null`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if each is type(None) else _type_name(each) for each in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"mapping of names to {_type_name(arguments[1])}"
    if origin is typing.Literal:
        return "text" if isinstance(arguments[0], str) else "integer"
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return "options"
    return _TYPE_NAMES[annotation]


def _first_of(annotation: Any) -> Any:
    """Returns the first type of a union that is not None; any other type as it is."""
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
    """Returns the docstrings of a struct's fields, each in one line, by name; those of the structs it extends too."""
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
                    found[field.target.id] = _in_one_line(after.value)
    return found


def _in_one_line(node: ast.expr) -> str:
    return " ".join(str(node.value).split()) if isinstance(node, ast.Constant) else ""
