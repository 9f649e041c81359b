"""The compile processes: forked from one that has loaded the backends, killed at will, replaced in no time."""

from __future__ import annotations

import io
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest

from manta.structured.compiling.compile_process import Setup, forks_well
from manta.structured.compiling.compiler import Compiler, CompilerBounds, CompilerFailed
from manta.structured.constraint import ConstraintError, ConstraintLimits, ConstraintSpec, JsonObjects, Kind
from manta.structured.fair_queue import FairQueue
from manta.structured.frames import frame, read_frame
from manta.structured.refusals import QueueFull
from manta.structured.vocabulary import Vocabulary
from tests.conftest import PROVE
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("own_fork_servers")


@pytest.fixture
def compiler(demo_vocabulary: Vocabulary) -> Iterator[Compiler]:
    compiler = Compiler(demo_vocabulary, ConstraintLimits(), num_processes=1)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def demo_vocabulary() -> Vocabulary:
    folder = pathlib.Path(__file__).parents[2] / "configs" / "demo" / "target"
    return Vocabulary.load(str(folder), 4096, (0,))


forked = pytest.mark.skipif(not forks_well(), reason="nothing is forked here")


def compile_regex(compiler: Compiler, regex: str) -> bytes:
    return compiler.resolve(ConstraintSpec(kind="regex", text=regex)).result(timeout=PATIENCE_S).compiled


@pytest.mark.parametrize("keyword", ["minLength", "$dynamicRef"])
def test_what_a_loose_constraint_is_resolved_to_is_compiled_once(compiler: Compiler, keyword: str) -> None:
    value = {"minLength": 2, "$dynamicRef": "#nowhere"}[keyword]
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", keyword: value}},
        "x-guidance": {"lenient": True},
    }
    loose = ConstraintSpec(kind="lark", text=f"start: %json {json.dumps(schema)}\n", loose=True)
    resolved = compiler.resolve(loose).result(timeout=PATIENCE_S)
    assert resolved.spec.backend == "llguidance"
    assert resolved.spec.loose == (keyword == "$dynamicRef")
    again = compiler.resolve(resolved.spec).result(timeout=PATIENCE_S)
    assert (again.compiled, again.not_enforced) == (resolved.compiled, resolved.not_enforced)
    assert compiler.num_compiled == 1


@pytest.mark.parametrize("forks", [True, False])
def test_a_process_whose_parent_ends_prints_nothing(demo_vocabulary: Vocabulary, forks: bool) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "manta.structured.compiling.compile_process"]
    with theirs, ours, subprocess.Popen(command, stdin=theirs.fileno(), stderr=subprocess.PIPE) as process:
        theirs.close()
        ours.sendall(frame(msgspec.msgpack.encode(Setup(demo_vocabulary, ConstraintLimits(), JsonObjects(), forks))))
        ours.close()
        assert process.stderr is not None
        assert (process.stderr.read(), process.wait(PATIENCE_S)) == (b"", 0)


def process_tree() -> tuple[int, list[int]]:
    """The process that others are forked from, and those."""
    servers = [
        child
        for child in psutil.Process().children()
        if "manta.structured.compiling.compile_process" in child.cmdline()
    ]
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
def test_a_killed_process_is_forked_anew(compiler: Compiler) -> None:
    compile_regex(compiler, "a")
    server, (first,) = process_tree()
    kill(first)
    compile_regex(compiler, "b")
    assert process_tree()[0] == server
    assert process_tree()[1] != [first]


@forked
def test_the_forking_process_is_replaced_when_needed(compiler: Compiler) -> None:
    compile_regex(compiler, "a")
    server, (first,) = process_tree()
    kill(server)
    compile_regex(compiler, "b")  # by a process that was there
    kill(first)
    compile_regex(compiler, "c")
    assert process_tree()[0] != server


CAP_SYS_NICE = 23


def may_raise_priorities() -> bool:
    (rights,) = re.findall(r"CapEff:\s*(\w+)", pathlib.Path("/proc/self/status").read_text())
    return bool(int(rights, 16) >> CAP_SYS_NICE & 1)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE") or not may_raise_priorities(), reason="who goes there stays there")
