"""Rewrites a schema so that a backend without some keywords can serve it: the result accepts the same instances.

`needs_rewriting` says at once whether there is anything to do. `rewritten` reads the schema, rewrites each place, and
returns a schema of draft 2020-12 that holds neither `oneOf`, `not` and `if` nor the keywords that depend on names.
What no schema says exactly is refused by name and place. Properties keep their order.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from manta.structured.constraint import Unsupported
from manta.structured.schemas import negation, patterns, property_counts, unevaluated
from manta.structured.schemas.documents import (
    COUNTS,
    KEYWORDS,
    NO_KEYWORD,
    SCHEMA,
    SCHEMA_LIST,
    SCHEMA_MAP,
    Document,
    draft_of,
    has_form,
)
from manta.structured.schemas.formats import is_annotation
from manta.structured.schemas.guard import encoded, finite_domain
from manta.structured.schemas.keyword_choices import CHOICES, choices_of, possible
from manta.structured.schemas.logic import (
    Alternative,
    Foreign,
    Logic,
    item_schemas,
    type_names,
    type_of,
)
from manta.structured.schemas.negation import all_of
from manta.structured.schemas.numbers import MAX_COUNT, NUMERIC, is_kept, keeps_multiples
from manta.structured.schemas.property_names import with_apart_names

_WANTED = frozenset(
    [
        *CHOICES,
        *("dependencies", "propertyNames", "contains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef", "minProperties", "maxProperties"),
    ]
)
_ASSERTIONS = KEYWORDS - {"$ref"}
_NUMBERED = NUMERIC | {"enum", "const"}


def needs_rewriting(schema: Any) -> bool:
    """Whether a keyword occurs, or seems to, that a rewrite removes or that its draft ignores."""
    pending = [schema]
    hides_neighbours = draft_of(schema) <= 7
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if not _WANTED.isdisjoint(value):
                return True
            ref, pattern, rules = value.get("$ref"), value.get("pattern"), value.get("patternProperties")
            if isinstance(ref, str) and not ref.startswith("#"):
                return True
            if isinstance(ref, str) and hides_neighbours and not _ASSERTIONS.isdisjoint(value):
                return True
            if isinstance(pattern, str) and not patterns.is_plain(pattern):
                return True
            if isinstance(rules, dict) and (len(rules) > 1 or not all(map(patterns.is_plain, rules))):
                return True
            if any(name in value and not _is_served(name, value[name]) for name in _NUMBERED | COUNTS):
                return True
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return not keeps_multiples(schema)


def _is_served(name: str, value: Any) -> bool:
    """Whether the backend takes a keyword's number as it is. An object is the schema of a property of that name."""
    if isinstance(value, dict):
        return is_kept(name, value)
    return has_form(name, value) and (value < MAX_COUNT if name in COUNTS else is_kept(name, value))


def rewritten(document: Document, proves: bool = True, counts: bool = False) -> tuple[Any, str]:
    """The schema for a document's grammar, and what a `Guard` needs to keep what the grammar leaves out; that is empty
    if the rewrite is exact. With `counts` the numbers of properties stay as they are. If `proves` is False, the grammar
    is as small as can be and the guard does the most. Raises `Unsupported` and `ConstraintError`.
    """
    try:
        return _Rewriter(document, proves, counts).run(), encoded(document)
    except RecursionError as error:
        place, cause = "the schema's branches and references", "they go too deep to tell apart"
        raise Unsupported.at(place, cause, "flatten them") from error


