"""Packed weights in memory that processes share: one copy, the same results, and nothing left, however they end."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest
import torch

from manta.workers.cache_folder import cache_entry
from manta.workers.decoders.decoder import Decoder
from manta.workers.kernels import build, shared_weights
from manta.workers.kernels.cpu_linear import PackedLinear
from tests.checkpoints import checkpoint, make_checkpoint
from tests.patience import wait_until
from tests.workers.cpu_forms import FORMS, in_form
from tests.workers.test_loader import change_tensors, load

shares = hasattr(os, "memfd_create") and build.load_library() is not None and shared_weights._has_huge_pages()
needs_shared_weights = pytest.mark.skipif(not shares, reason="no Linux with huge pages for files, or no C++ compiler")
pytestmark = needs_shared_weights

ROOT = str(pathlib.Path(__file__).resolve().parents[2])
HOLDER = """
import sys
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.torch_worker.loader import load_model
from manta.workers.platforms import choose_platform
model = load_model(sys.argv[1], load_model_config(sys.argv[1]), "float32", choose_platform("cpu", 1))
linears = [
    linear
    for layer in model.weights.layers
    for linear in (layer.mixer.qkv, layer.mixer.output, layer.mlp.gated, layer.mlp.down)
]
print(*(float(linear.packed.sum()) for linear in linears), flush=True)
sys.stdin.readline()
"""


class Holder:
    """A process that loads a model and holds it."""

    def __init__(self, folder: pathlib.Path) -> None:
        command = [sys.executable, "-c", HOLDER, str(folder)]
        environment = {**os.environ, "PYTHONPATH": ROOT}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def answer(self) -> list[float]:
        """Once it has loaded: sums of its weights, of all of which it has read."""
        assert self.process.stdout is not None
        return [float(word) for word in self.process.stdout.readline().split()]

    @property
    def pss(self) -> int:
        return psutil.Process(self.process.pid).memory_full_info().pss

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def linears(model: Decoder) -> list[PackedLinear]:
    found = [model.weights.head]
    for layer in model.weights.layers:
        found += [layer.mixer.qkv, layer.mixer.output, layer.mlp.gated, layer.mlp.down]
    packed = [linear for linear in found if isinstance(linear, PackedLinear)]
    assert len(packed) == len(found)
    return packed


def files(process: int | str = "self") -> set[int]:
    """Of shared weights that a process holds: their inodes."""
    found = set()
    for path in pathlib.Path(f"/proc/{process}/fd").iterdir():
        try:
            if shared_weights.PREFIX in os.readlink(path):
                found.add(path.stat().st_ino)
        except FileNotFoundError:
            continue
    return found


def logits(model: Decoder) -> torch.Tensor:
    hidden = torch.linspace(-1, 1, 3 * model.config.hidden_size).view(3, -1)
    return model.compute_logits(hidden.to(model.weights.dtype))


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A checkpoint that nobody else has loaded."""
    return shutil.copytree(checkpoint("qwen2", attention_bias=True), tmp_path / "model")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", [name for name in FORMS if name != "torch"])
def test_later_processes_read_the_first_ones_weights(folder: pathlib.Path, form: str, dtype: str) -> None:
    with in_form(form):
        alone = load(folder, dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PackedLinear, "_pack", lambda *_: pytest.fail("it is packed"))
            other = load(folder, dtype)
        for one, same in zip(linears(alone), linears(other), strict=True):
            assert torch.equal(one.packed, same.packed)
            assert one.packed.data_ptr() != same.packed.data_ptr()
        assert torch.equal(logits(alone), logits(other))
        before = files()
        del one, same, alone
        assert files() == before, "the other one holds it"
        del other
        assert len(before - files()) == 1


def test_others_weights_are_not_taken_for_these(folder: pathlib.Path) -> None:
    """Another dtype, another file of the same shape, another rank: `content` tells them apart."""
    before = files()
    models = [load(folder), load(folder, "bfloat16")]
    norm = torch.full((64,), 2.0)
    change_tensors(folder, model__norm__weight=norm)
    models.append(load(folder))
    assert len(files() - before) == 3
    assert not torch.equal(linears(models[0])[0].packed, torch.zeros_like(linears(models[0])[0].packed))


