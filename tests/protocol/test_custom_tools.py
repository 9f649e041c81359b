"""Custom tools, whose input is one text: grammars and readers in every format of calls, and grammars as JSON text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.cluster.chat import tool_formats as formats
from manta.cluster.chat.custom_input import InputReader
from manta.cluster.chat.reader import ChatReader, MessageBuilder
from manta.cluster.chat.tool_formats import ToolFormat
from manta.cluster.errors import RequestRefused
from manta.structured.constraint import ConstraintError, ConstraintSpec
from manta.structured.lark.grammar import in_json_strings, of_regex, read_lark
from tests.protocol.test_tool_sampling import world
from tests.tool_formats import WRITERS

PATCH_GRAMMAR = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""The grammar of `apply_patch` in Codex CLI (openai/codex, codex-rs, tool_apply_patch.lark)."""
PATCH = (
    "*** Begin Patch\n*** Update File: a/b.py\n@@ def f():\n-    return \"\\t\"\n+    return 'é <b>'\n*** End Patch\n"
)
SUMS = 'start: sum\nsum: item (" + " item)*\nitem: INT | "(" sum ")"\n%import common.INT\n'
"""A grammar that leads back to itself."""


def custom(syntax: str = "", definition: str = "") -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}} if syntax else {"type": "text"}
    return {"type": "custom", "custom": {"name": "log", "description": "Writes.", "format": form}}


def takes(constraint: ConstraintSpec, text: str, has_marks: bool = True) -> bool:
    """Returns whether a constraint allows a whole text."""
    here = world(has_marks)
    session = here.grammar(constraint).session()
    return all(session.accept(t) for t in here.tokenizer.encode(text, add_special_tokens=False)) and (
        session.is_accepting()
    )


INPUTS: list[tuple[dict[str, Any], str, str]] = [
    (custom("lark", PATCH_GRAMMAR), PATCH, PATCH.replace("@@ def", "?? def")),
    (custom("lark", "start: /.+/s"), PATCH, ""),
    (custom("lark", SUMS), "1 + (23 + 4)", "1 + (23 + 4"),
    (custom("regex", r"^(?P<day>\d{1,2})/[^\n]+$"), '31/"Ja\\n"', "31/\n"),
    (custom(), 'any "text"\n\\', ""),
]
"""Tools, with an input that each may get and one that it must not get."""


