"""Jinja's sandbox as transformers sets it up for chat templates, and the compiled templates of a process.

`cluster/text/template_process.py` renders with it; `cluster/text/chat_template.py` only parses.
"""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from manta.cluster.text.call_arguments import WrittenArguments

_MOST_COMPILED = 8
"""Templates that a process keeps compiled."""


class Renderer:
    """Compiles and renders templates, in the process that `template_process` started."""

    def __init__(self) -> None:
        environment = sandbox()
        self._compiled = functools.lru_cache(_MOST_COMPILED)(environment.from_string)

    def render(self, source: str, values: dict[str, Any], most_characters: int) -> str | None:
        """Returns the text that a template makes of `values`; None if it is longer than `most_characters`. Raises what
        the template raises.
        """
        pieces, left = [], most_characters
        for piece in self._compiled(source).generate(values):
            left -= len(piece)
            if left < 0:
                return None
            pieces.append(piece)
        return "".join(pieces)


class _GenerationTag(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks an assistant's text for training; here its body is plain content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """A template's namespace without underscore attributes, which would give access to the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not store {name!r} in a namespace; rename it")


def sandbox() -> jinja2.Environment:
    """Returns transformers' environment, with its filter, functions and extensions."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns a value as JSON. Replaces Jinja's own filter, which escapes HTML; no chat template wants that."""
    if isinstance(value, WrittenArguments):
        return value.json_text()
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)
