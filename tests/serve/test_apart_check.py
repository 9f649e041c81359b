"""What a process of its own finds in an adapter's folder while no engine runs: the same as an engine does."""

from __future__ import annotations

import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator

import pytest
from safetensors.torch import load_file, save_file

from manta.cluster.config import EngineConfig
from manta.cluster.engine.adapter_table import LoadedAdapter
from manta.cluster.serve.adapters.apart_check import can_check_apart, check_adapter
from manta.structured.refusals import Refusal
from manta.workers.adapters.adapter_copies import AdapterCopies
from manta.workers.adapters.adapter_files import read_adapter
from manta.workers.cache_folder import cache_entry
from tests.adapters import write_adapter
from tests.checkpoints import checkpoint

MOST, RANK = 1 << 20, 4
MODULES = ("q_proj", "down_proj")


@pytest.fixture
def server() -> Iterator[str]:
    name = secrets.token_hex(16)
    yield name
    shutil.rmtree(cache_entry("adapters") / name, ignore_errors=True)


def config(root: pathlib.Path, **options: object) -> EngineConfig:
    return EngineConfig(model=str(checkpoint("llama")), dtype="float32", adapter_roots=(str(root),), **options)  # type: ignore[arg-type]


def num_bytes(adapter: pathlib.Path, num_ranks: int = 1) -> int:
    """Float32 bytes of a rank's share: it has all of what is neither an output of its own nor an input of its own."""
    total = 0
    for name, each in load_file(adapter / "adapter_model.safetensors").items():
        is_split = ("q_proj" in name) == ("lora_B" in name)
        total += 4 * each.numel() // (num_ranks if is_split else 1)
    return total


def test_a_good_adapter_is_found_and_copied(tmp_path: pathlib.Path, server: str) -> None:
    adapter = write_adapter(checkpoint("llama"), tmp_path / "good", MODULES, RANK)
    digest = read_adapter(str(adapter), MOST).digest
    assert check_adapter(config(tmp_path), server, "good") == LoadedAdapter(str(adapter), digest)
    copies = AdapterCopies(server, MOST)
    os.utime(cache_entry("adapters") / server / digest, (0, 0))
    assert copies.digests(older_than_s=600) == [digest]
    check_adapter(config(tmp_path), server, "good")
    assert not copies.digests(older_than_s=600), "an engine that does not know of the load yet would remove it"
    shutil.rmtree(adapter)
    assert copies.has(digest)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_that_finds_no_room_is_refused_by_its_bytes(tmp_path: pathlib.Path, server: str, num_ranks: int) -> None:
    """Beside the adapters of the configuration."""
    adapter = write_adapter(checkpoint("llama"), tmp_path / "new", MODULES, RANK)
    fixed = write_adapter(checkpoint("llama"), tmp_path / "fixed", ("q_proj",), 2 * RANK)
    options = {"adapters": {"fixed": str(fixed), "same": str(fixed)}, "tensor_parallel_size": num_ranks}
    size = num_bytes(adapter, num_ranks)
    most = size + num_bytes(fixed, num_ranks)
    fits = check_adapter(config(tmp_path, max_adapter_bytes=most, **options), server, "new")
    assert isinstance(fits, LoadedAdapter)
    refused = check_adapter(config(tmp_path, max_adapter_bytes=most - 1, **options), server, "new")
    assert isinstance(refused, Refusal)
    assert (refused.kind, refused.value, refused.bound) == ("over_limit", size, size - 1)


def test_what_an_engine_refuses_is_refused(tmp_path: pathlib.Path, server: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    write_adapter(checkpoint("llama"), tmp_path / "outside", MODULES, RANK)
    wrong = write_adapter(checkpoint("llama"), root / "wrong", MODULES, RANK)
    tensors = load_file(wrong / "adapter_model.safetensors")
    save_file({name: each[:, :-1].contiguous() for name, each in tensors.items()}, wrong / "adapter_model.safetensors")
    for path, kind in (("nothing", "unknown_object"), ("../outside", "not_allowed"), ("wrong", "unfit")):
        refused = check_adapter(config(root), server, path)
        assert isinstance(refused, Refusal)
        assert (refused.kind, refused.field) == (kind, "lora_path")
    write_adapter(checkpoint("llama"), root / "good", MODULES, RANK)
    with pytest.raises(RuntimeError, match="model cannot be read"):
        check_adapter(EngineConfig(model=str(root), adapter_roots=(str(root),)), server, "good")


def test_an_engine_on_tpus_checks_its_adapters_itself(tmp_path: pathlib.Path) -> None:
    """Their room is that of pools on its chips."""
    assert [can_check_apart(config(tmp_path, device=device)) for device in ("cpu", "cuda", "tpu")] == [
        True,
        True,
        False,
    ]
