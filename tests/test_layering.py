"""The order of rooms: who may import whom, over the whole repository and inside a room.

Read from the text of every module, so that imports inside functions and those for type checkers count too.
"""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

ROOMS = ("structured", "workers", "specdecode", "cluster")
"""Lowest first: a room may import those before it."""

INSIDE: dict[str, tuple[str, ...]] = {
    "structured": (
        # Plain data
        "structured.lru",
        "structured.fair_queue",
        "structured.pool_config",
        "structured.constraint",
        "structured.logits_processors",
        "structured.vocabulary",
        "structured.frames",
        "structured.masks",
        # Who proves a constraint
        "structured.backend",
        "structured.backends",
        "structured.compile_process",
        "structured.compiler",
        # Who fills masks
        "structured.grammar_worker",
        "structured.transport",
        "structured.pool_records",
        "structured.pool",
    ),
    "specdecode": (
        "specdecode.speculative_config",
        "specdecode.acceptance",
        "specdecode.lengths",
        "specdecode.forced",
        "specdecode.pace",
        "specdecode.ngram",
        "specdecode.proposers",
        "specdecode.draft_model",
        "specdecode.speculative_worker",
    ),
    "cluster.engine": (
        # What is told and answered
        "cluster.engine.interrupts",
        "cluster.engine.request",
        "cluster.engine.stats",
        # Who computes what: plain Python
        "cluster.engine.kv_blocks",
        "cluster.engine.sequence",
        "cluster.engine.turns",
        "cluster.engine.kv_cache_manager",
        "cluster.engine.admission",
        "cluster.engine.plan",
        "cluster.engine.outcome",
        "cluster.engine.scheduler",
        # Under which masks, and where
        "cluster.engine.constraint_service",
        "cluster.engine.step_masks",
        "cluster.engine.executor",
        "cluster.engine.ranks.worker_factory",
        "cluster.engine.ranks",
        "cluster.engine.ranks.rank_messages",
        "cluster.engine.ranks.deadline",
        "cluster.engine.ranks.rank_channel",
        "cluster.engine.ranks.claims",
        "cluster.engine.ranks.actor",
        "cluster.engine.ranks.group",
        "cluster.engine.ranks.executor",
        "cluster.engine.in_process",
        "cluster.engine.thread_executor",
        "cluster.engine.executor_choice",
        # The step loop
        "cluster.engine.engine",
        "cluster.engine.beam_search",
    ),
    "workers": (
        # What is told and answered
        "workers.host",
        "workers.sampling",
        "workers.sampling.noise",
        "workers.sampling_params",
        "workers.step",
        "workers.model_info",
        "workers.phases",
        # Plain data: configuration, weights, and what a step hands to the kernels
        "workers.checkpoints",
        "workers.checkpoints.transformers_support",
        "workers.model_options",
        "workers.models",
        "workers.checkpoints.folder_kinds",
        "workers.checkpoints.model_folder",
        "workers.checkpoints.memory",
        "workers.kernels.transfer",
        "workers.shared_prefixes",
        "workers.attention",
        "workers.checkpoints.weights",
        "workers.checkpoints.checkpoint",
        "workers.checkpoints.schemes",
        "workers.sampling.logits_processors",
        "workers.sampling.sampling_state",
        "workers.sampling.verification",
        # The device seam: what the worker of every framework is, and what it shares with the others
        "workers.rank_sequences",
        "workers.rank_worker",
        # What computes
        "workers.kernels.linears",
        "workers.parallel",
        "workers.parallel.group",
        "workers.kernels",
        "workers.kernels.protocol",
        "workers.kernels.processor",
        "workers.kernels.build",
        "workers.kernels.layout",
        "workers.kernels.shared_weights",
        "workers.kernels.reference",
        "workers.kernels.cpu_linear",
        "workers.kernels.cpu",
        "workers.kernels.cpu_decoder",
        "workers.kernels.torch_sampler",
        "workers.kernels.cpu_sampler",
        "workers.kernels.cpu_kv_cache",
        "workers.kernels.cpu_all_reduce",
        "workers.kernels.triton",
        "workers.kernels.triton.launch",
        "workers.kernels.triton.rows",
        "workers.kernels.triton.rope",
        "workers.kernels.triton.metadata",
        "workers.kernels.triton.attention",
        "workers.kernels.triton.layers",
        "workers.kernels.triton.graphs",
        "workers.kernels.triton.noise",
        "workers.kernels.triton.edits",
        "workers.kernels.triton.sampler",
        "workers.decoders",
        "workers.decoders.model",
        "workers.platforms.cuda_group",
        "workers.platforms.cuda",
        "workers.platforms.cpu_group",
        "workers.platforms.cpu_linears",
        "workers.platforms.cpu",
        "workers.platforms",
        "workers.decoders.rope_table",
        "workers.decoders.decoder",
        "workers.decoders.transformers_model",
        "workers.parallel.shard",
        "workers.parallel.layers",
        "workers.loader",
        "workers.sampling.sampler",
        "workers.largest_step",
        "workers.pending_draw",
        "workers.model_runner",
        "workers.parallel.runner",
        "workers.step_times",
        "workers.draft_runner",
        "workers.torch_worker",
        "workers.trial",
    ),
    "cluster": (
        "cluster.version",
        "cluster.errors",
        "cluster.option_reader",
        "cluster.config",
        "cluster.batch.lines",
        "cluster.batch.journal",
        "cluster.batch.local_files",
        "cluster.batch.storage",
        "cluster.batch.lease",
        "cluster.batch.quota",
        "cluster.batch.records",
        "cluster.batch.retention",
        "cluster.batch.stored",
        "cluster.private_folder",
        "cluster.own_ray",
        "cluster.engine",
        "cluster.telemetry",
        "cluster.text",
        "cluster.protocol",
        "cluster.chat",
        "cluster.http",
        "cluster.http.errors",
        "cluster.http.access",
        "cluster.http.codec",
        "cluster.http.logprobs",
        "cluster.http.prompts",
        "cluster.http.metrics",
        "cluster.http.engines",
        "cluster.http.answers",
        "cluster.http.preparation",
        "cluster.http.exchange",
        "cluster.telemetry.server_span",
        "cluster.http.state",
        "cluster.http.example",
        "cluster.http.endpoints",
        "cluster.http.routing",
        "cluster.http.routes",
        "cluster.http.openapi",
        "cluster.http.app",
        "cluster.llm",
        "cluster.batch",
        "cluster.batch.endpoints",
        "cluster.batch.job",
        "cluster.batch.batch_run",
        "cluster.batch.runner",
        "cluster.serve",
        "cluster.serve.burst",
        "cluster.serve.packed",
        "cluster.serve.listening",
        "cluster.serve.listening.connections",
        "cluster.serve.listening.port",
        "cluster.serve.listening.tls",
        "cluster.serve.listening.listener",
        "cluster.serve.start_failure",
        "cluster.serve.start_watch",
        "cluster.serve.joined_ray",
        "cluster.serve.deployed",
        "cluster.serve.replica_process",
        "cluster.serve.scaling.decision",
        "cluster.serve.scaling.autoscaling",
        "cluster.serve.scaling.meter",
        "cluster.serve.scaling.waking",
        "cluster.serve.scaling.cluster_state",
        "cluster.serve.routing",
        "cluster.serve.routing.prefix_index",
        "cluster.serve.routing.reports",
        "cluster.serve.routing.placement",
        "cluster.serve.routing.replicas",
        "cluster.serve.routing.request_router",
        "cluster.serve.node_tls",
        "cluster.serve.token_channel",
        "cluster.serve.progress",
        "cluster.serve.prompt_run",
        "cluster.serve.gathering",
        "cluster.serve.submission",
        "cluster.serve.engine_client",
        "cluster.serve.engine_deployment",
        "cluster.batch.batch_client",
        "cluster.batch.application",
        "cluster.batch.deployment",
        "cluster.serve.ingress",
        "cluster.serve.app",
        "cluster.cli",
    ),
}
"""The modules of a room, lowest first: a module may import those before it. A name stands for all modules under it that
have no place of their own.
"""

