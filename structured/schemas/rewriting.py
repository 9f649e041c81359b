"""Rewrites a schema so that a backend without some keywords can serve it: the result accepts the same instances.

`needs_rewriting` says at once whether there is anything to do. `rewritten` reads the schema, rewrites each place, and
returns a schema of draft 2020-12 that holds neither `oneOf`, `not` and `if` nor the keywords that depend on names.
What no schema says exactly is refused by name and place. Properties keep their order.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

from manta.structured.constraint import Unsupported
from manta.structured.schemas import negation, patterns
from manta.structured.schemas.documents import (
    COUNTS,
    KEYWORDS,
    SCHEMA,
    SCHEMA_LIST,
    SCHEMA_MAP,
    Document,
    draft_of,
    read,
)
from manta.structured.schemas.formats import is_annotation
from manta.structured.schemas.guard import encoded, finite_domain
from manta.structured.schemas.logic import (
    ATOMS,
    MAX_ALTERNATIVES,
    Alternative,
    Logic,
    item_schemas,
    type_names,
    type_of,
)
from manta.structured.schemas.negation import Context, absent, all_of, alternatives, present
from manta.structured.schemas.numbers import MAX_COUNT, NUMERIC, is_kept, is_number, keeps_multiples

CHOICES = ("oneOf", "not", "if", "dependentRequired", "dependentSchemas")
"""Keywords that become an `anyOf`."""
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
            if isinstance(pattern, str) and looks_around(pattern):
                return True
            if isinstance(rules, dict) and (len(rules) > 1 or any(map(looks_around, rules))):
                return True
            if any(name in value and not is_kept(name, value[name]) for name in _NUMBERED):
                return True
            if any(is_number(value.get(name)) and value[name] >= MAX_COUNT for name in COUNTS):
                return True
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return not keeps_multiples(schema)


def rewritten(schema: Any, proves: bool = True) -> tuple[Any, str]:
    """The schema for the grammar, and what a `Guard` needs to keep what the grammar leaves out; that is empty if
    the rewrite is exact. If `proves` is False, the grammar is as small as can be and the guard does the most. Raises
    `Unsupported` and `ConstraintError`.
    """
    try:
        rewriter = _Rewriter(read(schema), proves)
        return rewriter.run(schema), encoded(rewriter.document)
    except RecursionError as error:
        raise Unsupported("the schema's branches and references go too deep to tell apart; flatten them") from error


class _Rewriter:
    def __init__(self, document: Document, proves: bool) -> None:
        self.document = document
        self.logic = Logic(document, proves)
        self._keeps_multiples = keeps_multiples([document.root, document.definitions])
        self._done: dict[str, Any] = {}
        """Definitions that the result refers to, rewritten; None while that is under way."""
        self._joint: dict[int, str] = {}
        """The names of definitions that were made of a reference and what stands beside it."""

    def run(self, original: Any) -> Any:
        root = self.rewrite(self.document.root)
        if isinstance(root, bool):
            return root
        done = {name: schema for name, schema in self._done.items() if schema is not False}
        options = {"x-guidance": original["x-guidance"]} if "x-guidance" in original else {}
        return {**root, **({"$defs": done} if done else {}), **options}

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

    def _leave_out(self, schema: dict[str, Any], keyword: str, reason: str = "it has no grammar") -> None:
        """The grammar does without a keyword, which a guard then enforces."""
        if "is no keyword of the draft" in reason or not self._mark(schema, keyword):
            raise Unsupported(f"{self.document.path(schema) or '#'}/{keyword} is not enforced: {reason}")

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
            choices = {"anyOf": lambda context: self._possible(branches, context), **choices}
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
        for name in CHOICES:
            if name not in plain:
                continue
            value = plain.pop(name)
            maker = getattr(self, _MAKERS[name])
            if name in ("dependentRequired", "dependentSchemas"):
                for key, needed in value.items():
                    choices[id(schema), name, key] = lambda context, maker=maker, key=key, needed=needed: maker(
                        key, needed, context
                    )
            else:
                choices[id(schema), name] = lambda context, maker=maker, value=value: maker(value, schema, context)
        plain.pop("then", None)
        plain.pop("else", None)

    # ---- keywords that become a choice -------------------------------------------------------------------------------

    def _possible(self, branches: list[Any], context: Context) -> list[Alternative]:
        return [Alternative(each) for each in branches if not self.logic.is_empty([*context, each])]

    def one_of(self, branches: list[Any], schema: Any, context: Context) -> list[Alternative]:
        """Exactly one holds: one, and the negation of each other that does not exclude it."""
        found: list[Alternative] = []
        possible = [each.schema for each in self._possible(branches, context)]
        overlapping: dict[int, list[int]] = {index: [] for index in range(len(possible))}
        for (i, one), (j, other) in itertools.combinations(enumerate(possible), 2):
            if not self.logic.is_empty([*context, one, other]):
                overlapping[i].append(j)
                overlapping[j].append(i)
        for index, branch in enumerate(possible):
            here = [*context, branch]
            others = [alternatives(self.logic, possible[other], here) for other in overlapping[index]]
            for each in negation.product(self.logic, others, here):
                found.append(Alternative(all_of(branch, each.schema), each.reason))
        return found

    def negated(self, value: Any, schema: Any, context: Context) -> list[Alternative]:
        """`structured/schemas/negation.py` has the proofs."""
        return alternatives(self.logic, value, context)

    def conditional(self, condition: Any, schema: Any, context: Context) -> list[Alternative]:
        """`if` and `then` hold, or `if` fails and `else` holds."""
        if "then" not in schema and "else" not in schema:
            return [Alternative(True)]
        found = [Alternative(all_of(condition, schema.get("then", True)))]
        for each in alternatives(self.logic, condition, context):
            found.append(Alternative(all_of(each.schema, schema.get("else", True)), each.reason))
        return [each for each in found if negation.is_possible(self.logic, each, context)]

    def dependent_names(self, name: str, needed: list[str], context: Context) -> list[Alternative]:
        """The name is absent, or all are present."""
        return self._dependent(name, present(name, *(other for other in needed if other != name)), context)

    def dependent_schema(self, name: str, needed: Any, context: Context) -> list[Alternative]:
        """The name is absent, or present and its schema holds."""
        return self._dependent(name, all_of(present(name), needed), context)

    def _dependent(self, name: str, held: Any, context: Context) -> list[Alternative]:
        others = {"type": type_names(frozenset(ATOMS) - {"object"})}
        return self._possible([others, absent(name), held], context)

    # ---- keywords that stay or become others of their kind -----------------------------------------------------------

    def _plain(self, schema: dict[str, Any], whole: dict[str, Any] | None = None) -> Any:
        whole = schema if whole is None else whole
        if "enum" in schema or "const" in schema:
            name = "enum" if "enum" in schema else "const"
            if set(whole) - {"enum", "type"} or not is_kept(name, schema[name]):
                return self._listed(name, schema, self.logic.finite_values(self.logic.flat([whole]) or []) or [])
        schema = self._with_names(self._closed(schema))
        counted = self._counted(schema)
        if counted is not None:
            return counted
        schema = self._uncounted(schema)
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
            elif name in NUMERIC and not (is_kept(name, value) and (name != "multipleOf" or self._keeps_multiples)):
                self._leave_out(schema, name)
            elif name == "pattern" and looks_around(value) and (plainer := _without_look_ahead(value)) is not None:
                result[name] = plainer
            elif name == "pattern" and (looks_around(value) or (not self.logic.proves and _has_anchor_within(value))):
                self._leave_out(schema, name)
            elif name != "format" or not is_annotation(value):
                result[name] = value
        if schema.get("uniqueItems"):
            self._limit_items(schema, result)
        return False if False in result.get("allOf", ()) else result

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

    def _with_names(self, schema: dict[str, Any]) -> dict[str, Any]:
        """`propertyNames` and patterns that overlap, as patterns that exclude each other: each name then falls under
        one of them, whose schema is the conjunction of all that applied to it.
        """
        rules = schema.get("patternProperties", {})
        if any(map(looks_around, rules)):
            rules = {_without_look_ahead(rule) or rule: value for rule, value in rules.items()}
            schema = self.document.copy_of(schema, {**schema, "patternProperties": rules})
        if "propertyNames" not in schema and len(rules) < 2:
            return schema
        schema = self.document.copy_of(schema, dict(schema))
        allowed = schema.pop("propertyNames", True)
        if "properties" in schema:
            schema["properties"] = {
                name: value if self.logic.judge.is_valid(name, [allowed]) else False
                for name, value in schema["properties"].items()
            }
        wanted = [] if allowed is True else self._name_patterns(allowed, schema)
        if wanted is not None and (wanted or not _are_apart(list(rules))):
            self._split_names(schema, rules, wanted)
        return schema

    def _name_patterns(self, allowed: Any, schema: dict[str, Any]) -> list[str] | None:
        """Patterns that a name must all satisfy; None if only listed names are allowed, so that none is needed."""
        if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
            return None
        flat = self.logic.flat([{"type": "string"}, allowed])
        return ["^a$", "^b$"] if flat is None else [text for part in flat for text in self._texts(part, schema)]

    def _texts(self, part: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
        """The patterns that a schema of strings amounts to."""
        for name, value in part.items():
            if name == "pattern":
                yield value
            elif name in ("enum", "const"):
                texts = [text for text in (value if name == "enum" else [value]) if isinstance(text, str)]
                yield patterns.of_texts(texts)
            elif name in ("minLength", "maxLength"):
                yield f"^(?:(?s:.){{{f'{value},' if name == 'minLength' else f'0,{value}'}}})$"
            elif name == "not":
                yield from self._texts_of_negation(value, schema)
            elif name not in ("type", "allOf", "$ref") and not (name == "format" and is_annotation(value)):
                raise Unsupported(f"{self.document.path(schema)}/propertyNames/{name} is not enforced; use a pattern")

    def _texts_of_negation(self, value: Any, schema: dict[str, Any]) -> Iterator[str]:
        found = alternatives(self.logic, value, [{"type": "string"}])
        if len(found) != 1 or found[0].reason:
            raise Unsupported(f"{self.document.path(schema)}/propertyNames/not is not enforced; use a pattern")
        for part in self.logic.flat([found[0].schema]) or []:
            yield from self._texts(part, schema)

    def _split_names(self, schema: dict[str, Any], rules: dict[str, Any], wanted: list[str]) -> None:
        if len(rules) > 5:
            raise Unsupported(
                f"{self.document.path(schema)}/patternProperties: more than 5 patterns overlap; use fewer"
            )
        additional = schema.get("additionalProperties", True)
        result: dict[str, Any] = {}
        try:
            for size in range(len(rules), -1 if wanted else 0, -1):
                for chosen in itertools.combinations(rules, size):
                    pattern = patterns.combined([*wanted, *chosen], [rule for rule in rules if rule not in chosen])
                    if pattern is not None:
                        result[pattern] = all_of(*(rules[rule] for rule in chosen)) if chosen else additional
        except (patterns.Unreadable, patterns.TooLarge) as error:
            where = self.document.path(schema)
            raise Unsupported(
                f"{where}/patternProperties: how they overlap is not understood; simplify them"
            ) from error
        schema["patternProperties"] = result
        if wanted:
            schema["additionalProperties"] = False

    def _counted(self, schema: dict[str, Any]) -> Any:
        """Writes a count of optional properties as a choice of those that are required or absent. At least k of n are
        there if and only if some k are; at most k are there if and only if some n - k are absent.
        """
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        if (not least and most is None) or "properties" not in schema or not self.logic.proves:
            return None
        flat = self.logic.flat([schema]) or []
        names = self.logic.possible_names(flat)
        required = {name for part in flat for name in part.get("required", ())}
        if names is None:
            return self._at_least_one(schema, required)
        optional = [name for name in names if name not in required]
        least = max(0, int(least) - len(required))
        spare = 0 if most is None else max(0, len(optional) + len(required) - int(most))
        if (most is not None and len(required) > most) or least > len(optional):
            return self._of_type_other_than_object(schema)
        rest = {name: value for name, value in schema.items() if name not in ("minProperties", "maxProperties")}
        if max(math.comb(len(optional), size) for size in (least, spare)) > MAX_ALTERNATIVES:
            where = self.document.path(schema)
            raise Unsupported(
                f"{where}/minProperties: there are too many ways to choose {least} to {most} of {len(optional)} "
                "optional properties; list some in required"
            )
        choices = [list(itertools.combinations(optional, size)) for size in (least, spare)]
        parts: list[Any] = [self.document.copy_of(schema, rest)]
        others = type_names(frozenset(ATOMS) - {"object"})
        typed = schema.get("type") == "object"
        if least:
            parts.append({"anyOf": [present(*chosen) for chosen in choices[0]] + [{"type": others}] * (not typed)})
        if spare:
            gone = [{"type": "object", "properties": dict.fromkeys(chosen, False)} for chosen in choices[1]]
            parts.append({"anyOf": gone + [{"type": others}] * (not typed)})
        return self.rewrite(all_of(*parts))

    def _uncounted(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Drops a count that a grammar does not keep. A grammar counts a name that comes twice as two, and cannot
        choose among optional properties.
        """
        if not schema.keys() & {"minProperties", "maxProperties"}:
            return schema
        flat = self.logic.flat([schema]) or []
        required = {name for part in flat for name in part.get("required", ())}
        names = {name for part in flat for name, value in part.get("properties", {}).items() if value is not False}
        dropped = [] if names <= required else ["minProperties", "maxProperties"]
        if schema.get("minProperties", 0) > 1 + len(required) or not self.logic.proves:
            dropped.append("minProperties")
        dropped = [name for name in dropped if name in schema]
        for name in dropped:
            self._leave_out(schema, name)
        return self.document.copy_of(schema, {name: value for name, value in schema.items() if name not in dropped})

    def _closed(self, schema: dict[str, Any]) -> dict[str, Any]:
        """`unevaluatedProperties` as `additionalProperties` beside all names that are evaluated anywhere below. It is
        exact if all of them are evaluated whichever branches hold; else the guard has the rest.
        """
        if schema.get("unevaluatedProperties", True) is True:
            return schema
        known: dict[str, dict[str, Any]] = {"properties": {}, "patternProperties": {}}
        is_certain = self._evaluated(self.document.origin(schema), known, set())
        if is_certain is None:
            return schema
        result = dict(schema)
        if is_certain:
            result.pop("unevaluatedProperties")
        for name, names in known.items():
            result[name] = {**schema.get(name, {}), **{key: True for key in names if key not in schema.get(name, {})}}
        result["additionalProperties"] = schema["unevaluatedProperties"]
        return self.document.copy_of(schema, result)

    def _evaluated(self, schema: Any, known: dict[str, dict[str, Any]], seen: set[int]) -> bool | None:
        """Adds the names that a schema evaluates; whether it always does; None if it may evaluate any name."""
        if isinstance(schema, bool) or id(schema) in seen:
            return True
        if "additionalProperties" in schema or ("unevaluatedProperties" in schema and seen):
            return None
        seen.add(id(schema))
        for name, names in known.items():
            names |= schema.get(name, {})
        certain = [*schema.get("allOf", ()), *([self.document.resolve(schema["$ref"])] if "$ref" in schema else [])]
        branches = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("dependentSchemas", {}).values()]
        branches += [schema[name] for name in ("if", "then", "else") if name in schema]
        found = [self._evaluated(part, known, seen) for part in (*certain, *branches)]
        if None in found:
            return None
        return not branches and all(found)

    def _at_least_one(self, schema: dict[str, Any], required: set[str]) -> Any:
        """One more than the required properties is there if one of the optional ones is, or one that is not listed."""
        optional = [name for name, value in schema["properties"].items() if value is not False and name not in required]
        if "maxProperties" in schema or schema["minProperties"] != len(required) + 1 or not optional:
            return None
        rest = {name: value for name, value in schema.items() if name != "minProperties"}
        gone = {"type": "object", "properties": dict.fromkeys(optional, False), "minProperties": len(required) + 1}
        others = {"type": type_names(frozenset(ATOMS) - {"object"})}
        branches = [*(present(name) for name in optional), gone, *([] if schema.get("type") == "object" else [others])]
        return self.rewrite(all_of(self.document.copy_of(schema, rest), {"anyOf": branches}))

    def _of_type_other_than_object(self, schema: dict[str, Any]) -> Any:
        flat = self.logic.flat([schema, {"type": type_names(frozenset(ATOMS) - {"object"})}]) or []
        return False if self.logic.is_empty(flat) else self.rewrite(all_of(*flat))


def looks_around(pattern: str) -> bool:
    """Whether a pattern has what no automaton reads but Python's `re` does: a look ahead or behind, a word's border."""
    return re.search(r"\(\?(=|!|<=|<!)|\\[bB]", pattern) is not None and _is_python(pattern)


def _without_look_ahead(pattern: str) -> str | None:
    try:
        return patterns.without_look_ahead(pattern)
    except (patterns.Unreadable, patterns.TooLarge):
        return None


def _has_anchor_within(pattern: str) -> bool:
    return re.search(r"(?<!\\)\$.|.\^", re.sub(r"\[\^?[^]]*\]", "x", pattern)) is not None and _is_python(pattern)


def _is_python(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


_TIED = frozenset(["properties", "patternProperties", "additionalProperties", "prefixItems", "items"])
_LEFT_OVER = frozenset(
    ["contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"]
)
_MAKERS = {
    "oneOf": "one_of",
    "not": "negated",
    "if": "conditional",
    "dependentRequired": "dependent_names",
    "dependentSchemas": "dependent_schema",
}


def _are_apart(rules: list[str]) -> bool:
    return all(patterns.are_disjoint([one, other]) for one, other in itertools.combinations(rules, 2))
