"""Packed weights of experts in files: a second start reads none of them nor the checkpoint's, and a step those that it
chooses.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pathlib

import numpy as np
import pytest
import torch

from manta.cluster.llm import LLM, SamplingParams
from manta.workers.checkpoints.memory import weight_files
from manta.workers.checkpoints.model_folder import resolve_model_folder
from manta.workers.decoders.decoder import Decoder
from manta.workers.kernels.packed_files import HUGE_PAGE
from tests.workers import large_mixtures
from tests.workers.large_mixtures import Sizes
from tests.workers.test_loading_memory import AWQ, FP8, Make, gguf, gpt_oss, qwen3
from tests.workers.test_packed_files import KEPT, IdleWork, cache, flip, idle, is_mapped, keep, load
from tests.workers.test_shared_weights import files, logits, needs_shared_weights

__all__ = ["cache", "idle"]  # fixtures
pytestmark = needs_shared_weights

SIZES = Sizes(layers=1, experts=48)
NUM_CHOSEN, MOST_PAGES_OF_AN_EXPERT = 2, 4
"""The experts of a token, and the most huge pages in which the two linears of one lie."""
LITTLE = 0.25
"""Share of a checkpoint's bytes that a second start may read: norms, routers and the embedding, and what the system
reads around them.
"""


def resident(path: pathlib.Path) -> np.ndarray:
    """Returns for each page of a file whether the system has it in memory (mincore(2)), whoever has read it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        content = np.frombuffer(mapped, np.uint8)
        found = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        size = ctypes.c_size_t(len(mapped))
        assert (
            ctypes.CDLL(None).mincore(ctypes.c_void_p(content.ctypes.data), size, ctypes.c_void_p(found.ctypes.data))
            == 0
        )
        del content
    return found & 1 == 1


