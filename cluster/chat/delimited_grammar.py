"""Grammar rules for the arguments of a call in Gemma 4's syntax (`cluster/chat/delimited_arguments.py` reads it).

Keys stand in the order of the schema, each once, the required ones always, in objects at any depth. A string is any
text without the mark that ends it. What a format with raw strings cannot carry (`cluster/chat/argument_grammar.py`) is
refused or left out here too, and so are these keywords of lists: all but `items`, `minItems` and `maxItems`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from manta.cluster.chat.argument_forms import OF_STRINGS, assertions, resolved, types_of
from manta.cluster.chat.argument_grammar import FREE_KEY, OF_OBJECT, ArgumentRules, has_type
from manta.cluster.chat.lark_text import escaped, literal, without
from manta.cluster.protocol.constraint_fields import json_text

_OF_NUMBERS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
_OF_LISTS = frozenset(["items", "minItems", "maxItems"])
_COMMA = '","'
_ANY: dict[str, Any] = {}
"""The schema that stands for `true` and for a list's items that no schema describes."""


class DelimitedRules(ArgumentRules):
    """Writes the rules of one tool's arguments; their names begin with `prefix`."""

    def rules(self) -> list[str]:
        """Returns the rule `prefix` and the rules that it needs. Raises `NotCarried`."""
        root = resolved(self._schema, self._schema)
        if not isinstance(root, dict):
            root = {}
            self._cannot("a schema of the arguments that is no object")
        self._names: dict[int, str] = {}
        """The rule of each schema that has one, by the schema's identity: a schema may hold itself."""
        self._write_object(self._prefix, root, "the arguments")
        return self._rules

    def _is_writable(self, key: str) -> bool:
        return re.fullmatch(r"[^\s:,{}\[\]<>]([^\n:,{}\[\]<>]*[^\s:,{}\[\]<>])?", key) is not None

    def _rule_of(self, key: str, schema: Any) -> str:
        """Returns the rule of the values of a schema, which it writes if there is none yet."""
        plain = resolved(schema, self._schema)
        if plain is True:
            plain = _ANY
        elif not isinstance(plain, dict):
            self._cannot(f"the argument {key[:80]!r}, whose schema is {plain!r}")
            plain = _ANY
        if id(plain) not in self._names:
            name = self._names[id(plain)] = f"{self._prefix}_v{len(self._names)}"
            self._write_value(name, key, plain)
        return self._names[id(plain)]

    def _write_value(self, name: str, key: str, schema: dict[str, Any]) -> None:
        names = assertions(schema)
        for choice in ("anyOf", "oneOf"):
            if names == {choice}:
                types = [kind for each in schema[choice] for kind in types_of(each, self._schema)]
                if choice == "oneOf" and len(set(types)) < len(types):
                    self._cannot(f"oneOf with one type twice in the argument {key[:80]!r}")
                self._rules.append(f"{name}: {' | '.join(self._rule_of(key, each) for each in schema[choice])}")
                return
        if "enum" in names or "const" in names:
            self._forbid(key, names - {"enum", "const", "type"})
            self._rules.append(f"{name}: {self._listed_values(key, schema)}")
            return
        kinds = types_of(schema, self._schema)
        known = {"type"}
        alternatives = []
        for kind, (keywords, write) in self._writers().items():
            if kind in kinds:
                known |= keywords
                alternatives.append(f"{name}_{kind}")
                write(f"{name}_{kind}", schema, key)
        self._forbid(key, names - known)
        if not alternatives:
            self._cannot(f"the argument {key[:80]!r}, for which there is no value")
            alternatives = ['"null"']
        self._rules.append(f"{name}: {' | '.join(alternatives)}")

    def _writers(self) -> dict[str, tuple[frozenset[str], Callable[[str, dict[str, Any], str], None]]]:
        """Returns, for each JSON type, the keywords that its rule takes into account, and what writes the rule."""
        return {
            "string": (OF_STRINGS, self._write_string),
            "number": (_OF_NUMBERS, self._write_number),
            "boolean": (frozenset(), lambda name, schema, key: self._rules.append(f'{name}: "true" | "false"')),
            "null": (frozenset(), lambda name, schema, key: self._rules.append(f'{name}: "null"')),
            "array": (_OF_LISTS, self._write_list),
            "object": (OF_OBJECT, self._write_object),
        }

    def _forbid(self, key: str, names: set[str]) -> None:
        for name in sorted(names):
            self._cannot(f"the keyword {name} in the argument {key[:80]!r}")

    def _listed_values(self, key: str, schema: dict[str, Any]) -> str:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if "enum" in schema and "const" in schema:
            values = [value for value in values if value == schema["const"]]
        kept = [value for value in values if has_type(value, schema.get("type"))]
        texts = [text for text in map(self._text, kept) if text is not None]
        if not texts:
            self._cannot(f"the argument {key[:80]!r}, for which there is no text")
            return '"null"'
        return " | ".join(literal(text, self._token_id) for text in texts)

    def _text(self, value: Any) -> str | None:
        """Returns a value as the format writes it; None if it cannot."""
        if isinstance(value, str):
            return None if self._form.quote in value else f"{self._form.quote}{value}{self._form.quote}"
        if isinstance(value, dict | list):
            items = [self._text(each) for each in (value.values() if isinstance(value, dict) else value)]
            if None in items or not all(map(self._is_writable, value if isinstance(value, dict) else [])):
                return None
            if isinstance(value, dict):
                return f"{{{','.join(f'{name}:{item}' for name, item in zip(value, items, strict=True))}}}"
            return f"[{','.join(map(str, items))}]"
        return json.dumps(value)

    # ---- one type ------------------------------------------------------------------------------------------------

    def _write_string(self, name: str, schema: dict[str, Any], key: str) -> None:
        pattern, may_be_empty = self._string(key, schema, [])
        quote = self._form.quote
        mark, text = literal(quote, self._token_id), f"TEXT_{name.upper()}"
        self._rules.append(f"{text}: /{pattern}/ & ~{without(quote)}")
        if mark.startswith("<["):
            self._rules.append(f"{name}: {mark} {f'{text}?' if may_be_empty else text} {mark}")
            return
        self._rules.append(f"{name}: {mark} {name}_rest")
        self._rules.append(f"{name}_rest[lazy]: {text} {json_text(quote)}")

    def _write_number(self, name: str, schema: dict[str, Any], key: str) -> None:
        types = schema.get("type", "number")
        kept = types if isinstance(types, list) else [types]
        plain = {"type": "number" if "number" in kept or "integer" not in kept else "integer"}
        bounds = {keyword: schema[keyword] for keyword in _OF_NUMBERS & schema.keys()}
        self._rules.append(f"{name}: %json {json_text({**plain, **bounds, 'x-guidance': self._options})}")

    def _write_list(self, name: str, schema: dict[str, Any], key: str) -> None:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if high == 0:
            self._rules.append(f'{name}: "[" "]"')
            return
        item = self._rule_of(key, schema.get("items", True))
        most = "" if high is None else high - 1
        more = f"({_COMMA} {item})*" if low < 2 and high is None else f"({_COMMA} {item}){{{max(low - 1, 0)},{most}}}"
        items = f"{item} {more}" if high != 1 else item
        self._rules.append(f'{name}: "[" {items if low else f"({items})?"} "]"')

    def _write_object(self, name: str, schema: dict[str, Any], key: str) -> None:
        if name == self._prefix:
            self._check_keywords(schema)
        named, required, more = self._members(schema)
        parts = []
        for index, (each, of_value) in enumerate(named.items()):
            if of_value is False and each not in required:
                continue
            if not self._is_writable(each):
                self._cannot(f"the argument {each[:80]!r}, whose name holds a character of the format's marks")
                continue
            value = self._rule_of(each, of_value)
            self._rules.append(f"{name}_{index}: {literal(f'{each}:', self._token_id)} {value}")
            parts.append((f"{name}_{index}", each in required))
        extra = None
        if more is not False:
            extra, free = f"{name}_{len(named)}", f"KEY_{name.upper()}"
            excluded = "".join(f" & ~/{escaped(each)}:/" for each in named if self._is_writable(each))
            self._rules.append(f"{free}: /{FREE_KEY}:/{excluded}")
            self._rules.append(f"{extra}: {free} {self._rule_of('additionalProperties', more)}")
        self._rules.append(f'{name}: "{{" {self._with_commas(name, parts, extra, _COMMA)} "}}"')
