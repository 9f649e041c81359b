"""The syntax trees of the product's modules, which several tests read. A process parses each module once."""

from __future__ import annotations

import ast
import functools
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]

ROOMS = ("manta.structured", "manta.workers", "manta.specdecode", "manta.cluster")
"""Lowest first: a room may import those before it."""


@functools.cache
def modules(room: str) -> dict[str, ast.Module]:
    """Name to text of every module of a room, packages themselves among them."""
    found = {}
    for path in sorted(ROOT.joinpath(*room.split(".")).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(), str(path))
    return found
