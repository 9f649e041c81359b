"""The order of rooms: who may import whom, over the whole repository and inside a room.

Read from the text of every module, so that imports inside functions and those for type checkers count too.
"""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
from collections.abc import Iterator

import pytest

from tests.house.syntax_trees import ROOMS, ROOT, modules, nodes

MAX_LINES = 600
"""Lines of a source file; a longer one holds more than one thing."""

FOLDERS = (
    "manta.structured",
    "manta.structured.regexes",
    "manta.structured.gbnf",
    "manta.structured.lark",
    "manta.structured.schemas",
    "manta.structured.backends",
    "manta.structured.compiling",
    "manta.structured.grammar_pool",
    # What is told and answered; models as descriptions; what a rank keeps of sequences: no framework
    "manta.workers.models",
    "manta.workers",
    "manta.workers.sampling",
    "manta.workers.ranks",
    # torch
    "manta.workers.kernels",
    "manta.workers.kernels.triton",
    "manta.workers.checkpoints.formats",
    "manta.workers.checkpoints",
    "manta.workers.adapters",
    "manta.workers.parallel",
    "manta.workers.platforms",
    "manta.workers.decoders.mixers",
    "manta.workers.decoders",
    "manta.workers.torch_worker",
    "manta.workers.pooling",
    # JAX
    "manta.workers.jax_worker",
    "manta.specdecode",
    # Configuration and errors, then the engine
    "manta.cluster",
    "manta.cluster.engine.executors",
    "manta.cluster.engine.ranks",
    "manta.cluster.engine",
    "manta.cluster.text",
    "manta.cluster.protocol",
    "manta.cluster.chat",
    "manta.cluster.llm",
    # HTTP
    "manta.cluster.telemetry",
    "manta.cluster.storage",
    "manta.cluster.http.access",
    "manta.cluster.http.exchange",
    "manta.cluster.http.endpoints",
    "manta.cluster.http",
    # Ray Serve
    "manta.cluster.serve.starting",
    "manta.cluster.serve.listening",
    "manta.cluster.serve.scaling",
    "manta.cluster.serve.routing",
    "manta.cluster.serve.channel",
    "manta.cluster.serve.adapters",
    "manta.cluster.serve.requests",
    "manta.cluster.serve.recorded",
    "manta.cluster.serve.engine",
    "manta.cluster.serve.fleet",
    "manta.cluster.batch",
    "manta.cluster.serve",
    "manta.cluster.cli",
)
"""Lowest first: the files of a folder may import each other without a circle, and those of the folders before it. A
module that is named is one that does not stand where its folder does.
"""

OWNED: dict[str, tuple[str, ...]] = {
    "manta.workers.kernels.cpu": ("manta.workers.kernels", "manta.workers.platforms.cpu"),
    "manta.workers.platforms.cpu": ("manta.workers.platforms",),
    "manta.workers.kernels.triton": ("manta.workers.kernels.triton", "manta.workers.platforms.cuda"),
    "manta.workers.platforms.cuda": ("manta.workers.platforms",),
}
"""Beginnings of names: who alone may import the modules. A device's kernels are used through its platform only."""

RAY_USERS = (
    "manta.cluster.serve",
    "manta.cluster.batch.batch_deployment",
    "manta.cluster.own_ray",
    "manta.cluster.worker_setup",
    "manta.cluster.engine.ranks",
    "manta.structured.grammar_pool.transport",
)
"""Modules that may import Ray. The HTTP application and an engine with one rank run without it."""


SHARED_NAMES = {
    "app": "an application of ASGI and one of Serve",
    "logits_processors": "what is registered, and what runs in the sampler",
    "cpu": "the platform of the CPU and its kernels",
}
"""Names that modules of several folders have, and what tells them apart. Not to grow: give a module a name that says
where it belongs.
"""
REPEATING = (
    "manta.workers.kernels.triton",
    "manta.workers.torch_worker",
    "manta.workers.jax_worker",
    "manta.cluster.http.endpoints",
)
"""Folders whose modules may have the names of others: a framework's have those of what they compute, and endpoints
those of the shapes that they take.
"""


@functools.cache
def all_modules() -> frozenset[str]:
    return frozenset(name for room in ROOMS for name in modules(room))


