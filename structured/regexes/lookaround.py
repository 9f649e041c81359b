"""Rewrites regular expressions that look around as equal ones that do not, which grammar backends enforce.

The expression, which the whole answer matches, is read as Python's `re` reads it. It becomes a deterministic automaton
(`structured/regexes/assertions.py`), and that an expression again. Nothing is approximated: what is too large, or no
regular language, is refused with the construct's name and place. `\\w`, `\\d` and `\\s` stay the backend's own classes.
"""

from __future__ import annotations

import re
import warnings
from re import _parser

import msgspec

from manta.structured.constraint import ConstraintError, ConstraintSpec
from manta.structured.regexes.assertions import Pattern, Unknown, class_ranges
from manta.structured.regexes.constructs import LAZY, LOOKS, Construct, constructs
from manta.structured.schemas.automata import ANY, Dfa, Ranges, TooLarge, complement, ranges_of

_FIRST_SYMBOL = 0xE000
"""Symbols are written as characters for private use until the expression is made."""
_WRITTEN = re.compile(r"\(\?s:\.\)|\[(?P<not>\^?)(?P<body>(?:\\u.{4}|\\U.{8}|-)*)\]|\\u.{4}|\\U.{8}")
_RANGE = re.compile(r"\\[uU]([0-9a-f]{8}|[0-9a-f]{4})(?:-\\[uU]([0-9a-f]{8}|[0-9a-f]{4}))?")
_CLASSES = (r"\w", r"\W", r"\d", r"\D", r"\s", r"\S")


_BACKENDS = ("auto", "llguidance", "xgrammar")
"""Backends that take the text of `regex` for a regular expression; what a registered one takes it for is its own."""


def with_plain_regex(spec: ConstraintSpec) -> ConstraintSpec:
    """The constraint with `without_looks` of its regular expression. Raises `ConstraintError`."""
    if spec.kind != "regex" or spec.backend not in _BACKENDS:
        return spec
    return msgspec.structs.replace(spec, text=without_looks(spec.text))


def without_looks(pattern: str) -> str:
    """An expression of the same texts without lookahead, lookbehind, word boundaries and non-greedy quantifiers.

    Positions in messages count characters from 0. Raises `ConstraintError` for constructs that have no such
    expression, and where it would be too large.
    """
    found = list(constructs(pattern))
    for construct in found:
        if construct.name not in (*LOOKS, LAZY):
            raise _unenforced(construct, remedy="write the pattern without it")
    looks = [construct for construct in found if construct.name in LOOKS]
    if looks:
        return _rewritten(pattern, looks[0])
    for construct in reversed(found):  # greedy or not, the whole text matches the same
        end = construct.position + len(construct.text)
        pattern = pattern[: end - 1] + pattern[end:]
    return pattern


def _rewritten(pattern: str, look: Construct) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets that Python may once read in another way
            parsed = _parser.parse(pattern)
        if parsed.state.flags & ~(re.UNICODE | re.NOFLAG):
            raise Unknown("a flag")
        automaton = Pattern(parsed)
        text = _dfa(automaton).expression()
    except re.error as error:
        remedy = f"with {look} the pattern is read as Python's re does"
        raise ConstraintError.because("unfit", "regex", cause=str(error), remedy=remedy) from error
    except Unknown as error:
        raise _unenforced(look, f"not beside {error}", "write the pattern without one") from error
    except (TooLarge, RecursionError) as error:
        remedy = "simplify the pattern or write it without lookaround"
        raise _unenforced(look, "the automaton of the pattern is too large", remedy) from error
    if text is None:
        raise ConstraintError.because("unsatisfiable", "regex")
    return _WRITTEN.sub(lambda match: _class(match, automaton), text)


def _unenforced(construct: Construct, cause: str = "", remedy: str = "") -> ConstraintError:
    return ConstraintError.because("not_enforced", f"regex: {construct}", cause=cause, remedy=remedy)


def _dfa(automaton: Pattern) -> Dfa:
    symbols = range(len(automaton.symbols))
    edges = [0, *range(_FIRST_SYMBOL + 1, _FIRST_SYMBOL + len(symbols))]
    return Dfa.explored(
        edges,
        automaton.start(),
        lambda position: (automaton.after(position, symbol) for symbol in symbols),
        automaton.accepts,
    )


# ---- classes of characters -------------------------------------------------------------------------------------------


def _class(written: re.Match[str], automaton: Pattern) -> str:
    """The class of characters that stands for a set of symbols."""
    if written.group() == "(?s:.)":
        return written.group()
    body = written["body"] if written["body"] is not None else written.group()
    chosen: list[tuple[int, int]] = []
    for low, high in _RANGE.findall(body):
        chosen.append((int(low, 16), int(high or low, 16)))
    wanted = complement(ranges_of(chosen)) if written["not"] else ranges_of(chosen)
    parts = [
        pair
        for number, symbol in enumerate(automaton.symbols)
        for pair in symbol
        if any(low <= _FIRST_SYMBOL + number <= high for low, high in wanted)
    ]
    return _class_text(ranges_of(parts), {name for name, _ in automaton.sets if name})


def _class_text(ranges: Ranges, names: set[str]) -> str:
    """The shortest of the ways to write a set, with the classes that the pattern names, and their complements."""
    if ranges == ANY:
        return "(?s:.)"
    if ranges == ((ranges[0][0], ranges[0][0]),):
        return _character(ranges[0][0])
    known = [name for name in _CLASSES if name in names or name.swapcase() in names]
    texts = [f"[{_body(ranges)}]", f"[^{_body(complement(ranges))}]"]
    for name in known:
        added, removed = _minus(ranges, class_ranges(name)), _minus(class_ranges(name), ranges)
        less = f"&&[^{_body(removed)}]" if removed else ""
        texts.append(f"[{name}{_body(added)}{less}]" if not (added and less) else f"[[{name}{_body(added)}]{less}]")
    return min(texts, key=len)


def _minus(one: Ranges, other: Ranges) -> Ranges:
    return complement(ranges_of([*complement(one), *other]))


def _body(ranges: Ranges) -> str:
    return "".join(_character(low) if low == high else f"{_character(low)}-{_character(high)}" for low, high in ranges)


def _character(code: int) -> str:
    character = chr(code)
    if character.isalnum() and code < 128:
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
