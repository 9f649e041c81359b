"""Two batch runners over a storage that fails, tears, repeats and delays, and runners that are killed at random.

Whatever happens: each batch ends, an ended batch never changes, its files hold each line of the input once, and clients
see legal changes of its status only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import types
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from manta.cluster.batch import batch_job, batch_run, batch_runner, lease, stored
from manta.cluster.batch.batch_runner import Runner
from manta.cluster.batch.lines import BatchRequest, BatchResponse
from manta.cluster.protocol.batches_api import Batch
from manta.cluster.serve_limits import BatchLimits
from manta.cluster.storage import file_records, records, retention
from manta.cluster.storage.records import ENDED, Records
from manta.cluster.storage.retention import remove_expired
from tests.batch.batch_world import CALM, EPOCH_S, Faults, FaultyStorage, Killed, Scheduler, VirtualLoop, World
from tests.conftest import PROVE

NUM_SCHEDULES = 600 if PROVE else 9
LIMITS = BatchLimits()
OWNERS = ("one", "two")
LEGAL = {
    "validating": {"in_progress", "finalizing", "cancelling", *ENDED},
    "in_progress": {"finalizing", "cancelling", *ENDED},
    "finalizing": {"cancelling", *ENDED},
    "cancelling": {*ENDED},
}
"""The statuses that a client may see after each."""
PLACES = ("none", "asked", "state", "finalizing", "result", "ended", "parts", "lease", "files", "open")
"""Parts of paths at which faults are aimed."""
GIVEN_UP = {"batch_cancelled", "batch_expired"}


@contextlib.contextmanager
def patched(scheduler: Scheduler, chance: random.Random) -> Iterator[None]:
    """No real time, threads or randomness in the modules of batches."""
    secrets = types.SimpleNamespace(token_hex=lambda size: f"{chance.getrandbits(size * 8):0{size * 2}x}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "to_thread", scheduler.to_thread)
        for module in (records, file_records, retention, batch_runner, batch_run, stored, lease, batch_job):
            patch.setattr(module, "time", scheduler.clock())
        for module in (records, file_records, stored, lease):
            patch.setattr(module, "secrets", secrets)
        for module in (file_records, stored):
            patch.setattr(module, "threading", types.SimpleNamespace(Lock=scheduler.lock))
        for module in (file_records, retention, batch_runner, batch_run, stored):
            patch.setattr(module.logger, "disabled", True)
        patch.setattr(batch_runner, "LOOK_S", 3.0)
        patch.setattr(batch_runner, "CLEAN_S", 20.0)
        patch.setattr(retention, "STALE_UPLOAD_S", 30.0)
        patch.setattr(retention, "REOPEN_S", 0.0)
        yield


class Cluster:
    """Runners that come and go over one storage."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.chance = world.chance
        self.running: dict[FaultyStorage, asyncio.Task[None]] = {}

    def start(self) -> None:
        storage = FaultyStorage(self.world)
        found = Runner(Records(storage, LIMITS), self.answer, asyncio.Semaphore(3), 4096)
        self.running[storage] = asyncio.create_task(found.serve())
        storage.on_kill = lambda: self.reap(storage)

    def reap(self, storage: FaultyStorage) -> None:
        """Ends the tasks of a runner that was killed."""
        task = self.running.pop(storage, None)
        if task is not None:
            self.world.scheduler.loop.call_soon(task.cancel)

    async def answer(self, request: BatchRequest, request_id: str, client: str) -> BatchResponse:
        """Good or bad at random, so that two answers of one line differ."""
        await asyncio.sleep(self.chance.random() * 3)
        status = self.chance.choice((200, 200, 200, 400, 429, 500))
        return BatchResponse(status, request_id, msgspec.Raw(b'{"usage": {}}'))

    async def stop_one(self) -> None:
        """Kills a runner, or stops it gracefully."""
        if not self.running:
            return
        storage = self.chance.choice(list(self.running))
        task = self.running.pop(storage)
        storage.is_dead = self.chance.random() < 0.8
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Killed):
            await task


