"""Tools: what a chat request may call, and the grammar that holds the model's calls to it.

The grammar fixes the marks of the model's format (`cluster/text/tool_formats.py`) and each tool's name, and lets the
tool's JSON schema rule the arguments, so that `cluster/text/tool_parser.py` can parse every call of a response.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from cluster.errors import refuse
from cluster.http.protocol.constraints import json_text
from cluster.text.tool_formats import ToolFormat
from structured.constraint import ConstraintSpec

# ---- requests ------------------------------------------------------------------------------------------------------


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; None takes any object."""
    strict: bool | None = None
    """False also accepts a schema that is enforced in part, and the answer's header says which."""


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    function: Function
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Call this function, once."""

    function: FunctionName
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")


def check_tools(tools: list[Tool], choice: ToolChoice | None) -> None:
    """Raises `RequestRefused` for names that no model could call, and for a choice that no tool fits."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        path = f"tools[{index}].function"
        name, parameters = tool.function.name, tool.function.parameters
        if not _NAME.match(name):
            refuse(f"{path}.name", f"{path}.name {name[:80]!r} must be 1 to 64 letters, digits, underscores and dashes")
        if name in names:
            refuse(f"{path}.name", f"{path}.name {name!r} is taken by an earlier tool; choose another")
        names.add(name)
        if parameters and parameters.get("type", "object") != "object":
            refuse(f"{path}.parameters", f'{path}.parameters must describe an object: {{"type": "object", ...}}')
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        refuse("tool_choice", f"tool_choice names {choice.function.name!r}, which is not in tools; add it")
    if choice == "required" and not tools:
        refuse("tool_choice", 'tool_choice "required" needs tools; add some')


def template_tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """The tools as chat templates read them; `strict` is no concern of the model."""
    return [
        {"type": "function", "function": msgspec.to_builtins(msgspec.structs.replace(tool.function, strict=None))}
        for tool in tools
    ]


# ---- grammar -------------------------------------------------------------------------------------------------------

JSON_SPACE = r"[ \n\t]{0,20}"
"""White space between two tokens of arguments: enough to indent, too little for a model to lose itself in."""


def calls_grammar(
    form: ToolFormat,
    tools: list[Tool],
    token_id: Callable[[str], int | None],
    *,
    parallel: bool,
    required: bool,
    answer_schema: str | None = None,
) -> str:
    """A Lark grammar (llguidance's dialect) of one or, with `parallel`, more calls of `tools`.

    Not `required`: any text may come before or instead of the calls, or with `answer_schema` JSON of that schema
    instead of them. `token_id` gives the id of a mark that is one token, which text then cannot imitate.
    """
    begin_id = token_id(form.begin)
    begin = _mark(form.begin, begin_id)
    end = _mark(form.end, token_id(form.end)) if form.end else ""
    call = "(" + " | ".join(f"call_{index}" for index in range(len(tools))) + ")"
    more = ""
    if form.is_list:
        body = f'"[" {call} ("," SPACE? {call})* "]"' if parallel else f'"[" {call} "]"'
    else:
        body = f"SPACE? {call} SPACE? {end}"
        more = f"(SPACE? {begin} body)*" if parallel and not form.is_bare else ""
    calls = f"SPACE? {begin} body {more}"
    bare = " | SPACE? body" if form.is_bare else ""
    rules = [f"body: {body}", "SPACE: /[ \\n]{1,2}/"]
    if required:
        rules.append(f"start: {calls}{bare}")
    elif answer_schema is not None:
        rules += [f"start: {calls} | answer", f"answer: %json {answer_schema}"]
    else:
        rules += _optional_calls(form, begin_id, begin, more, bare)
    for index, tool in enumerate(tools):
        head = f'{{"name": {json_text(tool.function.name)}, "{form.arguments_key}": '
        rules.append(f'call_{index}: {json_text(head)} arguments_{index} "}}"')
        options = {"whitespace_pattern": JSON_SPACE, "lenient": tool.function.strict is False}
        rules.append(f"arguments_{index}: %json {json_text({**arguments_schema(tool), 'x-guidance': options})}")
    return "\n".join(["%llguidance {}", *rules]) + "\n"


def _optional_calls(form: ToolFormat, begin_id: int | None, begin: str, more: str, bare: str) -> list[str]:
    """Rules for free text that ends with calls, if any. Once `begin` is written, a call must follow."""
    text = r"/(.|\n)*/"
    if form.is_bare:
        text += r' & ~/[ \n]*\{"name":(.|\n)*/'
    if begin_id is not None:
        text += f" & ~/(.|\\n)*{re.escape(form.begin)}(.|\\n)*/"
        return [f"start: TEXT? | TEXT? {begin} body {more}{bare}", f"TEXT: {text}"]
    return [f"start: TEXT? | opened body {more}{bare}", f"opened[lazy]: TEXT {begin}", f"TEXT: {text}"]


def arguments_constraint(tool: Tool) -> ConstraintSpec:
    """What the arguments alone must fit."""
    loose = tool.function.strict is False
    return ConstraintSpec(kind="json_schema", text=json_text(arguments_schema(tool)), loose=loose)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are always an object."""
    return {"type": "object", **(tool.function.parameters or {})}


def _mark(text: str, token_id: int | None) -> str:
    return json_text(text) if token_id is None else f"<[{token_id}]>"
