"""What damages a batch storage or its runners, one fault a test: full disks, power failures, runners thought dead.

`test_batch_storage_faults.py` combines such faults at random.
"""

from __future__ import annotations

import asyncio
import errno
import os
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from manta.cluster.batch import batch_run, lease, stored
from manta.cluster.batch import batch_runner as runner_module
from manta.cluster.batch.lease import Holder, Lease, LeaseLost, acquire
from manta.cluster.serve_limits import BatchLimits
from manta.cluster.storage import local_files, retention
from manta.cluster.storage.records import Records
from manta.cluster.storage.retention import remove_expired
from manta.cluster.storage.storage import Storage
from tests.batch.test_batches_api import KEYS, Service, completed, ended, lines_of, requests, serving, started, until
from tests.patience import PATIENCE_S

_DAMAGES = {"empty": b"", "zeros": b"\x00" * 64, "torn": b'{"id": "batc'}
DAMAGED = [pytest.param(content, id=name) for name, content in _DAMAGES.items()]
"""Contents of an object after a power failure."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the next look, or long for another try."""
    monkeypatch.setattr(runner_module, "LOOK_S", 0.01)
    monkeypatch.setattr(runner_module, "RETRY_S", 0.01)
    monkeypatch.setattr(batch_run, "FLUSH_CHECK_S", 0.01)
    monkeypatch.setattr(stored, "FLUSH_S", 0.01)


def failing_once(
    monkeypatch: pytest.MonkeyPatch, name: str, fails: Callable[[str], bool], act: Callable[[str], None]
) -> None:
    """Calls `act` with the source, in place of the first call of the function `name` of `os` whose target `fails`."""
    original, has_failed = getattr(os, name), threading.Event()

    def replaced(source: Any, target: Any, *arguments: Any, **options: Any) -> Any:
        if fails(str(target)) and not has_failed.is_set():
            has_failed.set()
            act(str(source))
        return original(source, target, *arguments, **options)

    monkeypatch.setattr(os, name, replaced)


def path_of(root: pathlib.Path, pattern: str) -> pathlib.Path:
    (path,) = root.glob(pattern)
    return path


def numbers(found: list[dict]) -> list[int]:
    return sorted(int(each["custom_id"].removeprefix("request-")) for each in found)


# ---- a write that is interrupted -------------------------------------------------------------------------------------


