"""The cores and memory that this process may use, within its container's limits.

The CPU platform, the deployment of engines and `manta check` plan with them. A limit that the system does not report
counts as none.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil

PROCESS_GROUPS = pathlib.Path("/proc/self/cgroup")
"""The file in which Linux lists a process's control groups."""
GROUPS = pathlib.Path("/sys/fs/cgroup")
"""The folder of the groups' limits."""


def num_cores() -> int:
    """Returns the number of cores on which threads of this process may run at a time, at least 1.

    A container's quota is rounded down: the threads of a step wait for each other, so one with half a core would delay
    all. The rest of the quota serves other processes than the engine.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = _performance_cores() or os.cpu_count() or 1
    quotas = [quota for group in _groups("cpu") if (quota := _quota(group)) is not None]
    return max(1, min([cores, *map(int, quotas)]))


def free_memory() -> int:
    """Returns the bytes that this process may still allocate without swapping or exceeding a limit: its container's, or
    its own (`ulimit -v`).
    """
    left = [rest for group in _groups("memory") if (rest := _memory_left(group)) is not None]
    return max(0, min([psutil.virtual_memory().available, _address_space_left(), *left]))


def give_back_freed_memory() -> None:
    """Has the C library give back to the system what this process has freed, where it can (glibc). What lies between
    memory that is still in use would stay with the process.
    """
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@functools.cache
def _c_library() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def address_space_limit() -> int | None:
    """Returns the bytes of address space that this process, and each one that it starts, may have (`ulimit -v`); None
    without a limit.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0] if hasattr(resource, "RLIMIT_AS") else resource.RLIM_INFINITY
    return None if limit == resource.RLIM_INFINITY else limit


def identity() -> int:
    """Returns a 63-bit number that is the same for all processes of one machine or container."""
    boot = _read(pathlib.Path("/proc/sys/kernel/random/boot_id")) or str(psutil.boot_time())
    digest = hashlib.sha256(f"{boot} {socket.gethostname()}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _performance_cores() -> int | None:
    """Returns the number of performance cores on Apple silicon, else None. Slower cores would delay every step."""
    if sys.platform != "darwin":
        return None
    command = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # an Intel Mac
        return None
    return int(answer) if answer.strip().isdigit() else None


def _groups(controller: str) -> Iterator[pathlib.Path]:
    """Yields the cgroup folders of this process and of its ancestors, each of which may set a limit (v1 and v2).

    Inside a container the path may be the host's, whose folders do not exist there. The topmost folder is then the
    container's own.
    """
    for line in (_read(PROCESS_GROUPS) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = GROUPS / controller if controllers else GROUPS
        parts = pathlib.PurePosixPath(path).parts[1:]
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth])


def _quota(group: pathlib.Path) -> float | None:
    """Returns the group's quota in cores; None without a limit, which the file states as "max" or -1."""
    if (both := _read(group / "cpu.max")) is not None:
        quota, _, period = both.partition(" ")
    else:
        quota, period = (_read(group / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _memory_left(group: pathlib.Path) -> int | None:
    """Returns the bytes left under the group's limit, or None without one. Inactive file pages count as free.

    Beyond `memory.high` the system ends nothing, but it slows every process of the group down until it has swapped.
    """
    limits = [_read(group / name) or "" for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    bounds = [int(limit) for limit in limits if limit.isdigit()]
    used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes") or ""
    if not (bounds and used.isdigit()):
        return None
    counts = dict(line.split(" ", 1) for line in (_read(group / "memory.stat") or "").splitlines())
    return min(bounds) - int(used) + int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))


def _address_space_left() -> int:
    """Returns the bytes of address space that are left to this process; without a limit more than any memory has."""
    limit = address_space_limit()
    return sys.maxsize if limit is None else limit - psutil.Process().memory_info().vms


def _read(path: pathlib.Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
