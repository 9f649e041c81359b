"""Every file that Manta writes, under four faults: somebody else's content beside it, torn content, a full disk, and a
folder that vanishes. Nothing foreign changes, and nothing that was acknowledged is lost.

A `Writer` stands for one kind of file. `write` acknowledges a value by returning, and `read` returns the acknowledged
values that a later process finds.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec
import pytest

from manta.cluster.batch.journal import BatchRefused, Journal
from manta.cluster.batch.lease import Holder, Lease, acquire
from manta.cluster.batch.lines import BatchResponse, BatchResult, LineKey
from manta.cluster.batch.stored import StoredResults
from manta.cluster.config import ServeConfig
from manta.cluster.private_folder import PrivateFolder
from manta.cluster.protocol.responses_api import ResponseObject
from manta.cluster.serve.listening.port import Port
from manta.cluster.serve.starting import start_failure
from manta.cluster.serve_limits import BatchLimits, ResponseLimits
from manta.cluster.storage.kept_responses import KeptResponses, StoredResponse
from manta.cluster.storage.records import Records
from manta.cluster.storage.retention import remove_expired
from manta.cluster.storage.storage import Storage
from manta.workers.checkpoints.gguf_file import gguf_folder
from manta.workers.kernels import build, cpu_all_reduce, processor
from manta.workers.models.model_config import ModelError
from manta.workers.prefix_store import PrefixStore
from tests.checkpoints import checkpoint
from tests.full_disk import full_disk
from tests.gguf_files import write_gguf
from tests.house.syntax_trees import ROOMS, modules, nodes
from tests.house.writing_calls import writes

INPUT = [b'{"custom_id": "%d", "url": "/v1/completions", "body": {}}' % number for number in range(40)]
OLD_ID = f"{1:014x}" + "0" * 24
"""The part of an id that says when: 1970. Whatever has it would have expired long ago."""
SOMEBODYS = '{"file": "/gone"}'
RESPONSE: dict[str, Any] = (
    dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "user"))
    | dict.fromkeys(("safety_identifier", "prompt_cache_key"))
    | {"created_at": 0, "model": "m", "metadata": {}, "parallel_tool_calls": True, "reasoning": {}, "text": {}}
    | {"background": False, "store": True, "temperature": 1.0, "tool_choice": "auto", "tools": [], "top_p": 1.0}
)
Refused = (OSError, BatchRefused, ModelError, subprocess.CalledProcessError, start_failure.StartFailed)
"""What a writer raises that did not write."""


class Writer:
    """One kind of file below `root`."""

    foreign: tuple[str, ...] = ()
    """Paths below the root at which somebody else's content stands; those that end with a slash are folders."""
    is_torn = True
    """Whether somebody mends a torn file. Ray's token is Ray's to judge; it is on disk before it has its name."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root

    def write(self, number: int) -> None:
        raise NotImplementedError

    def read(self) -> set[int]:
        raise NotImplementedError

    def clean(self) -> None:
        """Removes what has expired or was left behind."""


class BatchOutput(Writer):
    foreign = ("out.jsonl.bak", "out.jsonl~")

    def __init__(self, root: pathlib.Path) -> None:
        super().__init__(root)
        (root.parent / "in.jsonl").write_bytes(b"\n".join(INPUT))

    @contextlib.contextmanager
    def journal(self) -> Iterator[Journal]:
        target = self.root / "out.jsonl"
        with (self.root.parent / "in.jsonl").open("rb") as source, Journal(target, source, 4096) as journal:
            yield journal

    def write(self, number: int) -> None:
        key = LineKey.of(number, INPUT[number])
        with self.journal() as journal:
            journal.write(key, BatchResult(key.id, str(number)))

    def read(self) -> set[int]:
        with self.journal() as journal:
            return {number for number, line in enumerate(INPUT) if journal.has(LineKey.of(number, line))}


class StorageWriter(Writer):
    foreign = (
        "README",
        ".partial/notes",
        f".partial/{OLD_ID}",
        "open/notes.cancel",
        f"open/{OLD_ID}.cancel",
        f"files/me/{OLD_ID}",
        f"files/me/{OLD_ID}.json",
        f"files/photos/{OLD_ID}/",
        f"reserved/me/{OLD_ID}",
        f"batches/me/{OLD_ID}/",
        "responses/me/AAA",
        f"responses/me/{OLD_ID}",
        f"responses/me/{OLD_ID}.ended",
        "deleted/me/1",
    )

    def __init__(self, root: pathlib.Path) -> None:
        super().__init__(root)
        self.storage = Storage(str(root))
        self.records = Records(self.storage, BatchLimits())
        self.responses = KeptResponses(self.storage, ServeConfig(responses=ResponseLimits(max_responses=16)))
        self.ids: dict[str, int] = {}

    def clean(self) -> None:
        remove_expired(self.records)
        self.responses.remove_expired()


class StoredFiles(StorageWriter):
    def write(self, number: int) -> None:
        upload = self.records.files.begin_upload("me", 100)
        try:
            upload.write(b"%d" % number)
            upload.commit("in.jsonl")
        except BaseException:
            upload.discard()
            raise

    def read(self) -> set[int]:
        found = set()
        for file in self.records.files.all_of("me"):
            with self.records.files.content("me", file.id) as content:
                text = content.read()
            if len(text) == file.bytes:
                found.add(int(text))
        return found


class Batches(StorageWriter):
    def write(self, number: int) -> None:
        batch = self.records.create_batch(
            "me", endpoint="", input_file_id=f"{number}", completion_window="24h", expires_at=1 << 40
        )
        self.ids[batch.id] = number

    def read(self) -> set[int]:
        found = {batch_id: self.records.batch("me", batch_id) for batch_id in self.ids}
        return {int(batch.input_file_id) for batch in found.values() if batch is not None and batch.input_file_id}


class Responses(StorageWriter):
    def write(self, number: int) -> None:
        response_id = f"resp_{time.time_ns() // 1000:014x}{number:024x}"
        response = msgspec.convert(RESPONSE | {"id": response_id}, ResponseObject)
        self.responses.create("me", StoredResponse(response, []))
        self.ids[response_id] = number

    def read(self) -> set[int]:
        return {number for response_id, number in self.ids.items() if self.responses.find("me", response_id)}


class Parts(StorageWriter):
    def write(self, number: int) -> None:
        key = LineKey.of(number, INPUT[number])
        results = StoredResults(self.storage, "batches/me/one/parts")
        results.write(key, BatchResult(key.id, str(number), BatchResponse(200, "a", msgspec.Raw(b"{}"))))
        results.flush()

    def read(self) -> set[int]:
        return {line.key.number for line in StoredResults(self.storage, "batches/me/one/parts").stored()}


class Leases(StorageWriter):
    """A lease's epoch is its value: nobody else gets it."""

    def write(self, number: int) -> None:
        lease = acquire(self.storage, f"batches/me/{number}/lease", Holder("me"))
        assert isinstance(lease, Lease)
        lease.check()
        self.ids[f"batches/me/{number}/lease"] = number

    def read(self) -> set[int]:
        you = Holder("you")
        return {number for folder, number in self.ids.items() if isinstance(acquire(self.storage, folder, you), float)}


