"""Adapters in memory that the engines of a node share: packed once, freed with the last engine, never other values."""

from __future__ import annotations

import gc
import os
import pathlib
import resource
import subprocess
import sys

import pytest
import torch

from manta.cluster.llm import LLM, SamplingParams
from manta.workers.kernels.packed_files import HUGE_PAGE
from manta.workers.kernels.shared_weights import share_tensors
from tests.adapters import merged, write_adapter
from tests.checkpoints import checkpoint, reference_greedy
from tests.workers.test_shared_weights import ROOT, files, needs_shared_weights

pytestmark = needs_shared_weights

PROMPT = [30 + 7 * place % 280 for place in range(40)]
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MOST_BYTES = 1.1
"""Memory of a shared adapter beside the bytes of its values."""
ENGINE = """
import sys
from manta.cluster.llm import LLM
llm = LLM(sys.argv[1], dtype="float32", num_threads=1, adapters={"a": sys.argv[2]})
print("ready", flush=True)
sys.stdin.readline()
"""


def engine(adapter: pathlib.Path | None = None) -> LLM:
    adapters = {} if adapter is None else {"a": str(adapter)}
    return LLM(str(checkpoint("llama")), dtype="float32", num_threads=1, adapters=adapters)


def tokens(llm: LLM) -> list[int]:
    (answer,) = llm.generate([PROMPT], GREEDY, use_tqdm=False, adapter="a")
    return answer.outputs[0].token_ids


def allocated(inode: int, process: int | str = "self") -> int:
    """Returns the bytes of memory that a shared file of a process takes."""
    for path in pathlib.Path(f"/proc/{process}/fd").iterdir():
        if path.exists() and path.stat().st_ino == inode:
            return path.stat().st_blocks * 512
    raise AssertionError("the process does not have it")


@pytest.fixture
def adapter(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_adapter(checkpoint("llama"), tmp_path / "adapter", MODULES, 32)


def test_engines_of_a_node_hold_an_adapter_once(adapter: pathlib.Path, tmp_path: pathlib.Path) -> None:
    expected = reference_greedy(merged(checkpoint("llama"), adapter, tmp_path / "merged"), PROMPT, NUM_TOKENS)
    plain = engine()
    before = files()
    first = engine(adapter)
    (of_adapter,) = files() - before
    second = engine(adapter)
    assert files() - before == {of_adapter}
    num_bytes = first.engine.model.adapters["a"].num_bytes
    assert num_bytes <= allocated(of_adapter) <= MOST_BYTES * num_bytes
    assert tokens(first) == expected
    del first
    gc.collect()
    assert files() - before == {of_adapter}
    assert tokens(second) == expected
    del second
    gc.collect()
    assert not files() - before
    del plain


@pytest.mark.prove
def test_an_engine_of_another_process_reads_the_same_memory(adapter: pathlib.Path) -> None:
    """However the first one ends."""
    command = [sys.executable, "-c", ENGINE, str(checkpoint("llama")), str(adapter)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": ROOT}
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        theirs = files(other.pid)
        own = engine(adapter)
        shared = files() & theirs
        num_bytes = own.engine.model.adapters["a"].num_bytes
        assert any(num_bytes <= allocated(each) <= MOST_BYTES * num_bytes for each in shared)
        before = tokens(own)
        other.kill()
    assert shared <= files()
    assert tokens(own) == before


def numbers(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes, dtypes = ((3, 5), (700, 900), (1, 1)), (torch.bfloat16, torch.float32, torch.float32)
    return [torch.randn(shape, generator=generator).to(kind) for shape, kind in zip(shapes, dtypes, strict=True)]


def test_whoever_names_other_values_gets_its_own() -> None:
    held = share_tensors("test of names", numbers(1))
    other = share_tensors("test of names", numbers(2))
    same = share_tensors("test of names", numbers(1))
    wider = [*numbers(1), torch.ones(100)]
    for found, wanted in ((held, numbers(1)), (other, numbers(2)), (same, numbers(1)), (wider, wider)):
        assert all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, share_tensors("test of names", wider), wider))
    assert [each.dtype for each in held] == [each.dtype for each in numbers(1)]


def test_what_fills_a_huge_page_lies_in_one() -> None:
    before = files()
    large = share_tensors("test of huge pages", [torch.ones(HUGE_PAGE // 4 + 1000)])
    (inode,) = files() - before
    assert allocated(inode) < HUGE_PAGE + 3 * 4096
    assert large[0].sum() == HUGE_PAGE // 4 + 1000


def test_a_process_with_many_open_files_shares_nothing() -> None:
    """Each shared adapter keeps a file open, and connections need some."""
    before, own, limits = files(), numbers(1), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, limits[1]))
    try:
        shared = share_tensors("test of files", own)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert all(one is same for one, same in zip(shared, own, strict=True))
    assert files() == before
