"""The grammar that holds a model's calls to the tools of a request.

It fixes the marks of the model's format (`cluster/chat/tool_formats.py`) and each tool's name, and lets the tool's JSON
schema rule the arguments, so that `cluster/chat/tool_parser.py` can parse every call of a response.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from cluster.chat.tool_formats import ToolFormat
from cluster.protocol.constraint_fields import json_text
from cluster.protocol.tools import Tool, arguments_schema

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


def _mark(text: str, token_id: int | None) -> str:
    return json_text(text) if token_id is None else f"<[{token_id}]>"