class PrivateFolders(Writer):
    foreign = ("manta-checkout/lock", "manta-checkout/model", "manta-abcdefgh/lock", "manta-abcdefgh/kept", "manta-x")

    def __init__(self, root: pathlib.Path) -> None:
        super().__init__(root)
        self.made: dict[int, PrivateFolder] = {}

    def write(self, number: int) -> None:
        tempfile.tempdir = str(self.root)
        try:
            self.made[number] = PrivateFolder()
        finally:
            tempfile.tempdir = None

    def read(self) -> set[int]:
        return {number for number, folder in self.made.items() if folder.path.is_dir()}

    def clean(self) -> None:
        self.write(-1)
        self.made.pop(-1).close()


class GgufFolders(Writer):
    foreign = ("gguf/mine/gguf_tensors.json", "gguf/model-copy/config.json", "gguf/.new/config.json", "gguf/notes")

    def __init__(self, root: pathlib.Path) -> None:
        super().__init__(root)
        self.file = root.parent / "model.gguf"
        if not self.file.exists():
            write_gguf(checkpoint("llama"), self.file, lambda name: "F32")

    def write(self, number: int) -> None:
        os.environ["MANTA_CACHE"] = str(self.root)
        os.utime(self.file, (number, number))
        folder = gguf_folder(self.file)
        for name in ("config.json", "tokenizer.json", "gguf_tensors.json"):
            assert json.loads((folder / name).read_text())

    def read(self) -> set[int]:
        whole = set()
        for number in range(3):
            with contextlib.suppress(*Refused):
                self.write(number)  # it comes from the cache, or is made again
                whole.add(number)
        return whole


