"""The compile processes: forked from one that has loaded the backends, killed at will, replaced in no time."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from structured.compiler import Compiler, _forks_well
from structured.constraint import ConstraintError, ConstraintLimits, ConstraintSpec
from structured.vocabulary import Vocabulary

PATIENCE_S = 60.0


@pytest.fixture
def compiler(demo_vocabulary: Vocabulary) -> Iterator[Compiler]:
    compiler = Compiler(demo_vocabulary, ConstraintLimits(), num_processes=1)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def demo_vocabulary() -> Vocabulary:
    folder = pathlib.Path(__file__).parents[1] / "configs" / "demo" / "target"
    return Vocabulary.load(str(folder), 4096, (0,))


forked = pytest.mark.skipif(not _forks_well(), reason="nothing is forked here")


def compile_regex(compiler: Compiler, regex: str) -> bytes:
    return compiler.resolve(ConstraintSpec(kind="regex", text=regex)).result(timeout=PATIENCE_S).compiled


def process_tree() -> tuple[int, list[int]]:
    """The process that others are forked from, and those."""
    servers = [child for child in psutil.Process().children() if "structured.compile_process" in child.cmdline()]
    newest = max(servers, key=lambda server: server.create_time())  # engines of earlier tests may have left theirs
    return newest.pid, [child.pid for child in newest.children()]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@forked
def test_a_process_that_is_killed_is_forked_anew_and_nothing_is_refused(compiler: Compiler) -> None:
    compile_regex(compiler, "a")
    server, (first,) = process_tree()
    kill(first)
    compile_regex(compiler, "b")
    assert process_tree()[0] == server
    assert process_tree()[1] != [first]


@forked
def test_the_process_that_forks_is_replaced_where_it_is_needed_again(compiler: Compiler) -> None:
    compile_regex(compiler, "a")
    server, (first,) = process_tree()
    kill(server)
    compile_regex(compiler, "b")  # by a process that was there
    kill(first)
    compile_regex(compiler, "c")
    assert process_tree()[0] != server


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="no such priority here")
def test_processes_run_below_everybody(compiler: Compiler) -> None:
    compile_regex(compiler, "a")
    assert os.sched_getscheduler(process_tree()[1][0]) == os.SCHED_IDLE


@pytest.mark.skipif(sys.platform != "linux", reason="the system limits no memory")
def test_a_compilation_that_needs_too_much_memory_is_refused_and_the_next_one_is_not(
    plugin: None, demo_vocabulary: Vocabulary
) -> None:
    compiler = Compiler(demo_vocabulary, ConstraintLimits(compile_memory_bytes=2**27), num_processes=1)
    spec = ConstraintSpec(kind="regex", text='{"at": {"compile": "grow"}}', backend="example")
    with pytest.raises(ConstraintError, match=f"needs more than {2**27} bytes"):
        compiler.resolve(spec).result(timeout=PATIENCE_S)
    compile_regex(compiler, "a")
    compiler.close()


@forked
def test_closing_ends_them_all(demo_vocabulary: Vocabulary) -> None:
    compiler = Compiler(demo_vocabulary, ConstraintLimits(), num_processes=2)
    with pytest.raises(ConstraintError):
        compile_regex(compiler, "a(")
    server, processes = process_tree()
    compiler.close()
    deadline = time.monotonic() + PATIENCE_S
    while any(is_running(pid) for pid in (server, *processes)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
