"""How models write their tool calls. They differ in a few marks only; which a model uses its chat template shows.

`cluster/chat/tool_parser.py` reads a format, and the grammar of `cluster/protocol/tools.py` enforces it.
"""

from __future__ import annotations

import msgspec


class ToolFormat(msgspec.Struct, frozen=True):
    """How a model writes a call: `begin`, `{"name": ..., arguments_key: {...}}`, `end`."""

    name: str
    begin: str
    end: str = ""
    arguments_key: str = "arguments"
    is_list: bool = False
    """All calls stand in one JSON array after one `begin`; else every call has its own."""
    is_bare: bool = False
    """`begin` may be missing if the answer is nothing but one call."""


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", is_list=True)
LLAMA3 = ToolFormat("llama3", "<|python_tag|>", arguments_key="parameters", is_bare=True)

FORMATS: tuple[tuple[str, ToolFormat], ...] = (
    ("<tool_call>", HERMES),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA3),
    ('"parameters": ', LLAMA3),
)
"""What a chat template that uses the format contains; the first that matches counts."""


def detect_format(template: str) -> ToolFormat | None:
    """The format of a chat template; None if it has no place for tools."""
    if "tools" not in template:
        return None
    return next((found for mark, found in FORMATS if mark in template), HERMES)