class _Rewriter:
    def __init__(self, document: Document, proves: bool, counts: bool) -> None:
        self.document = document
        self.logic = Logic(document, proves)
        self._counts = counts
        self._keeps_multiples = keeps_multiples([document.root, document.definitions])
        self._done: dict[str, Any] = {}
        """Definitions that the result refers to, rewritten; None while that is under way."""
        self._joint: dict[int, str] = {}
        """The names of definitions that were made of a reference and what stands beside it."""

    def run(self) -> Any:
        root = self.rewrite(self.document.root)
        if isinstance(root, bool):
            return root
        done = {name: schema for name, schema in self._done.items() if schema is not False}
        return {**root, **({"$defs": done} if done else {})}

    def rewrite(self, schema: Any) -> Any:
        if isinstance(schema, bool):
            return schema
        self.logic.step()
        schema = self._without_loop(schema)
        plain, choices = self._split(schema)
        if not choices:
            return self._plain(plain)
        context = [plain]
        found = negation.product(self.logic, [each(context) for each in choices.values()], context)
        self._guard_vague(found, schema)
        if not found:
            return False
        branches = [self.rewrite(each.schema) for each in found]
        return self._joined(plain, branches, schema)

    def _definition(self, ref: str) -> Any:
        """Returns what a reference names, rewritten; None while that is under way."""
        name = ref.removeprefix("#/$defs/")
        if name not in self._done:
            self._done[name] = None
            self._done[name] = self.rewrite(self.document.definitions[name])
        return self._done[name]

    def _without_loop(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A reference that is part of a loop may have nothing beside it in llguidance. Then what it names stands there
        itself, and the whole becomes a definition, to which the loop leads back.
        """
        conjuncts = schema.get("allOf", [])
        parts = [schema, *(part for part in conjuncts if isinstance(part, dict))]
        is_alone = len(schema) == 1 and len(conjuncts) < 2
        if is_alone or not any(part.get("$ref") in self.document.loops() for part in parts):
            return schema
        if id(schema) not in self._joint:
            name = self._joint[id(schema)] = f"j{len(self._joint)}"
            changed = {key: value for key, value in schema.items() if key != "$ref"}
            if conjuncts:
                changed["allOf"] = [self._opened(part) for part in conjuncts]
            if "$ref" in schema:
                changed["allOf"] = [*changed.get("allOf", []), self.document.resolve(schema["$ref"])]
            self.document.definitions[name] = self.document.copy_of(schema, changed)
        return {"$ref": f"#/$defs/{self._joint[id(schema)]}"}

    def _opened(self, schema: Any) -> Any:
        """Puts what a reference in a loop names in place of the reference."""
        if isinstance(schema, bool) or schema.get("$ref") not in self.document.loops():
            return schema
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return all_of(self.document.copy_of(schema, rest) if rest else True, self.document.resolve(schema["$ref"]))

    def _joined(self, plain: dict[str, Any], branches: list[Any], schema: dict[str, Any]) -> Any:
        """The plain keywords and one of the branches, which stand where the first of their keywords stood."""
        if True in branches:
            return self._plain(plain)
        branches = [branch for branch in branches if branch is not False]
        if not branches:
            return False
        names = list(schema)
        first = min((names.index(name) for name in ("oneOf", "anyOf") if name in schema), default=len(names))
        copy_of = self.document.copy_of
        before = copy_of(schema, {name: value for name, value in plain.items() if name in names[:first]})
        after = copy_of(schema, {name: value for name, value in plain.items() if name not in before})
        if set(before) & _TIED and set(after) & _TIED:  # they must stay together, for they read each other
            before, after = plain, {}
        parts = [self._plain(before, plain), {"anyOf": branches}, self._plain(after, plain)]
        return all_of(*(part for part in parts if part != {}))

    def _guard_vague(self, found: list[Alternative], schema: dict[str, Any]) -> None:
        reasons = [each.reason for each in found if each.reason]
        if reasons:
            self._leave_out(schema, self._blamed(schema), reasons[0])

    def _leave_out(self, schema: dict[str, Any], keyword: str, reason: str | Foreign = "it has no grammar") -> None:
        """The grammar does without a keyword, which a guard then enforces. No guard enforces a foreign one."""
        place = f"{self.document.path(schema) or '#'}/{keyword}"
        if isinstance(reason, Foreign):
            cause, remedy = f"{reason.keyword}: {NO_KEYWORD}", "name a newer draft in $schema"
            raise Unsupported.at(place, cause, remedy)
        if not self._mark(schema, keyword):
            raise Unsupported.at(place, cause=reason)

    def _mark(self, schema: dict[str, Any], keyword: str) -> bool:
        """Marks the schema, or the parts of one that a rewrite put together; False if a part is not the client's."""
        if self.document.mark(schema, keyword):
            return True
        parts = [part for part in schema.get("allOf", ()) if isinstance(part, dict) and self._has_choice(part)]
        return bool(parts) and not set(schema) & set(CHOICES) and all(self._mark(part, keyword) for part in parts)

    def _has_choice(self, schema: dict[str, Any]) -> bool:
        parts = [part for part in schema.get("allOf", ()) if isinstance(part, dict)]
        return any(name in schema for name in CHOICES) or any(map(self._has_choice, parts))

    def _blamed(self, schema: Any) -> str:
        names = [name for name in CHOICES if name in schema]
        return names[0] if names else "allOf"

    def _split(self, schema: dict[str, Any]) -> tuple[dict[str, Any], dict[Any, Any]]:
        """The keywords that stay, and a function for each that becomes a choice. Those of an `allOf` below count here,
        so that contradictions between them are found.
        """
        choices: dict[Any, Any] = {}
        plain = self.document.copy_of(schema, dict(schema))
        self._move_choices(plain, schema, choices)
        if "allOf" in plain:
            plain["allOf"] = [self._without_choices(part, choices) for part in plain["allOf"]]
            plain["allOf"] = [part for part in plain["allOf"] if part not in (True, {})]
            if not plain["allOf"]:
                del plain["allOf"]
        if choices and "anyOf" in plain:
            branches = plain.pop("anyOf")
            choices = {"anyOf": functools.partial(possible, self.logic, branches), **choices}
        return plain, choices

    def _without_choices(self, schema: Any, choices: dict[Any, Any]) -> Any:
        if isinstance(schema, bool) or not any(name in schema for name in (*CHOICES, "allOf")):
            return schema
        plain = dict(schema)
        self._move_choices(plain, schema, choices)
        if "allOf" in plain:
            plain["allOf"] = [self._without_choices(part, choices) for part in plain["allOf"]]
        return plain

    def _move_choices(self, plain: dict[str, Any], schema: dict[str, Any], choices: dict[Any, Any]) -> None:
        choices |= {(id(schema), name): choice for name, choice in choices_of(self.logic, schema)}
        for name in (*CHOICES, "then", "else"):
            plain.pop(name, None)

    # ---- keywords that stay or become others of their kind -----------------------------------------------------------

    def _plain(self, schema: dict[str, Any], whole: dict[str, Any] | None = None) -> Any:
        whole = schema if whole is None else whole
        if "enum" in schema or "const" in schema:
            name = "enum" if "enum" in schema else "const"
            if set(whole) - {"enum", "type"} or not is_kept(name, schema[name]):
                return self._listed(name, schema, self.logic.finite_values(self.logic.flat([whole]) or []) or [])
        schema = with_apart_names(self.logic, unevaluated.closed(self.document, schema))
        if not self._counts:
            choice = property_counts.as_choice(self.logic, schema)
            if choice is not None:
                return self.rewrite(choice)
            schema = self._without_counts(schema)
        result: dict[str, Any] = {}
        for name, value in schema.items():
            if name == "$ref":
                if self._definition(value) is False:
                    return False
                result[name] = value
            elif name in SCHEMA_MAP:
                result[name] = {key: self.rewrite(item) for key, item in value.items()}
            elif name in SCHEMA_LIST:
                result[name] = [self.rewrite(item) for item in value]
            elif name in _LEFT_OVER:
                self._check_left_over(name, value, schema)
            elif name in SCHEMA:
                result[name] = self.rewrite(value)
            elif name == "type":
                result[name] = "number" if value == "fraction" else value
            elif not self._keeps(name, value):
                self._leave_out(schema, name)
            elif name != "format" or not is_annotation(value):
                result[name] = value
        if schema.get("uniqueItems"):
            self._limit_items(schema, result)
        return False if False in result.get("allOf", ()) else result

    def _keeps(self, name: str, value: Any) -> bool:
        """Whether grammars enforce the value of a keyword that stands for itself."""
        if name in NUMERIC:
            return is_kept(name, value) and (name != "multipleOf" or self._keeps_multiples)
        return name != "pattern" or self._keeps_pattern(value)

    def _keeps_pattern(self, pattern: str) -> bool:
        return patterns.is_plain(pattern) or (self.logic.proves and patterns.is_small(pattern))

    def _without_counts(self, schema: dict[str, Any]) -> dict[str, Any]:
        if not schema.keys() & {"minProperties", "maxProperties"}:
            return schema
        left_out = property_counts.not_kept(self.logic, schema)
        for name in left_out:
            self._leave_out(schema, name)
        kept = {name: value for name, value in schema.items() if name not in left_out}
        return self.document.copy_of(schema, kept) if left_out else schema

    def _listed(self, name: str, schema: dict[str, Any], values: list[Any]) -> Any:
        """The schema of these values, which `name` lists."""
        if is_kept("enum", values):
            return {"enum": values} if values else False
        self._leave_out(schema, name)
        return {"type": type_names(frozenset(map(type_of, values)))}

    def _check_left_over(self, name: str, value: Any, schema: dict[str, Any]) -> None:
        """Leaves the keyword to the guard unless it says nothing here."""
        says_nothing = {
            "minContains": True,
            "maxContains": True,
            "uniqueItems": value is False or schema.get("maxItems", 2) <= 1,
            "contains": schema.get("minContains") == 0 and "maxContains" not in schema,
        }.get(name, value is True or value == {})
        if not says_nothing:
            self._leave_out(schema, name)

    def _limit_items(self, schema: dict[str, Any], result: dict[str, Any]) -> None:
        """Items that differ are no more than there are values for them."""
        flat = self.logic.flat([schema]) or []
        longest = max((len(part.get("prefixItems", ())) for part in flat), default=0)
        values = finite_domain(self.logic, self.logic.flat(item_schemas(flat, longest)) or [])
        if values is not None:
            result["maxItems"] = min(longest + len(values), result.get("maxItems", math.inf))


_TIED = frozenset(["properties", "patternProperties", "additionalProperties", "prefixItems", "items"])
_LEFT_OVER = frozenset(
    ["contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"]
)
