"""One module opens the cache: nobody else names its root, and each kind of entry is attacked by a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.syntax_trees import ROOMS, modules, nodes
from tests.workers.test_cache_folder import KINDS

OWNER = "manta.workers.cache_folder"
ROOT_NAMES = {"MANTA_CACHE", "XDG_CACHE_HOME", ".cache"}
"""Texts that alone lead to the root of the cache."""


def product() -> Iterator[tuple[str, ast.AST]]:
    for room in (*ROOMS, "benchmarks"):
        for name, tree in modules(room).items():
            yield from ((name, node) for node in nodes(tree))


def test_one_module_alone_knows_the_root_of_the_cache() -> None:
    naming = {
        f"{name} line {node.lineno}"
        for name, node in product()
        if isinstance(node, ast.Constant) and node.value in ROOT_NAMES and name != OWNER
    }
    assert naming == set()


def test_every_kind_of_entry_is_attacked() -> None:
    calls = [
        node
        for _, node in product()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cache_entry"
    ]
    names = {ast.literal_eval(call.args[0]) for call in calls}
    assert names == KINDS.keys()
