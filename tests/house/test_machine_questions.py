"""How many cores and how much memory there are is asked in one place, which knows the limits of containers."""

from __future__ import annotations

import ast

from tests.house.syntax_trees import ROOMS, modules, nodes

ONE_PLACE = "manta.structured.host"
QUESTIONS = {"cpu_count", "process_cpu_count", "sched_getaffinity", "virtual_memory", "swap_memory", "sysconf"}
"""Functions that answer for the whole machine."""
POOLS = {"ThreadPoolExecutor", "ProcessPoolExecutor", "Pool", "ThreadPool"}
"""Classes that ask one of them unless they are told a number."""


def asks(node: ast.AST) -> bool:
    """Returns whether a piece of source asks for the machine's size."""
    if isinstance(node, ast.Attribute | ast.Name):
        return (node.attr if isinstance(node, ast.Attribute) else node.id) in QUESTIONS
    if not isinstance(node, ast.Call) or node.args or any(each.arg == "max_workers" for each in node.keywords):
        return False
    return (getattr(node.func, "attr", None) or getattr(node.func, "id", None)) in POOLS


def test_the_machine_is_asked_in_one_place() -> None:
    trees = {name: tree for room in ROOMS for name, tree in modules(room).items()}
    found = {f"{name}:{node.lineno}" for name, tree in trees.items() for node in nodes(tree) if asks(node)}  # type: ignore[attr-defined]
    others = sorted(place for place in found if place.partition(":")[0] != ONE_PLACE)
    assert found
    assert not others, f"ask {ONE_PLACE}, which knows what a container may have"
