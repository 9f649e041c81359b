"""GBNF means to Manta what it means to llama.cpp: random grammars, and a judge that reads no GBNF.

A grammar is drawn as a tree and written in one of the many ways that GBNF has. The judge matches texts against the
tree. Texts are drawn from the tree, and from the masks of both backends.
"""

from __future__ import annotations

import functools
import random
from typing import Any, NamedTuple

import pytest

from manta.structured.backend import Grammar, Session, make_backend
from manta.structured.constraint import ConstraintError, ConstraintSpec
from tests.structured.grammar_walk import walk
from tests.structured.test_grammar_backends import vocabulary

LETTERS = 'ab-]"\\[^ \né😀'
BACKENDS = ("llguidance", "xgrammar")


# ---- grammars and their judge --------------------------------------------------------------------------------------


class Set(NamedTuple):
    """Characters that one place may have."""

    characters: frozenset[str]
    is_negated: bool = False

    def has(self, character: str) -> bool:
        return (character in self.characters) != self.is_negated


class Literal(NamedTuple):
    text: str


class Row(NamedTuple):
    parts: tuple[Any, ...]


class Ways(NamedTuple):
    parts: tuple[Any, ...]


class Times(NamedTuple):
    part: Any
    low: int
    high: int | None


class Name(NamedTuple):
    name: str


Rules = dict[str, Any]


def matches(rules: Rules, text: str) -> bool:
    """Whether the rule `root` takes the whole text."""

    @functools.cache
    def ends(node: Any, at: int) -> frozenset[int]:
        """The places where a match may end that begins at `at`."""
        if isinstance(node, Set):
            return frozenset([at + 1] if at < len(text) and node.has(text[at]) else [])
        if isinstance(node, Literal):
            return frozenset([at + len(node.text)] if text.startswith(node.text, at) else [])
        if isinstance(node, Name):
            return ends(rules[node.name], at)
        if isinstance(node, Ways):
            return frozenset().union(*(ends(part, at) for part in node.parts))
        if isinstance(node, Row):
            places = frozenset([at])
            for part in node.parts:
                places = frozenset().union(*(ends(part, place) for place in places))
            return places
        found: set[int] = set()
        places, count = frozenset([at]), 0
        seen: set[tuple[int, frozenset[int]]] = set()
        while places and (node.high is None or count <= node.high):
            if count >= node.low:
                found |= places
            state = (min(count, node.low), places)
            if state in seen:
                break
            seen.add(state)
            places, count = frozenset().union(*(ends(node.part, place) for place in places)), count + 1
        return frozenset(found)

    return len(text) in ends(rules["root"], 0)