OWNED: dict[str, tuple[str, ...]] = {
    "workers.kernels.cpu": ("workers.kernels", "workers.platforms.cpu"),
    "workers.platforms.cpu": ("workers.platforms",),
    "workers.kernels.triton": ("workers.kernels.triton", "workers.platforms.cuda"),
    "workers.platforms.cuda": ("workers.platforms",),
}
"""Beginnings of names: who alone may import the modules. A device's kernels are used through its platform only."""

RAY_USERS = (
    "cluster.serve",
    "cluster.batch.deployment",
    "cluster.own_ray",
    "cluster.engine.ranks",
    "structured.transport",
)
"""Who may import Ray: the HTTP application, and an engine that has one rank, run without it."""


@functools.cache
def modules(room: str) -> dict[str, ast.Module]:
    """Name to text of every module of a room, packages themselves among them."""
    found = {}
    for path in sorted(ROOT.joinpath(*room.split(".")).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(), str(path))
    return found


ALL = frozenset(name for room in ROOMS for name in modules(room))


def imports(module: str, tree: ast.Module) -> Iterator[str]:
    """The modules of this repository that a module imports anywhere in its text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in ALL)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{module} line {node.lineno}: imports are absolute here"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names & ALL
            if node.module in ALL and not names <= ALL:
                yield node.module


def packages(tree: ast.Module) -> set[str]:
    """The packages, of this repository or not, of which a module imports something anywhere in its text."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module.partition(".")[0])
    return found


