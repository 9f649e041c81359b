"""Packed weights in files: a later engine maps them and computes the same tokens, and whatever else lies there counts
for nothing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import safetensors.torch
import torch

from manta.cluster.llm import LLM, SamplingParams
from manta.structured import low_priority
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.checkpoints.values_digest import CheckpointValues
from manta.workers.decoders.decoder import Decoder
from manta.workers.kernels import build, idle_work
from manta.workers.platforms import choose_platform
from manta.workers.torch_worker.loader import load_model
from tests.adapters import adapters_of
from tests.checkpoints import FAMILIES, checkpoint
from tests.engine.histories import GREEDY, prompts
from tests.full_disk import full_disk
from tests.patience import PATIENCE_S
from tests.workers.test_cache_folder import STRANGER, needs_root
from tests.workers.test_layer_kinds import folder_of
from tests.workers.test_shared_weights import files, logits, needs_shared_weights
from tests.workers.thread_group import ThreadGroup

pytestmark = needs_shared_weights

KEPT: dict[str, Any] = {"packed_weights_bytes": 1 << 30}


class IdleWork:
    """Work that engines would do in threads, which tests run when they want it."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[Callable[[], bool]], None]] = []
        self.later: list[Callable[[Callable[[], bool]], None]] = []
        """Work that looks again whether its time has come."""

    def begin(self, work: Callable[[Callable[[], bool]], None], failure: str, delay_s: float | None = None) -> None:
        (self.waiting if delay_s is None else self.later).append(work)

    def run(self, is_over: Callable[[], bool] = lambda: False) -> None:
        while self.waiting:
            self.waiting.pop(0)(is_over)


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> IdleWork:
    work = IdleWork()
    monkeypatch.setattr(idle_work, "begin", work.begin)
    return work


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of packed weights. Checkpoints count as settled, however new they are."""
    build.load_library()  # from the cache that all tests share
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path / "cache"))
    settled = functools.partial(CheckpointValues, settled_s=-1e6)
    monkeypatch.setattr("manta.workers.torch_worker.weight_content.CheckpointValues", settled)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A checkpoint that nobody else has loaded."""
    return shutil.copytree(checkpoint("qwen2", attention_bias=True), tmp_path / "model")


def load(folder: pathlib.Path, max_bytes: int = 1 << 30, group: ThreadGroup | None = None, **options: Any) -> Decoder:
    platform = choose_platform("cpu", 1)
    config = load_model_config(folder)
    model = load_model(folder, config, "float32", platform, group=group, kept_bytes=max_bytes, **options)
    assert isinstance(model, Decoder)
    return model


def keep(folder: pathlib.Path, idle: IdleWork, **options: Any) -> torch.Tensor:
    """Has an engine keep its weights, and ends it. Returns what it has computed."""
    model = load(folder, **options)
    found = logits(model)
    idle.run()
    return found


def is_mapped(file: pathlib.Path) -> bool:
    return str(file) in pathlib.Path("/proc/self/maps").read_text()


# ---- every kind of model ---------------------------------------------------------------------------------------------


@functools.cache
def adapter() -> str:
    return adapters_of(checkpoint("llama")).add("packed", 5, target_modules=["q_proj", "down_proj"])


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("llama", {}),
    "experts": ("mixtral", {"dtype": "bfloat16"}),
    "int8": ("llama", {"weights": "int8"}),
    "an adapter": ("llama", {"adapters": {"kept": ""}}),
    "a draft model": ("llama", {"speculative": {"proposers": ("draft",), "adaptive": False}}),
    "int4": ("qwen2", {"weights": "int4", "dtype": "bfloat16"}),
    "latent vectors": ("deepseek_v3", {}),
    "exact": ("llama", {"weights": "int8", "exact": True}),
    "recurrent states": ("qwen3_next", {}),
    "windows": ("gemma3", {"weights": "int8"}),
}


def run(folder: pathlib.Path, options: dict[str, Any], kept: Iterable[pathlib.Path] = ()) -> tuple[Any, list[bool]]:
    """Returns the tokens of an engine, and which of the files it has mapped."""
    llm = LLM(str(folder), **{"dtype": "float32", "num_threads": 1, "kv_cache_bytes": 1 << 22, **KEPT, **options})
    name = "kept" if "adapters" in options else ""
    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False, adapter=name)
    return [output.outputs[0].token_ids for output in outputs], [is_mapped(file) for file in kept]


