"""Says why a constraint cannot be enforced in the words of the request: the keyword, its place, and the field that lets
the answer be constrained in part. The grammar backends have reasons of their own, which name them.
"""

from __future__ import annotations

import re

_UNIMPLEMENTED = re.compile(r"(?:(?:json_schema|lark): )?(#[^:\s]*): Unimplemented keys: \[([^\]]*)\]")
_NOT_PROVEN = re.compile(r"(?:; )?(\w+): \w+ is not proven to enforce ([^;]*)")
_REMEDY = "ask for loose enforcement"
_WAYS_OUT = (
    ("response_format", 'send "strict": false in response_format.json_schema'),
    ("tools", 'send "strict": false in that function'),
    ("structured_outputs", 'send "loose": true in structured_outputs'),
    ("format", "constrain less"),
)
"""The beginning of a field, and what lets its constraint be enforced in part."""


def in_words(field: str, message: str) -> str:
    """The reason `message` for a constraint that the body's `field` asks for."""
    text = _UNIMPLEMENTED.sub(r"the keyword \2 at \1 cannot be enforced", message)
    if text != message:
        text = _NOT_PROVEN.sub("", text)  # another backend's reason for the same
        if _REMEDY not in text:
            text = f"{text}; change it, or {_REMEDY}"
    text = _NOT_PROVEN.sub(r"\2 cannot be enforced", text)
    return text.replace(_REMEDY, f"{_way_out(field)} to enforce the rest")


def _way_out(field: str) -> str:
    return next((way for start, way in _WAYS_OUT if field.startswith(start)), _REMEDY)
