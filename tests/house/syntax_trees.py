"""The syntax trees of modules, which several tests read. A process parses and walks each module once, and keeps the
trees until the last file that reads them has run (`tests/sharing.py`).
"""

from __future__ import annotations

import ast
import pathlib

from tests import garbage
from tests.sharing import shared

ROOT = pathlib.Path(__file__).resolve().parents[2]

ROOMS = ("manta.structured", "manta.workers", "manta.specdecode", "manta.cluster")
"""Lowest first: a room may import those before it."""


def modules(room: str) -> dict[str, ast.Module]:
    """Maps the name of every module of a room, packages themselves among them, to its tree. The tests and benchmarks
    are rooms here too.
    """
    trees: dict[str, dict[str, ast.Module]] = shared("syntax trees", dict, dict.clear)
    if room not in trees:
        with garbage.lasting():
            trees[room] = _parsed(room)
    return trees[room]


def _parsed(room: str) -> dict[str, ast.Module]:
    found = {}
    for path in sorted(ROOT.joinpath(*room.split(".")).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(), str(path))
    return found


def nodes(tree: ast.Module) -> list[ast.AST]:
    """Returns what `ast.walk` gives of a module's tree, which remembers it."""
    if not hasattr(tree, "all_nodes"):
        tree.all_nodes = list(ast.walk(tree))  # type: ignore[attr-defined]
    return tree.all_nodes  # type: ignore[attr-defined]
