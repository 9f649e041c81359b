"""A constraint as a grammar of llguidance, with what guards need for the schemas that the grammar lets through in part.

A schema that stands alone has one guard. Schemas within a grammar (`%json` in Lark, tools' arguments, structural tags)
have a guard each, and with them a *frame*: the grammar with markers in the place of guarded schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, cast

import llguidance
import msgspec

from manta.structured.backends.keywords import subschemas
from manta.structured.backends.lark_schemas import EmbeddedSchema, counts_tokens, embedded_schemas, with_replaced
from manta.structured.backends.llguidance_schema import departures, has_control_characters, mended, place_of
from manta.structured.backends.schema_patterns import (
    check_patterns,
    demands_controls,
    unenforced_patterns,
    with_grammar_patterns,
)
from manta.structured.constraint import ConstraintError, ConstraintSpec, Unsupported
from manta.structured.gbnf.writing import gbnf_as_lark
from manta.structured.schemas.any_order import free
from manta.structured.schemas.closing import close
from manta.structured.schemas.documents import is_too_old, read
from manta.structured.schemas.formats import is_annotation, with_exact_formats
from manta.structured.schemas.guard import Guard, encoded
from manta.structured.schemas.loosening import loosened
from manta.structured.schemas.numbers import json_text, read_json
from manta.structured.schemas.rewriting import needs_rewriting, rewritten

UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[[^\]]*\]")
_SHORT_ESCAPES = 'nrbtf"\\'
"""`\\uXXXX` is left out: with it, an additional property could spell a given property's name and replace it."""
WHITESPACE = r"[ \n\t]{0,20}"
"""Allowed between two tokens of JSON. It is bounded, so that a model cannot write white space for ever."""
NUM_MARKERS = 1024
"""Tokens beyond the model's that stand for guarded schemas in a frame. The first begins each of them."""


Way = Literal["proved", "guarded", "loosened", "apart"]
"""Ways in which schemas become grammars. The first leaves least to the guard: rewritten with proofs; rewritten without;
loosened; and loosened so that no two schemas apply to one value.
"""
SIMPLER_WAYS: tuple[Way, ...] = ("guarded", "loosened", "apart")


class Translation(msgspec.Struct, array_like=True):
    """A grammar, Lark or JSON, and what it leaves out."""

    grammar: str
    guard: str = ""
    """The marked schema that `Guard.of` reads; empty if the grammar allows no more than the schema."""
    frame: str = ""
    """The grammar with markers in the place of guarded schemas; empty if there is none within it."""
    parts: list[tuple[str, str]] = []
    """The grammar and the guard of each schema that has a marker."""

    @property
    def guard_bytes(self) -> int:
        return len(self.guard) + sum(len(guard) for _, guard in self.parts)


def translated(spec: ConstraintSpec, way: Way, first_marker: int) -> Translation:
    """Markers are the tokens from `first_marker` on. Raises `ConstraintError`, and `Unsupported` if a keyword would not
    be enforced.
    """
    try:
        if spec.kind in ("json_schema", "json_object"):
            return _schema_grammar(spec, way)
        lark = lark_of(spec)
        if lark is not None:
            return _with_prepared_schemas(lark, spec, way, first_marker)
        return Translation(_plain_grammar(spec))
    except ConstraintError:
        raise
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise ConstraintError.because("unfit", spec.kind, cause=str(error)) from error


def schemas_within(spec: ConstraintSpec) -> list[Any]:
    """The schemas of a constraint; none if its text cannot be read."""
    try:
        if spec.kind == "json_schema":
            return [read_json(spec.text)]
        lark = lark_of(spec)
        return [] if lark is None else [each.schema for each in embedded_schemas(lark)]
    except (ValueError, KeyError, TypeError, AssertionError):
        return []


def holds_schemas(spec: ConstraintSpec) -> bool:
    """Whether the constraint is a grammar with schemas in it."""
    return spec.kind in ("lark", "structural_tag") and bool(schemas_within(spec))


def unknown_formats(schema: Any) -> Iterator[str]:
    """Formats that no specification defines, each as `#/path/format: why`."""
    for path, subschema in subschemas(schema):
        name = subschema.get("format")
        if is_annotation(name):
            yield f"{path}/format: {name!r} is no format of JSON Schema"


def place_within(message: str, schemas: list[Any]) -> str | None:
    """The place of the keyword that llguidance's reason says is not enforced, if one of a grammar's schemas has it."""
    found = UNIMPLEMENTED.search(message)
    return None if found is None else next(filter(None, (place_of(found.group(), schema) for schema in schemas)), None)


