"""Reads a JSON schema of any draft into one shape: draft 2020-12, references flat, annotations gone.

`read` returns a `Document`. Each schema that a reference names is an entry of `Document.definitions`, and each
`$ref` is `#/$defs/N` for an entry N. The modules beside this one work on documents and know no other draft.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from manta.structured.constraint import ConstraintError, Unsupported
from manta.structured.schemas.numbers import MAX_COUNT, MAX_DIGITS, is_integer, is_number, is_too_long, numbers_in

DRAFTS = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
_TOO_OLD = re.compile(r"https?://json-schema\.org/draft-0[0-3]/")
_META_SCHEMAS = {draft: uri for uri, draft in DRAFTS.items()}

SCHEMA = frozenset(
    [
        *("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties"),
    ]
)
"""Keywords whose value is a schema."""
SCHEMA_LIST = frozenset(["anyOf", "oneOf", "allOf", "prefixItems"])
"""Keywords whose value is a list of schemas."""
SCHEMA_MAP = frozenset(["properties", "patternProperties", "dependentSchemas"])
"""Keywords whose value is schemas by name."""
_PLAIN = frozenset(
    [
        *("type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "format", "minItems", "maxItems", "uniqueItems", "minContains"),
        *("maxContains", "required", "minProperties", "maxProperties", "dependentRequired"),
    ]
)
KEYWORDS = SCHEMA | SCHEMA_LIST | SCHEMA_MAP | _PLAIN | {"$ref"}
"""All that a schema of a `Document` may hold."""

_SINCE = {
    **dict.fromkeys(["const", "contains", "propertyNames"], 6),
    **dict.fromkeys(["if", "then", "else"], 7),
    **dict.fromkeys(["dependentRequired", "dependentSchemas", "minContains", "maxContains"], 2019),
    **dict.fromkeys(["unevaluatedItems", "unevaluatedProperties"], 2019),
}
"""The first draft that knows a keyword; the others are known to all."""
GUARD = "$guard"
"""A key beside those of the specification: the keywords of this schema that a grammar leaves out."""
NO_KEYWORD = "the draft that $schema names does not have it"
_ABSENT = object()


class Document:
    """A schema and what its references name."""

    def __init__(self, draft: int) -> None:
        self.draft = draft
        self.root: Any = True
        self.definitions: dict[str, Any] = {}
        self.foreign: set[str] = set()
        """Keywords that occur and that the draft does not know. A validator ignores them and a grammar enforces them,
        so they must not be negated.
        """
        self._loops: frozenset[str] | None = None
        self.has_marks = False
        """Whether the grammar leaves out a keyword somewhere."""
        self._paths: dict[int, str] = {}
        self._origins: dict[int, Any] = {}
        """The schema that a client wrote, for each that stands for it."""
        self._kept: list[Any] = []
        """Keeps alive the schemas whose `id` is a key of `_paths`."""

    def resolve(self, ref: str) -> Any:
        return self.definitions[ref.removeprefix("#/$defs/")]

    def replace(self, root: Any, definitions: dict[str, Any]) -> None:
        """Makes `root` the document's schema, with those of the definitions that it refers to."""
        self.root, self.definitions, self._loops = root, {}, None
        pending = list(references(root))
        while pending:
            name = pending.pop().removeprefix("#/$defs/")
            if name not in self.definitions:
                self.definitions[name] = definitions[name]
                pending += references(definitions[name])

    def as_schema(self) -> Any:
        """Returns the document as one schema of draft 2020-12."""
        if not self.definitions or isinstance(self.root, bool):
            return self.root
        return {**self.root, "$defs": self.definitions}

    def loops(self) -> frozenset[str]:
        """References to definitions that refer, by way of others or not, to themselves."""
        if self._loops is None:
            reached = {name: set(references(schema)) for name, schema in self.definitions.items()}
            for middle in reached:  # Warshall's closure
                for targets in reached.values():
                    if f"#/$defs/{middle}" in targets:
                        targets |= reached[middle]
            self._loops = frozenset(
                f"#/$defs/{name}" for name, targets in reached.items() if f"#/$defs/{name}" in targets
            )
        return self._loops

    def path(self, schema: Any) -> str:
        """The JSON pointer of a schema as the client wrote it; empty for one that a rewrite made."""
        return self._paths.get(id(schema), "")

    def place(self, schema: Any, path: str) -> None:
        self._paths[id(schema)] = path
        self._origins[id(schema)] = schema
        self._kept.append(schema)

    def copy_of(self, schema: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
        """`changed`, which from now on stands for `schema` in messages and marks."""
        self._paths[id(changed)] = self.path(schema)
        self._origins[id(changed)] = self._origins.get(id(schema))
        self._kept.append(changed)
        return changed

    def origin(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The schema that a client wrote, if this one stands for it; else the schema itself."""
        found = self._origins.get(id(schema))
        return schema if found is None else found

    def mark(self, schema: dict[str, Any], keyword: str) -> bool:
        """Notes that the grammar leaves out a keyword of this schema; False if no client wrote the schema."""
        origin = self._origins.get(id(schema))
        if origin is None:
            return False
        if keyword not in origin.setdefault(GUARD, []):
            origin[GUARD].append(keyword)
        self.has_marks = True
        return True


def read(schema: Any) -> Document:
    """Raises `ConstraintError` if a reference names nothing, and `Unsupported` if it depends on the instance."""
    reader = _Reader(schema)
    document = reader.document
    document.root = reader.read(schema, reader.resolver, "#")
    while reader.pending:
        name, contents, resolver, path = reader.pending.pop()
        document.definitions[name] = reader.read(contents, resolver, path)
    return document


def draft_of(schema: Any) -> int:
    """The draft that `$schema` names; 2020 if it names none that is known."""
    uri = schema.get("$schema") if isinstance(schema, dict) else None
    return DRAFTS.get(uri.rstrip("#"), 2020) if isinstance(uri, str) else 2020


def is_too_old(schema: Any) -> bool:
    """Whether `$schema` names a draft before 4, whose keywords mean other things or are gone."""
    uri = schema.get("$schema") if isinstance(schema, dict) else None
    return isinstance(uri, str) and _TOO_OLD.match(uri) is not None


class _Reader:
    """Walks through a schema once."""

    def __init__(self, schema: Any) -> None:
        self.document = Document(draft_of(schema))
        self.pending: list[tuple[str, Any, Any, str]] = []
        """Definitions to read: name, contents, resolver and path."""
        self._names: dict[int, str] = {}
        self._root = schema
        self._own: set[int] = set()
        """The `id` of each part of the schema, once it is asked for."""
        self._has_scopes = _count_ids(schema) > 0
        self.resolver: Any = None
        self._specification: Any = None

    def read(self, schema: Any, resolver: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            if not isinstance(schema, bool):
                raise ConstraintError.because(
                    "wrong_value", path, value=str(schema)[:40], bound="an object, true or false"
                )
            return schema
        if self._has_scopes and schema is not self._root and _id_of(schema) is not None:
            self._check_draft(schema, path)
            resolver = self._in_scope(schema, resolver)
        self.document.foreign |= {name for name in schema if self.document.draft < _SINCE.get(name, 0)}
        schema = self._modern(schema, path)
        result: dict[str, Any] = {}
        for name, value in schema.items():
            item = self._item(name, value, resolver, path)
            if item is not _ABSENT:
                result[name] = item
        references = [result.pop(name) for name in ("$ref", "$dynamicRef", "$recursiveRef") if name in result]
        if references:
            result = _withreferences(result, references, "$ref" in schema and next(iter(schema)) == "$ref")
        self.document.place(result, path)
        return result

    def _item(self, name: str, value: Any, resolver: Any, path: str) -> Any:
        """The value of one keyword; `_ABSENT` for an annotation."""
        where = f"{path}/{name}"
        if name in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(value, str):
            return self._reference(name, value, resolver, where)
        if name not in KEYWORDS:
            return _ABSENT
        if name in SCHEMA:
            return self.read(value, resolver, where)
        if name in SCHEMA_LIST:
            _expect(isinstance(value, list), where, "a list of schemas")
            return [self.read(item, resolver, f"{where}/{index}") for index, item in enumerate(value)]
        if name in SCHEMA_MAP:
            _expect(isinstance(value, dict), where, "an object of schemas")
            return {key: self.read(item, resolver, f"{where}/{_escaped(key)}") for key, item in value.items()}
        _check_plain(name, value, where)
        return _count(name, int(value), where) if name in COUNTS else value

    def _modern(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """The schema's keywords in the meaning that draft 2020-12 gives them."""
        draft = self.document.draft
        if "$ref" in schema and draft <= 7:
            return {"$ref": schema["$ref"]}  # a reference hid its neighbours until draft 2019-09
        if draft == 2020 and not schema.keys() & {"dependencies", "additionalItems"} and _is_modern(schema):
            return schema
        if "prefixItems" in schema and (draft < 2020 or "additionalItems" in schema):
            cause, remedy = "an older draft does not know it", "say $schema 2020-12, or use items"
            raise Unsupported.at(f"{path}/prefixItems", cause, remedy)
        result: dict[str, Any] = {}
        for name, value in schema.items():
            if name == "items" and isinstance(value, list):
                result["prefixItems"] = value
                result |= {"items": schema["additionalItems"]} if "additionalItems" in schema else {}
            elif name == "dependencies" and isinstance(value, dict):
                if draft > 7:
                    self.document.foreign |= {"dependentRequired", "dependentSchemas"}
                lists = {key: item for key, item in value.items() if isinstance(item, list)}
                result["dependentRequired"] = lists | schema.get("dependentRequired", {})
                others = {key: item for key, item in value.items() if not isinstance(item, list)}
                result["dependentSchemas"] = others | schema.get("dependentSchemas", {})
            elif isinstance(value, bool) and name in ("exclusiveMinimum", "exclusiveMaximum"):
                if value and (bound := "m" + name[10:]) in schema:
                    result[name] = schema[bound]
            elif name != "additionalItems":
                result.setdefault(name, value)
        return result

    def _reference(self, name: str, ref: str, resolver: Any, where: str) -> str:
        if name != "$ref" and (self._has_scopes or resolver is not None):
            cause = "its target depends on the instance if schemas within have $id"
            raise Unsupported.at(where, cause, "use $ref")
        contents, inner, path = self._lookup(ref, resolver, where)
        key = id(contents)
        if key not in self._names:
            self._names[key] = f"d{len(self._names)}"
            self.pending.append((self._names[key], contents, inner, path))
        return f"#/$defs/{self._names[key]}"

    def _lookup(self, ref: str, resolver: Any, where: str) -> tuple[Any, Any, str]:
        """Returns what a reference names, the resolver in force there, and its path."""
        if resolver is None and not self._has_scopes and (ref in ("#", "") or ref.startswith("#/")):
            found = _at(self._root, ref)
            if found is not _ABSENT:
                return found, resolver, ref or "#"
        from referencing.exceptions import Unresolvable  # here, because few schemas need it and loading takes a while

        try:
            found = (resolver or self._root_resolver()).lookup(ref)
        except Unresolvable as error:
            more = {"value": ref, "bound": "the parts of the schema", "remedy": "put what it names into $defs"}
            raise ConstraintError.because("names_nothing", where, **more) from error
        resolver = None if not self._has_scopes and self._is_own(found.contents) else found.resolver
        return found.contents, resolver, ref if ref.startswith("#/") else where

    def _is_own(self, contents: Any) -> bool:
        """Whether this is a part of the schema itself, and not of a published one that it refers to."""
        if not self._own:
            self._own = set(_identities(self._root))
        return id(contents) in self._own

    def _root_resolver(self) -> Any:
        import jsonschema.validators
        import referencing
        import referencing.jsonschema

        if self.resolver is None:
            specification = referencing.jsonschema.specification_with(_META_SCHEMAS[self.document.draft])
            resource = specification.create_resource(self._root)
            registry = jsonschema.validators.SPECIFICATIONS.with_resource(resource.id() or "", resource)
            self._specification = specification
            self.resolver = registry.resolver_with_root(resource)
        return self.resolver

    def _in_scope(self, schema: dict[str, Any], resolver: Any) -> Any:
        root = self._root_resolver()
        return (resolver or root).in_subresource(self._specification.create_resource(schema))

    def _check_draft(self, schema: dict[str, Any], path: str) -> None:
        if "$schema" in schema and draft_of(schema) != self.document.draft:
            cause, remedy = "one schema may not mix drafts", "write the whole in one"
            raise Unsupported.at(f"{path}/$schema", cause, remedy)


def _withreferences(result: dict[str, Any], references: list[str], is_first: bool) -> dict[str, Any]:
    """`$ref` where it stood: properties are written in the order in which the schema gives them."""
    first, *others = references
    result = {"$ref": first, **result} if is_first else {**result, "$ref": first}
    if others:
        result["allOf"] = [*result.get("allOf", []), *({"$ref": other} for other in others)]
    return result


def _is_modern(schema: dict[str, Any]) -> bool:
    items, low, high = (schema.get(name) for name in ("items", "exclusiveMinimum", "exclusiveMaximum"))
    return not (isinstance(items, list) or isinstance(low, bool) or isinstance(high, bool))


def _id_of(schema: dict[str, Any]) -> str | None:
    value = schema.get("$id", schema.get("id"))
    return value if isinstance(value, str) else None


def _count_ids(value: Any, is_root: bool = True) -> int:
    """Counts the schemas below the root that have an id of their own."""
    if isinstance(value, list):
        return sum(_count_ids(item, False) for item in value)
    if not isinstance(value, dict):
        return 0
    own = not is_root and _id_of(value) is not None
    return own + sum(_count_ids(item, False) for name, item in value.items() if name not in ("enum", "const"))


def references(value: Any) -> Iterator[str]:
    """Yields the references in a schema and in what it holds."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def _identities(value: Any) -> Iterator[int]:
    yield id(value)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _identities(item)


def _at(root: Any, ref: str) -> Any:
    """Returns what a JSON pointer names, given as a fragment of a URI."""
    value = root
    for part in unquote(ref).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return _ABSENT
    return value


def _expect(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise ConstraintError.because("wrong_value", where, bound=what)


def _is_count(value: Any) -> bool:
    return is_integer(value) and value >= 0


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


TYPES = frozenset(["null", "boolean", "integer", "number", "string", "array", "object"])


def _is_type(value: Any) -> bool:
    return value in TYPES if isinstance(value, str) else isinstance(value, list) and set(map(str, value)) <= TYPES


_FORMS: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
    (("type",), _is_type, "a type of JSON or a list of types"),
    (("enum",), lambda value: isinstance(value, list), "a list"),
    (("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), is_number, "a number"),
    (("multipleOf",), lambda value: is_number(value) and value > 0, "a number above 0"),
    (("minLength", "maxLength", "minItems", "maxItems"), _is_count, "an integer of 0 or more"),
    (("minContains", "maxContains", "minProperties", "maxProperties"), _is_count, "an integer of 0 or more"),
    (("pattern", "format"), lambda value: isinstance(value, str), "a string"),
    (("uniqueItems",), lambda value: isinstance(value, bool), "true or false"),
    (("required",), _is_names, "a list of names"),
    (
        ("dependentRequired",),
        lambda value: isinstance(value, dict) and all(map(_is_names, value.values())),
        "lists of names by name",
    ),
]
COUNTS = frozenset(name for names, check, _ in _FORMS if check is _is_count for name in names)
_FORM_OF = {name: (check, what) for names, check, what in _FORMS for name in names}


def has_form(name: str, value: Any) -> bool:
    """Whether the value of a keyword that is no schema has the form that its later drafts demand."""
    return name not in _FORM_OF or _FORM_OF[name][0](value)


def _check_plain(name: str, value: Any, where: str) -> None:
    check, what = _FORM_OF.get(name, (None, ""))
    if check is not None:
        _expect(check(value), where, what)
    if any(map(is_too_long, numbers_in(value))):
        raise Unsupported.at(where, f"a number has more than {MAX_DIGITS} digits", "use shorter ones")


def _count(name: str, value: int, where: str) -> Any:
    """The count; `_ABSENT` if it says nothing."""
    if value < MAX_COUNT:
        return value
    if name.startswith("max"):
        return _ABSENT
    more = {"value": value, "bound": MAX_COUNT - 1, "unit": "that a text can have", "remedy": "ask for less"}
    raise Unsupported.because("exceeds", where, **more)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