class Client:
    """One client's batch, and all that the client sees of it."""

    def __init__(self, world: World, owner: str, num_lines: int, window_s: int, cancel_s: float | None) -> None:
        self.owner = owner
        self.num_lines = num_lines
        self._world = world
        self._window_s = window_s
        self._cancel_s = cancel_s
        self._records = Records(FaultyStorage(world, has_faults=False), LIMITS)
        self._seen: Batch | None = None
        self.is_cancelled = False

    async def run(self) -> Batch:
        upload = await asyncio.to_thread(self._records.files.begin_upload, self.owner, 10_000)
        for number in range(self.num_lines):
            await asyncio.to_thread(upload.write, _line(number))
        file = await asyncio.to_thread(upload.commit, "in.jsonl")
        now = int(EPOCH_S + self._world.scheduler.loop.now)
        self._seen = await asyncio.to_thread(
            self._records.create_batch,
            self.owner,
            endpoint="/v1/completions",
            input_file_id=file.id,
            completion_window="x",
            expires_at=now + self._window_s,
        )
        begun = self._world.scheduler.loop.now
        while self._seen.status not in ENDED:
            await asyncio.sleep(self._world.chance.random() * 4)
            self._note(await asyncio.to_thread(self._records.batch, self.owner, self._seen.id))
            waited_s = self._world.scheduler.loop.now - begun
            assert waited_s < 20_000, f"batch {self._seen} does not end"
            if self._cancel_s is not None and waited_s >= self._cancel_s and self._seen.status not in ENDED:
                self.is_cancelled = True
                await asyncio.to_thread(self._records.cancel, self.owner, self._seen.id)
        return self._seen

    def _note(self, batch: Batch | None) -> None:
        old = self._seen
        assert batch is not None
        assert old is not None
        if old.status in ENDED:
            assert batch == old, "an ended batch changed"
        elif batch.status != old.status:
            assert batch.status in LEGAL[old.status], (old.status, batch.status)
        self._seen = batch

    async def check(self) -> Batch:
        """Looks at the end that the client saw."""
        assert self._seen is not None
        self._note(await asyncio.to_thread(self._records.batch, self.owner, self._seen.id))
        batch = self._seen
        lines, codes = [], set()
        for file_id, is_good in ((batch.output_file_id, True), (batch.error_file_id, False)):
            for result in await self._lines(file_id):
                lines.append(int(result["id"].split("_")[2]))
                codes.add(result["error"] and result["error"]["code"])
                assert (result["error"] is None and result["response"]["status_code"] == 200) is is_good
        if batch.status == "failed":
            assert (self.num_lines, lines) == (0, [])
            return batch
        assert sorted(lines) == list(range(self.num_lines)), f"{batch.status}: {sorted(lines)}"
        counts = batch.request_counts
        assert counts.total == self.num_lines == counts.completed + counts.failed
        assert codes & GIVEN_UP <= {f"batch_{batch.status}"}
        assert batch.status != "cancelled" or self.is_cancelled
        assert batch.status != "expired" or (batch.expired_at is not None and batch.expired_at >= batch.expires_at)
        return batch

    async def _lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        file = await asyncio.to_thread(self._records.files.find, self.owner, file_id)
        assert file is not None
        content = (await asyncio.to_thread(self._records.files.content, self.owner, file_id)).read()
        assert len(content) == file.bytes
        return [json.loads(text) for text in content.splitlines()]


def _line(number: int) -> bytes:
    request = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"{number}"}}
    return f"{json.dumps(request)}\n".encode()


def corrupt(world: World) -> None:
    """A power failure empties an object that may be rewritten or asked again."""
    ended = {path.rpartition("/")[0] for path in world.objects if path.endswith("/ended")}
    paths = [
        path
        for path in world.objects
        if (path.startswith("batches/") and path.rpartition("/")[2] in ("state", "asked"))
        or (("/lease/" in path or "/parts/" in path or path.endswith(".cancel")) and world.chance.random() < 0.3)
        if path.rpartition("/")[0] not in ended
    ]
    if paths:
        world.objects[world.chance.choice(paths)] = b""