def test_processes_run_below_everybody(compiler: Compiler) -> None:
    compile_regex(compiler, "a")
    assert os.sched_getscheduler(process_tree()[1][0]) == os.SCHED_IDLE


@forked
def test_waiting_on_a_busy_machine_is_not_counted(demo_vocabulary: Vocabulary) -> None:
    compiler = Compiler(demo_vocabulary, ConstraintLimits(compile_seconds=1.5), num_processes=1)
    compile_regex(compiler, "a")
    pid = process_tree()[1][0]
    os.kill(pid, signal.SIGSTOP)  # all of the time, here
    compiled = compiler.resolve(ConstraintSpec(kind="regex", text="b"))
    time.sleep(2.0)
    os.kill(pid, signal.SIGCONT)
    assert compiled.result(timeout=PATIENCE_S).compiled
    compiler.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the system limits no memory")
def test_a_compilation_exceeding_its_memory_is_refused(plugin: None, demo_vocabulary: Vocabulary) -> None:
    compiler = Compiler(demo_vocabulary, ConstraintLimits(compile_memory_bytes=2**27), num_processes=1)
    spec = ConstraintSpec(kind="regex", text='{"at": {"compile": "grow"}}', backend="example")
    with pytest.raises(ConstraintError, match=f"takes more than {2**27} bytes"):
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


# ---- what fails costs one constraint -------------------------------------------------------------------------------


def misbehaving(how: str) -> ConstraintSpec:
    return ConstraintSpec(kind="regex", text=json.dumps({"at": {"compile": how}}), backend="example")


def test_a_truncated_message_ends_the_stream() -> None:
    message = frame(b"abcdef")
    assert read_frame(io.BytesIO(message)) == b"abcdef"
    assert all(read_frame(io.BytesIO(message[:length])) is None for length in range(len(message)))


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("half", ConstraintError, "compiling it ended the compiler"),
        ("stall", ConstraintError, "takes more than 1 s"),
        ("garbage", CompilerFailed, "DecodeError"),
        ("quit", ConstraintError, "compiling it ended the compiler"),
    ],
)
def test_a_misbehaving_process_is_replaced(
    plugin: None, demo_vocabulary: Vocabulary, how: str, error: type[Exception], message: str
) -> None:
    limits = ConstraintLimits(compile_seconds=1.0 if how == "stall" else PATIENCE_S)
    compiler = Compiler(demo_vocabulary, limits, num_processes=1)
    try:
        with pytest.raises(error, match=message):
            compiler.resolve(misbehaving(how)).result(timeout=PATIENCE_S)
        compile_regex(compiler, "a")
        assert compiler.num_alive == 1
    finally:
        compiler.close()


HALF = "\ud800"
ESCAPED_HALF = r"\ud800"
KINDS: tuple[Kind, ...] = ("json_schema", "json_object", "regex", "choice", "lark", "ebnf", "structural_tag")


def with_halves() -> Iterator[ConstraintSpec]:
    """Half of a surrogate pair in every field and after every escape."""
    for kind in KINDS:
        yield ConstraintSpec(kind=kind, text=f"a{HALF}")
        yield ConstraintSpec(kind=kind, text="a", backend=HALF)
    yield ConstraintSpec(kind=HALF, text="a")  # type: ignore[arg-type]
    schemas = [{"const": HALF}, {"properties": {HALF: {"not": {}}}}, {"type": "string", "pattern": HALF}, {HALF: 1}]
    for schema in [*schemas, {"enum": [HALF]}, {"$ref": f"#/{HALF}"}, {"description": HALF}, {"required": [HALF]}]:
        for backend in ("auto", "llguidance", "xgrammar"):
            for loose in (False, True):
                yield ConstraintSpec(kind="json_schema", text=json.dumps(schema), backend=backend, loose=loose)
    for backend in ("auto", "llguidance", "xgrammar"):
        yield ConstraintSpec(kind="choice", text=json.dumps([HALF, "b"]), backend=backend)
    tag = {"structures": [{"begin": "<a>", "schema": {"const": HALF}, "end": HALF}], "triggers": [HALF]}
    yield ConstraintSpec(kind="structural_tag", text=json.dumps(tag))
    yield ConstraintSpec(kind="lark", text=f'start: %json {{"const": "{ESCAPED_HALF}"}}')
    yield ConstraintSpec(kind="lark", text=f'start: "{ESCAPED_HALF}"')
    yield ConstraintSpec(kind="lark", text=f'%llguidance {{"{ESCAPED_HALF}": 1}}\nstart: "a"')


