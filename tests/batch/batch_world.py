"""A storage that fails, and a clock that nobody waits for: where `test_batch_storage_faults.py` runs batch runners.

`asyncio.to_thread` runs its function in a thread of its own, but only one thread runs at a time: each stops before
every operation of the storage until the event loop resumes it. The loop's clock jumps to the next timer. A schedule is
therefore a function of its seed.
"""

from __future__ import annotations

import asyncio
import functools
import io
import random
import selectors
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import msgspec

from manta.cluster.protocol.batches_api import Batch, FileObject
from manta.cluster.storage.records import BatchOutcome, Finalizing
from manta.cluster.storage.storage import Storage

EPOCH_S = 1_800_000_000.0
"""Unix time at which every schedule begins."""
CLAIMED = {"finalizing": Finalizing, "result": BatchOutcome, "ended": Batch}
"""Objects of a batch that never change once they can be decoded."""
AIMED = 0.3
"""Probability that a fault aimed at certain objects strikes in one operation."""


class Killed(BaseException):
    """Ends the threads of a runner that was killed."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))
        self.set_exception_handler(lambda *_: None)

    def time(self) -> float:
        return self.now


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "every task waits for another one"
        self._loop.now += max(0.0, timeout)
        return []


class Fiber:
    """A thread that runs while it is resumed."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._go, self._stopped = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._stopped.acquire()
        self.pause_s: float | None = 0.0
        """Seconds until it wants to go on; None if it has ended."""
        self.value: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.fiber = self  # type: ignore[attr-defined]
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.value = self._function()
        except BaseException as error:
            self.error = error
        self.pause_s = None
        self._stopped.release()

    def resume(self) -> None:
        self._go.release()
        self._stopped.acquire()

    def pause(self, seconds: float) -> None:
        """Called in the thread."""
        self.pause_s = seconds
        self._stopped.release()
        self._go.acquire()


class Scheduler:
    """Runs functions as fibers of an event loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self._fibers: list[Fiber] = []
        self._is_closing = False

    async def to_thread(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """As `asyncio.to_thread`: if its caller is cancelled, the function goes on."""
        fiber = Fiber(functools.partial(function, *arguments, **options))
        self._fibers.append(fiber)
        return await asyncio.shield(self.loop.create_task(self._drive(fiber)))

    async def _drive(self, fiber: Fiber) -> Any:
        fiber.resume()
        while fiber.pause_s is not None:
            await asyncio.sleep(fiber.pause_s)
            fiber.resume()
        self._fibers.remove(fiber)
        if fiber.error is not None:
            raise fiber.error
        return fiber.value

    def pause(self, seconds: float) -> None:
        """Lets others run; in the event loop itself it does nothing."""
        fiber = getattr(threading.current_thread(), "fiber", None)
        if fiber is not None:
            if not self._is_closing:
                fiber.pause(seconds)
            if self._is_closing:
                raise Killed

    def close(self) -> None:
        """Ends all fibers."""
        self._is_closing = True
        for fiber in self._fibers:
            while fiber.pause_s is not None:
                fiber.resume()

    def clock(self) -> types.SimpleNamespace:
        """What takes the place of the module `time`."""
        now = lambda: EPOCH_S + self.loop.now  # noqa: E731
        nanoseconds = lambda: int(now() * 1e9)  # noqa: E731
        return types.SimpleNamespace(time=now, monotonic=now, time_ns=nanoseconds, sleep=self.pause)

    def lock(self) -> Lock:
        """What takes the place of `threading.Lock`."""
        return Lock(self)


class Lock:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_held = False

    def __enter__(self) -> None:
        while self._is_held:
            self._scheduler.pause(0.01)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False


class Faults(msgspec.Struct, frozen=True):
    """How often the storage does what, as probabilities of one operation."""

    fails: float = 0.0
    """An operation raises. A write may have happened all the same."""
    tears: float = 0.0
    """A write that raises leaves a part of its content."""
    repeats: float = 0.0
    """A write happens again up to a minute later."""
    lists_late: float = 0.0
    """A listing misses what is new and shows what is gone."""
    stalls: float = 0.0
    """The process stops for up to a minute, longer than a lease, and goes on."""
    kills: float = 0.0
    """The runner is killed before or after it."""
    stalls_at: str = "none"
    """A part of paths at which `stalls` is `AIMED`."""
    kills_at: str = "none"
    """A part of paths at which `kills` is `AIMED`."""


CALM = Faults()


class World:
    """All objects of a storage, and what may never happen to them."""

    def __init__(self, scheduler: Scheduler, chance: random.Random, has_atomic_claims: bool) -> None:
        self.scheduler = scheduler
        self.chance = chance
        self.has_atomic_claims = has_atomic_claims
        self.objects: dict[str, bytes] = {}
        self.changed_at: dict[str, float] = {}
        """Time of each object's last creation or removal."""
        self.faults = CALM
        self.violations: list[str] = []
        self.num_operations = 0

    def store(self, path: str, content: bytes) -> None:
        old = self.objects.get(path)
        self._check_claimed(path, old, content)
        is_content = path.startswith("files/") and not path.endswith(".json")
        if is_content and decodes(self.objects.get(f"{path}.json"), FileObject):
            self.violations.append(f"{path} was written after its commit")
        if old is None:
            self.changed_at[path] = self.scheduler.loop.now
        self.objects[path] = content

    def _check_claimed(self, path: str, old: bytes | None, new: bytes) -> None:
        kind = CLAIMED.get(path.rpartition("/")[2])
        if path.startswith("batches/") and kind is not None and old not in (None, new) and decodes(old, kind):
            self.violations.append(f"{path} changed from {old!r} to {new!r}")

    def delete(self, path: str) -> None:
        for each in [name for name in self.objects if name == path or name.startswith(f"{path}/")]:
            del self.objects[each]
            self.changed_at[each] = self.scheduler.loop.now


