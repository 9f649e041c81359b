"""Grammar rules for the arguments of a call, in formats that do not write them as one JSON object.

The keys stand in the order of the schema, each once, the required ones always. A string is raw text without the mark
that ends it; a value of any other type is JSON of its schema; in Python's syntax `True`, `False` and `None` may be
written as Python does, but not within lists and dictionaries. What a format cannot carry is refused, or with
`strict: false` left out:

- keywords of the whole object but `properties`, `required`, `additionalProperties` and `patternProperties`; with
  `patternProperties` no other names than those of `properties` are written;
- keys that hold a character of the format's marks;
- of raw strings, `pattern` beside `format` or a length, a `pattern` that no automaton can hold or whose automaton is
  too large, and `oneOf` with one type twice;
- texts that would be read as something else: a string that holds its end mark, or the string `"null"` where null is
  allowed too. Where strings and lists or objects are allowed, all is JSON, its strings in quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from manta.cluster.chat.argument_forms import (
    NUMBER,
    OF_STRINGS,
    ArgumentForm,
    assertions,
    form_of,
    resolved,
    type_of,
    types_of,
)
from manta.cluster.chat.lark_text import ANY_TEXT, TokenId, escaped, literal, without
from manta.cluster.chat.tool_formats import ToolFormat
from manta.cluster.protocol.constraint_fields import json_text
from manta.structured.constraint import ConstraintError
from manta.structured.regexes.automata import TooLarge
from manta.structured.schemas.formats import REGULAR
from manta.structured.schemas.patterns import combined, matcher

_SOME_NUMBER = r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?"
_SOME_INTEGER = r"-?(0|[1-9][0-9]{0,14})"
OF_OBJECT = frozenset(["type", "properties", "required", "additionalProperties", "patternProperties"])
"""The keywords of an object that rules take into account."""
FREE_KEY = r"[a-zA-Z0-9_]{1,64}"
"""Pattern of a key that the schema does not name."""


class NotCarried(ValueError):
    """The format cannot carry a demand of the schema; the message names the demand."""


class Members(NamedTuple):
    """The keys of an object by its schema."""

    named: dict[str, Any]
    """The schemas of the keys that `properties` or `required` name, in their order."""
    required: frozenset[str]
    more: Any
    """The schema of further keys; False if there may be none, or if patterns say which."""


class ArgumentRules:
    """Writes the rules of one tool's arguments; their names begin with `prefix`."""

    def __init__(
        self,
        form: ToolFormat,
        schema: dict[str, Any],
        options: dict[str, Any],
        token_id: TokenId,
        prefix: str,
        closes: bool,
    ) -> None:
        """Takes the `options` of `%json`. With `lenient` in them nothing is refused. With `closes`, arguments that the
        schema lists exclude others, unless it says so.
        """
        self._closes = closes
        self._form, self._schema, self._options = form, schema, options
        self._token_id, self._prefix = token_id, prefix
        self._is_lenient = bool(options["lenient"])
        self._marks = form.argument_marks()
        self._rules: list[str] = []
        self.left_out: list[str] = []
        """The demands that a lenient grammar leaves out because the format cannot carry them."""

    def rules(self) -> list[str]:
        """Returns the rule `prefix` and the rules that it needs. Raises `NotCarried`."""
        root = resolved(self._schema, self._schema)
        if not isinstance(root, dict):
            root = {}
            self._cannot("a schema of the arguments that is no object")
        self._check_keywords(root)
        members = self._members(root)
        parts = []
        for index, (key, schema) in enumerate(members.named.items()):
            if schema is False and key not in members.required:
                continue
            rule = self._argument(index, key, schema)
            if rule is not None:
                parts.append((rule, key in members.required))
        extra = None
        if members.more is not False:
            extra = self._additional(len(members.named), list(members.named), members.more)
        self._rules.insert(0, f"{self._prefix}: {self._sequence(parts, extra)}")
        return self._rules

    def _check_keywords(self, root: dict[str, Any]) -> None:
        for name in sorted(assertions(root) - OF_OBJECT):
            self._cannot(f"the keyword {name} of the whole object")

    def _members(self, schema: dict[str, Any]) -> Members:
        """Returns what an object of a schema may and must hold."""
        named = dict(schema.get("properties") or {})
        required = frozenset(name for name in schema.get("required") or [] if isinstance(name, str))
        more = schema.get("additionalProperties", not (self._closes and named))
        named |= {name: more for name in schema.get("required") or [] if name in required - named.keys()}
        return Members(named, required, False if "patternProperties" in schema else more)

    def _cannot(self, what: str) -> None:
        if not self._is_lenient:
            raise NotCarried(what)
        self.left_out.append(what)

    # ---- which arguments -----------------------------------------------------------------------------------------

    def _sequence(self, parts: list[tuple[str, bool]], extra: str | None) -> str:
        if self._form.values != "python":
            found = [rule if is_required else f"({rule})?" for rule, is_required in parts]
            return " ".join([*found, *([f"({extra})*"] if extra else [])]) or '""'
        return self._with_commas(self._prefix, parts, extra, '", "')

    def _with_commas(self, name: str, parts: list[tuple[str, bool]], extra: str | None, comma: str) -> str:
        """Writes rules for what may follow after a written argument (`name`_after) and without one (`name`_from), and
        returns the first of them.
        """
        last = len(parts)
        self._rules.append(f"{name}_after_{last}: {f'({comma} {extra})*' if extra else EMPTY}")
        self._rules.append(f"{name}_from_{last}: {f'({extra} {name}_after_{last})?' if extra else EMPTY}")
        for index in reversed(range(last)):
            rule, is_required = parts[index]
            following = f"{name}_after_{index + 1}"
            skipped = ("", "") if is_required else (f" | {following}", f" | {name}_from_{index + 1}")
            self._rules.append(f"{name}_after_{index}: {comma} {rule} {following}{skipped[0]}")
            self._rules.append(f"{name}_from_{index}: {rule} {following}{skipped[1]}")
        return f"{name}_from_0"

    def _argument(self, index: int, key: str, schema: Any) -> str | None:
        """Returns the rule of a named argument; None if the argument is left out."""
        if not self._is_writable(key):
            self._cannot(f"the argument {key[:80]!r}, whose name holds a character of the format's marks")
            return None
        name = f"{self._prefix}_{index}"
        head = literal(self._marks[0] + key + self._marks[1], self._token_id)
        self._value(name, key, schema)
        self._rules.append(f"{name}: {head} {name}_value")
        return name

    def _is_writable(self, key: str) -> bool:
        if self._form.values == "python":
            return re.fullmatch(r"""[^\s"'()\[\]{},=][^\n"'()\[\]{},=]*(?<!\s)""", key) is not None
        return re.fullmatch(r"[^<>\s]([^<>\n]*[^<>\s])?", key) is not None

    def _additional(self, index: int, named: list[str], schema: Any) -> str | None:
        """Returns the rule of an argument that the schema does not name."""
        before, between, _ = self._marks
        name, key = f"{self._prefix}_{index}", f"KEY_{self._prefix.upper()}"
        writable = [each for each in named if self._is_writable(each)]
        if "<[" in literal(before + between, self._token_id):
            first, last, head, tail = "", "", literal(before, self._token_id), literal(between, self._token_id)
        else:
            first, last, head, tail = escaped(before), escaped(between), "", ""
        excluded = "".join(f" & ~/{first}{escaped(each)}{last}/" for each in writable)
        self._rules.append(f"{key}: /{first}{FREE_KEY}{last}/{excluded}")
        self._value(name, "additionalProperties", schema)
        self._rules.append(f"{name}: {head} {key} {tail} {name}_value")
        return name

    # ---- values --------------------------------------------------------------------------------------------------

    def _value(self, name: str, key: str, schema: Any) -> None:
        """Adds the rule `name`_value: a value and the mark after it."""
        form = form_of(schema, self._schema)
        end = self._marks[2]
        if self._form.values == "raw" and (form.is_raw or form.is_mixed):
            self._text_value(name, key, schema, form)
            return
        after = f" {literal(end, self._token_id)}" if end else ""
        python = ""
        if self._form.values == "python":
            python = "".join(f'"{word}" | ' for word in self._python_words(schema, form))
        self._rules.append(f"{name}_value: {python}{name}_json{after}")
        self._rules.append(f"{name}_json: %json {json_text(self._embedded(schema))}")

    def _python_words(self, schema: Any, form: ArgumentForm) -> Iterator[str]:
        """Returns Python's words for the constants that are certainly valid."""
        plain = resolved(schema, self._schema)
        for word, value in (("True", True), ("False", False), ("None", None)):
            if form.types & {"boolean", "null"} and self._is_certain(plain, value):
                yield word

    def _is_certain(self, schema: Any, value: Any) -> bool:
        schema = resolved(schema, self._schema)
        if not isinstance(schema, dict):
            return schema is True
        names = assertions(schema)
        if names == {"anyOf"}:
            return any(self._is_certain(each, value) for each in schema["anyOf"])
        if not names <= {"type", "enum", "const"} | OF_STRINGS:
            return False
        is_listed = any(each is value for each in schema.get("enum", [value])) and schema.get("const", value) is value
        return is_listed and ("null" if value is None else "boolean") in types_of(schema, self._schema)

    def _embedded(self, schema: Any) -> dict[str, Any]:
        plain = schema if isinstance(schema, dict) else {} if schema is True else {"not": {}}
        shared = {name: self._schema[name] for name in ("$defs", "definitions") if name in self._schema}
        return {**plain, **shared, "x-guidance": self._options}

    def _text_value(self, name: str, key: str, schema: Any, form: ArgumentForm) -> None:
        texts, may_be_empty = self._texts(key, schema, form)
        upper = f"TEXT_{name.upper()}"
        mark = self._marks[2].strip()
        end = literal(self._marks[2], self._token_id)
        self._rules.append(f"{upper}: ({' | '.join(texts)}) & ~{without(mark)}")
        if end.startswith("<["):
            self._rules.append(f"{name}_value: {f'{upper}?' if may_be_empty else upper} {end}")
            return
        self._rules.append(f"{name}_value[lazy]: {upper} {json_text(self._marks[2])}")

    def _texts(self, key: str, schema: Any, form: ArgumentForm) -> tuple[list[str], bool]:
        """Returns the alternatives of a terminal, and whether the text may be empty."""
        words = {"null": ["null"], "boolean": ["true", "false"]}
        taken = [word for kind, found in words.items() if kind in form.types for word in found]
        excluded = [*map(escaped, taken), *([NUMBER] if "number" in form.types else [])]
        less = "".join(f" & ~/{each}/" for each in excluded)
        texts, may_be_empty = [], False
        for leaf in self._leaves(key, schema):
            kinds = types_of(leaf, self._schema)
            if "enum" in leaf or "const" in leaf:
                texts += self._listed(leaf, form)
                may_be_empty |= "" in leaf.get("enum", [leaf.get("const")])
                continue
            if "string" in kinds:
                pattern, is_empty = self._string(key, leaf, excluded)
                texts += [f"(/{pattern}/{less})"] if pattern is not None else []
                may_be_empty |= is_empty
            for kind, found in words.items():
                texts += [f"/{word}/" for word in found if kind in kinds]
            if "number" in kinds:
                names = leaf.get("type", ["number"])
                texts.append(f"/{_SOME_NUMBER if 'number' in names else _SOME_INTEGER}/")
        if not texts:
            self._cannot(f"the argument {key[:80]!r}, for which there is no text")
            return [f"/{ANY_TEXT}/"], True
        return texts, may_be_empty

    def _listed(self, leaf: dict[str, Any], form: ArgumentForm) -> list[str]:
        """Returns the values of an `enum` or `const`, each as its text, without those that would be read as another
        value.
        """
        values = leaf["enum"] if "enum" in leaf else [leaf["const"]]
        if "enum" in leaf and "const" in leaf:
            values = [value for value in values if value == leaf["const"]]
        texts = []
        for value in values:
            if not has_type(value, leaf.get("type")):
                continue
            text = value if isinstance(value, str) else json.dumps(value)
            misread = isinstance(value, str) and not form.is_raw and re.fullmatch(rf"null|true|false|{NUMBER}", value)
            if not misread and self._marks[2].strip() not in text:
                texts.append(f"/({escaped(text)})/")  # `//` would begin a comment
        return texts

    def _leaves(self, key: str, schema: Any) -> Iterator[dict[str, Any]]:
        """Returns the alternatives of a schema, each without combinations of its own."""
        schema = resolved(schema, self._schema)
        if not isinstance(schema, dict):
            self._cannot(f"the argument {key[:80]!r}, whose schema is {schema!r}")
            yield {"type": "string"}
            return
        names = assertions(schema)
        for name in ("anyOf", "oneOf"):
            if names == {name}:
                members = schema[name]
                types = [kind for each in members for kind in types_of(each, self._schema)]
                if name == "oneOf" and len(set(types)) < len(types):
                    self._cannot(f"oneOf with one type twice in the argument {key[:80]!r}")
                for each in members:
                    yield from self._leaves(key, each)
                return
        for name in sorted(names - {"type", "enum", "const"} - OF_STRINGS):
            self._cannot(f"the keyword {name} in the argument {key[:80]!r}")
        if ("enum" in names or "const" in names) and names & OF_STRINGS:
            self._cannot(f"enum beside other keywords in the argument {key[:80]!r}")
        yield schema

    def _string(self, key: str, leaf: dict[str, Any], excluded: list[str]) -> tuple[str | None, bool]:
        """Returns a regular expression of the strings, or None if there are none, and whether it matches the empty
        string.

        An automaton takes the `excluded` expressions out of a pattern, because llguidance may fail where nothing is
        left of the pattern.
        """
        pattern = leaf.get("pattern")
        if "format" in leaf and leaf["format"] in REGULAR:
            if pattern is not None:
                self._cannot(f"pattern beside format in the argument {key[:80]!r}")
            pattern = REGULAR[leaf["format"]]
        low, high = leaf.get("minLength", 0), leaf.get("maxLength")
        if pattern is None:
            most = "" if high is None else high
            return f"(?s:.{{{low},{most}}})" if low or high is not None else ANY_TEXT, low == 0
        if low or high is not None:
            self._cannot(f"pattern or format beside a length in the argument {key[:80]!r}")
        return self._pattern(key, pattern, [f"^({each})$" for each in excluded])

    def _pattern(self, key: str, pattern: str, unwanted: list[str]) -> tuple[str | None, bool]:
        try:
            found = combined([pattern], unwanted)
            if found is None:
                return None, False
        except (ConstraintError, TooLarge):
            self._cannot(f"the pattern {pattern[:80]!r} in the argument {key[:80]!r}")
            return ANY_TEXT, True
        body = found.removeprefix("^(?:").removesuffix(")$").replace(r"\/", r"\u002f")  # Lark ends it at a slash
        return f"({body})", matcher(found).finds("")


def has_type(value: Any, names: Any) -> bool:
    if names is None:
        return True
    found = names if isinstance(names, list) else [names]
    return type_of(value) in found or ("integer" in found and type_of(value) == "number" and float(value).is_integer())


EMPTY = '""'
"""A rule that matches nothing but the empty text."""