@forked
def test_a_lone_surrogate_is_refused_and_harmless(compiler: Compiler) -> None:
    compile_regex(compiler, "a")
    before = process_tree()
    for spec in with_halves():
        with pytest.raises(ConstraintError) as caught:
            compiler.resolve(spec).result(timeout=PATIENCE_S)
        str(caught.value).encode()  # it can be told
    compile_regex(compiler, "b")
    assert process_tree() == before


@pytest.mark.few(4)
@forked
@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "nonsense", "text": "a"},
        {"kind": "regex", "text": 5},
        {"kind": "regex", "text": "a", "begin_after": (2**70,)},
        {"kind": "regex", "text": "a", "begin_after": [1]},
        {"kind": "regex", "text": "a", "loose": "yes"},
        {"kind": "json_schema", "text": '{"enum": []}'},
        {"kind": "json_schema", "text": json.dumps({"enum": list(range(10_001))})},
        {"kind": "choice", "text": "[]"},
        {"kind": "json_schema", "text": "[" * 100_000},
    ],
)
def test_an_invalid_constraint_is_refused_and_harmless(compiler: Compiler, fields: dict[str, Any]) -> None:
    compile_regex(compiler, "a")
    before = process_tree()
    with pytest.raises(ConstraintError):
        compiler.resolve(ConstraintSpec(**fields)).result(timeout=PATIENCE_S)
    compile_regex(compiler, "b")
    assert process_tree() == before


@forked
def test_null_characters_are_text(compiler: Compiler) -> None:
    for kind, text in (("regex", "a\0b"), ("choice", r'["a\u0000b"]'), ("json_schema", r'{"const": "a\u0000b"}')):
        spec = ConstraintSpec(kind=kind, text=text)  # type: ignore[arg-type]
        assert compiler.resolve(spec).result(timeout=PATIENCE_S).spec.text == text


@forked
def test_terminal_interrupts_do_not_reach_compilers(compiler: Compiler) -> None:
    compile_regex(compiler, "a")
    before = server, processes = process_tree()
    for pid in (server, *processes):
        os.kill(pid, signal.SIGINT)
    compile_regex(compiler, "b")
    assert process_tree() == before


