"""Regular expressions are ECMA-262's with the `u` flag: in masks, under guards, and in what is refused.

The verdicts are those of `regress`, which is neither ours nor a grammar backend's.
"""

from __future__ import annotations

import json
import random

import pytest

from manta.structured.backends.choose import Backends
from manta.structured.backends.guarded import GuardedSession
from manta.structured.constraint import ConstraintError, ConstraintSpec
from manta.structured.regexes.automata import TooLarge
from manta.structured.regexes.ecma import MAX_NESTING, Unreadable, parse
from manta.structured.regexes.languages import expression
from manta.structured.regexes.matching import Matcher
from manta.structured.regexes.regex_constraint import for_whole_answer, with_plain_regex
from manta.structured.schemas.formats import REGULAR
from manta.structured.vocabulary import Vocabulary
from tests.conftest import PROVE
from tests.structured.ecma_patterns import FAULTS, any_pattern, any_text, finds, is_valid
from tests.structured.test_schema_conformance import accepts, grammar_of

SEEDS = range(40 if PROVE else 4)


def _texts(rng: random.Random, count: int) -> list[str]:
    return ["", *(any_text(rng) for _ in range(count))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pattern_finds_what_ecma_finds(seed: int) -> None:
    rng, num_read = random.Random(seed), 0
    for _ in range(300):
        pattern = any_pattern(rng)
        try:
            matcher, whole = Matcher(pattern), expression(pattern)
        except TooLarge:
            continue
        num_read += 1
        for text in _texts(rng, 10):
            expected = finds(pattern, text)
            assert matcher.finds(text) == expected, (pattern, text)
            assert (whole is not None and finds(f"^(?:{whole})$", text)) == expected, (pattern, text, whole)
    assert num_read > 250


@pytest.mark.parametrize("seed", SEEDS)
def test_what_ecma_refuses_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        pattern = any_pattern(rng)
        at = rng.randrange(len(pattern) + 1)
        pattern = pattern[:at] + rng.choice(FAULTS) + pattern[at:]
        if r"\b" in pattern.lower() or r"\u" in pattern or r"\{" in pattern:
            continue  # `regress` reads `\b*` and `\ud83d\ude0*`, which ECMA-262 refuses; `\{,3}` is ours
        try:
            parse(pattern)
            is_read = True
        except Unreadable as error:
            is_read = False
            if error.kind == "not_regular":
                continue
        assert is_read == is_valid(pattern), pattern


def _schema(pattern: str) -> dict[str, object]:
    return {"type": "string", "pattern": pattern}


@pytest.mark.parametrize("seed", SEEDS)
def test_masks_write_what_ecma_finds(vocabulary: Vocabulary, seed: int) -> None:
    rng, num_served, refused = random.Random(f"masks {seed}"), 0, []
    for _ in range(25):
        pattern, texts = any_pattern(rng), _texts(rng, 8)
        expected = [finds(pattern, text) for text in texts]
        try:
            grammar = grammar_of(_schema(pattern), any_whitespace=False)
        except ConstraintError as error:
            refused.append((error.refusal.kind, any(expected)))
            continue
        num_served += 1
        for text, wanted in zip(texts, expected, strict=True):
            may_differ = (
                wanted and "\x00" in text
            )  # a grammar writes control characters only where a pattern needs them
            assert may_differ or accepts(grammar, text) == wanted, (pattern, text)
    assert num_served > 10
    assert ("unsatisfiable", True) not in refused
    assert ("unsatisfiable", True) not in refused


CONSTRUCTS = [
    (r"^\d$", ["7"], ["٣", "a"]),
    (r"^\w$", ["a", "_"], ["é", "-"]),
    (r"^\s$", [" ", "\u00a0", "\ufeff", "\u2028"], ["\x1c", "a"]),
    (r"^\W\D\S$", ["éaa"], ["aaa", "é1a", "éa "]),
    (r"^.$", ["a", "\U0001f600", "\x85"], ["\n", "\r", "\u2028", "\u2029", "ab"]),
    (r"^(?s:.)$", ["\n", "\u2028"], [""]),
    (r"^(?i:straße)$", ["STRAßE", "\u017ftra\u1e9ee"], ["strasse"]),
    (r"^(?m:^b$)$", ["b"], ["a\nb"]),
    (r"(?m:^b$)", ["a\nb", "b\u2028c"], ["ab", "bc"]),
    (r"^[^]$", ["a", "\n"], ["", "ab"]),
    (r"^a[]?$", ["a"], ["", "aa"]),
    (r"^\p{Lu}\p{Script=Greek}\P{L}$", ["Éλ1"], ["éλ1", "Éa1", "Éλa"]),
    (r"^\u{1F600}\u0061\x62\cJ\/$", ["\U0001f600ab\n/"], ["ab"]),
    (r"^\ud83d\ude00$", ["\U0001f600"], ["ab"]),
    (r"^(?<year>[0-9]{2})-\k$".replace(r"\k", "x"), ["19-x"], ["1-x"]),
    (r"^a+?b??$", ["a", "aab"], ["b"]),
    (r"^[\b]$", ["\b"], ["b"]),
    (r"a\x01$", ["a\x01"], ["a", ""]),
    (r"^[-[&&~]+$", ["[&&~-"], ["a", "]"]),
    (r"^[\w-]$", ["-", "a"], ["+"]),
    (r"^a{2,}$", ["aa", "aaaa"], ["a"]),
    (r"b$|^a", ["xb", "ay"], ["xby"]),
    (r"a$", ["ba"], ["a\n"]),
    (r"\bfoo\b", ["a foo", "éfoo"], ["afoo", "foo_"]),
    (r"^(?=.*\d)(?!.*x)[a-z\d]+(?<!9)$", ["a1b"], ["ab", "a1x", "a9"]),
    (r"^\-\@\_\}$", ["-@_}"], ["-"]),
]


@pytest.mark.parametrize(("pattern", "found", "others"), CONSTRUCTS, ids=[each[0] for each in CONSTRUCTS])
def test_a_construct_means_what_it_means_in_ecma(pattern: str, found: list[str], others: list[str]) -> None:
    strict = pattern != r"^\-\@\_\}$"  # punctuation that needs no backslash
    grammar = grammar_of(_schema(pattern), any_whitespace=False)
    for text in (*found, *others):
        expected = text in found
        assert not strict or finds(pattern, text) == expected, text
        assert Matcher(pattern).finds(text) == expected, text
        assert accepts(grammar, text) == expected, text


REFUSED = [
    (r"(a|b)\1", "not_enforced", r"the backreference \1 at position 5", "write the pattern without it"),
    (r"(?<n>a)\k<n>", "not_enforced", r"the backreference \k at position 7", "write the pattern without it"),
    ("a{,3}", "unfit", "the quantifier {,3} at position 1", "write {0,3}"),
    ("x[[:alpha:]]", "unfit", "the unmatched ] at position 11", r"write \]"),
    ("(?P<n>a)", "unfit", "the named group (?P< at position 0", "write (?<name>...)"),
    ("x(?>ab|a)b", "unfit", "the atomic group (?> at position 1", "write (?:...)"),
    ("a{2}+", "unfit", "the possessive quantifier {2}+ at position 1", "write the pattern without it"),
    ("(a)(?(1)b|c)", "unfit", "the conditional (?( at position 3", "write the pattern without it"),
    ("(?i)a", "unfit", "the group (?i) at position 0", "write flags as (?i:...)"),
    (r"a\Z", "unfit", r"the escape \Z at position 1", "write $"),
    (r"\a", "unfit", r"the escape \a at position 0", "write a"),
    ("(?=a)*", "unfit", "the quantifier * at position 5", "put a group before it"),
    ("a(?=b", "unfit", "the open group (?= at position 1", "close it"),
    ("[a", "unfit", "the open class [a at position 0", "close it"),
    ("[b-a]", "unfit", "the range b-a at position 1", r"give two characters in order, or write \-"),
    (r"\p{Latin}", "unfit", r"the property \p{Latin} at position 0", "name one of Unicode"),
    ("a{", "unfit", "the brace { at position 1", r"write \{"),
    ("(" * (MAX_NESTING + 1) + ")" * (MAX_NESTING + 1), "unfit", "the nesting of more than 100", "flatten it"),
]


@pytest.mark.parametrize(("pattern", "kind", "named", "remedy"), REFUSED, ids=[each[0][:20] for each in REFUSED])
def test_a_refusal_names_construct_place_and_remedy(pattern: str, kind: str, named: str, remedy: str) -> None:
    for ask, place in ((for_whole_answer, "regex"), (lambda text: grammar_of(_schema(text)), "#/pattern")):
        with pytest.raises(ConstraintError) as caught:
            ask(pattern)
        refusal = caught.value.refusal
        assert (refusal.field, refusal.kind) == ("constraint", kind)
        assert refusal.place.startswith(place)
        assert named in refusal.place + refusal.cause
        assert refusal.remedy.startswith(remedy)


@pytest.mark.parametrize("keyword", ["pattern", "patternProperties", "propertyNames"])
def test_every_keyword_with_patterns_reads_the_same_dialect(keyword: str) -> None:
    def schema(pattern: str) -> dict[str, object]:
        if keyword == "patternProperties":
            return {"type": "object", "patternProperties": {pattern: True}, "additionalProperties": False}
        if keyword == "propertyNames":
            return {"type": "object", "propertyNames": {"pattern": pattern}}
        return {"type": "object", "properties": {"k": _schema(pattern)}, "required": ["k"]}

    def value(text: str) -> dict[str, object]:
        return {"k": text} if keyword == "pattern" else {text: 1}

    grammar = grammar_of(schema(r"^\w\d(?!x)"), any_whitespace=False)
    assert accepts(grammar, value("a1y"))
    assert not any(accepts(grammar, value(text)) for text in ("é1y", "a٣y", "a1x"))
    with pytest.raises(ConstraintError):
        grammar_of(schema("[[:alpha:]]"))


def test_schemas_that_are_enforced_in_part_read_the_same_dialect() -> None:
    loose = grammar_of(_schema(r"^\w$"), loose=True)
    assert accepts(loose, "a")
    assert not accepts(loose, "é")
    with pytest.raises(ConstraintError):
        grammar_of(_schema("a{,3}"), loose=True)
    assert accepts(grammar_of(_schema(r"(a)\1"), loose=True), "b")


def test_a_pattern_too_large_for_a_grammar_is_guarded() -> None:
    pattern = r"^(?=.*a.{9})(?=.*b.{9})\w+$"
    grammar = grammar_of(_schema(pattern), any_whitespace=False)
    assert isinstance(grammar.session(), GuardedSession)
    for text in ("ab0123456789", "ab01234567", "ab0123é456789"):
        assert accepts(grammar, text) == finds(pattern, text)
    with pytest.raises(ConstraintError) as caught:
        for_whole_answer(pattern)
    assert caught.value.refusal.kind == "not_enforced"


@pytest.mark.parametrize("name", REGULAR)
def test_a_format_is_a_pattern_that_matchers_and_grammars_take(name: str) -> None:
    assert is_valid(expression(REGULAR[name]) or "(")
    assert not Matcher(REGULAR[name]).finds("\x00")


def test_both_backends_take_the_same_expression(vocabulary: Vocabulary) -> None:
    backends = Backends(vocabulary)
    for backend in ("llguidance", "xgrammar"):
        spec = ConstraintSpec(kind="regex", text=r"(?!ab)\w{2}(?<!bb)|[^]-", backend=backend)
        resolved = backends.resolve(with_plain_regex(spec))
        session = backends.get(backend).load(resolved.spec, resolved.compiled).session()
        for text, expected in (("aa", True), ("ab", False), ("ba", True), ("bb", False), ("\n-", True)):
            copy = session.fork()
            tokens = [vocabulary.tokens.index(character.encode()) for character in text]
            assert (all(copy.accept(token) for token in tokens) and copy.is_accepting()) == expected


def test_a_registered_backend_gets_the_text_as_it_is() -> None:
    other = ConstraintSpec(kind="regex", text=json.dumps({"at": "(?=a)"}), backend="example")
    assert with_plain_regex(other) is other
