"""A model's chat templates, which write a conversation as text: Jinja in a sandbox, as transformers renders it.

A template comes with a model and is not trusted. `cluster/text/tokenizer.py` calls this module.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from manta.cluster.text.call_arguments import WrittenArguments


class TemplateError(ValueError):
    """The chat template refused the messages; the message is the template's own."""


class ChatTemplates:
    """The templates of one model by name: `default`, and perhaps `tool_use` for requests with tools.

    Raises `jinja2.TemplateError` if a source is no valid Jinja.
    """

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources
        environment = _sandbox()
        self._templates = {name: environment.from_string(source) for name, source in sources.items()}

    def __bool__(self) -> bool:
        return bool(self._templates)

    def source(self, tools: bool) -> str:
        """Returns the source of the template; with `tools`, that of the template for tools if there is one. Empty
        without a template.
        """
        source = self._sources.get("tool_use") if tools else None
        return source or self._sources.get("default") or ""

    def check(self, special_tokens: dict[str, str]) -> None:
        """Raises `TemplateError` if the template refuses a conversation of one message with both forms of its content.
        Does nothing without a template.
        """
        if "default" not in self._templates:
            return
        refusals = []
        for content in ("Hello", [{"type": "text", "text": "Hello"}]):
            values = {"messages": [{"role": "user", "content": content}], "tools": None, "add_generation_prompt": True}
            try:
                self.render(None, {**special_tokens, **values})
                return
            except TemplateError as error:
                refusals.append(str(error))
        raise TemplateError(
            f"its chat template refuses a conversation of one message ({refusals[0]}); mend it, or remove it to serve "
            "/v1/completions alone"
        )

    def render(self, tools: list[dict[str, Any]] | None, values: dict[str, Any]) -> str:
        """Returns the text that the template makes of `values`. Raises `TemplateError` if there is no template, or if
        the template raises anything.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise TemplateError(
                "this model has no chat template; use /v1/completions, or a model whose tokenizer brings one"
            )
        try:
            return template.render(values)
        except Exception as error:  # a template is a program and may raise anything
            raise TemplateError(str(error) or type(error).__name__) from error


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


def _sandbox() -> jinja2.Environment:
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