def _plain_grammar(spec: ConstraintSpec) -> str:
    if spec.kind == "choice":
        return llguidance.LLMatcher.grammar_from_lark(_choice(json.loads(spec.text)))
    if spec.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "lark":
        return llguidance.LLMatcher.grammar_from_lark(spec.text)
    if spec.kind == "ebnf":
        return llguidance.LLMatcher.grammar_from_lark(gbnf_as_lark(spec.text))
    return _tag_grammar(json.loads(spec.text))


def _choice(texts: list[str]) -> str:
    """A Lark grammar of these texts: one terminal, for a parser follows at most 2,000 alternatives at a time."""
    terminal = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts if text)
    ways = [*(["CHOICE"] if terminal else []), *(['""'] if "" in texts else [])]
    return f"start: {' | '.join(ways)}\n" + (f"CHOICE: {terminal}\n" if terminal else "")


# ---- schemas within a grammar ----------------------------------------------------------------------------------------


def lark_of(spec: ConstraintSpec) -> str | None:
    """The Lark grammar that a constraint is, or that its structural tags become; None if it is of another kind."""
    if spec.kind == "lark":
        return spec.text
    if spec.kind != "structural_tag":
        return None
    grammar = _tag_grammar(json.loads(spec.text))
    return None if grammar.startswith("{") else grammar


def may_be_partial(schema: Any) -> bool:
    """Whether a loose constraint lets the schema, which is within its grammar, be enforced in part."""
    return isinstance(schema, dict) and schema.get("x-guidance", {}).get("lenient") is not False


def with_leave(schema: Any, lenient: bool) -> Any:
    """The schema with leave to be enforced in part, or without."""
    return {**schema, "x-guidance": {**schema.get("x-guidance", {}), "lenient": lenient}}


def _with_prepared_schemas(lark: str, spec: ConstraintSpec, way: Way, first_marker: int) -> Translation:
    """The grammar with its schemas prepared, and with parts for those that need a guard."""
    kind = spec.kind
    found = embedded_schemas(lark)
    texts: list[str] = []
    marked: list[str] = []
    parts: list[tuple[str, str]] = []
    for each in found:
        schema, guard = _embedded(each, spec, way)
        texts.append(f"%json {json_text(schema)}")
        marked.append(texts[-1])
        if guard:
            marked[-1] = f"(<[{first_marker}]> <[{first_marker + 1 + len(parts)}]>)"
            parts.append((llguidance.LLMatcher.grammar_from_lark(f"start: {texts[-1]}"), guard))
    grammar = llguidance.LLMatcher.grammar_from_lark(with_replaced(lark, found, texts))
    if not parts:
        return Translation(grammar)
    frame = with_replaced(lark, found, marked)
    if counts_tokens(frame):
        keywords, beside = _keywords_of(found, spec, way), "max_tokens, <[*]> or <[^...]>"
        raise Unsupported.because("excludes", f"{kind}: {keywords}", bound=beside, remedy="leave these out")
    if len(parts) >= NUM_MARKERS:
        more = {"value": len(parts), "unit": "schemas that need a guard", "bound": NUM_MARKERS - 1}
        raise Unsupported.because("over_limit", kind, **more, remedy="use fewer")
    return Translation(grammar, "", llguidance.LLMatcher.grammar_from_lark(frame), parts)


def _keywords_of(found: list[EmbeddedSchema], spec: ConstraintSpec, way: Way) -> str:
    """The keywords that guards would enforce."""
    guards = [guard for each in found if (guard := _embedded(each, spec, way)[1])]
    return ", ".join(sorted({keyword for guard in guards for keyword in Guard.of(guard).left_out}))


def _embedded(each: EmbeddedSchema, spec: ConstraintSpec, way: Way) -> tuple[Any, str]:
    """The schema as llguidance can serve it, with its own options, and its guard."""
    schema = each.schema
    if not isinstance(schema, dict):
        return schema, ""
    options = schema.get("x-guidance", {})
    if options.keys().isdisjoint(("whitespace_flexible", "whitespace_pattern")):
        options = {**_whitespace(spec), **options}
    if spec.loose and may_be_partial(schema):
        check_patterns(schema, is_loose=True)
        loose = {**with_grammar_patterns(closed(schema, spec)), "x-guidance": options}
        return with_leave(loose, lenient=True), ""
    check_patterns(schema)
    prepared = _prepared(schema, spec, way)
    if not prepared.has_controls:
        options = {"json_allowed_escapes": _SHORT_ESCAPES, **options}
    return with_leave({**prepared.schema, "x-guidance": options}, lenient=False), prepared.guard