COMPILER = """
case "$*" in
*--version) echo {number} ;;
*-shared*)
    for last; do :; done
    echo 'extern "C" int answer() {{ return {number}; }}' | {compiler} -shared -fPIC -x c++ - -o "$last"
    ;;
*) for last; do :; done; : > "$last" ;;
esac
"""
"""A compiler for the shell, which makes a library of one function instead of all kernels."""


class Kernels(Writer):
    foreign = ("kernels/notes", "kernels/torch-0.so")

    def write(self, number: int) -> None:
        os.environ["MANTA_CACHE"] = str(self.root)
        compiler = shlex.join(build.find_compiler() or ("c++",))
        script = COMPILER.format(number=number, compiler=compiler)
        library = build.library_for(processor.form(), ("sh", "-c", script, "compiler"))
        assert build.load_checked(library).answer() == number

    def read(self) -> set[int]:
        whole = set()
        for number in range(3):
            with contextlib.suppress(*Refused):
                self.write(number)
                whole.add(number)
        return whole


class KeptBlocks(Writer):
    foreign = ("prefixes/notes", "prefixes/.partial-mine", "prefixes/0123-0-0123-0")

    def store(self) -> PrefixStore:
        os.environ["MANTA_CACHE"] = str(self.root)
        return PrefixStore("0" * 32, 0, 1 << 20, 1e6)

    def write(self, number: int) -> None:
        self.store().write(number.to_bytes(16, "big"), 0, memoryview(b"%03d\n" % number * 40))

    def read(self) -> set[int]:
        found = {number: self.store().read(number.to_bytes(16, "big"), 0, 160) for number in range(len(INPUT))}
        assert all(part is None or part == b"%03d\n" % number * 40 for number, part in found.items())
        return {number for number, part in found.items() if part is not None}

    def clean(self) -> None:
        self.store().make_room()


class FailureLog(Writer):
    """The cause of a failed start: in a file, or in the message."""

    foreign = ("manta-serve-0.log",)

    def __init__(self, root: pathlib.Path) -> None:
        super().__init__(root)
        self.told: list[str] = []

    def write(self, number: int) -> None:
        tempfile.tempdir = str(self.root)
        try:
            self.told.append(str(start_failure.unexpected(RuntimeError(f"number {number}."))))
        finally:
            tempfile.tempdir = None

    def read(self) -> set[int]:
        return {number for number in range(len(INPUT)) if any(f"number {number}." in each for each in self.told)}


WRITERS = (
    BatchOutput,
    StoredFiles,
    Batches,
    Responses,
    Parts,
    Leases,
    PrivateFolders,
    GgufFolders,
    Kernels,
    KeptBlocks,
    FailureLog,
)
SLOW = (GgufFolders, Kernels)


@pytest.fixture
def tmp_path() -> Iterator[pathlib.Path]:
    """A folder with a path so short that sockets fit below it, because a `PrivateFolder` avoids others. What writers
    set for their whole process ends with it.
    """
    folder = pathlib.Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    with mock.patch.dict(os.environ), mock.patch.object(tempfile, "tempdir", tempfile.tempdir):
        yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=WRITERS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> type[Writer]:
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path))
    if request.param is Kernels and build.find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    return request.param


def new_writer(kind: type[Writer], folder: pathlib.Path) -> Writer:
    (folder / "r").mkdir(parents=True, exist_ok=True)
    return kind(folder / "r")


def tries(writer: Writer, number: int) -> set[int]:
    """Returns the value if it was acknowledged, else nothing."""
    try:
        writer.write(number)
    except Refused:
        return set()
    return {number}


