"""Tools: what a chat request may call, as bodies name it and as chat templates read it."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from manta.cluster.errors import refuse
from manta.cluster.protocol.constraint_fields import json_text
from manta.cluster.protocol.foreign_fields import ignore
from manta.structured.constraint import ConstraintSpec


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; None takes no arguments, as in OpenAI's API."""
    strict: bool | None = None
    """False also accepts a schema that is enforced in part, and the answer's header says which."""


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    function: Function
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """Call this function, once."""

    function: FunctionName


class AllowedTool(msgspec.Struct, forbid_unknown_fields=True):
    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]

    @property
    def names(self) -> set[str]:
        return {tool.function.name for tool in self.tools}


class AllowedToolsChoice(msgspec.Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    """Call some of the tools. The prompt still shows all of them, so that it stays in the prefix cache."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice

_OF_NO_ARGUMENTS = frozenset({"$schema", "type", "title", "description", "properties", "required"})
"""Keywords with which the schema of a tool may still declare no arguments."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")


def leave_out_foreign_tools(body: dict[str, Any], own: str) -> None:
    """Removes from a decoded JSON body the `tools` of other types than `own`, which a server would have to run."""
    tools = body.get("tools")
    if not isinstance(tools, list):
        return
    body["tools"] = [tool for index, tool in enumerate(tools) if not is_foreign(tool, f"tools[{index}]", own)]


def is_foreign(tool: Any, path: str, own: str) -> bool:
    """Returns whether the type of a tool is another one than the client's `own`, and notes that it is ignored."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind == own:
        return False
    ignore(f"{path}.type={kind}")
    return True


def check_tools(tools: list[Tool], choice: ToolChoice | None) -> None:
    """Raises `RequestRefused` for names that no model could call, and for a choice that no tool fits."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        path = f"tools[{index}].function"
        name, parameters = tool.function.name, tool.function.parameters
        if not _NAME.match(name):
            refuse("wrong_value", f"{path}.name", name, "1 to 64 letters, digits, underscores and dashes")
        if name in names:
            refuse("not_allowed", f"{path}.name", name, remedy="choose another", cause="an earlier tool has it")
        names.add(name)
        if parameters and parameters.get("type", "object") != "object":
            refuse("wrong_value", f"{path}.parameters", bound='the schema of an object: {"type": "object", ...}')
    for name in sorted(_chosen(choice) - names):
        refuse("names_nothing", "tool_choice", name, "the tools", "add it to tools")
    if choice == "required" and not tools:
        refuse("requires", "tool_choice", "required", "tools", "add some")
    if isinstance(choice, AllowedToolsChoice) and not choice.allowed_tools.tools:
        refuse("empty", "tool_choice", remedy='name some tools, or send "none"', place="allowed_tools")


def _chosen(choice: ToolChoice | None) -> set[str]:
    """Returns the functions that a choice names."""
    if isinstance(choice, NamedToolChoice):
        return {choice.function.name}
    return choice.allowed_tools.names if isinstance(choice, AllowedToolsChoice) else set()


def must_call(choice: ToolChoice | None) -> bool:
    """Returns whether the answer has at least one call."""
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice not in (None, "auto", "none")


def template_tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """Returns the tools as chat templates read them, without `strict`, which is for the server."""
    return [
        {"type": "function", "function": msgspec.to_builtins(msgspec.structs.replace(tool.function, strict=None))}
        for tool in tools
    ]


def arguments_constraint(tool: Tool) -> ConstraintSpec:
    """Returns a constraint that is refused if the arguments of a call cannot be constrained: their schema within a
    grammar, as in the grammar of all calls.
    """
    loose = tool.function.strict is False
    schema = {**arguments_schema(tool), "x-guidance": {"lenient": loose}}
    return ConstraintSpec(kind="lark", text=f"start: %json {json_text(schema)}\n", loose=loose)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Returns the schema of a tool's arguments, which are always an object.

    A tool that declares no arguments gets none. Client libraries write an empty `properties` for a function without
    parameters, although JSON Schema allows further ones there. `{"type": "object"}` alone takes any object, as in MCP.
    """
    given = tool.function.parameters
    if not given or (given.get("properties") == {} and _OF_NO_ARGUMENTS.issuperset(given)):
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **given}
