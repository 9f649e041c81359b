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
MOST_TOGETHER = 8
"""Most adapters that act together in a request. Their ranks add up."""


class AdapterScale(msgspec.Struct, forbid_unknown_fields=True):
    """The scale of one adapter."""

    must_know_fields: ClassVar[bool] = True

    id: int
    """The adapter's place in the list of `GET /lora-adapters`."""
    scale: Annotated[float, msgspec.Meta(ge=-MOST_SCALE, le=MOST_SCALE)]
    """Factor on what it adds, beside the adapter's own."""


def all_scaled(scales: Sequence[AdapterScale], field: str) -> list[AdapterScale]:
    """Returns the adapters whose scale is not 0. `field` is the list's field of the body; empty for the body itself.
    Raises `RequestRefused` naming the entry at fault.
    """
    found: list[AdapterScale] = []
    seen: set[int] = set()
    for place, each in enumerate(scales):
        if each.id in seen:
            cause, remedy = "an entry before it has the same", "name each adapter once"
            refuse("not_allowed", f"{field}[{place}].id", each.id, remedy=remedy, cause=cause)
        seen.add(each.id)
        if each.scale != 0:
            if len(found) == MOST_TOGETHER:
                cause = f"at most {MOST_TOGETHER} adapters act together"
                refuse("unsupported", f"{field}[{place}].scale", each.scale, (0,), "merge some into one", cause=cause)
            found.append(each)
    return found
