"""Where a system lacks what only Linux has, everything still works: real work with `tests/other_system` in the way."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from manta.cluster.llm import LLM, ConstraintSpec, SamplingParams
from manta.structured.compiling.compiler import Compiler
from manta.structured.constraint import ConstraintError, ConstraintLimits
from manta.structured.masks import BufferShape, MaskBuffer
from manta.structured.vocabulary import Vocabulary
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S
from tests.processes import running_below
from tests.server import Server

OTHER_SYSTEM = pathlib.Path(__file__).parents[1] / "other_system"

OPTIONS = {"dtype": "float32", "kv_cache_bytes": 2**22, "num_threads": 1}
REGEX = "(ab|cde){2,5}x"

WORK = """
import json, mmap, os, signal, socket, sys
for module, name in ((os, "sched_getaffinity"), (mmap, "MADV_HUGEPAGE"), (os, "memfd_create"), (socket, "send_fds")):
    assert not hasattr(module, name), name
assert not os.path.exists("/proc/self/statm")
from manta.cluster import own_ray
from manta.cluster.llm import LLM, ConstraintSpec, SamplingParams
folder, options, regex, form = json.loads(sys.argv[1])
if form == "actors":
    own_ray.start()
llm = LLM(folder, **options, grammar_pool={"form": form}, constraints={"compile_seconds": 60.0})
constrained = SamplingParams(seed=3, max_tokens=40, constraint=ConstraintSpec(kind="regex", text=regex))
outputs = llm.generate(["one two", "three"], [SamplingParams(temperature=0, max_tokens=20), constrained])
if form == "actors":
    own_ray.stop()
print(json.dumps([output.outputs[0].text for output in outputs]))
"""

pytestmark = pytest.mark.usefixtures("own_fork_servers")


@pytest.fixture
def other_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """For processes that are started from now on."""
    root = str(pathlib.Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(OTHER_SYSTEM), root]))


@pytest.mark.parametrize("form", ["threads", pytest.param("actors", marks=pytest.mark.prove)])
def test_thread_and_actor_masks_give_the_same_text(other_system: None, form: str) -> None:
    folder = str(checkpoint("llama"))
    arguments = json.dumps([folder, OPTIONS, REGEX, form])
    done = subprocess.run([sys.executable, "-c", WORK, arguments], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    llm = LLM(folder, **OPTIONS, constraints={"compile_seconds": 60.0})
    constrained = SamplingParams(seed=3, max_tokens=40, constraint=ConstraintSpec(kind="regex", text=REGEX))
    here = llm.generate(["one two", "three"], [SamplingParams(temperature=0, max_tokens=20), constrained])
    assert json.loads(done.stdout.splitlines()[-1]) == [output.outputs[0].text for output in here]


@pytest.mark.prove
def test_a_server_starts_and_answers(other_system: None) -> None:
    server = Server()
    try:
        body = {"model": server.model, "prompt": "one", "max_tokens": 30, "structured_outputs": {"regex": REGEX}}
        status, _, reply = server.post("/v1/completions", body)
        assert status == 200
        assert set(reply["choices"][0]["text"]) <= set("abcdex")
    finally:
        server.stop()


# ---- compile processes -----------------------------------------------------------------------------------------------


@pytest.fixture
def others() -> list[psutil.Process]:
    """Compile processes of engines that earlier tests left to the garbage collector."""
    return compile_processes()


@pytest.fixture
def compiler(
    other_system: None, plugin: None, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Compiler]:
    monkeypatch.delattr("socket.send_fds")
    monkeypatch.delattr("os.sched_setscheduler", raising=False)
    limits = ConstraintLimits(compile_seconds=PATIENCE_S, compile_memory_bytes=2**26)
    compiler = Compiler(vocabulary, limits, num_processes=1)
    yield compiler
    compiler.close()


def compile_regex(compiler: Compiler, regex: str, backend: str = "auto") -> bytes:
    spec = ConstraintSpec(kind="regex", text=regex, backend=backend)
    return compiler.resolve(spec).result(timeout=PATIENCE_S).compiled


def compile_processes() -> list[psutil.Process]:
    return running_below(None, "compile")


def test_without_forks_compile_processes_start_individually(others: list[psutil.Process], compiler: Compiler) -> None:
    compile_regex(compiler, "a")
    (first,) = set(compile_processes()) - set(others)
    assert first.ppid() == os.getpid()
    first.kill()
    first.wait(PATIENCE_S)
    compile_regex(compiler, "b")
    (second,) = set(compile_processes()) - set(others)
    assert second.pid != first.pid
    compiler.close()
    deadline = time.monotonic() + PATIENCE_S
    while set(compile_processes()) - set(others):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_unlimited_compilations_memory_is_watched(compiler: Compiler) -> None:
    compile_regex(compiler, "a")
    with pytest.raises(ConstraintError) as caught:
        compile_regex(compiler, json.dumps({"at": {"compile": "grow"}}), backend="example")
    assert (caught.value.refusal.kind, caught.value.refusal.bound) == ("over_budget", 2**26)
    compile_regex(compiler, "b")  # by another process


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacks", ["memfd_create", "its permission"])
def test_without_memfd_masks_are_shared_by_file(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(name)

    if lacks == "memfd_create":
        monkeypatch.delattr("os.memfd_create", raising=False)
    else:
        monkeypatch.setattr("os.memfd_create", refuse, raising=False)
    buffer = MaskBuffer(BufferShape(3, 5, 2), shared=True)
    path = pathlib.Path(buffer.shape.path or "")
    other = MaskBuffer(buffer.shape)
    other.rows[2, 4] = 77
    assert buffer.rows[2, 4] == 77
    assert path.is_file()
    buffer.close()
    assert not path.exists()
