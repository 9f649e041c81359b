"""The grammar that holds a model's calls to the tools of a request.

The grammar fixes the marks of the model's format (`cluster/chat/tool_formats.py`) and each tool's name. A tool's JSON
schema rules the arguments. So `cluster/chat/tool_parser.py` can parse every call of a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manta.cluster.chat.argument_grammar import ArgumentRules, NotCarried
from manta.cluster.chat.custom_input import input_rules
from manta.cluster.chat.delimited_grammar import DelimitedRules
from manta.cluster.chat.lark_text import ANY_TEXT, TokenId, escaped, literal, starts_with_token, without
from manta.cluster.chat.tool_formats import ToolFormat
from manta.cluster.protocol.constraint_fields import json_text
from manta.cluster.protocol.tools import AnyTool, CustomTool, arguments_schema
from manta.structured.constraint import ConstraintError
from manta.structured.refusals import Refusal

_TERMINALS = ["SPACE: /[ \\n]{1,2}/", "INDENT: /[ \\n]{1,8}/", "INDEX: /0|[1-9][0-9]{0,2}/", "ID: /[a-zA-Z0-9]{9}/"]
_PLACEHOLDERS = {"{index}": "INDEX", "{id}": "ID"}


class FormatRefused(ValueError):
    """The format cannot hold the calls of tool number `tool`, or of any tool if `tool` is None. `cause` says why, or
    `refusal` if the tool itself has a mistake.
    """

    def __init__(self, cause: str, tool: int | None = None, refusal: Refusal | None = None) -> None:
        super().__init__(cause)
        self.cause, self.tool, self.refusal = cause, tool, refusal


def calls_grammar(
    form: ToolFormat,
    tools: Sequence[AnyTool],
    token_id: TokenId,
    *,
    parallel: bool,
    required: bool,
    answer_schema: str | None = None,
    left_out: list[str] | None = None,
    closes: bool = True,
) -> str:
    """Returns a Lark grammar (llguidance's dialect) of one call of `tools`, or of several with `parallel`.

    Unless `required`, any text may come before or instead of the calls; with `answer_schema`, only JSON of that schema
    instead of them. `token_id` gives the id of a mark that is one token, which text then cannot imitate. In harmony's
    channels the grammar covers the whole answer, the reasoning included.

    What the format cannot carry of a function that is not strict is appended to `left_out`. For a strict function it
    raises `FormatRefused`. `closes` says that functions which list arguments take no others, unless their schema says
    so, in formats that do not write arguments as JSON.
    """
    writer = _CallsGrammar(form, tools, token_id, closes)
    if form.is_channel:
        rules = writer.channels(required, answer_schema)
    else:
        rules = writer.calls(parallel, required, answer_schema)
    grammar = "\n".join(["%llguidance {}", *rules, *_TERMINALS, *writer.call_rules()]) + "\n"
    if left_out is not None:
        left_out += writer.left_out
    return grammar


class _CallsGrammar:
    def __init__(self, form: ToolFormat, tools: Sequence[AnyTool], token_id: TokenId, closes: bool) -> None:
        self._closes = closes
        self._form, self._tools, self._token_id = form, tools, token_id
        self._call = "(" + " | ".join(f"call_{index}" for index in range(len(tools))) + ")"
        self._first = self._call.replace("call_", "first_")
        self.left_out: list[str] = []

    # ---- the whole answer ----------------------------------------------------------------------------------------

    def calls(self, parallel: bool, required: bool, answer_schema: str | None) -> list[str]:
        """Returns the rules of a Lark grammar whose `start` is one call, or several if `parallel`. Unless `required`,
        an answer in JSON of `answer_schema` may take the place of calls, or free text if there is no schema.
        """
        form = self._form
        more = ""
        body = self._body(parallel)
        begins = [literal(begin, self._token_id) for begin in form.begins]
        begin = begins[0] if len(begins) == 1 else f"({' | '.join(begins)})"
        if form.calls == "each" and parallel:
            more = f"(SPACE? {begin} body)*"
        calls = f"SPACE? {begin} body {more}"
        bare = " | SPACE? body" if form.is_bare else ""
        rules = [f"body: {body}"]
        if required:
            rules.append(f"start: {calls}{bare}")
        elif answer_schema is not None:
            rules += [f"start: {calls} | answer", f"answer: %json {answer_schema}"]
        else:
            rules += self._optional_calls(more, bare)
        return rules

    def _body(self, parallel: bool) -> str:
        """Returns the expression that follows the mark that begins the calls."""
        form = self._form
        end = literal(form.end, self._token_id) if form.end else ""
        if form.calls == "list":
            # A list may stand alone: its bracket and first name are one lexeme, which free text is kept apart from.
            first = self._first if form.call else f'"[" INDENT? {self._call}'
            rest = f'("," INDENT? {self._call})*' if parallel else ""
            return f'SPACE? {first} {rest} INDENT? "]" {f"({end})?" if form.is_bare else end}'
        if form.calls == "section":
            return f"{self._call} {f'(SPACE? {self._call})*' if parallel else ''} SPACE? {end}"
        if form.call:
            return f"{self._call} {end}"
        return f"SPACE? {self._call} SPACE? {end}"

    def _optional_calls(self, more: str, bare: str) -> list[str]:
        """Returns rules for free text that may end with calls. Once `begin` is written, calls must follow."""
        text = f"/{ANY_TEXT}/"
        if self._form.is_bare:
            bare_starts = self._form.bare_starts(tool.name for tool in self._tools)
            text += f" & ~/[ \\n]*({'|'.join(map(escaped, bare_starts))}){ANY_TEXT}/"
        starts, rules = ["TEXT?"], []
        for index, begin in enumerate(self._form.begins):
            if starts_with_token(begin, self._token_id):
                text += f" & ~{without(begin)}"
                starts.append(f"TEXT? {literal(begin, self._token_id)} body {more}")
            else:
                starts.append(f"opened_{index} body {more}")
                rules.append(f"opened_{index}[lazy]: TEXT {json_text(begin)}")
        return [f"start: {' | '.join(starts)}{bare}", *rules, f"TEXT: {text}"]

    def channels(self, required: bool, answer_schema: str | None) -> list[str]:
        """Returns rules for reasoning and remarks, and then one call or, unless a call is required, an answer."""
        marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
        missing = [mark for mark in marks if self._token_id(mark) is None]
        if missing:
            raise FormatRefused(f"this model's tokenizer lacks the token {missing[0]} of its chat template")
        start, channel, message, end, _ = (literal(mark, self._token_id) for mark in marks)
        rules = [
            f'remark: {channel} ("analysis" | "commentary") {message} TEXT? {end} {start} "assistant"',
            f"called: {channel} {self._call} ({literal(self._form.end, self._token_id)})?",
            f"TEXT: /{ANY_TEXT}/",
        ]
        if required:
            return ["start: remark* called", *rules]
        answer = "TEXT?" if answer_schema is None else "answer_json"
        rules.append(f'answer: {channel} "final" {message} {answer}')
        if answer_schema is not None:
            rules.append(f"answer_json: %json {answer_schema}")
        return ["start: remark* (called | answer)", *rules]

    # ---- one call ------------------------------------------------------------------------------------------------

    def call_rules(self) -> list[str]:
        rules = []
        for index, tool in enumerate(self._tools):
            head, tail = self._frame(tool.name)
            if self._form.calls == "list" and self._form.call:
                rules.append(f"first_{index}: {self._frame(tool.name, '[')[0]} arguments_{index} {tail}")
            rules.append(f"call_{index}: {head} arguments_{index} {tail}")
            try:
                rules += self._arguments_of(tool, f"arguments_{index}")
            except NotCarried as error:
                message = f"this model's format of calls ({self._form.name}) cannot carry {error}"
                raise FormatRefused(message, index) from error
            except ConstraintError as error:
                raise FormatRefused("the grammar has a mistake", index, error.refusal) from error
        return rules

    def _arguments_of(self, tool: AnyTool, name: str) -> list[str]:
        grammar = tool.lark() if isinstance(tool, CustomTool) else None
        if grammar is not None:
            return input_rules(self._form, grammar, self._token_id, name)
        options = {"lenient": tool.is_loose}
        return self._arguments(name, arguments_schema(tool), options)

    def _arguments(self, name: str, schema: dict[str, Any], options: dict[str, Any]) -> list[str]:
        if self._form.argument:
            kind = DelimitedRules if self._form.values == "delimited" else ArgumentRules
            writer = kind(self._form, schema, options, self._token_id, name, self._closes)
            rules = writer.rules()
            self.left_out += writer.left_out
            return rules
        return [f"{name}: %json {json_text({**schema, 'x-guidance': options})}"]

    def _frame(self, name: str, before: str = "") -> tuple[str, str]:
        """Returns the expressions before and after the arguments of a call of function `name`."""
        form = self._form
        if not form.call:
            return self._object_head(name), '"}"'
        pieces = form.pieces()
        at = pieces.index("{arguments}")
        if form.is_channel:
            before = form.begin.partition("<|channel|>")[2]
        return self._joined(pieces[:at], name, before), self._joined(pieces[at + 1 :], name, "")

    def _object_head(self, name: str) -> str:
        form = self._form
        rest = f'"{form.name_key}": {json_text(name)}, "{form.arguments_key}": '
        if not form.id_key:
            return json_text("{" + rest)
        opening = json_text('{"' + form.id_key + '": "')
        closing = json_text('", ' + rest)
        return f"{opening} INDEX {closing}"

    def _joined(self, pieces: list[str], name: str, text: str) -> str:
        """Returns the pieces as an expression with `text` in front. Texts that stand side by side become one
        literal.
        """
        parts = []
        for piece in pieces:
            if piece in _PLACEHOLDERS:
                parts += [literal(text, self._token_id), _PLACEHOLDERS[piece]]
                text = ""
            else:
                text += name if piece == "{name}" else piece
        return " ".join(filter(None, [*parts, literal(text, self._token_id)]))
