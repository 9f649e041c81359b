"""A live server and a Ray that the tests of several files share, who ends them, and in which order files run.

Both take many seconds to start. A file shares one by naming the function or the fixture that starts it. The files that
share one run one after the other, under xdist in the same worker, and it ends after the last of them. That saves starts
and nothing else: a test passes alone and in any order, because whoever finds nothing running starts it. Files that read
the syntax trees of all modules run together too, because a process parses them once. So do files whose packages take
seconds to import, or, as JAX, to compile each operation at its first use.
"""

from __future__ import annotations

import functools
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

NAMED = {
    "server": re.compile(r"\bshared_server\("),
    "ray": re.compile(r"\b(local_ray|make_pool)\b"),
    "syntax trees": re.compile(r"syntax_trees import .*\bmodules\b"),
    "jax": re.compile(r"\b(manta|tests)\.workers\.jax_worker\b"),
    "litellm and sentence-transformers": re.compile(r"\bimport litellm\b|\bsentence[-_]transformers\b"),
}
"""Maps a shared thing to a pattern: the text of each test file that shares it matches."""

LONGEST = (
    "server", "test_resume", "ray", "test_ray_executor", "test_batch", "jax", "litellm and sentence-transformers",
    "test_triton_launches", "test_tensor_parallel", "test_docs", "test_closed_doors", "test_quantized_linear",
    "test_layer_kinds", "test_playground", "test_models", "test_kernels", "test_triton_kernels", "test_serve_command",
    "test_fuzz", "test_interrupted_start", "test_joined_ray", "test_recurrent_engine",
    "test_hostile_text", "test_start_failures", "test_strangers", "test_layer_kinds_engine", "test_config_keys",
    "test_device_seam", "test_constraint_bounds", "test_constrained_drafts", "test_round_trips",
    "test_constrained_schemas", "test_mixers_engine", "test_guarded_distribution", "test_compiler", "test_deadlines",
    "test_quantised_formats", "test_overlap", "test_kv_groups", "test_engine", "test_linear",
)  # fmt: skip
"""The files that cost more than about 6 CPU seconds, and names of `NAMED`, dearest first (`tests/costs.py`). They
start first, because one that started last would keep one process busy while the others have nothing left to do.
"""

_running: dict[str, tuple[Any, Callable[[], None]]] = {}
"""Maps a name to what runs under it and to the function that ends it."""


def shared(name: str, start: Callable[[], T], stop: Callable[[T], None]) -> T:
    """Returns what runs under a name, and calls `start` if nothing does. `stop` is called with it at the end."""
    if name not in _running:
        started = start()
        _running[name] = started, functools.partial(stop, started)
    return _running[name][0]


def end(name: str) -> None:
    """Ends what runs with this name, if anything does."""
    if name in _running:
        _, stop = _running.pop(name)
        stop()


@functools.cache
def shared_by(path: pathlib.Path) -> str | None:
    """Returns the name of what a test file shares; None if it shares nothing."""
    text = path.read_text()
    return next((name for name, pattern in NAMED.items() if pattern.search(text)), None)


def put_together(items: list[pytest.Item]) -> None:
    """Orders tests so that the longest files come first, and files that share something follow the first of them."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    first: dict[str, tuple[int, int]] = {}
    places = []
    for place, item in enumerate(items):
        name = shared_by(item.path)
        rank = ranks.get(name or item.path.stem, len(ranks))
        places.append(first.setdefault(name or str(item.path), (rank, place)))
    items[:] = [item for _, item in sorted(zip(places, items, strict=True), key=lambda each: each[0])]


def end_behind(item: pytest.Item, next_item: pytest.Item | None) -> None:
    """Ends what the file of a test shares, unless the file of the next test shares it too. Also ends a Ray that engines
    of this process have started: no file finds another's, whose token is in the environment.
    """
    if next_item is not None and next_item.path == item.path:
        return
    name = shared_by(item.path)
    goes_on = name is not None and next_item is not None and shared_by(next_item.path) == name
    if name is not None and not goes_on:
        end(name)
    if not (goes_on and name == "ray"):
        _end_ray()


def _end_ray() -> None:
    if "ray" not in sys.modules:
        return
    import ray

    from manta.cluster import own_ray

    if ray.is_initialized():
        own_ray.stop()


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Makes xdist's scheduler. It gives a whole file, and all files that share one thing, to the same worker."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return shared_by(config.rootpath / file) or file

    return Scheduling(config, log)