def test_what_is_not_whole_is_lent_to_nobody(folder: pathlib.Path) -> None:
    """Its maker raised over it: nothing of it is left, and the next one begins anew."""
    before = files()
    change_tensors(folder, model__norm__weight=torch.ones(63))
    with pytest.raises(ValueError, match="shape"):
        load(folder)
    assert files() == before
    with shared_weights.shared_weights("half") as weights:
        assert weights is not None
        weights.place(100, torch.float32, lambda memory: memory.fill_(1))
        assert shared_weights._find(_name("half")) is None
        kept = weights.place(1 << 20, torch.float32, lambda memory: memory.fill_(2))
    file = shared_weights._find(_name("half"))
    assert file is not None
    with open(f"/proc/self/fd/{file}", "r+b", buffering=0) as writable, pytest.raises(PermissionError):
        writable.write(b"x")
    os.close(file)
    assert kept.unique().tolist() == [2]


LOCK = """
import fcntl, os, sys
fcntl.lockf(os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o600), fcntl.LOCK_EX, 1, int(sys.argv[2]))
print(flush=True)
sys.stdin.read()
"""


def test_nobody_waits_forever_for_packing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(shared_weights, "PATIENCE_S", 0.1)
    arguments = [str(cache_entry("kernels") / shared_weights._LOCKS), str(shared_weights._byte(_name("slow")))]
    packer = subprocess.Popen([sys.executable, "-c", LOCK, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert packer.stdout is not None
        assert packer.stdout.readline()
        with shared_weights.shared_weights("slow") as weights:
            assert weights is not None
            assert not weights.is_whole
    finally:
        packer.kill()
        packer.communicate()
    assert "a copy is made" in caplog.text


def test_all_of_them_lies_in_huge_pages() -> None:
    """Their ends, too: what lies in small pages is read at a third less speed."""
    with shared_weights.shared_weights("ends") as weights:
        assert weights is not None
        tensors = [weights.place(700_000, torch.float32, lambda memory: memory.fill_(1)) for _ in range(5)]
    assert [float(tensor.sum()) for tensor in tensors] == [700_000] * 5
    sizes = _mapped_sizes(_name("ends"))
    assert sizes["ShmemPmdMapped"] == sizes["Rss"] > 5 * 700_000 * 4 // 1024


def _mapped_sizes(name: str) -> Counter[str]:
    """What this process has mapped of a file: KiB by the names of proc_pid_smaps(5)."""
    sizes: Counter[str] = Counter()
    is_named = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        key, *words = line.split()
        if not key.endswith(":"):
            is_named = name in line
        elif is_named and words[-1] == "kB":
            sizes[key.rstrip(":")] += int(words[0])
    return sizes


def _name(content: str) -> str:
    library = shared_weights._library()
    assert library is not None
    return shared_weights._name(library, content)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Of 48 MB in float32, most of it in linears."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
    return make_checkpoint("llama", tmp_path_factory.mktemp("large"), **sizes)


@pytest.fixture
def holders(large: pathlib.Path) -> Iterator[list[Holder]]:
    found = [Holder(large), Holder(large)]
    yield found
    for holder in found:
        holder.kill()


def test_two_processes_share_one_copy(large: pathlib.Path, holders: list[Holder]) -> None:
    """They start together."""
    first, second = holders
    assert first.answer() == second.answer()
    (shared,) = files(first.process.pid)
    assert files(second.process.pid) == {shared}
    together = second.pss
    first.kill()
    num_bytes = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    wait_until(lambda: second.pss > together + num_bytes // 4)  # it had the half
    before = files()
    model = load(large)
    assert files() - before == {shared}, "lent on by one who had it lent"
    second.kill()
    del model
    again = load(large)
    (other,) = files() - before
    assert other != shared, "the system has freed that"
    assert len(linears(again)) == 17
