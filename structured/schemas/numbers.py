"""Numbers of JSON, exact to the last digit: how they are read, written, compared and begun.

A number that is written as an integer is an `int`, any other is a `Decimal`. Nothing here rounds, and no number that a
model writes raises an error.
"""

from __future__ import annotations

import decimal
import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

MAX_DIGITS = 1000
"""Most digits of a number in a schema, and of a number that a guard follows. A float has at most 309."""
MAX_COUNT = 2**31
"""No text that a model writes has so many characters, items or properties."""
MAX_EXACT = 2**53
"""llguidance keeps numbers as 64-bit floats, which round integers from here on."""
_MAX_COEFFICIENT = 2**32 - 1
"""llguidance keeps a `multipleOf` as 32 bits and a power of ten."""
_MAX_REMAINDERS = 1024
"""Most remainders that a grammar tells apart for a `multipleOf`, which has no final zeros for this count. Compiling
takes 0.1 s for 1,021 of them and 50 s for a million (grammars of one integer).
"""
_MAX_EXPONENT = 10**15
"""Exponents beyond it, which `Decimal` does not read, are taken for it."""
_BOUNDS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
NUMERIC = _BOUNDS | {"multipleOf"}
"""Keywords that say something about numbers."""

Number = int | Decimal


# ---- JSON ------------------------------------------------------------------------------------------------------------


def read_json(text: str | bytes) -> Any:
    """The JSON value. Raises `ValueError` if it is none."""
    return json.loads(text, parse_float=_decimal, parse_int=_integer, parse_constant=_no_number)


def json_decoder() -> json.JSONDecoder:
    """Reads as `read_json` does."""
    return json.JSONDecoder(parse_float=_decimal, parse_int=_integer, parse_constant=_no_number)


def json_text(value: Any) -> str:
    return _ENCODER.encode(value).decode()


_ENCODER = msgspec.json.Encoder(decimal_format="number")


def _integer(text: str) -> Number:
    return int(text) if len(text) <= MAX_DIGITS else Decimal(text)


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except decimal.InvalidOperation:
        coefficient, _, exponent = text.lower().partition("e")
        sign = "-" if exponent.startswith("-") else ""
        return Decimal(f"{coefficient}e{sign}{_MAX_EXPONENT}")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def numbers_in(value: Any) -> Iterator[Number]:
    """The numbers that a JSON value is or holds."""
    if isinstance(value, list):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, dict):
        yield from numbers_in(list(value.values()))
    elif is_number(value):
        yield value


# ---- one number ------------------------------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """Whether a value is a number without a fraction, such as 1 or 1.0."""
    if isinstance(value, Decimal):
        return value == value.to_integral_value()
    return is_number(value) and (isinstance(value, int) or value.is_integer())


def plain_text(value: Number) -> str:
    """The number without an exponent, an integer without a point."""
    return str(int(value)) if is_integer(value) else format(value, "f")


def is_multiple(value: Number, divisor: Number) -> bool:
    (coefficient, exponent), (other, other_exponent) = _parts(value), _parts(divisor)
    shift = exponent - other_exponent
    if shift >= 0:
        return coefficient * pow(10, shift, other) % other == 0
    if -shift > coefficient.bit_length():  # 10**-shift is greater, so only 0 is a multiple
        return coefficient == 0
    return bool(coefficient % (other * 10**-shift) == 0)


def _parts(value: Number) -> tuple[int, int]:
    """The absolute value as a coefficient and a power of ten."""
    if isinstance(value, int):
        return abs(value), 0
    _, digits, exponent = _exact(value).as_tuple()
    assert isinstance(exponent, int)
    return int(Decimal((0, digits, 0))), exponent


def _exact(value: Any) -> Decimal:
    """The number; a float as it is written."""
    return Decimal(repr(value) if isinstance(value, float) else value)


def is_too_long(value: Number) -> bool:
    """Whether a number of a schema has more digits than `MAX_DIGITS`, written without an exponent."""
    number = _exact(value)
    _, digits, exponent = number.as_tuple()
    return number.is_finite() and max(len(digits), abs(number.adjusted()), abs(int(exponent))) > MAX_DIGITS


# ---- what a grammar keeps --------------------------------------------------------------------------------------------


def is_kept(keyword: str, value: Any) -> bool:
    """Whether llguidance's grammars enforce the value of `keyword` exactly, as far as its numbers go."""
    if keyword == "multipleOf":
        return not is_number(value) or _kept_multiple(value) is not None
    if keyword in _BOUNDS or keyword in ("enum", "const"):
        return all(map(_is_float, numbers_in(value)))
    return True


def _is_float(value: Number) -> bool:
    return -MAX_EXACT < value < MAX_EXACT and Decimal(repr(float(value))) == _exact(value)


def _kept_multiple(value: Number) -> tuple[int, int] | None:
    """The coefficient and negated exponent that llguidance makes of a `multipleOf`, if they are exact."""
    if not _is_float(value):
        return None
    scaled, exponent = float(value), 0
    while scaled % 1:
        scaled, exponent = scaled * 10, exponent + 1
    coefficient = int(scaled)
    is_exact = Decimal(f"{coefficient}e-{exponent}") == _exact(value)
    is_cheap = int(str(coefficient).rstrip("0") or 0) <= _MAX_REMAINDERS
    return (coefficient, exponent) if is_exact and is_cheap and coefficient <= _MAX_COEFFICIENT else None


