"""Follows a JSON text as it is written and says which continuation would break what its grammar left out.

A grammar may allow more than the schema. The schema then has marks (`GUARD`) where a keyword was left out, and a
`Guard` judges each value at the byte that completes it, by `jsonschema`'s verdict. Only values under a mark are judged.
Items of an array with `uniqueItems` are compared with those before them, one at a time. States are immutable, so that a
session rolls back and forks by keeping them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from manta.structured.constraint import Unsupported
from manta.structured.regexes.automata import TooLarge
from manta.structured.schemas.documents import GUARD, SCHEMA, SCHEMA_LIST, SCHEMA_MAP, Document
from manta.structured.schemas.judge import json_key
from manta.structured.schemas.logic import Logic, item_schemas, numbers_of, types_of
from manta.structured.schemas.numbers import NUMERIC, is_number, json_text, plain_text, range_of, read_json
from manta.structured.schemas.patterns import matcher
from manta.structured.schemas.possible_types import possible_types
from manta.structured.schemas.progress import Progress, Space, Ways

MAX_DOMAIN = 256
"""An array of unique items knows which are left if its items have at most this many values."""
MAX_NAMES = 1000
"""Most properties of one object whose places are remembered."""

VALUE, FIRST_ITEM, FIRST_KEY, KEY, COLON, AFTER, STRING, KEY_STRING, SCALAR, DONE = range(10)
"""Kinds of what the next byte belongs to."""
_SPACE = b" \t\r\n"
_LITERALS = (b"true", b"false", b"null")
_OPENING = frozenset(["$ref", "allOf", "patternProperties", "additionalProperties", "propertyNames"])
"""Keywords by which schemas apply to what a value holds. Without them, the grammar allows anything there."""
_LISTED = frozenset(["enum", "const"])
_BRANCHES = frozenset(["oneOf", "anyOf", "not", "if"])
MAX_DEPTH = 128
"""Deepest nesting of a text under a guard, which bounds what judging a value takes."""
_NUMBERS = frozenset(["integer", "fraction"])
_BEGUN = {
    ord("{"): frozenset(["object"]),
    ord("["): frozenset(["array"]),
    ord('"'): frozenset(["string"]),
    ord("t"): frozenset(["boolean"]),
    ord("f"): frozenset(["boolean"]),
    ord("n"): frozenset(["null"]),
}
"""The types of values by their first byte; other bytes begin numbers."""


class Place:
    """The schemas of one value by its position alone: all that hold there whichever branches are taken."""

    def __init__(self, guard: Guard, schemas: list[Any], is_open: bool) -> None:
        self.schemas = schemas
        self.is_open = is_open
        """Whether the grammar may allow anything here: it left out a keyword by which schemas apply to this place."""
        self.flat = guard.logic.flat(schemas) or []
        marks = {name for schema in self.flat for name in schema.get(GUARD, ())}
        self.is_unique = "uniqueItems" in marks
        self.is_judged = is_open or bool(marks - {"uniqueItems"}) or any(map(guard.has_mark_in_branch, self.flat))
        self.opens = is_open or not marks.isdisjoint(_OPENING)
        """Whether the grammar may allow anything within."""
        self.may_forbid_names = self.opens and any(map(_forbids_names, self.flat))
        """Whether a property may be wrong by its name alone."""
        self.reaches = is_open or guard.has_any_order or any(map(guard.reaches, self.flat))
        self.types = possible_types(guard.logic, self.flat) if self.is_judged else types_of(self.flat)
        self.is_narrowed = self.types != types_of(self.flat)
        """Whether branches exclude a type that the grammar may allow."""
        self.is_listed = not marks.isdisjoint(_LISTED)
        """Whether the grammar allows others than the listed values."""
        self.is_numeric = self.is_judged and not guard.left_out.isdisjoint(NUMERIC)
        """Whether the grammar may allow numbers that are too large or too small."""
        self.numbers = numbers_of(guard.logic, self.flat) if self.is_numeric else None
        """The range of numbers that may stand here; None if none may, or if the grammar has it."""
        self._guard = guard
        self._length = max((len(schema.get("prefixItems", ())) for schema in self.flat), default=0)
        self._items: dict[int, Place] = {}
        self._properties: dict[str, Place] = {}
        self._domain: frozenset[bytes] | None = None
        self._knows_domain = False

    def item(self, index: int) -> Place:
        index = min(index, self._length)
        if index not in self._items:
            self._items[index] = self._guard.place(item_schemas(self.flat, index), self.opens)
        return self._items[index]

    def property(self, name: str) -> Place:
        found = self._properties.get(name)
        if found is None:
            found = self._guard.place(self._guard.logic.property_schemas(self.flat, name), self.opens)
            if len(self._properties) < MAX_NAMES:
                self._properties[name] = found
        return found

    def domain(self) -> frozenset[bytes] | None:
        """The texts of all values, if they are few and each has one text, or is given one."""
        if not self._knows_domain:
            self._knows_domain = True
            values = finite_domain(self._guard.logic, self.flat)
            many_texts = (list, dict) if self.is_listed else (list, dict, Decimal)
            if values is not None and not any(isinstance(value, many_texts) for value in values):
                texts = (plain_text(value) if is_number(value) else json_text(value) for value in values)
                self._domain = frozenset(text.encode() for text in texts)
        return self._domain


def _forbids_names(schema: dict[str, Any]) -> bool:
    maps = (schema.get("properties", {}), schema.get("patternProperties", {}))
    return (
        "propertyNames" in schema
        or schema.get("additionalProperties") is False
        or any(value is False for values in maps for value in values.values())
    )


def finite_domain(logic: Logic, flat: list[dict[str, Any]]) -> list[Any] | None:
    """All values that satisfy the conjuncts, if they are known to be few."""
    values = logic.finite_values(flat)
    if values is not None:
        return values
    types = types_of(flat)
    if types <= {"null", "boolean"}:
        return [value for value in (None, True, False) if logic.judge.is_valid(value, flat)]
    if types != {"integer"}:
        return None
    low, high = range_of(flat, of_integers=True)[:2]
    if math.inf in (-low, high) or high - low > MAX_DOMAIN:
        return None
    return [number for number in range(low, high + 1) if logic.judge.is_valid(number, flat)]


class Frame(NamedTuple):
    """An array or object that is open."""

    parent: Frame | None
    place: Place
    is_array: bool
    start: int
    """Byte at which its text begins."""
    num_items: int
    """Items that are complete."""
    key: str
    """The property whose value comes next or is being written."""
    progress: Progress | None
    """Branches that are left and properties so far; None if no properties come in any order."""
    seen: frozenset[Any]
    """The items so far, if they must differ."""
    texts: frozenset[bytes]
    """Texts of the items, if their domain is known."""
    depth: int
    """Arrays and objects that are open, this one included."""
    is_plain: bool
    """Whether neither this nor an outer one is judged when it is complete, or holds items that must differ."""


class State(NamedTuple):
    """The place that the text has reached."""

    frame: Frame | None
    mode: int
    start: int
    """Byte at which the string, number or literal begins that is being written."""
    escaped: bool
    length: int
    """Bytes of the text so far."""


START = State(None, VALUE, 0, False, 0)


class Guard:
    """One for each compiled grammar. Not for two threads at once."""

    def __init__(self, document: Document, ordered: Document | None = None) -> None:
        """Follows what the grammar leaves out of a document, and the objects of any order in `ordered`."""
        self.logic = Logic(document)
        self._space = None if ordered is None else Space(ordered)
        self._reached: dict[int, bool] = {}
        self._places: dict[tuple[int, ...], Place] = {}
        self.has_any_order = ordered is not None
        """Whether the properties of some objects come in any order."""
        self.left_out = self._keywords()
        """The keywords that the grammar leaves out somewhere."""
        self._root = self.place([document.root])
        self.has_open_places = not (_OPENING | _LISTED | NUMERIC).isdisjoint(self.left_out)
        """Whether a value can be wrong from its first byte."""
        self.has_branches = not _BRANCHES.isdisjoint(self.left_out)
        """Whether some values may be wrong from their first byte: those of narrowed places."""

    @classmethod
    def of(cls, text: str) -> Guard:
        """Makes a guard from what `encoded` returned."""
        draft, root, definitions, *ordered = read_json(text)
        document = _document(draft, root, definitions)
        return cls(document, _document(draft, *ordered) if ordered else None)

    def _keywords(self) -> set[str]:
        document = self.logic.document
        pending, found, seen = [document.root, *document.definitions.values()], set(), set()
        while pending:
            schema = pending.pop()
            if isinstance(schema, dict) and id(schema) not in seen:
                seen.add(id(schema))
                found |= set(schema.get(GUARD, ()))
                pending += self._children(schema)
        return found

    def place(self, schemas: list[Any], is_open: bool = False) -> Place:
        schemas = [schema for schema in schemas if schema is not True]
        key = (is_open, *map(id, schemas))
        if key not in self._places:
            self._places[key] = Place(self, schemas, is_open)
        return self._places[key]

    def reaches(self, schema: Any) -> bool:
        """Whether the schema, or one that it holds or refers to, has a mark."""
        if not isinstance(schema, dict):
            return False
        key = id(schema)
        if key not in self._reached:
            self._reached[key] = False  # a schema within itself adds nothing
            self._reached[key] = GUARD in schema or any(map(self.reaches, self._children(schema)))
        return self._reached[key]

    def _children(self, schema: dict[str, Any]) -> list[Any]:
        found: list[Any] = []
        for name, value in schema.items():
            if name in SCHEMA_MAP and isinstance(value, dict):
                found += value.values()
            elif name in SCHEMA_LIST:
                found += value
            elif name in SCHEMA:
                found.append(value)
            elif name == "$ref":
                found.append(self.logic.document.resolve(value))
        return found

    def has_mark_in_branch(self, schema: dict[str, Any]) -> bool:
        """Whether a mark lies where only some values must satisfy it: the value is then judged as a whole."""
        branches = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("dependentSchemas", {}).values()]
        branches += [schema[name] for name in ("not", "if", "then", "else", "contains") if name in schema]
        return any(map(self.reaches, branches))

    @contextlib.contextmanager
    def one_mask(self) -> Iterator[None]:
        """Bounds the cost of all verdicts within."""
        with self.logic.judge.one_mask():
            if self._space is None:
                yield
            else:
                with self._space.logic.judge.one_mask():
                    yield

    # ---- the text ----------------------------------------------------------------------------------------------------

    def place_of(self, state: State) -> Place:
        """The place of the value that is being written, or comes next."""
        frame = state.frame
        if frame is None:
            return self._root
        return frame.place.item(frame.num_items) if frame.is_array else frame.place.property(frame.key)

    def _ways_of(self, state: State) -> Ways | None:
        """Returns what may stand where the next value is; None if no properties come in any order."""
        frame = state.frame
        if self._space is None or frame is None or frame.progress is None:
            return None if self._space is None else self._space.root
        return frame.progress.within(_key_of(frame))

    def may_end(self, state: State, text: bytes | bytearray) -> bool:
        """Whether the text may end here: a number at the top is complete only when it ends."""
        if state.mode != SCALAR or state.frame is not None:
            return True
        return self._complete(state, bytes(text[state.start :])) is not None

    def advance(self, state: State, text: bytes | bytearray, data: bytes) -> State | None:
        """The state after `data`, which follows `text`; None if it would break what the grammar left out."""
        base = state.length
        whole: bytes | None = None
        for index, byte in enumerate(data):
            mode = state.mode
            if mode in (STRING, KEY_STRING):
                if state.escaped:
                    state = state._replace(escaped=False)
                elif byte == 0x5C:
                    state = state._replace(escaped=True)
                elif byte == 0x22:
                    whole = bytes(text) + data if whole is None else whole
                    closed = self._string(state, whole[state.start : base + index + 1])
                    if closed is None:
                        return None
                    state = closed
                continue
            if mode == SCALAR:
                if byte not in b",]} \t\r\n":
                    if byte in b"el":
                        whole = bytes(text) + data if whole is None else whole
                        done = self._literal(state, whole[state.start : base + index + 1])
                        if done is None:
                            return None
                        state = done
                    continue
                whole = bytes(text) + data if whole is None else whole
                done = self._complete(state, whole[state.start : base + index])
                if done is None:
                    return None
                state = done
            if byte in _SPACE:
                continue
            whole = bytes(text) + data if byte in b"]}" and whole is None else whole
            moved = self._structure(state, byte, base + index, whole)
            if moved is None:
                return None
            state = moved
        state = state._replace(length=base + len(data))
        return state if self._leads_on(state, text, data) else None

    def _structure(self, state: State, byte: int, at: int, whole: bytes | None) -> State | None:
        """The state after a byte outside of strings, numbers and white space."""
        frame = state.frame
        if state.mode in (VALUE, FIRST_ITEM) and byte != 0x5D and not self._may_begin(state, byte):
            return None
        if byte in b"[{":
            depth = 1 if frame is None else frame.depth + 1
            if depth > MAX_DEPTH:
                return None
            is_array, nothing = byte == 0x5B, frozenset[Any]()
            place, ways = self.place_of(state), self._ways_of(state)
            is_plain = (frame is None or frame.is_plain) and not (place.is_judged or place.is_unique)
            progress = None if ways is None else ways.begun("array" if is_array else "object")
            opened = Frame(frame, place, is_array, at, 0, "", progress, nothing, nothing, depth, is_plain)
            return state._replace(frame=opened, mode=FIRST_ITEM if is_array else FIRST_KEY)
        if byte in b"]}":
            assert frame is not None
            assert whole is not None
            text = whole[frame.start : at + 1]
            if frame.progress is not None and (not frame.progress.may_end() or frame.progress.is_wrong(text)):
                return None
            return self._complete(state._replace(frame=frame.parent), text, frame.place)
        if byte == 0x22:
            is_key = state.mode in (FIRST_KEY, KEY)
            return state._replace(mode=KEY_STRING if is_key else STRING, start=at, escaped=False)
        if byte == 0x3A:
            return state._replace(mode=VALUE)
        if byte == 0x2C:
            assert frame is not None
            may_follow = frame.is_array or self._has_more(frame)
            return state._replace(mode=VALUE if frame.is_array else KEY) if may_follow else None
        return state._replace(mode=SCALAR, start=at)

    def _string(self, state: State, text: bytes) -> State | None:
        if state.mode == STRING:
            return self._complete(state, text)
        assert state.frame is not None
        name = read_json(text)
        place = state.frame.place
        if place.may_forbid_names and False in place.property(name).schemas:
            return None
        progress = state.frame.progress
        if progress is not None:
            progress = progress.after_name(name)
            if progress is None:
                return None
        return state._replace(frame=state.frame._replace(key=name, progress=progress), mode=COLON)

    def _has_more(self, frame: Frame, begun: bytes = b'"') -> bool:
        """Whether another property may follow, whose name in JSON begins so."""
        return not is_free(frame) or frame.progress is None or frame.progress.may_begin(begun)

    def _may_begin(self, state: State, byte: int) -> bool:
        """Whether a value of the place may begin with this byte, where the grammar may allow values of other types."""
        place, ways = self.place_of(state), self._narrowed(state)
        if ways is not None and ways.types.isdisjoint(_BEGUN.get(byte, _NUMBERS)):
            return False
        if not place.is_judged:
            return True
        return False not in place.schemas and not place.types.isdisjoint(_BEGUN.get(byte, _NUMBERS))

    def _narrowed(self, state: State) -> Ways | None:
        """Returns what may stand where the next value is, if the grammar may allow more for want of properties."""
        progress = None if state.frame is None else state.frame.progress
        return self._ways_of(state) if progress is not None and progress.is_narrowed else None

    def narrowed_domain(self, state: State) -> frozenset[bytes] | None:
        """The texts of all values that may stand at such a place, if they are listed and each has one text."""
        ways = self._narrowed(state)
        values = None if ways is None else ways.values()
        if values is None or any(isinstance(value, list | dict | Decimal) for value in values):
            return None
        return frozenset(json_text(value).encode() for value in values)

    def is_narrowed(self, state: State) -> bool:
        """Whether a value may be wrong from its first byte."""
        return self.place_of(state).is_narrowed or self._narrowed(state) is not None

    def _literal(self, state: State, text: bytes) -> State | None:
        return self._complete(state, text) if text in _LITERALS else state

    def _complete(self, state: State, text: bytes, place: Place | None = None) -> State | None:
        """The state after a value, whose text is given; None if the value must not stand there."""
        place = self.place_of(state) if place is None else place
        frame = state.frame
        if state.mode == SCALAR and not _is_number_of(place, text):
            return None
        if place.is_judged and not self.logic.judge.is_valid(read_json(text), place.schemas):
            return None
        if frame is None:
            return state._replace(mode=DONE)
        if frame.place.is_unique and frame.is_array:
            key = json_key(read_json(text))
            if key in frame.seen:
                return None
            frame = frame._replace(seen=frame.seen | {key}, texts=frame.texts | {text})
        if frame.progress is not None:
            progress = frame.progress.after_value(_key_of(frame), text)
            if progress is None:
                return None
            frame = frame._replace(progress=progress)
        return state._replace(frame=frame._replace(num_items=frame.num_items + 1), mode=AFTER)

    def _leads_on(self, state: State, text: bytes | bytearray, data: bytes) -> bool:
        """Whether a value that is being written can still become one that may stand there. The place may allow few
        values where the grammar allows any, or only values that the array does not hold yet.
        """
        frame = state.frame
        if state.mode == KEY_STRING and frame is not None and is_free(frame):
            return self._has_more(frame, (bytes(text) + data)[state.start :])
        if state.mode not in (STRING, SCALAR, VALUE):
            return True
        is_unique = frame is not None and frame.is_array and frame.place.is_unique
        place = self.place_of(state)
        begun = b"" if state.mode == VALUE else (bytes(text) + data)[state.start :]
        if state.mode == SCALAR:
            if not _is_number_of(place, begun):
                return False
            if begun in (b"0", b"-0") and place.types == {"integer"}:  # no digit may follow
                return self._complete(state, b"0") is not None
        domain = place.domain() if is_unique or place.is_open or place.is_listed else self.narrowed_domain(state)
        if domain is None:
            return True
        taken = frame.texts if is_unique and frame is not None else frozenset()
        return any(item.startswith(begun) for item in domain - taken)

    def is_deep(self, state: State) -> bool:
        """Whether a token could nest deeper than `MAX_DEPTH`."""
        return state.frame is not None and state.frame.depth > MAX_DEPTH // 2

    def is_hot(self, state: State) -> bool:
        """Whether the value that is being written is judged when it is complete, or compared with others."""
        frame = state.frame
        return (
            self.place_of(state).is_judged or (frame is not None and frame.place.is_unique) or self.tells_apart(state)
        )

    def tells_apart(self, state: State) -> bool:
        """Whether the value that is being written decides which branches are left of what holds it."""
        frame = state.frame
        return frame is not None and frame.progress is not None and frame.progress.tells_apart(_key_of(frame))

    def names_begun(self, state: State, text: bytes) -> list[bytes] | None:
        """Returns the rests of the names that may be being written, each with its closing quote; None if any is."""
        if state.mode != KEY_STRING or state.frame is None:
            return None
        following, begun = _following(state.frame), text[state.start :]
        if following is None:
            return None
        return [name[len(begun) :] for name in following.values() if name.startswith(begun)]

    def taken_begun(self, state: State, text: bytes) -> list[bytes]:
        """Returns the rests of names that have come, if what is being written may begin one and others are not free."""
        if state.mode != KEY_STRING or state.frame is None or state.frame.progress is None:
            return []
        begun = text[state.start :]
        return [name[len(begun) :] for name in state.frame.progress.taken() if name.startswith(begun)]

    def depends_on_place(self, state: State) -> bool:
        """Whether it depends on the place alone which bytes may follow: in a string that may be any, and between the
        properties of an object. In no open array or object a value is judged by its text.
        """
        if state.frame is None or not state.frame.is_plain or state.escaped:
            return False
        return state.mode in (AFTER, KEY, FIRST_KEY) or (state.mode == STRING and not self.is_hot(state))

    def reaches_from(self, state: State) -> bool:
        """Whether anything that a token could complete is under a mark."""
        frame = state.frame
        while frame is not None:
            if frame.place.reaches:
                return True
            frame = frame.parent
        return self._root.reaches


def is_free(frame: Frame) -> bool:
    """Whether the properties of an open object come in any order."""
    return frame.progress is not None and frame.progress.is_free


def _following(frame: Frame) -> dict[str, bytes] | None:
    """The names that may follow in an object of any order, each with its text in JSON; None if they are not listed."""
    return frame.progress.following() if frame.progress is not None and frame.progress.is_free else None


def _key_of(frame: Frame) -> str | int:
    """The property or item that comes next or is being written."""
    return frame.num_items if frame.is_array else frame.key


def _document(draft: int, root: Any, definitions: dict[str, Any]) -> Document:
    document = Document(draft)
    document.root, document.definitions = root, definitions
    return document


def _is_number_of(place: Place, text: bytes) -> bool:
    """Whether a number may begin with, or be, this text. Literals may."""
    if not place.is_numeric or text[:1].isalpha():
        return True
    return place.numbers is not None and place.numbers.has_prefix(text)


def encoded(document: Document, ordered: Any = None) -> str:
    """The marked schema, and that of objects of any order; empty if there is neither a mark nor such objects. Raises
    `Unsupported` for a pattern that no guard can follow.
    """
    if not document.has_marks and ordered is None:
        return ""
    for pattern in _patterns_in([document.root, *document.definitions.values(), ordered]):
        try:
            matcher(pattern)
        except TooLarge as error:
            place = f"the pattern {pattern[:80]!r}"
            raise Unsupported.at(place, "its automaton is too large", "simplify it") from error
    parts = [document.draft, document.root, document.definitions]
    if ordered is not None:
        parts += [{name: item for name, item in ordered.items() if name != "$defs"}, ordered.get("$defs", {})]
    return json_text(parts)


def _patterns_in(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _patterns_in(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name == "pattern" and isinstance(item, str):
                yield item
            elif name == "patternProperties" and isinstance(item, dict):
                yield from item
            if name not in ("const", "enum"):
                yield from _patterns_in(item)