@pytest.mark.few(8)
@pytest.mark.axes_in_turns
@pytest.mark.parametrize("has_marks", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("form", WRITERS, ids=lambda form: form.name)
def test_the_input_is_text_under_its_grammar_in_every_format(form: ToolFormat, has_marks: bool) -> None:
    if form.is_channel and not has_marks:
        pytest.skip("harmony's marks are always tokens")
    here = world(has_marks)
    for tool, good, bad in INPUTS:
        plan = here.plan(form, tools=[tool], tool_choice={"type": "custom", "custom": {"name": "log"}})
        written = WRITERS[form]([("log", {"input": good})])
        constraint = plan.params.constraint
        assert constraint is not None
        assert takes(constraint, written.removesuffix("<|call|>"), has_marks), (tool, written)
        if bad:
            wrong = WRITERS[form]([("log", {"input": bad})])
            assert not takes(constraint, wrong.removesuffix("<|call|>"), has_marks), (tool, wrong)
        for size in (1, 3, len(written)):
            reader, builder = ChatReader(plan), MessageBuilder()
            for begin in range(0, len(written), size):
                builder.add(reader.feed(written[begin : begin + size], False))
            builder.add(reader.feed("", True))
            (call,) = builder.message().tool_calls or []
            assert (call.type, call.function) == ("custom", None)
            assert call.custom is not None
            assert (call.custom.name, call.custom.input) == ("log", good), size


@pytest.mark.parametrize("form", [formats.GLM, formats.SEED_OSS, formats.QWEN3_CODER], ids=lambda form: form.name)
def test_a_raw_input_cannot_hold_the_mark_that_ends_it_and_can_end_anywhere(form: ToolFormat) -> None:
    here = world(False)
    plan = here.plan(form, tools=[custom("regex", r"(?s:.*)")], tool_choice="required")
    constraint = plan.params.constraint
    assert constraint is not None
    assert takes(constraint, WRITERS[form]([("log", {"input": "a </param> </arg_"})]), has_marks=False)
    mark = form.argument_marks()[2].strip()
    assert not takes(constraint, WRITERS[form]([("log", {"input": f"a {mark} b"})]), has_marks=False)


# ---- grammars as JSON text -------------------------------------------------------------------------------------------

GRAMMARS: list[tuple[str, str, bool]] = [
    ("start: /a.b/", 'a"b', True),
    ("start: /a.b/", "a\nb", False),
    ("start: /a.b/s", "a\nb", True),
    ("start: /(?s:a.)./", "a\n\n", False),
    ("start: /(?s)a./", "a\n", True),
    ("start: /[^a]+/", '\x01"\\z\x7f', True),
    (r'start: "a\"\\\n\u0041\x42"', 'a"\\\nAB', True),
    ('start: "a\\""i', 'A"', True),
    ('start: A B\nA: ~"x" & /[^y]{1,2}/\nB: "y"', '"\\y', True),
    ('start: A B\nA: ~"x" & /[^y]{1,2}/\nB: "y"', "xy", False),
    ('start: "a".."c" "!"~2..3', "b!!", True),
    ('start: "\\u0000".."\\u0020"', "\n", True),
    (r"start: /\d\s\w/", "5\té", True),
    (r"start: /[\s&&[^\n]]/", "\n", False),
    (r"start: /[\s--\n]/", "\t", True),
    (r"start: /\x22\u005c\x{41}\u{42}/", '"\\AB', True),
    (r"start: /(?i)n\n/", "N\n", True),
    (r"start: /[[:punct:]]\p{Lu}\pL/", '"Éé', True),
    (r"start: /a{2}\{/", "aa{", True),
    (r"start: /\/[\/]/", "//", True),
    (r"start: /[]a-]+/", "]a-", True),
    ("start: W*\n%import common (WORD, WS)\nW: WORD WS", "ab\n c\t", True),
    ("start: N+\n%import common.LF -> N // a comment\n", "\n\n", True),
    ("start: /a/ /b/\n%ignore /\\s+/", "a\n b", True),
    ('start: "a" B\n%ignore /\\s+/\nB: "\\"b"', 'a \n"b', True),
    ('start: "a" B\n%ignore WS\n%import common.WS\nB: "\\"b"', 'a \t\n"b', True),
    ('start: "a" B\n%ignore /[ ]*/\nB: /[^a]/', "a  \n", True),
    ('?start: x+ -> y\n!x: "q"\n  | "r" # another\n', "qr", True),
    ("start: (a | b)?\na: /x/\nb: a", "x", True),
    ('start: "(" start ")" | ESCAPED_STRING\n%import common.ESCAPED_STRING', '(("a\\"b"))', True),
]


@pytest.mark.parametrize(("grammar", "text", "is_valid"), GRAMMARS)
def test_a_grammar_takes_the_same_texts_between_the_quotes_of_json(grammar: str, text: str, is_valid: bool) -> None:
    plain = ConstraintSpec(kind="lark", text=grammar)
    assert takes(plain, text) == is_valid
    quoted = ConstraintSpec(kind="lark", text=in_json_strings(read_lark(grammar)))
    assert takes(quoted, json.dumps(text, ensure_ascii=False)[1:-1]) == is_valid


PATTERNS = st.recursive(
    st.sampled_from(["a", '"', r"\\", r"\n", ".", "[^a]", r"\s", r"[\t\"]", "/", r"\x01", "é"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda both: f"(?:{both[0]}|{both[1]})"),
        inner.map(lambda one: f"(?:{one})*"),
        inner.map(lambda one: f"(?s:{one}){{1,2}}"),
    ),
    max_leaves=5,
)


@given(PATTERNS, st.text('a"\\\n\t \x01é/', max_size=5))
def test_an_expression_takes_the_same_texts_between_the_quotes_of_json(pattern: str, text: str) -> None:
    grammar = of_regex(pattern)
    plain = ConstraintSpec(kind="lark", text=f"start: {grammar.definitions[0].body[0].text}")
    quoted = ConstraintSpec(kind="lark", text=in_json_strings(grammar))
    assert takes(quoted, json.dumps(text, ensure_ascii=False)[1:-1]) == takes(plain, text)


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        "begin: /a/",
        "start: <|special|>",
        "start: <[5]>",
        'start: %json {"type": "object"}',
        "start: @other",
        "%import python.NAME\nstart: NAME",
        "%import common.NOTHING\nstart: NOTHING",
        '%declare A\nstart: "a"',
        "start[max_tokens=5]: /a/",
        'start{x}: "a"',
        "start.5: /a/",
        "start /a/",
        "start: /a",
        'start: "a',
        "start: /(?x)a b/",
        "start: /[a/",
        r"start: /\u{110000}/",
        r"start: /\p{L/",
        "start: /a)/",
        'start: "ab".."c"',
        "start: " + '"a" ' * 60_000,
        "start: /" + "." * 60_000 + "/",
        "start: " + "/./ " * 10_000,
        "start: A\nA: " + "~(" * 20_000 + '"a"' + ")" * 20_000,
        "start: /" + "a" * 70_000 + "/",
        "start: A\nA: " + "~" * 60_000,
    ],
    ids=lambda grammar: grammar[:30],
)
def test_a_grammar_with_a_mistake_is_refused(grammar: str) -> None:
    with pytest.raises(ConstraintError):
        in_json_strings(read_lark(grammar))


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        (custom("lark", "start: <|im_end|>"), "tools[0].custom.format.grammar.definition"),
        (custom("regex", "[a"), "tools[0].custom.format.grammar.definition"),
        (custom("ebnf", "root"), "tools[0].custom.format.grammar.syntax"),
        ({"type": "custom", "custom": {"name": "a b"}}, "tools[0].custom.name"),
        ({"type": "custom", "function": {"name": "a"}}, "tools[0]"),
    ],
)
def test_a_refusal_names_the_field(tool: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        world(True).plan(formats.HERMES, tools=[tool])
    assert caught.value.refusal.field.startswith(field)


# ---- the reader ------------------------------------------------------------------------------------------------------


@given(st.text(), st.data())
def test_the_input_is_read_however_its_json_is_cut(text: str, data: Any) -> None:
    is_ascii = data.draw(st.booleans())
    written = json.dumps({"input": text}, ensure_ascii=is_ascii)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=6)))
    reader = InputReader()
    pieces = [reader.read(written[a:b]) for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    assert "".join(pieces) == text.encode("utf-8", "replace").decode()
