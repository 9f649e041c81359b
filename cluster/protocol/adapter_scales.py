"""The scales of adapters in llama.cpp's shape: a field of requests, and the body of `POST /lora-adapters`.

https://github.com/ggml-org/llama.cpp, `tools/server/README.md`. An adapter that a list leaves out has the scale 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from manta.cluster.errors import refuse

MOST_SCALE = 1e6
"""Highest absolute scale."""


class AdapterScale(msgspec.Struct, forbid_unknown_fields=True):
    """The scale of one adapter."""

    must_know_fields: ClassVar[bool] = True

    id: int
    """The adapter's place in the list of `GET /lora-adapters`."""
    scale: Annotated[float, msgspec.Meta(ge=-MOST_SCALE, le=MOST_SCALE)]
    """Factor on what it adds, beside the adapter's own."""


def only_scaled(scales: Sequence[AdapterScale], field: str) -> AdapterScale | None:
    """Returns the only adapter whose scale is not 0; None if there is none. `field` is the list's field of the body;
    empty for the body itself. Raises `RequestRefused` naming the entry at fault.
    """
    found: AdapterScale | None = None
    seen: set[int] = set()
    for place, each in enumerate(scales):
        if each.id in seen:
            cause, remedy = "an entry before it has the same", "name each adapter once"
            refuse("not_allowed", f"{field}[{place}].id", each.id, remedy=remedy, cause=cause)
        seen.add(each.id)
        if each.scale != 0:
            if found is not None:
                cause, remedy = "a request has one adapter at a time", "leave all but one out, or merge them into one"
                refuse("unsupported", f"{field}[{place}].scale", each.scale, (0,), remedy, cause=cause)
            found = each
    return found