def imports(module: str, tree: ast.Module) -> Iterator[str]:
    """The modules of this repository that a module imports anywhere in its text."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in all_modules())
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{module} line {node.lineno}: imports are absolute here"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names & all_modules()
            if node.module in all_modules() and not names <= all_modules():
                yield node.module


@functools.cache
def imported(room: str) -> dict[str, frozenset[str]]:
    """Maps each module of a room to the modules of this repository that it imports."""
    return {module: frozenset(imports(module, tree)) for module, tree in modules(room).items()}


def packages(tree: ast.Module) -> set[str]:
    """The packages, of this repository or not, of which a module imports something anywhere in its text."""
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module.partition(".")[0])
    return found


def folder(module: str) -> str:
    """The entry of `FOLDERS` that a module belongs to."""
    name = module
    while name not in FOLDERS:
        name = name.rpartition(".")[0]
        assert name, f"{module} lies in a folder without a place: add it to FOLDERS in {__file__}"
    return name


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_downwards_only(room: str) -> None:
    allowed = ROOMS[: ROOMS.index(room) + 1]
    upwards = [
        f"{module} imports {other}"
        for module, others in imported(room).items()
        for other in others
        if not other.startswith(allowed)
    ]
    assert not upwards


@pytest.mark.parametrize("room", ROOMS)
def test_folders_import_downwards_only(room: str) -> None:
    upwards = [
        f"{module} imports {other}"
        for module, others in imported(room).items()
        for other in others
        if other.startswith(f"{room}.") and FOLDERS.index(folder(other)) > FOLDERS.index(folder(module))
    ]
    assert not upwards


@pytest.mark.parametrize("room", ROOMS)
def test_files_of_a_folder_import_without_cycles(room: str) -> None:
    graph = {
        module: {other for other in others if other != module and folder(other) == folder(module)}
        for module, others in imported(room).items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_every_folder_has_its_place() -> None:
    folders = {name for room in ROOMS for name in modules(room) if ROOT.joinpath(*name.split(".")).is_dir()}
    assert folders == {name for name in FOLDERS if name != "manta.cluster.llm"}
    assert "manta.cluster.llm" in all_modules()


def test_no_file_is_too_long_to_read() -> None:
    places = (*ROOMS, "tests", "benchmarks")
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for place in places
        for path in (ROOT / place.replace(".", "/")).rglob("*")
        if path.suffix in (".py", ".cpp", ".h")
    }
    assert not {path: length for path, length in lengths.items() if length > MAX_LINES}


def test_module_names_are_unique_or_name_their_folder() -> None:
    files = [
        name
        for name in all_modules()
        if not ROOT.joinpath(*name.split(".")).is_dir() and not name.startswith(REPEATING)
    ]
    names = collections.Counter(name.rpartition(".")[2] for name in files)
    assert {name for name, count in names.items() if count > 1} - {"__main__"} == set(SHARED_NAMES)


@pytest.mark.parametrize("owned", OWNED)
def test_device_modules_are_imported_by_their_owners_only(owned: str) -> None:
    others = [
        f"{module} imports {other}"
        for room in ROOMS
        for module, imports_of in imported(room).items()
        for other in imports_of
        if other.startswith(owned) and not module.startswith(OWNED[owned])
    ]
    assert not others


def test_ray_is_imported_by_its_users_only() -> None:
    others = [
        module
        for room in ROOMS
        for module, tree in modules(room).items()
        if "ray" in packages(tree) and not module.startswith(RAY_USERS)
    ]
    assert not others


def test_only_kernels_ask_for_a_tensors_device() -> None:
    asking = [
        f"{module} line {node.lineno}"
        for room in ("manta.workers", "manta.specdecode")
        for module, tree in modules(room).items()
        for node in nodes(tree)
        if isinstance(node, ast.Attribute)
        and (node.attr == "is_cuda" or (node.attr == "type" and getattr(node.value, "attr", None) == "device"))
        and not module.startswith("manta.workers.kernels.")
    ]
    assert not asking


def test_one_module_alone_copies_asynchronously() -> None:
    """What looks like a copy that does not wait may wait for the whole stream, if the host's memory is not pinned."""
    copying = [
        f"{module} line {node.value.lineno}"
        for room in ROOMS
        for module, tree in modules(room).items()
        for node in nodes(tree)
        if isinstance(node, ast.keyword) and node.arg == "non_blocking" and module != "manta.workers.kernels.transfer"
    ]
    assert not copying


def test_imports_in_functions_and_for_type_checkers_count() -> None:
    tree = ast.parse(
        "import manta.workers.step\n"
        "if TYPE_CHECKING:\n    from manta.workers.decoders.decoder import Decoder\n"
        "def load():\n    from manta.workers import kv_groups, model_info\n    import torch\n"
    )
    assert sorted(imports("manta.workers.example", tree)) == [
        "manta.workers.decoders.decoder",
        "manta.workers.kv_groups",
        "manta.workers.model_info",
        "manta.workers.step",
    ]


OWNERS = {
    "sequence.py": {"num_computed_tokens", "num_pending_tokens", "num_sent_blocks", "draft_token_ids", "is_paused"},
    "kv_cache_manager.py": {"block_tables", "num_shared_blocks", "num_registered_blocks"},
    "step_plan.py": {"first_step"},
}
"""Attributes of a `Sequence` by the file of `cluster/engine/` that alone assigns them."""


@pytest.mark.parametrize("owner", OWNERS)
def test_the_state_of_a_sequence_has_one_owner(owner: str) -> None:
    found = set()
    for name, tree in modules("manta.cluster.engine").items():
        for node in nodes(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in OWNERS[owner]:
                found.add((name.rpartition(".")[2] + ".py", node.attr))
    assert found == {(owner, attribute) for attribute in OWNERS[owner]}