def test_a_part_truncated_by_full_disk_is_survived(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(source: str) -> None:
        os.truncate(source, os.path.getsize(source) // 2)
        raise OSError(errno.ENOSPC, "no space left on device")

    failing_once(monkeypatch, "replace", lambda target: "/parts/" in target, cut_off)

    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            service.engines.gate.set()
            client = service.client()
            batch = await ended(client, await started(client, requests(9)))
            assert batch.status == "completed"
            assert numbers(await lines_of(client, batch.output_file_id)) == list(range(9))

    asyncio.run(main())


@pytest.mark.parametrize("name", ["00000000000000000000-00000000", "00000000000000000000-00000000.partial"])
@pytest.mark.parametrize("cut_off", [0, 5, 1_000])
def test_lines_of_a_torn_part_are_asked_again(name: str, cut_off: int, tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            client = service.client()
            service.engines.num_free = 5
            batch = await started(client, requests(9))
            await completed(client, batch, 5)
            await service.stop()
            parts = sorted(tmp_path.glob("batches/*/*/parts/*"))
            content = b"".join(part.read_bytes() for part in parts)
            for part in parts:
                part.unlink()
            (parts[0].parent / name).write_bytes(content[: len(content) - cut_off])
            service.engines.gate.set()
            service._start()
            batch = await ended(client, batch)
            assert batch.status == "completed"
            assert numbers(await lines_of(client, batch.output_file_id)) == list(range(9))

    asyncio.run(main())


def test_a_write_is_durable_before_it_is_visible(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    sync, replace, link = os.fsync, os.replace, os.link

    def synced(descriptor: int) -> None:
        sync(descriptor)
        events.append(("sync", os.fstat(descriptor).st_ino))

    def seen(original: Callable[..., None]) -> Callable[..., None]:
        def call(source: Any, target: Any, **options: Any) -> None:
            events.append(("seen", os.stat(source).st_ino))
            original(source, target, **options)

        return call

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", seen(replace))
    monkeypatch.setattr(os, "link", seen(link))
    storage, folder = Storage(str(tmp_path)), tmp_path / "a" / "b"
    for write in (storage.write, getattr(storage, "claim", storage.write)):
        events.clear()
        write("a/b/c", b"content")
        inode = (folder / "c").stat().st_ino
        assert events.index(("sync", inode)) < events.index(("seen", inode))
        assert events[-1] == ("sync", folder.stat().st_ino)
        storage.remove("a/b/c")
    events.clear()
    with storage.create("a/b/large") as file:
        file.write(b"content")
    assert ("sync", (folder / "large").stat().st_ino) in events


def test_only_partial_files_without_a_writer_are_removed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(str(tmp_path))
    storage.write("a/b", b"1")
    folder = tmp_path / local_files.PARTIAL_FOLDER
    for name, written in ((f"{1:032x}", 1), (f"{2:032x}", time.time()), ("somebody else's", 1)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (written, written))
    remove_expired(Records(storage, BatchLimits()))
    assert sorted(path.name for path in folder.iterdir()) == [f"{2:032x}", "somebody else's"]
    assert list(storage.sizes("a")) == ["b"]


def test_exactly_one_of_many_claims_wins(tmp_path: pathlib.Path) -> None:
    storage, found, barrier = Storage(str(tmp_path)), [], threading.Barrier(8)

    def claim(name: bytes) -> None:
        barrier.wait()
        for number in range(50):
            found.append((number, storage.claim(f"a/{number}", name)))
            storage.write("a/shared", name)

    threads = [threading.Thread(target=claim, args=(b"%d" % number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 400
    assert len(set(found)) == 50
    assert not list((tmp_path / local_files.PARTIAL_FOLDER).iterdir())


def test_a_claim_works_without_hard_links(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refused)
    storage = Storage(str(tmp_path))
    assert (storage.claim("a/b", b"one"), storage.claim("a/b", b"two")) == (b"one", b"one")


def test_an_upload_abandoned_by_its_client_is_absent(tmp_path: pathlib.Path) -> None:
    records = Records(Storage(str(tmp_path)), BatchLimits())
    left = records.files.begin_upload("one", 100)
    left.write(b"x")
    left.discard()
    with pytest.raises(ValueError, match="discarded"):
        left.commit("in.jsonl")
    committed = records.files.begin_upload("one", 100)
    committed.commit("in.jsonl")
    committed.discard()
    assert not records.files.all_of("one")
    assert not [path for path in tmp_path.glob("files/**/*") if path.is_file()]


# ---- objects that cannot be decoded ----------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", DAMAGED)
@pytest.mark.parametrize("pattern", ["batches/*/*/state", "batches/*/*/asked", "open/*.cancel", "batches/*/*/lease/*"])
def test_an_undecodable_object_stops_no_batch(pattern: str, damaged: bytes, tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            one, two = service.client(KEYS[0]), service.client(KEYS[1])
            service.engines.num_free = 5
            batch = await started(one, requests(9))
            await completed(one, batch, 5)
            await service.stop()
            is_cancelled = pattern.endswith(".cancel")
            if is_cancelled:
                await one.batches.cancel(batch.id)
            path_of(tmp_path, pattern).write_bytes(damaged)
            assert [each.id async for each in one.batches.list()] == [batch.id]
            assert (await one.batches.retrieve(batch.id)).status == "cancelling" if is_cancelled else "in_progress"
            service.engines.gate.set()
            service._start()
            other = await ended(two, await started(two, requests(3)))
            assert other.status == "completed"
            batch = await ended(one, batch)
            assert batch.status == "cancelled" if is_cancelled else "completed"
            good, bad = await lines_of(one, batch.output_file_id), await lines_of(one, batch.error_file_id)
            assert numbers(good + bad) == list(range(9))

    asyncio.run(main())


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_batch_without_a_decodable_object_fails(
    damaged: bytes, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "UNREADABLE_GRACE_S", 0.0)

    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            await service.stop()
            client = service.client()
            batch = await started(client, requests(3))
            path_of(tmp_path, "batches/*/*/asked").write_bytes(damaged)
            path_of(tmp_path, f"open/{batch.id}.*").write_bytes(damaged)
            service._start()
            batch = await ended(client, batch)
            assert (batch.status, batch.errors.data[0].code) == ("failed", "unreadable_batch")

    asyncio.run(main())


@pytest.mark.parametrize("damaged", DAMAGED)
def test_an_undecodable_file_hides_no_other(
    damaged: bytes, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            client = service.client()
            bad, good = [await client.files.create(file=("x", b"1\n"), purpose="batch") for _ in range(2)]
            path_of(tmp_path, f"files/*/{bad.id}.json").write_bytes(damaged)
            assert [file.id async for file in client.files.list()] == [good.id]
            records = Records(Storage(str(tmp_path)), service.config.batches)
            await asyncio.to_thread(remove_expired, records)
            assert [file.id async for file in client.files.list()] == [good.id]
            now = time.time
            monkeypatch.setattr(retention.time, "time", lambda: now() + 31 * 86_400)
            await asyncio.to_thread(remove_expired, records)
            assert not [path for path in tmp_path.glob("files/**/*") if path.is_file()]

    asyncio.run(main())


def test_the_list_leaves_unreadable_batches_out(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            client = service.client()
            bad, good = [await started(client, requests(1)) for _ in range(2)]
            original = Records.batch

            def batch(self: Records, owner: str, batch_id: str) -> Any:
                if batch_id == bad.id:
                    raise OSError(errno.EIO, "input/output error")
                return original(self, owner, batch_id)

            monkeypatch.setattr(Records, "batch", batch)
            assert [each.id async for each in client.batches.list()] == [good.id]

    asyncio.run(main())


# ---- endings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["cancelled", "expired"])
def test_an_interrupted_ending_continues_with_the_same_outcome(
    status: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            client = service.client()
            service.engines.num_free = 5
            batch = await started(client, requests(20), "1m")
            await completed(client, batch, 5)
            has_failed = asyncio.Event()
            create = Storage.create

            def failing(self: Storage, path: str) -> Any:
                if "-errors" in path and not has_failed.is_set():
                    has_failed.set()
                    raise OSError(errno.ENOSPC, "no space left on device")
                return create(self, path)

            monkeypatch.setattr(Storage, "create", failing)
            if status == "cancelled":
                await client.batches.cancel(batch.id)
            else:
                now = time.time
                await service.stop()
                monkeypatch.setattr(runner_module.time, "time", lambda: now() + 61)
                service._start()
            batch = await ended(client, batch)
            assert has_failed.is_set()
            assert (batch.status, batch.request_counts.failed) == (status, 15)
            assert len(await lines_of(client, batch.output_file_id)) == 5

    asyncio.run(main())


def test_two_cancels_at_once_both_succeed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier, replace = threading.Barrier(2), os.replace

    def together(source: Any, target: Any, **options: Any) -> None:
        if ".cancel" in str(target):
            barrier.wait(PATIENCE_S)
        replace(source, target, **options)

    monkeypatch.setattr(os, "replace", together)

    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            client = service.client()
            batch = await started(client, requests(3))
            both = await asyncio.gather(*(client.batches.cancel(batch.id) for _ in range(2)))
            assert {each.status for each in both} <= {"cancelling", "cancelled"}
            assert (await ended(client, batch)).status == "cancelled"

    asyncio.run(main())


def test_a_cancel_while_another_ones_mark_goes_succeeds(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch ends after this client found the other one's mark, and before it reads the mark."""
    records = Records(Storage(str(tmp_path)), BatchLimits())
    fields = {"endpoint": "/v1/completions", "input_file_id": "x", "completion_window": "24h", "expires_at": 0}
    batch = records.create_batch("one", **fields)
    records.cancel("one", batch.id)
    read = Storage.read

    def closing(self: Storage, path: str) -> bytes | None:
        if path.endswith(".cancel"):
            records.close_batch("one", batch.id)
        return read(self, path)

    monkeypatch.setattr(Storage, "read", closing)
    records.cancel("one", batch.id)
    assert not records.storage.sizes("open")


def test_a_failed_flush_during_cancellation_loses_no_answer(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_flushing, is_cancelled = threading.Event(), threading.Event()
    write = Storage.write

    def failing(self: Storage, path: str, content: bytes) -> None:
        if "/parts/" in path and not is_flushing.is_set():
            is_flushing.set()
            is_cancelled.wait(PATIENCE_S)
            raise OSError(errno.ENOSPC, "no space left on device")
        write(self, path, content)

    monkeypatch.setattr(Storage, "write", failing)

    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            client = service.client()
            service.engines.num_free = 5
            batch = await started(client, requests(9))
            await until(is_flushing.is_set)
            await until(lambda: len(service.engines.asked) >= 9)  # five of them were answered
            await client.batches.cancel(batch.id)
            await until(lambda: all(run.answering_ended for run in runs_of(service)))
            is_cancelled.set()
            batch = await ended(client, batch)
            good, bad = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
            assert (len(good), len(bad)) == (5, 4)

    asyncio.run(main())


class _Seen:
    def __init__(self, lines: asyncio.Task[None] | None) -> None:
        self.answering_ended = lines is not None and lines.done()


def runs_of(service: Service) -> list[_Seen]:
    """The batches that a service runs, and whether they have left their lines."""
    runs: Any = service.runner._runs
    found = list(runs.values()) if runs and isinstance(next(iter(runs)), str) else list(runs)
    return [_Seen(getattr(run, "_lines", None) or getattr(run, "answering", None)) for run in found]


# ---- two runners -----------------------------------------------------------------------------------------------------


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 0.2)
    monkeypatch.setattr(batch_run, "RENEW_S", 0.05)


def test_a_runner_believed_dead_cannot_undo_a_batch(
    short_leases: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first runner stops for long before it saves; the second one finishes the batch meanwhile."""
    is_stalled, goes_on = threading.Event(), threading.Event()

    async def main() -> None:
        async with serving(str(tmp_path)) as first, serving(str(tmp_path)) as second:
            await second.stop()
            client = first.client()
            storage = first.runner._records.storage
            write = storage.write

            def stalling(path: str, content: bytes) -> None:
                if "/lease/" in path and is_stalled.is_set():
                    goes_on.wait(PATIENCE_S)
                if path.endswith("/state") and b'"completed":5' in content:
                    is_stalled.set()
                    goes_on.wait(PATIENCE_S)
                write(path, content)

            monkeypatch.setattr(storage, "write", stalling)
            first.engines.num_free = 5
            batch = await started(client, requests(9))
            await until(is_stalled.is_set)
            second.engines.gate.set()
            second._start()
            done = await ended(client, batch)
            content = (await client.files.content(done.output_file_id)).text
            goes_on.set()
            first.engines.gate.set()
            await until(lambda: not first.runner._runs)
            for _ in range(20):
                assert await client.batches.retrieve(batch.id) == done
                await asyncio.sleep(0.01)
            assert (await client.files.content(done.output_file_id)).text == content
            assert numbers(await lines_of(client, done.output_file_id)) == list(range(9))

    asyncio.run(main())


def test_two_servers_on_one_storage_answer_lines_once(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with serving(str(tmp_path)) as first, serving(str(tmp_path)) as second:
            clients = [first.client(key) for key in KEYS]
            batches = [(client, await started(client, requests(30))) for client in clients for _ in range(2)]
            for each in (first, second):
                each.engines.gate.set()
            for client, batch in batches:
                found = await ended(client, batch)
                assert found.status == "completed"
                assert numbers(await lines_of(client, found.output_file_id)) == list(range(30))
            assert len(first.engines.asked) + len(second.engines.asked) == 4 * 30  # no line was answered twice
            for client in clients:
                names = [file.filename async for file in client.files.list()]
                assert len(names) == 4
            assert not Records(Storage(str(tmp_path)), BatchLimits()).open_batches()

    asyncio.run(main())


def test_a_lost_state_is_no_missing_input(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(source: str) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such file", source)

    failing_once(monkeypatch, "replace", lambda target: target.endswith("/state"), lost)

    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            service.engines.gate.set()
            client = service.client()
            assert (await ended(client, await started(client, requests(3)))).status == "completed"

    asyncio.run(main())


def test_expiry_leaves_what_another_runner_is_finishing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that was created days ago ends now, while another runner removes old files."""
    now = time.time

    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            client = service.client()
            await service.stop()
            batch = await started(client, requests(5), "7d")
            monkeypatch.setattr(runner_module.time, "time", lambda: now() + 3 * 86_400)
            records = Records(Storage(str(tmp_path)), BatchLimits())
            write, claim = Storage.write, getattr(Storage, "claim", None)

            def cleaning(self: Storage, path: str) -> None:
                if path.startswith("files/") and path.endswith("-output.json"):
                    cleanup = getattr(records, "remove_expired", None) or (lambda: remove_expired(records))
                    cleanup()

            def writing(self: Storage, path: str, content: bytes) -> None:
                cleaning(self, path)
                write(self, path, content)

            def claiming(self: Storage, path: str, content: bytes) -> bytes:
                cleaning(self, path)
                assert claim is not None
                return claim(self, path, content)

            monkeypatch.setattr(Storage, "write", writing)
            monkeypatch.setattr(Storage, "claim", claiming, raising=False)
            service.engines.gate.set()
            service._start()
            batch = await ended(client, batch)
            assert numbers(await lines_of(client, batch.output_file_id)) == list(range(5))

    asyncio.run(main())


# ---- leases ----------------------------------------------------------------------------------------------------------


def test_a_lease_is_fenced_off_by_its_successor(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    storage = Storage(str(tmp_path))
    first = acquire(storage, "lease", Holder("one"))
    assert isinstance(first, Lease)
    left_s = acquire(storage, "lease", Holder("two"))
    assert isinstance(left_s, float)
    assert 0 < left_s <= lease.LEASE_S
    again = acquire(storage, "lease", Holder("one"))
    assert isinstance(again, Lease)
    assert again.epoch == first.epoch
    monkeypatch.setattr(lease.time, "time", lambda: now() + lease.LEASE_S + 1)
    first.check()  # it has expired, but nobody took it: it is renewed
    assert isinstance(acquire(storage, "lease", Holder("two")), float)
    monkeypatch.setattr(lease.time, "time", lambda: now() + 3 * lease.LEASE_S)
    second = acquire(storage, "lease", Holder("two"))
    assert isinstance(second, Lease)
    assert second.epoch == first.epoch + 1
    for lost in (first.check, first.renew):
        with pytest.raises(LeaseLost):
            lost()
    second.check()
    second.release()
    with pytest.raises(LeaseLost):
        second.check()
    assert isinstance(acquire(storage, "lease", Holder("three")), Lease)


def test_a_lease_from_a_clock_that_was_set_back_ends(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names a time that is far ahead. Its holder renews it or has died; only the first keeps it."""
    storage, wall, steady, other = Storage(str(tmp_path)), time.time, time.monotonic, Holder("two")
    monkeypatch.setattr(lease.time, "time", lambda: wall() + 3600)
    held = acquire(storage, "lease", Holder("one"))
    assert isinstance(held, Lease)
    for waited_s in (0.0, 1.5 * lease.LEASE_S):
        monkeypatch.setattr(lease.time, "monotonic", lambda waited_s=waited_s: steady() + waited_s)
        monkeypatch.setattr(lease.time, "time", lambda: wall() + 3600)
        held.renew()
        monkeypatch.setattr(lease.time, "time", wall)
        left_s = acquire(storage, "lease", other)
        assert isinstance(left_s, float)
        assert 0 < left_s <= lease.LEASE_S
    monkeypatch.setattr(lease.time, "monotonic", lambda: steady() + 2.6 * lease.LEASE_S)
    assert isinstance(acquire(storage, "lease", other), Lease)


def test_one_of_several_runners_gets_the_lease(tmp_path: pathlib.Path) -> None:
    storage, found, barrier = Storage(str(tmp_path)), [], threading.Barrier(8)

    def take(name: str) -> None:
        barrier.wait()
        found.append(acquire(storage, "lease", Holder(name)))

    threads = [threading.Thread(target=take, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(each, Lease) for each in found) == 1
