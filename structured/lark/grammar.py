"""Reads a Lark grammar of a client, and writes it as a part of the grammar of a call.

The dialect is llguidance's, which OpenAI's grammars of custom tools are written in. Left out are references to special
tokens, schemas, other grammars, templates and attributes with values, because a call's input is text and nothing else.
Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import graphlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

from manta.structured.constraint import ConstraintError
from manta.structured.lark.json_text import in_json, text_in_json

_LEXEMES = re.compile(
    r"""
    (?P<space> [ \t\r]+ | (?:\#|//)[^\n]* )
    | (?P<line> \n )
    | (?P<string> "(?:\\.|[^"\\\n])*"i? )
    | (?P<regex> /(?:\\.|[^/\\])+/[imslux]* )
    | (?P<directive> %[a-z]+ )
    | (?P<rule> [!?]{0,2}_?[a-z][_a-z0-9-]* )
    | (?P<terminal> _?[A-Z][_A-Z0-9-]* )
    | (?P<number> [0-9]+ )
    | (?P<range> \.\. )
    | (?P<mark> ->|[:,.()\[\]|~&*+?-] )
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_REPEATED_CLASS = re.compile(r"(\[\^?\]?(?:\\.|[^\[\]\\])*\]|\\[sdwSDW]|[^\\\[\](){}.*+?^$|])[+*]")
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
_ENDS_ATOM = frozenset({"string", "regex", "rule", "terminal", ")", "]", "*", "+", "?"})
MAX_CHARACTERS = 2**16
"""Most characters of one grammar, at about a microsecond each. Codex CLI's has a thousand."""
MAX_NESTING = 50
"""Deepest nesting of parentheses in one rule."""
MAX_WRITTEN = 2**18
"""Most characters of what a grammar becomes. Each of its characters may become two hundred."""
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"(\+|-)?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*)|(\.[0-9]+)",
    "_EXP": r"[eE](\+|-)?[0-9]+",
    "FLOAT": r"([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+",
    "SIGNED_FLOAT": r"(\+|-)?(([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+)",
    "NUMBER": r"([0-9]+)|([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+",
    "SIGNED_NUMBER": r"(\+|-)?(([0-9]+)|([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+)",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+(?:[^\/*][^*]*\*+)*\/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""The terminals of Lark's library `common`."""


class Lexeme(NamedTuple):
    kind: str
    text: str
    line: int
    """Number of the line, from 1 on."""


class Definition(NamedTuple):
    name: str
    attributes: str
    """The text between the name and its colon."""
    body: list[Lexeme]


class LarkGrammar(NamedTuple):
    """A grammar whose first rule is `start`."""

    definitions: list[Definition]
    ignored: list[list[Lexeme]]
    """Expressions of texts that may stand between terminals."""


def read_lark(text: str) -> LarkGrammar:
    """Returns a grammar with its imports resolved. Raises `ConstraintError` that names the line of a mistake."""
    _check_length("lark", len(text), MAX_CHARACTERS)
    definitions: list[Definition] = []
    ignored: list[list[Lexeme]] = []
    for statement in _statements(list(_lexemes(text))):
        first = statement[0]
        if first.kind == "directive":
            if first.text == "%ignore":
                ignored.append(statement[1:])
            elif first.text == "%import":
                definitions += _imported(statement)
            else:
                _fail(first, f"{first.text} is not supported", "write what it stands for, or leave it out")
        else:
            definitions.append(_definition(statement))
    if not any(each.name == "start" for each in definitions):
        raise ConstraintError.because("missing", "lark", remedy="add a rule start", cause="it has no rule start")
    return LarkGrammar(definitions, ignored)


def of_regex(pattern: str) -> LarkGrammar:
    """Returns the grammar of the texts that a regular expression matches whole."""
    _check_length("regex", len(pattern), MAX_CHARACTERS)
    text = _SLASH.sub(lambda found: found[1] or r"\/", pattern)
    lexeme = Lexeme("regex", f"/{text}/", 1) if text else Lexeme("string", '""', 1)
    return LarkGrammar([Definition("start", "", [lexeme])], [])


def _lexemes(text: str) -> Iterator[Lexeme]:
    at, line = 0, 1
    while at < len(text):
        found = _LEXEMES.match(text, at)
        if found is None:
            shown = text[at : at + 20].partition("\n")[0]
            _fail(Lexeme("", shown, line), f"{shown!r} is not supported", "write rules of strings, /regexes/ and names")
        assert found.lastgroup is not None
        if found.lastgroup != "space":
            yield Lexeme(found[0] if found.lastgroup == "mark" else found.lastgroup, found[0], line)
        line += found[0].count("\n")
        at = found.end()


def _check_length(place: str, length: int, bound: int, unit: str = "characters") -> None:
    if length > bound:
        raise ConstraintError.because("over_limit", place, value=length, bound=bound, unit=unit, remedy="shorten it")


def _fail(at: Lexeme, cause: str, remedy: str) -> NoReturn:
    raise ConstraintError.because("unfit", f"line {at.line}", cause=cause, remedy=remedy)


def _statements(lexemes: list[Lexeme]) -> Iterator[list[Lexeme]]:
    """Yields the lines of a grammar. A line that begins with `|` continues the one before it."""
    statement: list[Lexeme] = []
    begins_line = True
    for each in lexemes:
        if each.kind == "line":
            begins_line = True
            continue
        if statement and begins_line and each.kind != "|":
            yield statement
            statement = []
        statement.append(each)
        begins_line = False
    if statement:
        yield statement


def _imported(statement: list[Lexeme]) -> Iterator[Definition]:
    """Yields the terminals of `%import common.LF`, `%import common.LF -> NL` or `%import common (INT, WS)`."""
    names = [each for each in statement if each.kind in ("rule", "terminal")]
    kinds = [each.kind for each in statement[1:]]
    if not names or names[0].text != "common" or len(names) < 2:
        _fail(statement[0], "only the library common can be imported", "write the rules instead")
    renames = "->" in kinds
    for index, name in enumerate(names[1:2] if renames else names[1:]):
        pattern = COMMON.get(name.text)
        if pattern is None:
            _fail(name, f"common has no terminal {name.text}", "write the terminal instead")
        given = names[2].text if renames and index == 0 and len(names) > 2 else name.text
        yield Definition(given, "", [Lexeme("regex", f"/{pattern}/", name.line)])


def _definition(statement: list[Lexeme]) -> Definition:
    name, rest = statement[0], statement[1:]
    colon = next((index for index, each in enumerate(rest) if each.kind == ":"), None)
    if name.kind not in ("rule", "terminal") or colon is None:
        _fail(name, f"{name.text!r} begins no rule", "write name: expression")
    attributes = "".join(each.text for each in rest[:colon])
    if attributes and not re.fullmatch(r"\[(lazy|capture)(,(lazy|capture))*\]", attributes):
        _fail(name, f"{attributes[:40]!r} behind a name is not supported", "leave it out")
    body = rest[colon + 1 :]
    depth = max(itertools.accumulate((each.kind == "(") - (each.kind == ")") for each in body), default=0)
    _check_length(f"line {name.line}", depth, MAX_NESTING, "levels of parentheses")
    return Definition(name.text.lstrip("!?"), attributes, body)


# ---- written ---------------------------------------------------------------------------------------------------------


def in_json_strings(grammar: LarkGrammar) -> str:
    """Returns the grammar of the texts as they stand between the quotes of JSON strings, for `%lark {...}`. Raises
    `ConstraintError`.

    A grammar that does not lead back to itself becomes one terminal. Of another one, each terminal takes as much as it
    can, and escapes begin alike: a terminal that takes some of them takes the backslash of the others too.
    """
    return _written(grammar, _JsonWriter)


def without_text(grammar: LarkGrammar, mark: str) -> str:
    """Returns the grammar, for `%lark {...}`, of its texts that do not hold `mark`, a part of an expression between
    slashes. If it leads back to itself, only its terminals are without the mark.
    """
    return _written(grammar, _Writer, f" & ~/(?s:.*){mark}(?s:.*)/")


def as_terminal(grammar: LarkGrammar, prefix: str) -> list[str] | None:
    """Returns the definition of a terminal `prefix` for the texts of a grammar, and those that it needs. Returns None
    for a grammar that ignores texts or whose rules lead back to themselves, because no terminal takes its texts.
    """
    return _as_terminal(grammar, _Writer, prefix)


def _as_terminal(grammar: LarkGrammar, kind: type[_Writer], prefix: str) -> list[str] | None:
    bodies = {each.name: each.body for each in grammar.definitions}
    if grammar.ignored or _is_recursive(bodies):
        return None
    names = {name: f"{prefix}_{index}" for index, name in enumerate(bodies)} | {"start": prefix}
    writer = kind(names)
    return [f"{names[each.name]}: {writer.expression(each.body)}" for each in grammar.definitions]


def _is_recursive(bodies: dict[str, list[Lexeme]]) -> bool:
    graph = {
        name: {each.text.lstrip("!?") for each in body if each.kind in ("rule", "terminal")}
        for name, body in bodies.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        return True
    return False


def _written(grammar: LarkGrammar, kind: type[_Writer], less: str = "") -> str:
    """Returns a grammar whose terminals are followed by `less`."""
    terminal = _as_terminal(grammar, kind, "TEXT")
    if terminal is not None:
        return "\n".join(["start: WHOLE", f"WHOLE: TEXT{less}", *terminal])
    lines, writer = [], kind()
    for each in grammar.definitions:
        body = writer.expression(each.body)
        if less and each.name.lstrip("_")[:1].isupper():
            body = f"({body}){less}"
        lines.append(f"{each.name}{each.attributes}: {body}")
    lines += [f"%ignore {writer.expression(_without_repeats(each, grammar))}" for each in grammar.ignored]
    return "\n".join(lines)


def _without_repeats(ignored: list[Lexeme], grammar: LarkGrammar) -> list[Lexeme]:
    """Returns an expression of texts to ignore. Of one class of characters, such as `/\\s+/`, each character is ignored
    by itself: the texts are the same, and no terminal takes the beginning of the escape that follows it.
    """
    bodies = {each.name: each.body for each in grammar.definitions}
    found = bodies.get(ignored[0].text, ignored) if len(ignored) == 1 else ignored
    if len(found) == 1 and found[0].kind == "regex":
        pattern, _, flags = found[0].text[1:].rpartition("/")
        if repeated := _REPEATED_CLASS.fullmatch(pattern):
            return [Lexeme("regex", f"/{repeated[1]}/{flags}", found[0].line)]
    return ignored


class _Writer:
    """Writes expressions of a grammar as they stand, without aliases."""

    def __init__(self, names: dict[str, str] | None = None) -> None:
        """With `names`, the names of rules and terminals are replaced."""
        self._names = names or {}
        self._written = 0
        """Characters so far."""

    def expression(self, body: Sequence[Lexeme]) -> str:
        """Returns a part of a definition. Raises `ConstraintError` if all so far are too long."""
        return " ".join(self._parts(body)) or '""'

    def _parts(self, body: Sequence[Lexeme]) -> Iterator[str]:
        at, before = 0, ""
        while at < len(body):
            each = body[at]
            at += 1
            if each.kind == "->":  # an alias, which names a node of a tree that nobody makes
                at += 1
                continue
            if each.kind == "string" and at + 1 < len(body) and body[at].kind == "range":
                yield self._counted(self._range(each, body[at + 1]))
                at, before = at + 2, "string"
                continue
            if each.kind == "~" and before not in _ENDS_ATOM:
                end = _end_of_atom(body, at)
                yield self._counted(self._negated(self.expression(body[at:end])))
                at, before = end, ")"
                continue
            yield self._counted(self._one(each))
            before = each.kind

    def _counted(self, text: str) -> str:
        self._written += len(text)
        _check_length("lark", self._written, MAX_WRITTEN, "characters in the grammar of a call up to here")
        return text

    def _one(self, each: Lexeme) -> str:
        if each.kind == "string":
            return self._string(each)
        if each.kind == "regex":
            return self._regex(each)
        if each.kind in ("rule", "terminal"):
            name = each.text.lstrip("!?")
            return self._names.get(name, name)
        return each.text

    def _string(self, each: Lexeme) -> str:
        return each.text

    def _regex(self, each: Lexeme) -> str:
        return each.text

    def _range(self, low: Lexeme, high: Lexeme) -> str:
        return f"{low.text}..{high.text}"

    def _negated(self, atom: str) -> str:
        return f"~{atom}"


class _JsonWriter(_Writer):
    """Writes expressions of the texts as JSON strings hold them."""

    def _string(self, each: Lexeme) -> str:
        text, ignores_case = _text_of(each)
        if not ignores_case:
            return json.dumps(text_in_json(text), ensure_ascii=False)
        return _slashed(in_json(re.escape(text), "i"), "i")

    def _regex(self, each: Lexeme) -> str:
        pattern, _, flags = each.text[1:].rpartition("/")
        return _slashed(in_json(pattern, flags), flags)

    def _range(self, low: Lexeme, high: Lexeme) -> str:
        ends = [_text_of(low)[0], _text_of(high)[0]]
        if [*map(len, ends)] != [1, 1]:
            _fail(low, "the ends of a range are single characters", "give one character each")
        codes = [f"\\x{{{ord(end):x}}}" for end in ends]
        return _slashed(in_json(f"[{codes[0]}-{codes[1]}]"), "")

    def _negated(self, atom: str) -> str:
        return f"({_slashed(in_json('(?s:.*)'), '')} & ~{atom})"


def _end_of_atom(body: Sequence[Lexeme], at: int) -> int:
    """Returns the index behind the atom at `at`: a name, a text, or what stands in parentheses."""
    depth = 0
    for index in range(at, len(body)):
        depth += (body[index].kind == "(") - (body[index].kind == ")")
        if depth <= 0:
            return index + 1
    return len(body)


def _text_of(each: Lexeme) -> tuple[str, bool]:
    """Returns the text of a string, and whether it ignores case."""
    quoted, ignores_case = each.text, each.text.endswith("i")
    return _ESCAPE.sub(_unescaped, quoted[1 : -2 if ignores_case else -1]), ignores_case


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2]
    return chr(int(code, 16)) if code else _ESCAPES.get(found[3], found[3])


def _slashed(pattern: str, flags: str) -> str:
    """Returns a regular expression between slashes; one for the empty text alone would begin a comment."""
    return f"/{pattern}/{flags}" if pattern else '""'
