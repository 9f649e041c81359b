"""Tools: what a chat request may call, as bodies name it and as chat templates read it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from manta.cluster.errors import refuse
from manta.cluster.protocol.constraint_fields import json_text
from manta.cluster.protocol.foreign_fields import ignore
from manta.structured.constraint import ConstraintSpec
from manta.structured.lark.grammar import LarkGrammar, in_json_strings, of_regex, read_lark


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; None takes no arguments, as in OpenAI's API."""
    strict: bool | None = None
    """True refuses a schema that cannot be enforced. False and None, OpenAI's default, enforce as much of it as can be,
    and the answer's header says what is left out.
    """


class Tool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A function, whose arguments are an object."""

    function: Function

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def demands(self) -> str:
        """The field of the tool that says which calls are valid."""
        return "function.parameters"

    @property
    def is_loose(self) -> bool:
        """Whether what cannot be enforced is left out."""
        return not self.function.strict


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""


class InputGrammar(msgspec.Struct, forbid_unknown_fields=True):
    must_know_fields: ClassVar[bool] = True

    definition: str
    syntax: Literal["lark", "regex"]


class GrammarFormat(msgspec.Struct, tag_field="type", tag="grammar", forbid_unknown_fields=True):
    must_know_fields: ClassVar[bool] = True

    grammar: InputGrammar


class Custom(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    format: TextFormat | GrammarFormat | None = None
    """Form of the input; None is any text."""


class CustomTool(msgspec.Struct, tag_field="type", tag="custom", forbid_unknown_fields=True):
    """A tool whose input is one text."""

    custom: Custom

    @property
    def name(self) -> str:
        return self.custom.name

    @property
    def demands(self) -> str:
        return "custom.format.grammar.definition"

    @property
    def is_loose(self) -> bool:
        return False

    @property
    def grammar(self) -> InputGrammar | None:
        """The grammar of the input; None for any text."""
        return self.custom.format.grammar if isinstance(self.custom.format, GrammarFormat) else None

    def lark(self) -> LarkGrammar | None:
        """Returns the grammar of the input; None for any text. Raises `ConstraintError` for one that has a mistake."""
        if self.grammar is None:
            return None
        return (read_lark if self.grammar.syntax == "lark" else of_regex)(self.grammar.definition)


AnyTool = Tool | CustomTool


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """Call this function, once."""

    function: FunctionName

    @property
    def name(self) -> str:
        return self.function.name


class CustomToolChoice(msgspec.Struct, tag_field="type", tag="custom", forbid_unknown_fields=True):
    """Call this custom tool, once."""

    custom: FunctionName

    @property
    def name(self) -> str:
        return self.custom.name


NamedChoice = NamedToolChoice | CustomToolChoice
"""Tool of a choice, by its kind and name."""


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[NamedChoice]

    @property
    def names(self) -> set[str]:
        return {tool.name for tool in self.tools}


class AllowedToolsChoice(msgspec.Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    """Call some of the tools. The prompt still shows all of them, so that it stays in the prefix cache."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | CustomToolChoice | AllowedToolsChoice

_OF_NO_ARGUMENTS = frozenset({"$schema", "type", "title", "description", "properties", "required"})
"""Keywords with which the schema of a tool may still declare no arguments."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")
KINDS = ("function", "custom")
"""Types of the tools that a client runs itself, in OpenAI's APIs."""


def leave_out_foreign_tools(body: dict[str, Any], own: Sequence[str] = KINDS) -> None:
    """Removes from a decoded JSON body the `tools` of other types than `own`, which a server would have to run."""
    tools = body.get("tools")
    if not isinstance(tools, list):
        return
    body["tools"] = [tool for index, tool in enumerate(tools) if not is_foreign(tool, f"tools[{index}]", own)]


def name_types(body: dict[str, Any]) -> None:
    """Adds the type `function` to tools of a decoded JSON body that have none."""
    tools = body.get("tools")
    if isinstance(tools, list):
        body["tools"] = [{"type": "function", **tool} if isinstance(tool, dict) else tool for tool in tools]