def keeps_multiples(schema: Any) -> bool:
    """Whether llguidance multiplies the values of `multipleOf` in a schema without overflow, if several apply to one
    number.
    """
    values = set(_multiples_in(schema))
    kept: list[tuple[int, int]] = [found for value in values if (found := _kept_multiple(value)) is not None]
    longest = max((exponent for _, exponent in kept), default=0)
    return len(kept) < 2 or math.prod(coefficient * 10**longest for coefficient, _ in kept) <= _MAX_COEFFICIENT


def _multiples_in(value: Any) -> Iterator[Number]:
    if isinstance(value, dict) and is_number(value.get("multipleOf")):
        yield value["multipleOf"]
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _multiples_in(item)


# ---- ranges ----------------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """The numbers from `low` to `high`; a superset of those that schemas allow."""

    low: Any = -math.inf
    high: Any = math.inf
    excludes_low: bool = False
    excludes_high: bool = False
    is_integer: bool = False
    """Whether all are integers; both ends then belong to the range."""
    step: int = 1
    """All integers are its multiples."""

    @property
    def is_empty(self) -> bool:
        return bool(self.low > self.high or (self.low == self.high and (self.excludes_low or self.excludes_high)))

    def negated(self) -> Range:
        low, high = (-end if isinstance(end, int | float) else end.copy_negate() for end in (self.high, self.low))
        return self._replace(low=low, high=high, excludes_low=self.excludes_high, excludes_high=self.excludes_low)

    def met(self, other: Range) -> Range:
        """The numbers that are in both."""
        low, excludes_low = max((self.low, self.excludes_low), (other.low, other.excludes_low))
        high, holds_high = min((self.high, not self.excludes_high), (other.high, not other.excludes_high))
        found = Range(low, high, excludes_low, not holds_high)
        return found.integers(math.lcm(self.step, other.step)) if self.is_integer or other.is_integer else found

    def integers(self, step: int = 1) -> Range:
        """The integers within that are multiples of `step`."""
        low, high = self.low, self.high
        if low > -math.inf:
            low = math.floor(low) + 1 if self.excludes_low else math.ceil(low)
        if high < math.inf:
            high = math.ceil(high) - 1 if self.excludes_high else math.floor(high)
        return Range(low, high, is_integer=True, step=step)

    def joined(self, other: Range) -> Range:
        """The smallest range that holds both."""
        low, excludes_low = min((self.low, self.excludes_low), (other.low, other.excludes_low))
        high, holds_high = max((self.high, not self.excludes_high), (other.high, not other.excludes_high))
        is_integer = self.is_integer and other.is_integer
        return Range(low, high, excludes_low, not holds_high, is_integer, math.gcd(self.step, other.step))

    def has_prefix(self, text: bytes) -> bool:
        """Whether a number of the range may begin with, or be, this part of a JSON number. One with an exponent may
        not, and `-0` stands for no integer: each number can be written without.
        """
        if text.startswith(b"-"):
            positive = Range(low=0, excludes_low=True)
            return self.negated().met(positive)._has_prefix(text[1:])
        return self._has_prefix(text)

    def _has_prefix(self, text: bytes) -> bool:
        """The same for a text without a sign."""
        whole, point, decimals = text.partition(b".")
        if len(text) > MAX_DIGITS + 2 or b"e" in text.lower():
            return False
        if not whole:
            return self._meets(0, math.inf)
        if point:
            digits = int(whole + decimals)
            return self._meets(*(Decimal(f"{number}e-{len(decimals)}") for number in (digits, digits + 1)))
        begun = int(whole)
        if begun == 0:  # no digit follows
            return self._meets(0, 1)
        least = max(self.low, self.step)
        longest = max(_num_digits(least) + 1, len(whole) + _num_digits(self.step))
        if self.high < math.inf:
            longest = _num_digits(self.high)
        counts = range(max(0, _num_digits(least) - len(whole) - 1), min(longest, MAX_DIGITS) - len(whole) + 1)
        scales = (10**count for count in reversed(counts))
        return any(self._meets(begun * scale, (begun + 1) * scale) for scale in scales)

    def _meets(self, low: Any, end: Any) -> bool:
        """Whether the range has a number of at least `low` and less than `end`."""
        if not self.is_integer:
            within = low < self.high or (low == self.high and not self.excludes_high)
            return bool(within and (end > self.low) and not self.is_empty)
        low, high = max(low, self.low), min(end, self.high + 1)
        return bool(high == math.inf or -(-math.ceil(low) // self.step) * self.step < high)


def _num_digits(number: Number) -> int:
    """Digits before the point, and at most one more."""
    return max(1, Decimal(number).adjusted() + 1)


def range_of(flat: list[dict[str, Any]], of_integers: bool) -> Range:
    """The range of the numbers, or the integers alone, that satisfy the bounds of all schemas."""
    found = Range()
    for schema in flat:
        for name in ("minimum", "exclusiveMinimum"):
            if name in schema and (schema[name], name != "minimum") > (found.low, found.excludes_low):
                found = found._replace(low=schema[name], excludes_low=name != "minimum")
        for name in ("maximum", "exclusiveMaximum"):
            if name in schema and (schema[name], name == "maximum") < (found.high, not found.excludes_high):
                found = found._replace(high=schema[name], excludes_high=name != "maximum")
    steps = [int(schema["multipleOf"]) for schema in flat if is_integer(schema.get("multipleOf"))]
    return found.integers(math.lcm(*steps)) if of_integers else found
