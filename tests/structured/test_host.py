"""Cores and free memory: a container's limits count, in both forms of control groups, and other systems have none."""

from __future__ import annotations

import os
import pathlib
import resource
import stat
import subprocess
import sys

import psutil
import pytest

from manta.cluster.llm import LLM, SamplingParams
from manta.structured import host
from tests.checkpoints import checkpoint

GIB = 2**30


@pytest.fixture
def groups(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty tree of control groups, on a machine of 64 cores and 100 GiB."""
    monkeypatch.setattr(host, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host, "PROCESS_GROUPS", tmp_path / "self")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    memory = psutil.virtual_memory()._replace(available=100 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return tmp_path / "cgroup"


def write(folder: pathlib.Path, **files: str | int) -> None:
    """File names with "__" for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def belongs_to(groups: pathlib.Path, text: str) -> None:
    (groups.parent / "self").write_text(text)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 64), ("200000 100000", 2), ("350000 100000", 3), ("50000 100000", 1), ("9999999 100000", 64)],
)
def test_a_quota_of_version_2_bounds_the_cores(groups: pathlib.Path, quota: str, expected: int) -> None:
    belongs_to(groups, "0::/\n")
    write(groups, cpu__max=quota)
    assert host.num_cores() == expected


def test_the_tightest_group_above_the_process_counts(groups: pathlib.Path) -> None:
    belongs_to(groups, "0::/kubepods/pod7/container\n")
    write(groups / "kubepods" / "pod7" / "container", cpu__max="max 100000", memory__max="max", memory__current=GIB)
    write(groups / "kubepods" / "pod7", cpu__max="400000 100000", memory__max=8 * GIB, memory__current=3 * GIB)
    write(groups / "kubepods", cpu__max="800000 100000", memory__max=50 * GIB, memory__current=4 * GIB)
    assert host.num_cores() == 4
    assert host.free_memory() == 5 * GIB


def test_memory_beyond_which_a_group_is_slowed_down_counts(groups: pathlib.Path) -> None:
    """Kubernetes' memory QoS and `systemd-run -p MemoryHigh` set it, beside a larger limit or alone."""
    belongs_to(groups, "0::/user/manta\n")
    write(groups / "user" / "manta", memory__high=3 * GIB, memory__max=4 * GIB, memory__current=GIB)
    assert host.free_memory() == 2 * GIB
    write(groups / "user" / "manta", memory__max="max")
    assert host.free_memory() == 2 * GIB
    write(groups / "user" / "manta", memory__high="max")
    assert host.free_memory() == 100 * GIB


def test_a_limit_of_address_space_counts(groups: pathlib.Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert host.free_memory() == 100 * GIB
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * GIB, before[1]))
    try:
        assert GIB < host.free_memory() < 3 * GIB
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_cgroup_v1_limits_count_wherever_seen(groups: pathlib.Path) -> None:
    """The path is the host's; the container's own group is at the top."""
    belongs_to(groups, "7:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n")
    write(groups / "cpu", cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    statistics = f"cache 5\ntotal_inactive_file {GIB}"
    write(groups / "memory", memory__limit_in_bytes=6 * GIB, memory__usage_in_bytes=4 * GIB, memory__stat=statistics)
    assert host.num_cores() == 2
    assert host.free_memory() == 3 * GIB
    write(groups / "cpu", cpu__cfs_quota_us=-1)
    write(groups / "memory", memory__limit_in_bytes=9223372036854771712)
    assert host.num_cores() == 64
    assert host.free_memory() == 100 * GIB


def test_without_control_groups_the_machine_counts(groups: pathlib.Path) -> None:
    assert host.num_cores() == 64
    assert host.free_memory() == 100 * GIB


def test_without_affinity_every_core_counts(groups: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert host.num_cores() == 12


@pytest.mark.parametrize(("answer", "expected"), [("echo 4", 4), ("exit 1", 10)])
def test_of_apple_silicon_the_performance_cores_count(
    answer: str, expected: int, groups: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    monkeypatch.setattr("sys.platform", "darwin")
    sysctl = groups.parent / "sysctl"
    sysctl.write_text(f"#!/bin/sh\n{answer}\n")
    sysctl.chmod(sysctl.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(groups.parent), prepend=os.pathsep)
    assert host.num_cores() == expected


def test_an_engine_works_without_affinity_and_madvise(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_some() -> list[int]:
        llm = LLM(str(checkpoint("llama")), dtype="float32", kv_cache_bytes=2**22)
        return llm.generate(["one two three"], SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].token_ids

    expected = write_some()
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for name in ("MADV_HUGEPAGE", "MADV_WILLNEED", "MADV_DONTNEED"):
        monkeypatch.delattr(f"mmap.{name}", raising=False)
    assert write_some() == expected


def test_processes_of_one_machine_know_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    here = host.identity()
    command = [sys.executable, "-c", "from manta.structured import host; print(host.identity())"]
    assert int(subprocess.run(command, capture_output=True, check=True).stdout) == here
    assert 0 <= here < 2**63
    monkeypatch.setattr("socket.gethostname", lambda: "another container")
    assert host.identity() != here