def is_foreign(tool: Any, path: str, own: Sequence[str] = KINDS) -> bool:
    """Returns whether the type of a tool is none of the client's `own`, and notes that it is ignored."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind in own:
        return False
    ignore(f"{path}.type={kind}")
    return True


def check_tools(tools: list[AnyTool], choice: ToolChoice | None) -> None:
    """Raises `RequestRefused` for names that no model could call, and for a choice that no tool fits."""
    kinds: dict[str, str] = {}
    for index, tool in enumerate(tools):
        kind, name = _kind(tool), tool.name
        path = f"tools[{index}].{kind}"
        if not _NAME.match(name):
            refuse("wrong_value", f"{path}.name", name, "1 to 64 letters, digits, underscores and dashes")
        if name in kinds:
            refuse("not_allowed", f"{path}.name", name, remedy="choose another", cause="an earlier tool has it")
        kinds[name] = kind
        parameters = tool.function.parameters if isinstance(tool, Tool) else None
        if parameters and parameters.get("type", "object") != "object":
            refuse("wrong_value", f"{path}.parameters", bound='the schema of an object: {"type": "object", ...}')
    for chosen in _chosen(choice):
        if kinds.get(chosen.name) != _kind(chosen):
            refuse("names_nothing", "tool_choice", chosen.name, f"the tools of type {_kind(chosen)}", "add it to tools")
    if choice == "required" and not tools:
        refuse("requires", "tool_choice", "required", "tools", "add some")
    if isinstance(choice, AllowedToolsChoice) and not choice.allowed_tools.tools:
        refuse("empty", "tool_choice", remedy='name some tools, or send "none"', place="allowed_tools")


def _kind(tool: AnyTool | NamedChoice) -> str:
    return str(tool.__struct_config__.tag)


def _chosen(choice: ToolChoice | None) -> list[NamedChoice]:
    """Returns the tools that a choice names."""
    if isinstance(choice, NamedToolChoice | CustomToolChoice):
        return [choice]
    return choice.allowed_tools.tools if isinstance(choice, AllowedToolsChoice) else []


def named_tool(choice: ToolChoice | None) -> str | None:
    """Returns the name of the one tool that must be called; None if the choice names none."""
    return choice.name if isinstance(choice, NamedToolChoice | CustomToolChoice) else None


def must_call(choice: ToolChoice | None) -> bool:
    """Returns whether the answer has at least one call."""
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice not in (None, "auto", "none")


def template_tools(tools: list[AnyTool]) -> list[dict[str, Any]]:
    """Returns the tools as chat templates read them, without `strict`, which is for the server. Templates know
    functions alone, so a custom tool is one with the argument `INPUT`.
    """
    functions = [_as_function(tool) if isinstance(tool, CustomTool) else tool.function for tool in tools]
    return [
        {"type": "function", "function": msgspec.to_builtins(msgspec.structs.replace(function, strict=None))}
        for function in functions
    ]


INPUT = "input"
"""Argument that holds the input of a custom tool, in the call that the model writes."""
_LANGUAGES = {"lark": "Lark grammar", "regex": "regular expression"}


def _as_function(tool: CustomTool) -> Function:
    parts = [tool.custom.description or ""]
    if tool.grammar is not None:
        parts.append(f"The {INPUT} is text of this {_LANGUAGES[tool.grammar.syntax]}:\n{tool.grammar.definition}")
    return Function(tool.name, "\n\n".join(filter(None, parts)) or None, arguments_schema(tool))


def arguments_constraint(tool: AnyTool) -> ConstraintSpec:
    """Returns a constraint that is refused if the arguments of a call cannot be constrained: their schema or grammar
    within a grammar, as in the grammar of all calls.
    """
    grammar = tool.lark() if isinstance(tool, CustomTool) else None
    if grammar is not None:
        return ConstraintSpec(kind="lark", text=in_json_strings(grammar))
    schema = {**arguments_schema(tool), "x-guidance": {"lenient": tool.is_loose}}
    return ConstraintSpec(kind="lark", text=f"start: %json {json_text(schema)}\n", loose=tool.is_loose)


def arguments_schema(tool: AnyTool) -> dict[str, Any]:
    """Returns the schema of a tool's arguments, which are always an object. It says nothing of a custom tool's grammar.

    A tool that declares no arguments gets none. Client libraries write an empty `properties` for a function without
    parameters, although JSON Schema allows further ones there. `{"type": "object"}` alone takes any object, as in MCP.
    """
    if isinstance(tool, CustomTool):
        properties = {INPUT: {"type": "string"}}
        return {"type": "object", "properties": properties, "required": [INPUT], "additionalProperties": False}
    given = tool.function.parameters
    if not given or (given.get("properties") == {} and _OF_NO_ARGUMENTS.issuperset(given)):
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **given}
