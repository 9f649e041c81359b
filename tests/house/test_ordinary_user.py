"""A user who may do what users may: lower a priority, and not raise it, as Linux has it (sched(7))."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOT_ROOT = ["setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice"] if os.geteuid() == 0 else []

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or (bool(NOT_ROOT) and shutil.which("setpriv") is None),
    reason="needs Linux, and setpriv (util-linux) to run as root without its rights",
)

AT_RAYS_NICENESS = """
import asyncio, os, sys, threading

import psutil

from manta.cluster.http.exchange.prompts import encode
from manta.cluster.text.tokenizer import LONG_TEXT, Tokenizer
from manta.structured.compiling.compiler import Compiler
from manta.structured.constraint import ConstraintLimits, ConstraintSpec
from manta.structured.low_priority import call_aside
from manta.structured.vocabulary import Vocabulary

os.nice(15)
assert call_aside(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) == 19
folder = sys.argv[1]
text = "a word or two " * LONG_TEXT
assert len(asyncio.run(encode(Tokenizer(folder), text, False, len(text), "prompt"))) > LONG_TEXT
compiler = Compiler(Vocabulary.load(folder, 4096, (0,)), ConstraintLimits(), num_processes=1)
compiler.resolve(ConstraintSpec(kind="regex", text="a+")).result(timeout=1500)
policies = [os.sched_getscheduler(child.pid) for child in psutil.Process().children(recursive=True)]
assert policies and set(policies) == {os.SCHED_OTHER}, policies
compiler.close()
"""


def test_long_work_gets_time_at_ray_workers_niceness() -> None:
    """A thread may not be set to a niceness below that; a process at idle priority would stay there for good."""
    folder = ROOT / "configs" / "demo" / "target"
    command = [*NOT_ROOT, sys.executable, "-c", AT_RAYS_NICENESS, str(folder)]
    # In a session of its own, which Linux gives a share of its own (sched(7), autogroups), and with much time: beside
    # four busy programs it would get a hundredth of a core.
    subprocess.run(command, cwd=ROOT, check=True, timeout=1600, start_new_session=True)
