"""On `PYTHONPATH`, it takes from a process, and from those that it starts, what only Linux has.

Python imports it before anything else. `tests/house/test_other_systems.py` does real work then.
"""

from __future__ import annotations

import builtins
import io
import mmap
import os
import resource
import signal
import socket
from typing import Any

import psutil

ONLY_LINUX = {
    os: ("sched_", "SCHED_", "memfd_create", "MFD_", "pidfd_open", "eventfd", "splice", "posix_fad"),
    mmap: ("MADV_",),
    signal: ("pidfd_send_signal", "sigwaitinfo", "sigtimedwait"),
    socket: ("send_fds", "recv_fds", "SO_PEERCRED", "SO_REUSEPORT", "SOCK_CLOEXEC", "SOCK_NONBLOCK"),
    resource: ("RLIMIT_AS", "prlimit"),
}


def _without_proc(function: Any) -> Any:
    def call(path: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and str(path).startswith(("/proc/", "/sys/fs/")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *arguments, **options)

    return call


for module, prefixes in ONLY_LINUX.items():
    for name in dir(module):
        if name.startswith(prefixes):
            delattr(module, name)
# psutil knows other systems by other means, which are not here: it finds the same files under another spelling.
psutil.PROCFS_PATH = "//proc"
builtins.open = io.open = _without_proc(io.open)
os.stat = _without_proc(os.stat)
