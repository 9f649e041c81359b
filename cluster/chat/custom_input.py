"""The input of a custom tool, which is one text: the grammar that holds it to the client's, and its reader.

A model writes the call as that of a function with the argument `INPUT`. Where a format writes arguments as JSON, the
grammar is that of the text between the quotes. Where it writes raw strings, it is that of texts without the mark that
ends them.
"""

from __future__ import annotations

import json
import re

from manta.cluster.chat.lark_text import TokenId, escaped, literal, without
from manta.cluster.chat.tool_formats import ToolFormat
from manta.cluster.protocol.constraint_fields import json_text
from manta.cluster.protocol.tools import INPUT
from manta.structured.lark.grammar import LarkGrammar, as_terminal, in_json_strings, without_text

_WHOLE = re.compile(
    r"""(?: [^"\\]
    | \\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}   # a pair of surrogates
    | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
    | \\u[dD][89abAB][0-9a-fA-F]{2}(?!\\|$)                       # half of one
    | \\[^u] )*""",
    re.VERBOSE | re.DOTALL,
)
"""Characters of a JSON string's text that no later ones change."""


def input_rules(form: ToolFormat, grammar: LarkGrammar, token_id: TokenId, name: str) -> list[str]:
    """Returns the rule `name` of the arguments of a call, and the rules that it needs. Raises `ConstraintError`."""
    text = f"{name}_text"
    if form.values in ("raw", "delimited"):
        return _raw_rules(form, grammar, token_id, name)
    if form.argument:
        before, between, after = form.argument_marks()
        head, tail = f'{before}{INPUT}{between}"', f'"{after}'
    else:
        head, tail = f'{{"{INPUT}": "', '"}'
    return [
        f"{name}: {literal(head, token_id)} {text} {literal(tail, token_id)}",
        _nested(text, in_json_strings(grammar)),
    ]


def _raw_rules(form: ToolFormat, grammar: LarkGrammar, token_id: TokenId, name: str) -> list[str]:
    text = f"{name}_text"
    before, between, after = form.text_marks()
    head, end = literal(before + INPUT + between, token_id), literal(after, token_id)
    mark = form.quote or after.strip()
    terminal = None if end.startswith("<[") else as_terminal(grammar, f"TEXT_{name.upper()}")
    if terminal is None:  # the mark begins with a token of its own, which no terminal takes
        return [f"{name}: {head} {text} {end}", _nested(text, without_text(grammar, escaped(mark)))]
    whole = f"WHOLE_{name.upper()}"
    return [
        f"{name}: {head} {text}",
        f"{text}[lazy]: {whole} {json_text(after)}",
        f"{whole}: TEXT_{name.upper()} & ~{without(mark)}",
        *terminal,
    ]


def _nested(name: str, grammar: str) -> str:
    return f"{name}: %lark {{\n{grammar}\n}}"


class InputReader:
    """Reads the arguments of one call, JSON text such as `{"input": "..."}`, as they come."""

    def __init__(self) -> None:
        self._is_inside = False
        self._held = ""

    def read(self, arguments: str) -> str:
        """Returns the part of the input that more of the arguments makes certain."""
        self._held += arguments
        if not self._is_inside:
            _, colon, rest = self._held.partition(":")
            _, quote, text = rest.partition('"')
            if not (colon and quote):
                return ""
            self._is_inside, self._held = True, text
        found = _WHOLE.match(self._held)
        assert found is not None
        self._held = self._held[found.end() :]
        if self._held.startswith('"'):
            self._held = '"'  # the string has ended, and what follows is no part of it
        text = json.loads(f'"{found[0]}"', strict=False)
        return text.encode("utf-8", "replace").decode()
