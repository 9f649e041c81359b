"""The types of a struct's fields, which Python evaluates from their text at each question."""

from __future__ import annotations

import functools
import typing
from typing import Any


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """Returns the types of a struct's fields by name, without bounds. The caller may not change the result."""
    return typing.get_type_hints(kind)