# ---- one schema ------------------------------------------------------------------------------------------------------


def _schema_grammar(spec: ConstraintSpec, way: Way) -> Translation:
    schema = read_json(spec.text) if spec.kind == "json_schema" else {"type": "object"}
    check_patterns(schema, spec.loose)
    prepared = _mended(closed(schema, spec)) if spec.loose else _prepared(schema, spec, way)
    options = {"lenient": spec.loose, **_whitespace(spec)}
    if not prepared.has_controls:
        options["json_allowed_escapes"] = _SHORT_ESCAPES
    grammar = llguidance.LLMatcher.grammar_from_json_schema(prepared.text, overrides=cast(Any, options))
    return Translation(grammar, prepared.guard)


def _whitespace(spec: ConstraintSpec) -> dict[str, Any]:
    """llguidance's options for the white space that a constraint allows between two tokens of JSON."""
    if spec.any_whitespace:
        return {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
    return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def closed(schema: Any, spec: ConstraintSpec) -> Any:
    """The schema with its objects closed if the constraint asks for that and the schema can be read; else as it is."""
    if spec.additional_properties != "closed":
        return schema
    try:
        document = read(schema)
    except ConstraintError:
        return schema
    return document.as_schema() if close(document) else schema


class _Prepared(NamedTuple):
    """A schema as llguidance can serve it."""

    schema: Any
    text: str
    """The schema in JSON."""
    has_controls: bool
    """Whether its strings hold control characters."""
    guard: str


def _mended(schema: Any, guard: str = "") -> _Prepared:
    schema = {} if schema is True else with_grammar_patterns(with_exact_formats(mended(schema)))
    text = json_text(schema)
    has_controls = has_control_characters(schema, text) or demands_controls(schema)
    return _Prepared(schema, text, has_controls, guard)


def _prepared(given: Any, spec: ConstraintSpec, way: Way) -> _Prepared:
    """Closed, rewritten or loosened, and mended. Raises `Unsupported` for what llguidance would ignore."""
    if is_too_old(given):
        cause, remedy = "drafts before 4 are not enforced", "write the schema in a later one"
        raise ConstraintError.because("not_enforced", "#/$schema", cause=cause, remedy=remedy)
    schema, guard = _translated_schema(given, spec, way)
    if schema is False:
        raise ConstraintError.because("unsatisfiable", spec.kind)
    prepared = _mended(schema, guard)
    ignored = [*unenforced_patterns(schema), *departures(prepared.schema, prepared.has_controls)]
    if ignored:
        raise Unsupported.at(spec.kind, cause="; ".join(ignored))
    return prepared


def _translated_schema(schema: Any, spec: ConstraintSpec, way: Way) -> tuple[Any, str]:
    """The schema for the grammar, and what a guard needs; empty if the grammar is exact."""
    closes, frees = spec.additional_properties == "closed", spec.property_order == "any"
    if not closes and not frees and way == "proved" and not needs_rewriting(schema):
        return schema, ""
    document = read(schema)
    is_closed = closes and close(document)
    plain = document.as_schema() if is_closed or frees else schema
    if way in ("loosened", "apart"):
        result, guard = loosened(document, joins=way == "loosened")
    elif way == "guarded" or needs_rewriting(plain):
        result, guard = rewritten(document, proves=way == "proved", counts=frees)
    else:
        result, guard = plain, encoded(document)
    freed = free(result, document.draft) if frees else None
    return (result, guard) if freed is None else (freed.grammar, encoded(document, freed.marked))


def _tag_grammar(tag: dict[str, Any]) -> str:
    """A grammar for free text in which each trigger begins one of the tags whose `begin` starts with the trigger."""
    if "structures" not in tag:
        cause = "llguidance serves the form with structures and triggers"
        raise Unsupported.at("structural_tag", cause)
    structures = []
    for item in tag["structures"]:
        trigger = next((text for text in tag["triggers"] if item["begin"].startswith(text)), None)
        if trigger is None:
            cause = f"no trigger starts {item['begin']!r}"
            raise ConstraintError.because("unfit", "structural_tag", cause=cause, remedy="add one to triggers")
        structures.append(
            llguidance.StructTag(trigger=trigger, begin=item["begin"], grammar=item["schema"], end=item["end"])
        )
    return llguidance.StructTag.to_grammar(structures, assume_special=False)