async def disturb(cluster: Cluster, faults: Faults, num_disturbances: int) -> None:
    """Kills, starts and corrupts at random; then everything works, and two runners run."""
    world, chance = cluster.world, cluster.chance
    world.faults = faults
    world.objects |= {"open/junk": b"", "open/batch_1.x.y.z": b"", "files/one/nonsense.json": b"\x00"}
    world.objects[f"files/one/file-{'0' * 30}.json"] = b""
    for _ in range(num_disturbances):
        await asyncio.sleep(chance.random() * 12)
        action = chance.random()
        if action < 0.45:
            await cluster.stop_one()
        elif action < 0.85:
            if len(cluster.running) < 2:
                cluster.start()
        else:
            corrupt(world)
    world.faults = CALM
    while len(cluster.running) < 2:
        cluster.start()


async def schedule(world: World, faults: Faults, num_disturbances: int) -> None:
    chance, cluster = world.chance, Cluster(world)
    clients = [
        Client(
            world,
            chance.choice(OWNERS),
            chance.choice((0, 1, 3, 8, 8)),
            chance.choice((20, 60, 86_400, 86_400)),
            chance.choice((None, None, chance.random() * 60)),
        )
        for _ in range(chance.randrange(1, 4))
    ]
    cluster.start()
    cluster.start()
    await asyncio.gather(disturb(cluster, faults, num_disturbances), *(client.run() for client in clients))
    for client in clients:
        await client.check()
    await asyncio.sleep(300)  # writes that are repeated late, runners that were stalled
    while cluster.running:
        _, task = cluster.running.popitem()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await asyncio.to_thread(remove_expired, Records(FaultyStorage(world), LIMITS))
    check_leftovers(world, [await client.check() for client in clients])


def check_leftovers(world: World, ended: list[Batch]) -> None:
    assert not world.violations, world.violations
    kept = {file_id for b in ended for file_id in (b.input_file_id, b.output_file_id, b.error_file_id) if file_id}
    files = {path.rpartition("/")[2].removesuffix(".json") for path in world.objects if path.startswith("files/")}
    assert files - {"nonsense"} == kept
    assert not [path for path in world.objects if path.startswith("open/batch_") and not path.endswith(".x.y.z")]


def run_schedule(seed: int, faults: Faults, num_disturbances: int, has_atomic_claims: bool = True) -> World:
    chance, loop = random.Random(seed), VirtualLoop()
    scheduler = Scheduler(loop)
    world = World(scheduler, chance, has_atomic_claims)
    try:
        with patched(scheduler, chance):
            loop.run_until_complete(schedule(world, faults, num_disturbances))
    finally:
        scheduler.close()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        loop.close()
    return world


def rate(*values: float) -> st.SearchStrategy[float]:
    return st.sampled_from((0.0, *values))


@settings(max_examples=NUM_SCHEDULES)
@given(
    st.integers(0, 2**32),
    st.builds(
        Faults,
        fails=rate(0.01, 0.1),
        tears=rate(0.02, 0.1),
        repeats=rate(0.05),
        lists_late=rate(0.3),
        stalls=rate(0.002, 0.01),
        kills=rate(0.002, 0.01),
        stalls_at=st.sampled_from(PLACES),
        kills_at=st.sampled_from(PLACES),
    ),
    st.integers(0, 15),
)
def test_batches_end_once_despite_storage_and_runner_faults(seed: int, faults: Faults, num_disturbances: int) -> None:
    run_schedule(seed, faults, num_disturbances)


@settings(max_examples=NUM_SCHEDULES // 3)
@given(
    st.integers(0, 2**32),
    st.builds(Faults, fails=rate(0.01, 0.1), tears=rate(0.02), lists_late=rate(0.3), kills=rate(0.002, 0.01)),
    st.integers(0, 15),
)
def test_batches_end_once_without_atomic_claims(seed: int, faults: Faults, num_disturbances: int) -> None:
    """No write takes longer than `lease.SETTLE_S` here."""
    run_schedule(seed, faults, num_disturbances, has_atomic_claims=False)
