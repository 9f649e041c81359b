"""What this process may use of its machine: cores and memory, a container's share of them included.

Asked by the CPU platform, by who deploys engines and by `manta check`, so that all plan with the same figures. Linux
tells most; what a system does not tell is taken to be unlimited.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil

PROCESS_GROUPS = pathlib.Path("/proc/self/cgroup")
GROUPS = pathlib.Path("/sys/fs/cgroup")
"""Where Linux tells a process's control groups, and where their limits are."""


def num_cores() -> int:
    """Cores that threads of this process run on at a time: at least 1.

    A container with half a core more gets no thread for it: threads of one step wait for each other, and for the one
    that used up its quota too. The rest serves the processes beside the engine.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = _performance_cores() or os.cpu_count() or 1
    quotas = [quota for group in _groups("cpu") if (quota := _quota(group)) is not None]
    return max(1, min([cores, *map(int, quotas)]))


def free_memory() -> int:
    """Bytes that this process may still take without swapping, or being killed by its container's limit."""
    left = [rest for group in _groups("memory") if (rest := _memory_left(group)) is not None]
    return max(0, min([psutil.virtual_memory().available, *left]))


def identity() -> int:
    """A number that processes of one machine, or of one container, have in common and others do not; 63 bits."""
    boot = _read(pathlib.Path("/proc/sys/kernel/random/boot_id")) or str(psutil.boot_time())
    digest = hashlib.sha256(f"{boot} {socket.gethostname()}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _performance_cores() -> int | None:
    """Of Apple silicon, whose other cores are slower by so much that every step would wait for them."""
    if sys.platform != "darwin":
        return None
    command = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # an Intel Mac
        return None
    return int(answer) if answer.strip().isdigit() else None


def _groups(controller: str) -> Iterator[pathlib.Path]:
    """Folders of this process's control group and of those above it, each of which may set a limit; versions 1 and 2.

    Inside a container the path may be the host's, which is not there: the topmost folder is the container's own then.
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
    """Cores; None without a limit, which is written "max" or -1."""
    if (both := _read(group / "cpu.max")) is not None:
        quota, _, period = both.partition(" ")
    else:
        quota, period = (_read(group / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _memory_left(group: pathlib.Path) -> int | None:
    """Bytes; pages of files that nobody used lately count as free, as they do for the machine."""
    limit = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes") or ""
    used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes") or ""
    if not (limit.isdigit() and used.isdigit()):
        return None
    counts = dict(line.split(" ", 1) for line in (_read(group / "memory.stat") or "").splitlines())
    return int(limit) - int(used) + int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))


def _read(path: pathlib.Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
