"""The formats of JSON Schema as regular expressions, and which of them a backend is given as a pattern.

Date and time follow RFC 3339, section 5.6, with years 0001 to 9999, the days that each month has, and no leap seconds.
Host names follow RFC 1123, URIs and IRIs RFC 3986 and RFC 3987, templates RFC 6570, pointers RFC 6901. Languages
that are not regular (`regex`, `idn-hostname`) are given as a part of them, so that what is written is always right.
"""

from __future__ import annotations

from typing import Any

_YEAR = r"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DAY_OF_ANY_YEAR = (
    r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"({_YEAR}-{_DAY_OF_ANY_YEAR}|{_LEAP_YEAR}-02-29)"
_HOUR_MINUTE = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOUR_MINUTE})"

_CLOCK = r"T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = r"([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_DURATION = rf"P({_DAYS}({_CLOCK})?|{_CLOCK}|[0-9]+W)"

_FIRST, _INNER = r"[a-zA-Z0-9]", r"[a-zA-Z0-9\-]"
# No label has hyphens in its third and fourth place, for those are encoded Unicode (RFC 5891), which is not regular.
_LONG_LABEL = rf"{_INNER}({_FIRST}{_INNER}|-{_FIRST}){_INNER}{{0,58}}{_FIRST}"
_LABEL = rf"{_FIRST}({_INNER}{{0,2}}{_FIRST}|{_LONG_LABEL})?"
_HOSTNAME = rf"{_LABEL}(\.{_LABEL})*"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_H16 = r"[0-9a-fA-F]{1,4}"
_LAST = rf"({_H16}:{_H16}|{_IPV4})"
_IPV6 = "|".join(
    [
        rf"({_H16}:){{6}}{_LAST}",
        rf"::({_H16}:){{5}}{_LAST}",
        *(rf"({_H16}(:{_H16}){{0,{n}}})?::({_H16}:){{{4 - n}}}{_LAST}" for n in range(5)),
        rf"({_H16}(:{_H16}){{0,5}})?::{_H16}",
        rf"({_H16}(:{_H16}){{0,6}})?::",
    ]
)
_UCS = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"


def _resource(beyond: str) -> tuple[str, str]:
    """The patterns of a URI and of a reference; `beyond` are the characters that an IRI allows in addition."""
    plain = rf"a-zA-Z0-9\-._\~!$\&'()*+,;={beyond}"
    escaped = r"%[0-9a-fA-F]{2}"
    char = rf"([{plain}:@]|{escaped})"
    host = rf"(\[({_IPV6}|v[0-9a-fA-F]+\.[a-zA-Z0-9\-._\~!$\&'()*+,;=:]+)\]|([{plain}]|{escaped})*)"
    authority = rf"(([{plain}:]|{escaped})*@)?{host}(:[0-9]*)?"
    path = rf"(/{char}*)*"
    rooted = rf"//{authority}{path}|/({char}+{path})?"
    rest = rf"(\?({char}|[/?])*)?(\#({char}|[/?])*)?"
    whole = rf"[a-zA-Z][a-zA-Z0-9+\-.]*:({rooted}|{char}+{path}|){rest}"
    relative = rf"({rooted}|([{plain}@]|{escaped})+{path}|){rest}"
    return whole, rf"{whole}|{relative}"


_URI, _URI_REFERENCE = _resource("")
_IRI, _IRI_REFERENCE = _resource(_UCS)

_TOKEN = r"(/([^/\~]|\~[01])*)*"
_NAME = r"([a-zA-Z0-9_]|%[0-9a-fA-F]{2})(\.?([a-zA-Z0-9_]|%[0-9a-fA-F]{2}))*"
_VARIABLE = rf"{_NAME}(:[1-9][0-9]{{0,3}}|\*)?"
_EXPRESSION = rf"\{{[+\#./;?\&]?{_VARIABLE}(,{_VARIABLE})*\}}"
_TEMPLATE = rf"([!\#$\&()*+,\-./0-9:;=?@A-Z\[\]_a-z\~{_UCS}]|%[0-9a-fA-F]{{2}}|{_EXPRESSION})*"

_MAILBOX = r"[a-zA-Z0-9!#$%\&'*+\-/=?\^_`{|}\~" + "{}" + r"]+"
_EMAIL, _IDN_EMAIL = (
    rf"{_MAILBOX.replace('{}', more)}(\.{_MAILBOX.replace('{}', more)})*@{_HOSTNAME}" for more in ("", _UCS)
)
_IDN_LABEL = r"[a-z0-9]{1,20}(-[a-z0-9]{1,20}){0,2}"

_ATOM = r"([a-zA-Z0-9 _,:;=@%\&!\"'\#/<>\~`.]|\\[dDwW.*+?()\[\]{}|/^$\-]|\[\^?[a-zA-Z0-9_ .]+\])[*+?]?"
_SIMPLE = rf"({_ATOM})*(\|({_ATOM})*)*"
_REGEX = rf"\^?({_ATOM}|\((\?:)?{_SIMPLE}\)[*+?]?)*\$?"

REGULAR = {
    name: f"^({text})$"
    for name, text in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "duration": _DURATION,
        "email": _EMAIL,
        "idn-email": _IDN_EMAIL,
        "hostname": _HOSTNAME,
        "idn-hostname": rf"{_IDN_LABEL}(\.{_IDN_LABEL}){{0,2}}",
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "uri": _URI,
        "uri-reference": _URI_REFERENCE,
        "iri": _IRI,
        "iri-reference": _IRI_REFERENCE,
        "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
        "uri-template": _TEMPLATE,
        "json-pointer": _TOKEN,
        "relative-json-pointer": rf"(0|[1-9][0-9]*)(\#|{_TOKEN})",
        "regex": _REGEX,
    }.items()
}
"""All formats of the specification, each as a pattern for the whole text."""
_BUILT_IN = frozenset(["duration", "email", "ipv4", "ipv6", "uuid", "uri"])
"""Formats that llguidance enforces by itself; its other ones let impossible dates and host names through."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("const", "enum", "default", "examples")


def is_annotation(name: Any) -> bool:
    """Whether a format is not defined by the specification, which then wants it ignored (2020-12 Validation, 7.2.3)."""
    return isinstance(name, str) and name not in REGULAR


def with_exact_formats(schema: Any) -> Any:
    """The schema with formats written as patterns where the backend lacks them, and without those that are unknown."""
    if isinstance(schema, list):
        return [with_exact_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: _within(name, value) for name, value in schema.items()}
    name = result.get("format")
    if not isinstance(name, str) or name in _BUILT_IN:
        return result
    del result["format"]
    if is_annotation(name):
        return result
    if "pattern" in result:
        return result | {"allOf": [*result.get("allOf", []), {"type": "string", "pattern": REGULAR[name]}]}
    return result | {"pattern": REGULAR[name]}


def _within(name: str, value: Any) -> Any:
    if name in _VALUES:
        return value
    if name in _BY_NAME and isinstance(value, dict):
        return {key: with_exact_formats(item) for key, item in value.items()}
    return with_exact_formats(value)