@pytest.mark.few(5)
@pytest.mark.parametrize("name", CASES)
def test_a_later_engine_maps_what_an_earlier_one_has_packed(
    name: str, cache: pathlib.Path, idle: IdleWork, tmp_path: pathlib.Path
) -> None:
    kind, options = CASES[name]
    source = checkpoint(kind) if kind in FAMILIES else folder_of(kind)
    folder, num_files = shutil.copytree(source, tmp_path / "model"), 1
    if "adapters" in options:
        options = {"adapters": {"kept": adapter()}}
    elif "speculative" in options:
        draft = shutil.copytree(checkpoint("qwen3"), tmp_path / "draft")
        options, num_files = {"speculative": {**options["speculative"], "draft_model": str(draft)}}, 2
    packed, _ = run(folder, options)
    gc.collect()
    idle.run()
    kept = sorted(cache.iterdir())
    assert len(kept) == num_files
    assert {file.stat().st_mode & 0o777 for file in kept} == {0o600}
    before = files()
    assert run(folder, options, kept) == (packed, [True] * num_files)
    assert files() <= before, "nothing was packed"
    assert sorted(cache.iterdir()) == kept


def test_each_rank_keeps_its_share(cache: pathlib.Path, idle: IdleWork, folder: pathlib.Path) -> None:
    def load_ranks() -> list[torch.Tensor]:
        def run(group: ThreadGroup) -> torch.Tensor:
            return logits(load(folder, group=group))

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(run, ThreadGroup.of(2)))

    first = load_ranks()
    idle.run()
    assert len(list(cache.iterdir())) == 2
    before = files()
    second = load_ranks()
    assert files() == before, "nothing was packed"
    assert torch.equal(first[0], second[0])


# ---- while it serves -------------------------------------------------------------------------------------------------


def test_mapped_weights_move_to_memory_that_is_lent(cache: pathlib.Path, idle: IdleWork, folder: pathlib.Path) -> None:
    """Threads that read them meanwhile see the same bytes."""
    expected = keep(folder, idle)
    (file,) = cache.iterdir()
    model, before = load(folder), files()
    assert is_mapped(file)
    sums, is_over = set(), threading.Event()

    def read(packed: torch.Tensor) -> None:
        while not (sums and is_over.is_set()):
            sums.add(float(packed.sum()))

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, model.weights.head.packed)  # type: ignore[attr-defined]
        idle.run()
        is_over.set()
        reading.result(PATIENCE_S)
    assert len(sums) == 1
    assert not is_mapped(file)
    assert len(files() - before) == 1
    assert torch.equal(logits(model), expected)
    file.unlink()
    other = load(folder)
    assert len(files() - before) == 1, "it has the memory of the first"
    assert not idle.waiting
    del model, reading
    assert torch.equal(logits(other), expected)
    del other
    assert files() == before


def test_work_stops_when_the_process_ends(cache: pathlib.Path, idle: IdleWork, folder: pathlib.Path) -> None:
    model = load(folder)
    idle.run(is_over=lambda: True)
    assert list(cache.iterdir()) == []
    del model
    expected = keep(folder, idle)
    mapped, before = load(folder), files()
    idle.run(is_over=lambda: True)
    assert files() == before
    assert torch.equal(logits(mapped), expected)
    del mapped
    load(folder)
    idle.run()  # nobody has these weights any more
    assert files() == before


# ---- never wrong -----------------------------------------------------------------------------------------------------


