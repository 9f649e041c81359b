"""The longest files run first. Files that share a server or a Ray run one after the other, and the last of them ends
it.
"""

from __future__ import annotations

import pathlib
import re
import types
from typing import Any

import pytest
import ray

from manta.cluster import own_ray
from tests import sharing

TESTS = pathlib.Path(__file__).parents[1]

STARTS = re.compile(
    r"from tests\.server import .*\bServer\b(?s:.*)(?<![\w.])Server\(|own_ray\.start\(|\bray_cluster\(|"
    r"ray\.cluster_utils|\bnamespaces\b|\"start\", \"--head\"|cli\", (?:\*\(command or \()?\"serve\""
)
"""Matches what starts a server or a Ray of a test file's own: 13 and 5 CPU seconds."""
PROVED = "make prove alone"
OWN = {
    "test_batch_cluster": PROVED,
    "test_changed_lists": PROVED,
    "test_closed_doors": "its clients attack, and one of them measures how the server bears it",
    "test_configs": "applies what configs/ has for Ray's dashboard",
    "test_docs": "the demo model under the options of the pages",
    "test_http_fuzz": PROVED,
    "test_interrupted_start": "interrupts starts",
    "test_jax_hosts": "two hosts",
    "test_joined_ray": "joins a Ray that others started",
    "test_link_cuts": PROVED,
    "test_machine_limits": PROVED,
    "test_node_autoscaling": PROVED,
    "test_node_faults": PROVED,
    "test_node_tls": PROVED,
    "test_other_systems": PROVED,
    "test_loopback": PROVED,
    "test_private_files": "looks at the files of a start",
    "test_quantised_server": PROVED,
    "test_ray_executor": "two nodes, and ranks that it kills",
    "test_resume": "kills engines and ingresses",
    "test_serve_command": "flags and prints of the command, and deaths of its engine",
    "test_serve_ranks": PROVED,
    "test_shifted_traffic": PROVED,
    "test_start_failures": "starts that fail",
    "test_start_storm": PROVED,
    "test_telemetry": PROVED,
    "test_two_applications": PROVED,
    "test_two_nodes": PROVED,
}
"""Test files that start servers or Rays of their own, and why no shared one serves."""


def items(*names: str) -> list[Any]:
    """Two tests of each file."""
    paths = [path for name in names for path in TESTS.rglob(f"test_{name}.py")]
    assert len(paths) == len(names)
    return [types.SimpleNamespace(path=path, number=number) for path in paths for number in range(2)]


def test_files_that_share_follow_the_first_one() -> None:
    found = items("faults", "kernels", "serve", "grammar_pool", "linear", "status")
    sharing.put_together(found)
    expected = items("serve", "status", "faults", "grammar_pool", "kernels", "linear")
    assert [(each.path, each.number) for each in found] == [(each.path, each.number) for each in expected]


def test_the_longest_files_start_first() -> None:
    found = items("loader", "docs", "resume", "host")
    sharing.put_together(found)
    assert [each.path.stem for each in found[::2]] == ["test_resume", "test_docs", "test_loader", "test_host"]


@pytest.mark.parametrize("name", sharing.LONGEST)
def test_each_long_file_exists_and_shares_nothing(name: str) -> None:
    assert name in sharing.NAMED or [sharing.shared_by(path) for path in TESTS.rglob(f"{name}.py")] == [None]


def test_a_shared_resource_ends_with_its_last_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_running", {})
    told: list[str] = []

    def use() -> str:
        return sharing.shared("server", lambda: told.append("starts") or "server", lambda server: told.append("ends"))

    serve, other, status, kernels = items("serve", "faults", "status", "kernels")[::2]
    assert use() == use() == "server"
    sharing.end_behind(serve, status)
    assert told == ["starts"]
    sharing.end_behind(kernels, other)
    assert told == ["starts"]
    sharing.end_behind(status, kernels)
    assert told == ["starts", "ends"]
    use()
    sharing.end_behind(serve, None)
    sharing.end_behind(serve, None)
    assert told == ["starts", "ends"] * 2


def test_a_ray_that_engines_have_started_ends_with_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next file would find its token in the environment, and `ray.init` would refuse to join another cluster."""
    ended: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(own_ray, "stop", lambda: ended.append("ray"))
    kernels, same, other = items("kernels", "linear")[:3]
    sharing.end_behind(kernels, same)
    assert not ended
    sharing.end_behind(same, other)
    assert ended == ["ray"]
    sharing.end_behind(other, None)
    assert ended == ["ray"] * 2
    pool, next_pool = items("grammar_pool", "grammar_pool_drafts")[1:3]
    sharing.end_behind(pool, next_pool)
    assert ended == ["ray"] * 2, "these files share one"


@pytest.mark.parametrize("name", sharing.NAMED)
def test_each_is_shared_by_several_files(name: str) -> None:
    assert sum(sharing.shared_by(path) == name for path in TESTS.rglob("test_*.py")) > 1


def test_each_file_that_starts_a_server_of_its_own_says_why() -> None:
    """All others share one (`NAMED`), or serve without Ray in their own process (`tests/local_server.py`)."""
    starting = {path.stem for path in TESTS.rglob("test_*.py") if STARTS.search(path.read_text())}
    assert starting - {pathlib.Path(__file__).stem} == OWN.keys()