class Drawn:
    """Draws grammars, writes them, and draws texts from them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.names = ["root", "a-rule", "B", "b", "x1"][: self.rng.randint(1, 5)]
        self.rules: Rules = {name: self._node(3, index) for index, name in enumerate(self.names)}

    def _node(self, depth: int, index: int) -> Any:
        rng = self.rng
        longer = ["row", "row", "ways", "times", "name"] if depth else []
        kind = rng.choice(["set", "literal", *longer])
        if kind == "set":
            return Set(frozenset(rng.choices(LETTERS, k=rng.randint(1, 4))), rng.random() < 0.2)
        if kind == "literal":
            return Literal("".join(rng.choices(LETTERS, k=rng.randint(0, 3))))
        if kind == "name":
            others = self.names[index + 1 :]
            if others and rng.random() < 0.7:
                return Name(rng.choice(others))
            return Row((Set(frozenset(rng.choice("ab("))), Name(rng.choice(self.names))))  # never at the left
        if kind == "times":
            low = rng.randint(0, 2)
            part = self._node(depth - 1, index)
            return Times(part, low, rng.choice([None, low, low + rng.randint(1, 2)]))
        parts = tuple(self._node(depth - 1, index) for _ in range(rng.randint(1, 3)))
        return Row(parts) if kind == "row" else Ways(parts)

    def text(self, node: Any, depth: int = 0) -> str:
        """A text that the node takes; an ever deeper one is cut short, and may be none of its texts."""
        rng = self.rng
        if depth > 40:
            return ""
        if isinstance(node, Set):
            return rng.choice([each for each in LETTERS + "z" if node.has(each)] or ["z"])
        if isinstance(node, Literal):
            return node.text
        if isinstance(node, Name):
            return self.text(self.rules[node.name], depth + 1)
        if isinstance(node, Ways):
            return self.text(rng.choice(node.parts), depth + 1)
        if isinstance(node, Row):
            return "".join(self.text(part, depth + 1) for part in node.parts)
        most = node.low + 2 if node.high is None else node.high
        return "".join(self.text(node.part, depth + 1) for _ in range(rng.randint(node.low, most)))

    def texts(self, count: int) -> list[str]:
        """Texts of the grammar, and the same with a character more, less or changed."""
        found = []
        for _ in range(count):
            text = self.text(self.rules["root"])[:40]
            at = self.rng.randint(0, len(text))
            other = self.rng.choice(LETTERS)
            found += [text, text[:at] + other + text[at:]]
            found += [text[:at] + text[at + 1 :], text[:at] + other + text[at + 1 :]]
        return found

    def has_an_end(self) -> bool:
        """Whether a text of the grammar can end."""

        def ends(node: Any, names: set[str]) -> bool:
            if isinstance(node, Name):
                return node.name in names
            if isinstance(node, Times):
                return node.low == 0 or ends(node.part, names)
            if isinstance(node, Row | Ways):
                return (all if isinstance(node, Row) else any)(ends(part, names) for part in node.parts)
            return True

        found: set[str] = set()
        while more := {name for name, node in self.rules.items() if name not in found and ends(node, found)}:
            found |= more
        return "root" in found

    # ---- writing ---------------------------------------------------------------------------------------------------

    def gbnf(self) -> str:
        lines = [f"{name}{self._space()}::={self._space(True)}{self._top(node)}" for name, node in self.rules.items()]
        return self.rng.choice(["\n", "\r\n", "\n# a comment\n\n"]).join(lines) + self.rng.choice(["", "\n"])

    def _top(self, node: Any) -> str:
        """Alternatives of a rule stand without brackets."""
        if isinstance(node, Ways):
            return self.rng.choice([" | ", "|", " |\n  "]).join(self._written(part, False) for part in node.parts)
        return self._written(node, False)

    def _written(self, node: Any, is_nested: bool) -> str:
        if isinstance(node, Set):
            parts = "".join(self._character(each, "\\]^-") for each in sorted(node.characters))
            return f"[{'^' if node.is_negated else ''}{parts}]"
        if isinstance(node, Literal):
            return '"' + "".join(self._character(each, '\\"') for each in node.text) + '"'
        if isinstance(node, Name):
            return node.name
        if isinstance(node, Times):
            return self._in_brackets(node.part) + self._space(is_nested) + self._count(node.low, node.high)
        if isinstance(node, Row):
            parts = [
                (self._written(each, is_nested) if _is_item(each) else self._in_brackets(each)) for each in node.parts
            ]
            return self._space(is_nested).join(parts)
        return self._in_brackets(node)

    def _in_brackets(self, node: Any) -> str:
        if isinstance(node, Set | Name):
            return self._written(node, True)
        parts = node.parts if isinstance(node, Ways) else [node]
        return f"({self._space(True)}{' | '.join(self._written(part, True) for part in parts)}{self._space(True)})"

    def _space(self, takes_lines: bool = False) -> str:
        return self.rng.choice([" ", "\t", "  ", *(["\n ", " # why\n"] if takes_lines else [])])

    def _count(self, low: int, high: int | None) -> str:
        short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
        if short is not None and self.rng.random() < 0.7:
            return short
        return f"{{{low}}}" if low == high else f"{{{low}, {'' if high is None else high}}}"

    def _character(self, character: str, special: str) -> str:
        code = ord(character)
        ways = [f"\\U{code:08x}", f"\\U{code:08X}"]
        if code < 0x10000:
            ways.append(f"\\u{code:04x}")
        if code < 0x100:
            ways.append(f"\\x{code:02X}")
        if character in '\\"[]-':
            ways.append("\\" + character)
        if character == "\n":
            ways.append("\\n")
        return self.rng.choice(ways) if character in special or self.rng.random() < 0.5 else character


def _is_item(node: Any) -> bool:
    return isinstance(node, Set | Literal | Name | Times)


# ---- sessions ------------------------------------------------------------------------------------------------------


def loaded(text: str, backend: str = "llguidance") -> Grammar:
    made = make_backend(backend, vocabulary())
    spec = ConstraintSpec(kind="ebnf", text=text)
    return made.load(spec, made.compile(spec))


def takes(session: Session, text: str) -> bool:
    """Whether the session takes the bytes of the text, one by one, and may then end."""
    single = vocabulary().byte_token_ids()
    return all(session.accept(single[byte]) for byte in text.encode()) and session.is_accepting()


def check(seed: int, backend: str, num_texts: int, num_walks: int) -> int:
    """Compares a random grammar with the judge, in both directions. Returns the number of texts that it takes."""
    drawn = Drawn(seed)
    text, num_taken = drawn.gbnf(), 0
    if not drawn.has_an_end():
        with pytest.raises(ConstraintError, match="never ends"):
            loaded(text, backend)
        return 0
    grammar = loaded(text, backend)
    for each in drawn.texts(num_texts):
        wanted = matches(drawn.rules, each)
        assert takes(grammar.session(), each) == wanted, (text, each)
        num_taken += wanted
    for _ in range(num_walks):
        token_ids, has_ended = walk(grammar.session(), vocabulary(), drawn.rng, free=8, longest=60)
        written = b"".join(vocabulary().tokens[token_id] for token_id in token_ids)
        if has_ended:
            assert matches(drawn.rules, written.decode()), (text, written)
    return num_taken


@pytest.mark.parametrize(("backend", "num_grammars"), [("llguidance", 80), ("xgrammar", 5)])  # it compiles slowly
def test_random_grammars_take_what_they_say(backend: str, num_grammars: int) -> None:
    assert sum(check(seed, backend, 6, 1) for seed in range(num_grammars)) > 5 * num_grammars


@pytest.mark.prove
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", range(10))
def test_many_random_grammars_take_what_they_say(backend: str, part: int) -> None:
    count = 200 if backend == "llguidance" else 20
    assert sum(check(seed, backend, 12, 3) for seed in range(1000 + count * part, 1000 + count * (part + 1)))


# ---- single forms --------------------------------------------------------------------------------------------------

FORMS: dict[str, tuple[str, list[str], list[str]]] = {
    "code points": (r'root ::= "\xe9\u00e9\u4e2d\U0001F600"', ["éé中😀"], ["e9", "é中😀"]),
    "zeros": (r'root ::= "\u0041\x09\U0000000a"', ["A\t\n"], ["41"]),
    "short escapes": (r'root ::= "\t\r\n\\\"\[\]\-"', ['\t\r\n\\"[]-'], []),
    "ranges of code points": (r"root ::= [\u0430-\u044f\U0001F600-\U0001F64F]+", ["да😀", "🙏"], ["ё", "d", ""]),
    "hyphens": ("root ::= [a-] [-b] [+--] [a-c-e]", ["--,d".replace("d", "-"), "ab+b", "ab-e"], ["abad", "ab.a"]),
    "negated": (r"root ::= [^\n\]a-c]", ["d", "\t", "😀"], ["a", "b", "\n", "]", ""]),
    "any character": ('root ::= "a" . "b"', ["a\nb", "a😀b", "abb"], ["ab", "axxb"]),
    "repetitions": (
        'root ::= "ab"{2} "c"{1,} "d"{0,2} ("e" "f"){1,2}',
        ["ababcef", "ababccddefef"],
        ["abcef", "ababcdddef"],
    ),
    "repeated repetitions": ('root ::= "a"{2}{1,2} "b"?*', ["aa", "aaaabb"], ["aaa", "a"]),
    "no more": ('root ::= "a" "b"{0}', ["a"], ["ab"]),
    "empty ways": ('root ::= "a" ws "b"\nws ::= | " " ws', ["ab", "a  b"], ["a b b"]),
    "names": ('root ::= a-b A-b 9x\na-b ::= "1"\nA-b ::= "2"\n9x ::= a_b\na_b ::= "3"', ["123"], ["113", "223"]),
    "comments": ('# first\nroot ::= # here\n  "#" | # or\n  ( "b" # so\n  )\n# last', ["#", "b"], ["# or"]),
    "a line that begins with a bar": ('root ::= "a"\n  # or\n  | "b"\n\n  | "c"\n', ["a", "b", "c"], ["ab"]),
    "the later rule": ('root ::= a\na ::= "1"\na ::= "2"', ["2"], ["1", "12"]),
    "ways without an end": ('root ::= "a" | b "c"\nb ::= "x" b', ["a"], ["xc", "x"]),
    "the end within": (
        'root ::= word ";" root | "."\nword ::= [a-z]* "end"',
        ["xend;.", "xenend;end;."],
        ["xen;.", ";."],
    ),
    "what may go on": ('root ::= "a" "ab"? "b" root | ""', ["ab", "aabb", "abaabb"], ["aab", "aabbb"]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_means_these_texts(form: str, backend: str) -> None:
    text, taken, refused = FORMS[form]
    grammar = loaded(text, backend)
    assert [each for each in taken if not takes(grammar.session(), each)] == []
    assert [each for each in refused if takes(grammar.session(), each)] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the rule root is missing"),
        ('a ::= "b"', "the rule root is missing"),
        ("root ::= a | b\na ::= 'x'", "line 2: \"'x'\" stands where GBNF takes the end of the line"),
        ("root ::= numero", "the rule root: it names the rule numero, which is missing"),
        ('root ::= "a" root-2\nroot-2 ::= "x"? root-2 "y"', "the rule root-2: it may begin with itself"),
        ('root ::= a\na ::= b\nb ::= "x"? a', "the rule a: it may begin with itself"),
        ('root ::= "a" root', "ebnf: nothing satisfies it: the rule root never ends"),
        ("root ::= <think> [a-z]", "the token <think>; write the grammar in Lark"),
        ("root ::= (\n!<[1001]>)*", "line 2 cannot be enforced: the token !<\\[1001\\]>"),
        (r'root ::= "\u00e"', "takes an escape"),
        (r'root ::= "\q"', "takes an escape"),
        (r'root ::= "\ud83d\ude00"', "takes the escape of a character; .U takes those beyond"),
        (r'root ::= "\U00110000"', "takes the escape of a character"),
        ("root ::= [z-a]", "takes a range whose ends are in order"),
        ("root ::= []", "takes at least one character in brackets"),
        ("root ::= [a", "the end stands where GBNF takes a closing quote or bracket"),
        ('root ::= "a', "takes a closing quote or bracket"),
        ('root ::= ("a"', "takes a closing bracket"),
        ("root ::= *", "takes an item before a repetition"),
        ('root ::= "a"{,3}', "takes {n}, {n,} or {n,m}"),
        ('root ::= "a"{3,2}', "takes bounds in order"),
        ('root ::= "a"{0,99999}', "99999 repetitions and the limit is 10000"),
        ('root = "a"', "takes ::="),
        ('root ::= "a" )', "takes the end of the line"),
        ("root ::= " + "(" * 120 + '"a"' + ")*" * 120 + "*" * 2000, "nested too deep"),
    ],
)
def test_what_is_not_served_is_refused_with_its_place(text: str, words: str) -> None:
    for backend in BACKENDS:
        with pytest.raises(ConstraintError, match=words):
            make_backend(backend, vocabulary()).compile(ConstraintSpec(kind="ebnf", text=text))
