"""Names and paths that operators give over HTTP. Paths lie below folders that the configuration names, wherever links
lead.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence

from manta.cluster.errors import refuse

MOST_NAME_CHARACTERS = 256
_STEPS = {".", ".."}
"""Parts of a path that clients resolve before they ask for `/v1/models/NAME`."""


def check_new_name(field: str, name: str) -> None:
    """Refuses, under the name of the `field`, a name that requests could not well give as their model."""
    if len(name) > MOST_NAME_CHARACTERS:
        refuse("over_limit", field, len(name), MOST_NAME_CHARACTERS, "give a shorter name", unit="characters")
    if not name.isprintable():
        refuse("wrong_value", field, name, "printable characters")
    if name != unicodedata.normalize("NFC", name.strip()):
        refuse("wrong_value", field, name, "in Unicode's normal form (NFC), without spaces around it")
    if not _STEPS.isdisjoint(name.split("/")):
        refuse("wrong_value", field, name, "a name without the parts . and .., which URLs resolve")


def paths_below(path: str, roots: Sequence[str], field: str, remedy: str) -> list[str]:
    """Returns the paths, without links, that a path may mean, which begins at each of the roots in turn if it is
    relative. Refuses, under the name of the `field`, a path that leads out of the roots, whether or not anything is
    there.
    """
    if "\0" in path:
        refuse("wrong_value", field, path, "a path, without null characters")
    real_roots = [os.path.realpath(root) for root in roots]
    inside = [
        real
        for real in (os.path.realpath(os.path.join(root, path)) for root in roots)
        if any(os.path.commonpath((real, root)) == root for root in real_roots)
    ]
    if not inside:
        refuse("not_allowed", field, path, tuple(roots) or None, remedy)
    return inside
