"""The cache between starts: nothing that another user planted there is loaded or served, of any kind of entry."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.checkpoints import benchmark_checkpoint
from manta.cluster.text.tokenizer_trial import TokenizerTrial
from manta.workers.adapters.adapter_copies import AdapterCopies
from manta.workers.adapters.adapter_files import read_adapter
from manta.workers.cache_folder import UntrustedCache, cache_entry
from manta.workers.checkpoints.gguf_file import gguf_folder
from manta.workers.checkpoints.values_digest import CheckpointValues
from manta.workers.jax_worker.programs import jax, keep_compiled_programs
from manta.workers.kernels import build, processor
from manta.workers.kernels.packed_files import HUGE_PAGE, PackedFiles, PackedMemory
from manta.workers.prefix_store import PrefixStore
from tests.adapters import adapters_of
from tests.checkpoints import checkpoint
from tests.gguf_files import write_gguf

STRANGER = 12345
"""A user who is not this one."""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty cache, beside a temporary folder."""
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def kernels(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Returns the library that would be loaded; what is compiled is a text."""
    monkeypatch.setattr(build, "_compile", lambda _, library: library.write_text("compiled"))
    return build.library_for(processor.form(), ("true",))


def gguf(root: pathlib.Path, _: pytest.MonkeyPatch) -> pathlib.Path:
    """Returns a file of the folder that is served for a GGUF file."""
    file = root / "model.gguf"
    if not file.exists():
        write_gguf(checkpoint("llama"), file, lambda name: "F32")
    return gguf_folder(file) / "config.json"


def programs(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Returns a file in the folder of JAX's programs."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        keep_compiled_programs()
        program = pathlib.Path(jax.config.values["jax_compilation_cache_dir"]) / "jit_forward-0123"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    if not program.exists():
        program.write_text("compiled")
    return program


def models(root: pathlib.Path, _: pytest.MonkeyPatch) -> pathlib.Path:
    """Returns a file of a checkpoint that benchmarks made."""
    return benchmark_checkpoint("one-layer-llama") / "config.json"


def tokenizers(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Returns the mark that says that a tokenizer passed; its trial is a program that always does."""
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    folder = root / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text("{}")
    TokenizerTrial(folder).wait()
    (mark,) = cache_entry("tokenizers").iterdir()
    return mark


def prefixes(root: pathlib.Path, _: pytest.MonkeyPatch) -> pathlib.Path:
    """Returns the file of a kept block."""
    store = PrefixStore("0" * 32, 0, 1 << 20, 1e6)
    if store.read(bytes(16), 0, 4) is None:
        store.write(bytes(16), 0, memoryview(b"part"))
    (block,) = cache_entry("prefixes").iterdir()
    return block


def digests(root: pathlib.Path, _: pytest.MonkeyPatch) -> pathlib.Path:
    """Returns the file with the digest of one of a checkpoint's files, which may be new."""
    CheckpointValues(checkpoint("llama"), settled_s=-1e6).digest()
    return min(path for path in cache_entry("digests").iterdir() if path.suffix != ".lock")


@functools.cache
def made_adapter() -> pathlib.Path:
    return pathlib.Path(adapters_of(checkpoint("llama")).add("kept", 3, target_modules=["q_proj"]))


def adapters(root: pathlib.Path, _: pytest.MonkeyPatch) -> pathlib.Path:
    """Returns the values of an adapter's copy."""
    digest = read_adapter(str(made_adapter()), 1 << 20).digest
    copies = AdapterCopies("0" * 32, 1 << 20)
    copies.keep(made_adapter(), digest)
    return cache_entry("adapters") / ("0" * 32) / digest / "adapter_model.safetensors"


class NoLibrary:
    """The part of the kernels that maps files, where a file holds a huge page of zeros."""

    _name = "none.so"
    manta_unmap_weights = manta_checksum_weights = staticmethod(lambda *_: True)

    def __init__(self) -> None:
        self._memory = (ctypes.c_char * HUGE_PAGE)()

    def manta_map_weights(self, *_: object) -> int:
        return ctypes.addressof(self._memory)


def packed(root: pathlib.Path, _: pytest.MonkeyPatch) -> pathlib.Path:
    """Returns the file with a model's packed weights."""
    library: Any = NoLibrary()
    files = PackedFiles(CheckpointValues(checkpoint("llama"), settled_s=-1e6), "float32", 1 << 30)
    if files.find(library) is None:
        files.keep(library, PackedMemory(library.manta_map_weights(), HUGE_PAGE, bytes(1)), lambda: False)
    (file,) = cache_entry("packed").iterdir()
    return file


Kind = Callable[[pathlib.Path, pytest.MonkeyPatch], pathlib.Path]
KINDS: dict[str, Kind] = {
    "kernels": kernels,
    "gguf": gguf,
    "jax": programs,
    "benchmarks": models,
    "tokenizers": tokenizers,
    "prefixes": prefixes,
    "digests": digests,
    "adapters": adapters,
    "packed": packed,
}
"""A file that is loaded from each folder of the cache, by the folder's name."""
PLANTED = json.dumps({"planted": True}).encode()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def give_away(path: pathlib.Path) -> None:
    for each in (path, *path.rglob("*")):
        try:
            os.chown(each, STRANGER, STRANGER, follow_symlinks=False)
        except PermissionError:
            pytest.skip("root without its rights gives no files away")


@needs_root
def test_a_planted_folder_is_not_used(
    kind: str, cache: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Whoever may write to the cache knows the name of what will be looked for."""
    file = KINDS[kind](tmp_path, monkeypatch)
    assert cache in file.parents
    assert KINDS[kind](tmp_path, monkeypatch) == file, "it is found again"
    file.write_bytes(PLANTED)
    give_away(cache / kind)
    found = KINDS[kind](tmp_path, monkeypatch)
    assert found.read_bytes() != PLANTED
    assert found.is_relative_to(tmp_path / "tmp" / f"manta-cache-{os.getuid()}")
    assert file.read_bytes() == PLANTED, "what is another user's stays"


@needs_root
def test_planted_files_in_a_folder_of_ours_are_removed(
    kind: str, cache: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder was open to others once."""
    file = KINDS[kind](tmp_path, monkeypatch)
    file.write_bytes(PLANTED)
    give_away(file)
    found = KINDS[kind](tmp_path, monkeypatch)
    assert found == file
    assert found.read_bytes() != PLANTED


def test_what_others_could_have_written_is_removed(
    kind: str, cache: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = KINDS[kind](tmp_path, monkeypatch)
    file.write_bytes(PLANTED)
    for each in (file, *file.parents):
        if each.is_relative_to(cache / kind):
            each.chmod(0o777)
    found = KINDS[kind](tmp_path, monkeypatch)
    assert found == file
    assert found.read_bytes() != PLANTED
    assert not (cache / kind).stat().st_mode & 0o077


def test_a_shared_folder_above_is_not_used(
    kind: str, cache: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = KINDS[kind](tmp_path, monkeypatch)
    file.write_bytes(PLANTED)
    cache.chmod(0o777)
    found = KINDS[kind](tmp_path, monkeypatch)
    assert found.read_bytes() != PLANTED
    assert not found.is_relative_to(cache)
    cache.chmod(0o1777)
    assert KINDS[kind](tmp_path, monkeypatch) == file, "as in /tmp nobody can replace what another user has made"


@needs_root
def test_a_planted_link_is_not_followed(cache: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = cache_entry("jax")
    cache.chmod(0o1777)
    (cache / "gguf").symlink_to(other)
    assert cache_entry("gguf") == other, "this user's own link is good"
    os.chown(cache / "gguf", STRANGER, STRANGER, follow_symlinks=False)
    assert cache_entry("gguf").is_relative_to(tmp_path / "tmp")


def test_without_a_private_folder_nothing_is_used(cache: pathlib.Path, tmp_path: pathlib.Path) -> None:
    cache.chmod(0o777)
    (tmp_path / "tmp").chmod(0o777)
    with pytest.raises(UntrustedCache, match=r"other users may write to the folder .*/tmp; .* with MANTA_CACHE"):
        cache_entry("jax")


def test_a_cache_of_a_umask_of_002_is_made_private(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Manta's own folder in the user's cache, which earlier versions left open to the user's group."""
    monkeypatch.delenv("MANTA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "manta" / "jax").mkdir(parents=True)
    for folder in (tmp_path / "manta" / "jax", tmp_path / "manta"):
        folder.chmod(0o775)
    assert cache_entry("jax") == tmp_path / "manta" / "jax"
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "manta", tmp_path / "manta" / "jax")] == [0o700] * 2
    shutil.rmtree(tmp_path / "manta")
    assert cache_entry("jax").is_dir()
