"""The compile processes: forked from one that has loaded the backends, killed at will, replaced in no time."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Iterator

import pytest

from structured.compiler import Compiler
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


def compile_regex(compiler: Compiler, regex: str) -> bytes:
    return compiler.resolve(ConstraintSpec(kind="regex", text=regex)).result(timeout=PATIENCE_S).compiled


def children(pid: int) -> list[int]:
    """Of all its threads."""
    lists = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for children in lists for child in children.read_text().split()]


def process_tree() -> tuple[int, list[int]]:
    """The process that others are forked from, and those."""
    servers = [child for child in children(os.getpid()) if b"structured.compile_process" in command_line(child)]
    assert len(servers) == 1
    return servers[0], children(servers[0])


def command_line(pid: int) -> bytes:
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while (
        pathlib.Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_is_killed_is_forked_anew_and_nothing_is_refused(compiler: Compiler) -> None:
    compile_regex(compiler, "a")
    server, (first,) = process_tree()
    kill(first)
    compile_regex(compiler, "b")
    assert process_tree()[0] == server
    assert process_tree()[1] != [first]


def test_the_process_that_forks_is_replaced_where_it_is_needed_again(compiler: Compiler) -> None:
    compile_regex(compiler, "a")
    server, (first,) = process_tree()
    kill(server)
    compile_regex(compiler, "b")  # by a process that was there
    kill(first)
    compile_regex(compiler, "c")
    assert process_tree()[0] != server


def test_processes_run_below_everybody(compiler: Compiler) -> None:
    compile_regex(compiler, "a")
    assert os.sched_getscheduler(process_tree()[1][0]) == os.SCHED_IDLE


def test_closing_ends_them_all(demo_vocabulary: Vocabulary) -> None:
    compiler = Compiler(demo_vocabulary, ConstraintLimits(), num_processes=2)
    with pytest.raises(ConstraintError):
        compile_regex(compiler, "a(")
    server, processes = process_tree()
    compiler.close()
    deadline = time.monotonic() + PATIENCE_S
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in (server, *processes)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
