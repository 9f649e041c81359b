"""Tests go through public doors: how often they reach for a private name of the product may only fall."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROOMS = ("cluster", "specdecode", "workers", "structured")
LIMIT = 314
"""Accesses that there are. Lower it when there are fewer."""
SLACK = 15
"""Accesses by which the limit may be too high, so that branches that lower it do not collide."""
NAMED_TUPLES = {"_replace", "_fields", "_asdict", "_make"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLES


def private_names(tree: ast.AST) -> Iterator[str]:
    """The private names that a module defines: functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        if is_private(name):
            yield name


def reached(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each private attribute of something else than `self`, by a dot or by `monkeypatch.setattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr") and len(node.args) > 1:
            for argument in node.args[:2]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value.rpartition(".")[2]


def test_tests_reach_for_fewer_private_names() -> None:
    trees = [ast.parse(path.read_text()) for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    names = {name for tree in trees for name in private_names(tree)}
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, name in reached(ast.parse(path.read_text()))
        if is_private(name) and name in names
    ]
    shown = "\n".join(found)
    assert len(found) <= LIMIT, f"{len(found)} accesses, and {LIMIT} may be; use what is public:\n{shown}"
    assert len(found) > LIMIT - SLACK, f"there are only {len(found)} accesses: lower LIMIT to that"


def test_every_way_to_a_private_name_is_seen() -> None:
    text = "a._b\nself._c\nx.d._e = 1\npatch.setattr(y, '_f', 1)\npatch.setattr('m.n._g', 1)\nz._replace()\n"
    assert [name for _, name in reached(ast.parse(text)) if is_private(name)] == ["_b", "_e", "_f", "_g"]