def forget(path: pathlib.Path) -> None:
    """Has the system drop a file from its memory. Skips the test where it does not, as in a file system in memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(path).any():
        pytest.skip(f"the system keeps {path} in its memory")


def forgotten(cache: pathlib.Path) -> pathlib.Path:
    """Returns the only file of a cache, which `forget` has dropped."""
    (path,) = cache.iterdir()
    forget(path)
    return path


def experts_of(model: Decoder, file: pathlib.Path) -> list[set[int]]:
    """Returns the huge pages of a file in which each expert of the first layer lies."""
    mapping = next(line for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if str(file) in line)
    start = int(mapping.partition("-")[0], 16)
    found = []
    for mlp in model.weights.layers[0].mlp.experts.experts:  # type: ignore[union-attr]
        packed = [linear.packed for linear in (mlp.gated, mlp.down)]
        places = [(each.data_ptr() - start, each.data_ptr() - start + each.nbytes) for each in packed]
        found.append({page for first, end in places for page in range(first // HUGE_PAGE, (end - 1) // HUGE_PAGE + 1)})
    return found


def huge_pages(pages: np.ndarray) -> set[int]:
    """Returns the huge pages of which some page is in memory."""
    return set((np.nonzero(pages)[0] * mmap.PAGESIZE // HUGE_PAGE).tolist())


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return large_mixtures.write(tmp_path / "model", *large_mixtures.qwen3_moe(SIZES))


def test_a_second_start_reads_no_experts_and_a_token_reads_its_own(
    cache: pathlib.Path, idle: IdleWork, folder: pathlib.Path
) -> None:
    expected = keep(folder, idle)
    file = forgotten(cache)
    model = load(folder)
    assert is_mapped(file)
    experts = experts_of(model, file)
    of_experts = {page for each in experts for page in each} - {min(map(min, experts)), max(map(max, experts))}
    after_start = huge_pages(resident(file))
    assert len(of_experts) > 10
    assert not after_start & of_experts, "the first and the last huge page of experts have other weights too"
    rows = torch.randn(1, SIZES.hidden, generator=torch.Generator().manual_seed(0))
    chosen, shares = torch.tensor([[7, 30]]), torch.tensor([[0.5, 0.5]])
    model.weights.layers[0].mlp.experts.forward(rows, chosen, shares)  # type: ignore[union-attr]
    assert huge_pages(resident(file)) - after_start == (experts[7] | experts[30]) - after_start
    assert torch.equal(logits(model), expected)


@pytest.mark.prove
def test_one_token_reads_as_many_experts_as_it_chooses(
    cache: pathlib.Path, idle: IdleWork, folder: pathlib.Path
) -> None:
    """A whole engine starts, and answers one token with one."""
    common = {"dtype": "bfloat16", "num_threads": 1, "kv_cache_bytes": 1 << 22, **KEPT}
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    LLM(str(folder), **common)
    idle.run()
    gc.collect()  # nobody holds them any more
    file = forgotten(cache)
    llm = LLM(str(folder), **common)
    after_start = huge_pages(resident(file))
    llm.generate([[5]], params, use_tqdm=False)
    read = huge_pages(resident(file)) - after_start
    assert 0 < len(read) <= NUM_CHOSEN * MOST_PAGES_OF_AN_EXPERT
    assert len(after_start) + len(read) < file.stat().st_size / HUGE_PAGE / 2


@pytest.mark.prove
def test_experts_move_to_huge_pages_once_half_of_them_were_read(
    cache: pathlib.Path, idle: IdleWork, folder: pathlib.Path
) -> None:
    expected = keep(folder, idle)
    file = forgotten(cache)
    model, before = load(folder), files()
    idle.run()
    assert is_mapped(file), "nobody has read any"
    assert len(idle.later) == 1
    rows = torch.randn(SIZES.experts, SIZES.hidden, generator=torch.Generator().manual_seed(0))
    chosen = torch.arange(SIZES.experts)[:, None]
    model.weights.layers[0].mlp.experts.forward(rows, chosen, torch.ones(chosen.shape))  # type: ignore[union-attr]
    idle.waiting, idle.later = idle.later, []
    idle.run()
    assert not is_mapped(file)
    assert len(files() - before) == 1
    assert torch.equal(logits(model), expected)


@pytest.mark.prove
def test_damaged_experts_are_found_when_they_move(
    cache: pathlib.Path, idle: IdleWork, folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(folder, idle)
    (file,) = cache.iterdir()
    flip(file, file.stat().st_size // 2)
    model = load(folder)
    idle.run()  # all of it is in memory, because it was written just now
    assert "is damaged and is removed; answers since the start may be wrong" in caplog.text
    assert not file.exists()
    del model


FORMATS: dict[str, tuple[Make, str]] = {
    "MXFP4": (gpt_oss(True), "auto"),
    "AWQ": (qwen3(large_mixtures.in_awq, AWQ), "auto"),
    "FP8": (qwen3(large_mixtures.in_fp8_blocks, FP8), "int4"),
    "bfloat16": (qwen3(), "int8"),
    "in one tensor": (gpt_oss(False), "auto"),
    "GGUF, Q4_K": (gguf("Q4_K"), "auto"),
    "GGUF, MXFP4": (gguf("MXFP4"), "auto"),
}


@pytest.mark.prove
@pytest.mark.parametrize("name", FORMATS)
def test_a_second_start_reads_little_of_the_checkpoint(
    name: str, cache: pathlib.Path, idle: IdleWork, tmp_path: pathlib.Path
) -> None:
    """Whichever form it has: only shapes decide what is mapped."""
    make, weights = FORMATS[name]
    folder = resolve_model_folder(str(make(tmp_path / "model", Sizes(layers=1, experts=16))))
    expected = keep(folder, idle, weights=weights)
    (file,) = weight_files(folder)
    gc.collect()  # a file that is mapped stays in memory
    forget(file)
    model = load(folder, weights=weights)
    assert resident(file).mean() < LITTLE
    assert torch.equal(logits(model), expected)