def test_a_compiler_that_fails_to_start_is_retried(
    demo_vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/nowhere/python")
        compiler = Compiler(demo_vocabulary, ConstraintLimits(), bounds=CompilerBounds(retry_seconds=0.1))
        with pytest.raises(CompilerFailed, match="does not start"):
            compile_regex(compiler, "a")
        wait_until(lambda: compiler.num_alive == 0)
    try:
        wait_until(lambda: compiler.num_alive == compiler.num_processes == 2)
        compile_regex(compiler, "a")  # the failure was not remembered as a refusal
    finally:
        compiler.close()


def test_refusals_are_remembered_within_a_bound(demo_vocabulary: Vocabulary) -> None:
    bounds = CompilerBounds(refusal_bytes=100_000)
    compiler = Compiler(demo_vocabulary, ConstraintLimits(), num_processes=1, bounds=bounds)
    try:
        for index in range(5):
            with pytest.raises(ConstraintError) as caught:
                compile_regex(compiler, "a" * 40_000 + str(index) + "(")
            assert len(caught.value.refusal.cause) <= 2000
        assert 0 < compiler.refusals.num_bytes <= 100_000
    finally:
        compiler.close()


# ---- clients that share it -------------------------------------------------------------------------------------------


def slow(number: int) -> ConstraintSpec:
    """Takes as long as it may."""
    return ConstraintSpec(
        kind="regex", text=json.dumps({"at": {"compile": "hang"}, "number": number}), backend="example"
    )


def test_abandoned_constraints_are_not_compiled(plugin: None, demo_vocabulary: Vocabulary) -> None:
    """Neither what waits nor what is under way: those would take hours here."""
    compiler = Compiler(demo_vocabulary, ConstraintLimits(compile_seconds=3600.0), num_processes=1)
    try:
        compile_regex(compiler, "a")
        left = [compiler.resolve(slow(number)) for number in range(3)]
        time.sleep(0.5)  # the first is under way
        assert all(future.cancel() for future in left)
        compile_regex(compiler, "b")
        assert compiler.num_compiled == 2
        assert not compiler._jobs
    finally:
        compiler.close()


def test_leaving_takes_nothing_from_other_waiters(plugin: None, demo_vocabulary: Vocabulary) -> None:
    compiler = Compiler(demo_vocabulary, ConstraintLimits(compile_seconds=1.0), num_processes=1)
    try:
        leaving, staying = compiler.resolve(slow(0)), compiler.resolve(slow(0))
        assert leaving.cancel()
        with pytest.raises(ConstraintError, match="takes more than 1 s"):
            staying.result(timeout=PATIENCE_S)
    finally:
        compiler.close()


def test_one_client_cannot_occupy_everything(plugin: None, demo_vocabulary: Vocabulary) -> None:
    compiler = Compiler(demo_vocabulary, ConstraintLimits(compile_seconds=3600.0, max_waiting=8), num_processes=2)
    try:
        crowd = [compiler.resolve(slow(number), "crowd") for number in range(9)]
        wait_until(lambda: sum(future.done() for future in crowd) >= 2)
        refused = [future for future in crowd if future.done()]
        with pytest.raises(QueueFull, match=r"6 constraints wait.* the limit is 6; .*constraints\.max_waiting"):
            refused[0].result()
        quick = ConstraintSpec(kind="regex", text="a")
        assert compiler.resolve(quick, "other").result(timeout=PATIENCE_S).compiled
        for future in crowd:
            future.cancel()
    finally:
        compiler.close()


def test_clients_take_turns_and_each_keeps_its_order() -> None:
    queue: FairQueue[int] = FairQueue(num_takers=2, max_waiting=100)
    for number in range(3):
        queue.put("a", number)
    queue.put("b", 10)
    assert queue.take() == ("a", 0)
    assert queue.take() == ("b", 10)
    with pytest.raises(TimeoutError):  # the second process stays for others
        queue.take(timeout_s=0.01)
    queue.put("", 20)
    queue.put("", 21)
    assert [queue.take(), queue.take()] == [("", 20), ("", 21)], "who shares with nobody is not held back"
    queue.done("a")
    assert queue.take() == ("a", 1)
    queue.close()
    queue.done("a")
    assert queue.take() == ("a", 2)
    queue.done("a")
    assert queue.take() is None


def test_refusals_of_long_constraints_take_little_memory(demo_vocabulary: Vocabulary) -> None:
    """What is remembered is bounded: neither their texts nor messages that repeat them."""
    compiler = Compiler(demo_vocabulary, ConstraintLimits(), num_processes=1)
    try:
        for number in range(2):
            text = "(" + "a" * (500_000 if PROVE else 100_000) + str(number)
            with pytest.raises(ConstraintError) as caught:
                compiler.resolve(ConstraintSpec(kind="regex", text=text)).result(timeout=PATIENCE_S)
            assert len(caught.value.refusal.cause) <= 2000
        assert len(compiler.refusals) == 2
        assert compiler.refusals.num_bytes < 2 * 4000
        assert not [key for key in compiler.refusals._entries if len(key) > 32]
    finally:
        compiler.close()