def place(module: str, order: tuple[str, ...]) -> int:
    """Where a module stands in the order of its room: its own place, or that of the nearest package above it."""
    name = module
    while name:
        if name in order:
            return order.index(name)
        name = name.rpartition(".")[0]
    raise AssertionError(f"{module} has no place in the order of its room: add it to INSIDE in {__file__}")


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_downwards_only(room: str) -> None:
    allowed = ROOMS[: ROOMS.index(room) + 1]
    upwards = [
        f"{module} imports {other}"
        for module, tree in modules(room).items()
        for other in imports(module, tree)
        if other.partition(".")[0] not in allowed
    ]
    assert not upwards


@pytest.mark.parametrize("room", INSIDE)
def test_modules_of_a_room_import_downwards_only(room: str) -> None:
    order = INSIDE[room]
    upwards = [
        f"{module} imports {other}"
        for module, tree in modules(room).items()
        for other in imports(module, tree)
        if other.startswith(f"{room}.") and module != room and place(other, order) > place(module, order)
    ]
    assert not upwards


@pytest.mark.parametrize("room", INSIDE)
def test_the_order_of_a_room_names_what_is_there(room: str) -> None:
    gone = [name for name in INSIDE[room] if name not in modules(room)]
    assert not gone


@pytest.mark.parametrize("owned", OWNED)
def test_a_devices_modules_are_imported_by_their_owners_only(owned: str) -> None:
    others = [
        f"{module} imports {other}"
        for room in ROOMS
        for module, tree in modules(room).items()
        for other in imports(module, tree)
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


def test_nobody_but_kernels_asks_which_device_a_tensor_is_on() -> None:
    asking = [
        f"{module} line {node.lineno}"
        for room in ("workers", "specdecode")
        for module, tree in modules(room).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (node.attr == "is_cuda" or (node.attr == "type" and getattr(node.value, "attr", None) == "device"))
        and not module.startswith("workers.kernels.")
    ]
    assert not asking


def test_one_module_alone_copies_to_and_from_a_device_without_waiting() -> None:
    """What looks like a copy that does not wait may wait for the whole stream, if the host's memory is not pinned."""
    copying = [
        f"{module} line {node.value.lineno}"
        for room in ROOMS
        for module, tree in modules(room).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "non_blocking" and module != "workers.kernels.transfer"
    ]
    assert not copying


def test_imports_in_functions_and_for_type_checkers_count() -> None:
    tree = ast.parse(
        "import workers.step\n"
        "if TYPE_CHECKING:\n    from workers.decoders.decoder import Decoder\n"
        "def load():\n    from workers import host, model_info\n    import torch\n"
    )
    assert sorted(imports("workers.example", tree)) == [
        "workers.decoders.decoder",
        "workers.host",
        "workers.model_info",
        "workers.step",
    ]


OWNERS = {
    "sequence.py": {"num_computed_tokens", "num_pending_tokens", "num_sent_blocks", "draft_token_ids", "is_paused"},
    "kv_cache_manager.py": {"block_table", "num_shared_blocks", "num_registered_blocks"},
    "plan.py": {"first_step"},
}
"""Attributes of a `Sequence` by the file of `cluster/engine/` that alone assigns them."""


@pytest.mark.parametrize("owner", OWNERS)
def test_the_state_of_a_sequence_has_one_owner(owner: str) -> None:
    found = set()
    for path in (ROOT / "cluster" / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in OWNERS[owner]:
                found.add((path.name, node.attr))
    assert found == {(owner, attribute) for attribute in OWNERS[owner]}