def flip(file: pathlib.Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[pathlib.Path], object]] = {
    "a bit": lambda file: flip(file, file.stat().st_size // 3),
    "a bit of the checksums": lambda file: flip(file, file.stat().st_size - 60),
    "a bit of the mark": lambda file: flip(file, file.stat().st_size - 1),
    "half of it": lambda file: os.truncate(file, file.stat().st_size // 2),
    "its last bytes": lambda file: os.truncate(file, file.stat().st_size - 3),
    "zeros to its end": lambda file: file.write_bytes(file.read_bytes()[:4096].ljust(file.stat().st_size, b"\0")),
    "all of it": lambda file: os.truncate(file, 0),
    "a page of zeros": lambda file: file.write_bytes(file.read_bytes()[:4096] + bytes(4096) + file.read_bytes()[8192:]),
    "another file's": lambda file: file.write_bytes(other_content(file)),
}


def other_content(file: pathlib.Path) -> bytes:
    """Returns a whole file under another name."""
    (other,) = (each for each in file.parent.iterdir() if each != file)
    return other.read_bytes()


@pytest.mark.few(6)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_removed_and_written_again(
    damage: str, cache: pathlib.Path, idle: IdleWork, folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = keep(folder, idle)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    if damage == "another file's":
        keep(folder, idle, weights="int8")
    DAMAGES[damage](file)
    found = load(folder)
    assert f"{file} is damaged" in caplog.text
    assert not file.exists()
    assert torch.equal(logits(found), expected)
    idle.run()
    assert file.read_bytes() == whole


def test_a_checkpoint_that_was_changed_in_place_is_packed_anew(
    cache: pathlib.Path, idle: IdleWork, folder: pathlib.Path
) -> None:
    before = keep(folder, idle)
    weights = folder / "model.safetensors"
    status = weights.stat()
    tensors = {name: tensor * 0.75 for name, tensor in safetensors.torch.load_file(weights).items()}
    with weights.open("r+b") as file:
        file.write(safetensors.torch.save(tensors, {"format": "pt"}))
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    expected = logits(load(folder, max_bytes=0))
    assert not torch.equal(expected, before)
    assert torch.equal(keep(folder, idle), expected)
    assert torch.equal(logits(load(folder)), expected)
    assert len(list(cache.iterdir())) == 2


def test_equal_values_elsewhere_are_the_same(cache: pathlib.Path, idle: IdleWork, folder: pathlib.Path) -> None:
    expected = keep(folder, idle)
    copy = shutil.copytree(folder, folder.with_name("copy"))
    assert torch.equal(keep(copy, idle), expected), "its values are not known before they were read"
    (file,) = cache.iterdir()
    model = load(copy)
    assert is_mapped(file)
    assert torch.equal(logits(model), expected)


def test_values_that_change_while_they_are_loaded_are_not_kept(
    cache: pathlib.Path, idle: IdleWork, folder: pathlib.Path
) -> None:
    model = load(folder)
    (folder / "model.safetensors").touch()
    with pytest.raises(RuntimeError, match="has changed while it was loaded"):
        idle.run()
    del model
    assert not cache.exists() or list(cache.iterdir()) == []


def test_a_full_disk_keeps_nothing(cache: pathlib.Path, idle: IdleWork, folder: pathlib.Path) -> None:
    model = load(folder)
    with full_disk(1 << 20), pytest.raises(OSError, match="too large"):
        idle.run()
    assert list(cache.iterdir()) == []
    expected = logits(model)
    del model
    assert torch.equal(logits(load(folder)), expected)


# ---- bounds and owners -----------------------------------------------------------------------------------------------


def test_files_that_were_used_longest_ago_leave_first(
    cache: pathlib.Path, idle: IdleWork, folder: pathlib.Path
) -> None:
    keep(folder, idle)
    (first,) = cache.iterdir()
    size = first.stat().st_size
    keep(folder, idle, weights="int8")
    (second,) = set(cache.iterdir()) - {first}
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    load(folder)
    idle.run()
    assert first.stat().st_mtime > 2, "it was used"
    bound = 2 * size + (1 << 16)
    keep(folder, idle, weights="int4", max_bytes=bound)
    assert first in set(cache.iterdir())
    assert second not in set(cache.iterdir())
    keep(folder, idle, exact=True, weights="int8", max_bytes=size // 2)
    assert len(list(cache.iterdir())) == 2, "it has no room, and takes none from others"


def test_a_file_that_others_may_write_is_replaced(cache: pathlib.Path, idle: IdleWork, folder: pathlib.Path) -> None:
    expected = keep(folder, idle)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    for plant in (open_to_all, turn_into_a_link):
        plant(file)
        model = load(folder)
        assert not is_mapped(file)
        assert torch.equal(logits(model), expected)
        idle.run()
        assert (file.is_symlink(), file.stat().st_mode & 0o777, file.read_bytes()) == (False, 0o600, whole)
        del model


def open_to_all(file: pathlib.Path) -> None:
    file.chmod(0o666)


def turn_into_a_link(file: pathlib.Path) -> None:
    file.rename(file.parents[1] / "elsewhere")
    file.symlink_to(file.parents[1] / "elsewhere")


@needs_root
def test_another_users_file_is_not_mapped(cache: pathlib.Path, idle: IdleWork, folder: pathlib.Path) -> None:
    expected = keep(folder, idle)
    (file,) = cache.iterdir()
    with contextlib.suppress(PermissionError):
        os.chown(file, STRANGER, STRANGER)
    model = load(folder)
    assert not is_mapped(file)
    assert not file.exists()
    assert torch.equal(logits(model), expected)


# ---- the thread ------------------------------------------------------------------------------------------------------


def test_idle_work_runs_in_a_thread_of_low_priority(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    found: list[tuple[int, bool]] = []

    def work(is_over: Callable[[], bool]) -> None:
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        found.append((niceness - os.getpriority(os.PRIO_PROCESS, os.getpid()), is_over()))
        raise OSError("no room")

    idle_work.begin(work, "it is not done", delay_s=0)
    for thread in threading.enumerate():
        if thread.name == idle_work.THREAD:
            thread.join(PATIENCE_S)
    assert found == [(low_priority.NICENESS, False)]
    assert "it is not done: no room" in caplog.text


def test_options_of_an_engine_reach_its_loader(cache: pathlib.Path, idle: IdleWork) -> None:
    """Without the option nothing is kept."""
    llm = LLM(str(checkpoint("llama")), num_threads=1, kv_cache_bytes=1 << 22)
    llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert not idle.waiting
    assert not cache.exists()