def test_nothing_foreign_changes(kind: type[Writer], tmp_path: pathlib.Path) -> None:
    writer = new_writer(kind, tmp_path)
    for name in writer.foreign:
        path = writer.root / name
        file = path / "picture" if name.endswith("/") else path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(SOMEBODYS)
        for each in (file, path):
            os.utime(each, (1, 1))
    foreign = {path: path.stat().st_mtime_ns for path in writer.root.rglob("*") if path.is_file()}
    for number in range(1 if kind in SLOW else 30):
        writer.write(number)
    writer.clean()
    assert {path: path.stat().st_mtime_ns for path in foreign if path.exists()} == foreign
    assert {path.read_text() for path in foreign} == {SOMEBODYS}
    assert number in writer.read()


def test_a_full_disk_loses_nothing_that_was_acknowledged(kind: type[Writer], tmp_path: pathlib.Path) -> None:
    writer = new_writer(kind, tmp_path)
    acknowledged = tries(writer, 0)
    assert acknowledged == {0}
    for number, max_bytes in enumerate((300,) if kind in SLOW else (0, 1, 40, 150, 600), 1):
        with full_disk(max_bytes):
            acknowledged |= tries(writer, number)
        assert acknowledged <= writer.read()
    writer.write(9)
    assert acknowledged | {9} <= writer.read() | {9}
    assert not list(tmp_path.glob("**/.manta-*")), "a folder of its own that it could not finish"


def test_a_torn_file_loses_no_other(kind: type[Writer], tmp_path: pathlib.Path) -> None:
    if not kind.is_torn:
        return
    writer = new_writer(kind, tmp_path / "0")
    writer.write(0)
    names = [path.relative_to(writer.root) for path in writer.root.rglob("*") if path.is_file()]
    parts = (0.5,) if kind in SLOW else (0.0, 0.5, 1.0)
    for case, (index, part) in enumerate((i, part) for i in range(len(names)) for part in parts):
        writer = new_writer(kind, tmp_path / f"{case + 1}")
        writer.write(0)
        torn = sorted(path for path in writer.root.rglob("*") if path.is_file())[index]
        writer.write(1)
        tear(torn, part)
        assert 1 in writer.read() or torn.name == "out.jsonl"  # both values are in that one
        writer.write(2)
        writer.clean()
        assert 2 in writer.read()


def tear(path: pathlib.Path, part: float) -> None:
    """Cuts off the last line of a file at `part` of it."""
    content = path.read_bytes()
    start = content[:-1].rfind(b"\n") + 1
    if path.suffix == ".so":
        path.unlink()  # this process has loaded it, and its end runs code of that file
    path.write_bytes(content[: start + int((len(content) - 1 - start) * part)])


def test_a_folder_that_vanishes_is_made_again_or_missed(kind: type[Writer], tmp_path: pathlib.Path) -> None:
    writer = new_writer(kind, tmp_path)
    writer.write(0)
    shutil.rmtree(writer.root)
    acknowledged = tries(writer, 1)
    assert acknowledged <= (writer.read() if writer.root.exists() else set()) or kind is FailureLog
    writer.root.mkdir(exist_ok=True)
    writer.write(2)
    assert 2 in writer.read()


def test_an_upload_whose_folder_vanishes_is_not_acknowledged(tmp_path: pathlib.Path) -> None:
    records = Records(Storage(str(tmp_path / "root")), BatchLimits())
    upload = records.files.begin_upload("me", 100)
    upload.write(b"content")
    shutil.rmtree(tmp_path / "root")
    with pytest.raises(OSError, match="was removed before it was complete"):
        upload.commit("in.jsonl")
    assert records.files.all_of("me") == []