def decodes(content: bytes | None, kind: Any) -> bool:
    try:
        return content is not None and bool(msgspec.json.decode(content, type=kind))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


class FaultyStorage(Storage):
    """A `Storage` as one process sees it. Nothing that it does happens after `is_dead` is set."""

    def __init__(self, world: World, has_faults: bool = True) -> None:
        self.is_local = self.is_of_one_process = False
        self._world = world
        self._has_faults = has_faults
        self.is_dead = False
        self._stalls_until = 0.0
        self.on_kill: Callable[[], None] | None = None
        """Called when `Faults.kills` strikes."""
        self.has_atomic_claims = world.has_atomic_claims

    @property
    def _faults(self) -> Faults:
        return self._world.faults if self._has_faults else CALM

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self._world.chance.random() < probability

    def _pause(self, path: str) -> None:
        """Others run; the process may stall or be killed."""
        now, chance, parts = self._world.scheduler.loop.now, self._world.chance, path.split("/")
        if self._happens(AIMED if self._faults.stalls_at in parts else self._faults.stalls):
            self._stalls_until = now + chance.uniform(10, 60)
        self._world.scheduler.pause(max(0.0, self._stalls_until - now) + chance.random() * 0.05)
        is_killed = self._happens(AIMED if self._faults.kills_at in parts else self._faults.kills)
        if is_killed and self.on_kill is not None and not self.is_dead:
            self.is_dead = True
            self.on_kill()
        if self.is_dead:
            raise Killed

    def _begin(self, path: str) -> None:
        """Before an operation: others run, and it may fail."""
        self._world.num_operations += 1
        self._pause(path)
        if self._happens(self._faults.fails):
            raise OSError("the storage fails")

    def write(self, path: str, content: bytes) -> None:
        self._begin(path)
        self._store(path, content)

    def _store(self, path: str, content: bytes) -> None:
        if self._happens(self._faults.tears):
            self._world.store(path, content[: self._world.chance.randrange(len(content) + 1)])
            raise OSError("the write was interrupted")
        self._world.store(path, content)
        if self._happens(self._faults.repeats):
            later_s = self._world.chance.random() * 60
            self._world.scheduler.loop.call_later(later_s, self._world.store, path, content)
        self._pause(path)
        if self._happens(self._faults.fails):
            raise OSError("the write happened, but its answer is lost")

    def create_exclusively(self, path: str, content: bytes) -> None:
        self._begin(path)
        if path in self._world.objects:
            raise FileExistsError(path)
        if not self._world.has_atomic_claims:
            self._pause(path)
        self._store(path, content)

    def read(self, path: str) -> bytes | None:
        self._begin(path)
        return self._world.objects.get(path)

    def read_all(self, folder: str, names: Iterable[str]) -> dict[str, bytes | Exception]:
        found: dict[str, bytes | Exception] = {}
        shuffled = list(names)
        self._world.chance.shuffle(shuffled)
        for name in shuffled:
            try:
                content = self.read(f"{folder}/{name}")
            except OSError as error:
                found[name] = error
                continue
            if content is not None:
                found[name] = content
        return found

    def create(self, path: str) -> BinaryIO:
        self._begin(path)
        return _Writer(self, path)  # type: ignore[return-value]

    def open(self, path: str) -> BinaryIO:
        content = self.read(path)
        if content is None:
            raise FileNotFoundError(path)
        return io.BytesIO(content)

    def sizes(self, folder: str) -> dict[str, int]:
        self._begin(folder)
        found = dict(self._listed(folder, self._world.objects))
        if self._happens(self._faults.lists_late):
            for name, _ in list(self._listed(folder, self._world.changed_at)):
                is_new = self._world.scheduler.loop.now - self._world.changed_at.get(f"{folder}/{name}", 0.0) < 30
                if is_new and self._happens(0.5):
                    if name in found:
                        del found[name]
                    else:
                        found[name] = 1
        return dict(sorted(found.items()))

    def _listed(self, folder: str, paths: dict[str, Any]) -> Iterator[tuple[str, int]]:
        for path in paths:
            if path.startswith(f"{folder}/"):
                name, slash, _ = path[len(folder) + 1 :].partition("/")
                yield name, 0 if slash else len(self._world.objects.get(path, b""))

    def has(self, path: str) -> bool:
        return self.read(path) is not None

    def remove(self, path: str) -> None:
        self._begin(path)
        self._world.delete(path)
        self._pause(path)

    def remove_stale_partials(self) -> None:
        self._begin("")


class _Writer:
    """An object that appears piece by piece."""

    def __init__(self, storage: FaultyStorage, path: str) -> None:
        self._storage = storage
        self._path = path
        self._content = b""

    def write(self, piece: bytes) -> None:
        self._content += piece
        self._storage._begin(self._path)
        self._storage._world.store(self._path, self._content)

    def close(self) -> None:
        if self._path not in self._storage._world.objects:
            self.write(b"")
