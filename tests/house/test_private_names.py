"""Tests go through public doors: how often they reach for private names, or replace constants, may only fall."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator

from tests.house.syntax_trees import ROOMS, modules, nodes

MOST_PRIVATE = 300
"""Private names of the product that tests use. Lower it when there are fewer."""
MOST_CONSTANTS = 85
"""Constants of the product's modules that tests replace. Times and bounds are better passed, as a struct."""
SLACK = 15
"""A limit may be too high by so much, so that branches that lower it do not collide."""
NAMED_TUPLES = {"_replace", "_fields", "_asdict", "_make"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLES


def private_names(tree: ast.Module) -> Iterator[str]:
    """The private names that a module defines: functions, classes, variables and attributes."""
    for node in nodes(tree):
        name = ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        if is_private(name):
            yield name


def reached(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each private attribute of something else than `self`, by a dot or by `setattr`."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not _is_self(node.value):
            yield node.lineno, node.attr
    yield from ((line, name) for line, name in replaced(tree) if is_private(name))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def replaced(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each attribute that pytest's `setattr` replaces."""
    for node in nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            for argument in node.args[:2]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value.rpartition(".")[2]


def is_constant(name: str) -> bool:
    return len(name) > 2 and name.isupper()


def product_trees() -> Iterator[ast.Module]:
    yield from (tree for room in ROOMS for tree in modules(room).values())


def used(names: set[str], places: Iterable[tuple[str, str]]) -> list[str]:
    """Where tests use one of the names."""
    return [f"{place} {name}" for place, name in places if name in names]


@functools.cache
def in_tests() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Places and names of what tests reach for, and of what they replace."""
    places: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
    for module, tree in modules("tests").items():
        for found, find in zip(places, (reached, replaced), strict=True):
            found += [(f"{module}:{line}", name) for line, name in find(tree)]
    return places


def check(found: list[str], most: int) -> None:
    shown = "\n".join(found)
    assert len(found) <= most, f"{len(found)} uses, and {most} may be; go through a public door:\n{shown}"
    assert len(found) > most - SLACK, f"there are only {len(found)} uses: lower the limit to that"


def test_tests_reach_for_fewer_private_names() -> None:
    names = {name for tree in product_trees() for name in private_names(tree)}
    check(used(names, in_tests()[0]), MOST_PRIVATE)


def test_tests_replace_fewer_constants() -> None:
    names = {
        target.id
        for tree in product_trees()
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and is_constant(target.id)
    }
    check(used(names, in_tests()[1]), MOST_CONSTANTS)


def test_every_way_to_a_private_name_is_seen() -> None:
    text = "a._b\nself._c\nx.d._e = 1\npatch.setattr(y, '_f', 1)\npatch.setattr('m.n._g', 1)\nz._replace()\n"
    assert [name for _, name in reached(ast.parse(text))] == ["_b", "_e", "_f", "_g"]
    assert [name for _, name in replaced(ast.parse("patch.setattr(y, 'LONG_S', 1)\npatch.setattr('m.MOST', 1)"))] == [
        "LONG_S",
        "MOST",
    ]