def test_a_disk_that_fills_up_between_two_names_tears_no_claim(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    storage = Storage(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        with pytest.raises(OSError, match="No space left"):
            storage.claim("a/b", b"mine")
    assert storage.claim("a/b", b"yours") == b"yours"


def test_a_failed_start_says_why_without_room_for_a_log(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with full_disk(10):
            told = str(start_failure.unexpected(RuntimeError("why.")))
        assert "the application did not start: RuntimeError: why." in told
        assert "No log was written" in told


def test_the_file_of_ranks_that_has_no_room_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    if build.load_library() is None:
        pytest.skip("there are no kernels")
    made: list[str] = []
    make = tempfile.mkstemp

    def noted(**options: Any) -> tuple[int, str]:
        file, path = make(**options)
        made.append(path)
        return file, path

    monkeypatch.setattr(tempfile, "mkstemp", noted)
    with full_disk(100):
        assert cpu_all_reduce.create_file(2) is None
    assert [os.path.exists(path) for path in made] == [False]


def test_lock_files_are_opened_as_they_are(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"manta-ports-{os.getuid()}"
    for content in (b"", b"somebody else's"):
        port = Port("127.0.0.1", 0, peers="one")
        port.take().close()
        (lock,) = folder.iterdir()
        assert lock.read_bytes() == content
        lock.write_bytes(b"somebody else's")
        port.give_back()


@pytest.mark.prove
@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
def test_a_small_file_system_fills_up_without_a_loss(kind: type[Writer], tmp_path: pathlib.Path) -> None:
    """As `test_a_full_disk_loses_nothing_that_was_acknowledged`, with a disk that is really full."""
    writer = new_writer(kind, tmp_path)
    size = 2 << 20 if kind in SLOW else 64 << 10
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(writer.root)], check=False)
    if mounted.returncode:
        pytest.skip("this root may mount nothing")
    try:
        acknowledged = tries(writer, 0)
        filler = writer.root / "filler"
        for number, free in enumerate((0, 4096, 8192, 16384), 1):
            filler.write_bytes(bytes(max(0, shutil.disk_usage(writer.root).free - free)))
            acknowledged |= tries(writer, number)
            filler.unlink()
            assert acknowledged <= writer.read()
        writer.write(9)
    finally:
        subprocess.run(["umount", "--lazy", str(writer.root)], check=True)


# ---- the table has every writer --------------------------------------------------------------------------------------


TABLE = {
    "manta.cluster.cli.__main__": "opens /dev/null",
    "manta.cluster.batch.journal": BatchOutput,
    "manta.cluster.storage.local_files": StorageWriter,
    "manta.cluster.storage.storage": StorageWriter,
    "manta.cluster.private_folder": PrivateFolders,
    "manta.cluster.serve.listening.port": test_lock_files_are_opened_as_they_are,
    "manta.cluster.serve.starting.ray_messages": "Ray's messages, which end with the command; without room it says so",
    "manta.cluster.serve.starting.start_failure": FailureLog,
    "manta.cluster.text.tokenizer_trial": "an empty file in the cache, whose name alone says something",
    "manta.cluster.telemetry.request_log": "a log; a torn line is no request, and stays",
    "manta.workers.adapters.adapter_copies": "folders in the cache, which count only with the digest of their values",
    "manta.workers.adapters.adapter_sources": "an adapter behind a URL, in a folder that is removed when it was read",
    "manta.workers.cache_folder": KeptBlocks,
    "manta.workers.kept_files": KeptBlocks,
    "manta.workers.checkpoints.gguf_file": GgufFolders,
    "manta.workers.checkpoints.gguf_tokenizer": GgufFolders,
    "manta.workers.kernels.build": Kernels,
    "manta.workers.kernels.cpu_all_reduce": test_the_file_of_ranks_that_has_no_room_is_removed,
    "manta.workers.platforms.cpu_group": "removes what cpu_all_reduce made, by the name that it got from there",
    "manta.workers.kernels.shared_weights": "memory without a name, and a lock file that is opened as it is",
    "manta.structured.grammar_pool.transport": "a new folder for sockets, which tempfile removes",
    "manta.structured.masks": "memory without a name, or a new file that tempfile removes",
}
"""Modules that write files: the writer or test that stands for them, or why no fault can cost anything."""


def test_every_module_that_writes_files_is_in_the_table() -> None:
    found = {module for room in ROOMS for module, tree in modules(room).items() if any(map(writes, nodes(tree)))}
    assert found == set(TABLE)


@pytest.mark.parametrize(
    ("call", "is_one"),
    [
        ("open(path, 'rb')", False),
        ("open(path, 'ab')", True),
        ("os.open(path, os.O_RDONLY)", False),
        ("os.open(path, os.O_CREAT | os.O_RDWR)", True),
        ("os.replace(a, b)", True),
        ("text.replace(a, b)", False),
    ],
)
def test_calls_that_write_are_told_apart(call: str, is_one: bool) -> None:
    assert writes(ast.parse(call, mode="eval").body) is is_one
