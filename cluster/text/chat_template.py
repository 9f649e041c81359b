"""A model's chat templates, which write a conversation as text: Jinja in a sandbox, as transformers renders it.

A template comes with a model and is not trusted, so `cluster/text/template_process.py` runs it in another process.
`cluster/text/tokenizer.py` calls this module.
"""

from __future__ import annotations

import functools
from typing import Any

import jinja2

from manta.cluster.text.template_process import OverBudget, RenderRefused, TemplateProcess
from manta.cluster.text.template_sandbox import sandbox


class TemplateError(ValueError):
    """The chat template refused the messages, with a message of its own, or it takes more than it may."""


class ChatTemplates:
    """The templates of one model by name: `default`, and perhaps `tool_use` for requests with tools.

    Raises `jinja2.TemplateError` if a source is no valid Jinja.
    """

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources
        environment = sandbox()
        for source in sources.values():
            try:
                environment.parse(source)  # not compiled, because that computes what is constant
            except RecursionError as error:
                raise jinja2.TemplateError("it is nested too deeply") from error

    def __bool__(self) -> bool:
        return bool(self._sources)

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
        if "default" not in self._sources:
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
        """Returns the text that the template makes of `values`. Raises `TemplateError` if there is no template, if the
        template raises anything, or if it takes more memory, time or text than `template_process` allows.
        """
        source = self._sources.get("tool_use") if tools else None
        source = self._sources.get("default") if source is None else source
        if source is None:
            raise TemplateError(
                "this model has no chat template; use /v1/completions, or a model whose tokenizer brings one"
            )
        try:
            return template_process().render(source, values)
        except RenderRefused as error:
            raise TemplateError(str(error)) from error
        except OverBudget as error:
            raise TemplateError(f"the model's chat template cannot render these messages: {error}; mend it") from error


@functools.cache
def template_process() -> TemplateProcess:
    """Returns the process that renders all templates of this one."""
    return TemplateProcess()
