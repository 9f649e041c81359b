"""One rank: a Ray actor that holds a worker. Ray places, starts and ends it; steps come over a separate TCP connection.

The actor imports torch when it starts, not when this module is imported, so a process that starts actors needs no
torch.
"""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from ray import cloudpickle

from manta.cluster.config import EngineConfig
from manta.cluster.engine.ranks.load_reports import reported
from manta.cluster.engine.ranks.rank_channel import Address, RankLost, connect
from manta.cluster.engine.ranks.rank_messages import (
    Answer,
    Done,
    DropAdapter,
    DropKept,
    Failed,
    Held,
    HoldAdapter,
    KeepBlocks,
    Message,
    Moved,
    Output,
    Register,
    Reset,
    RestoreBlocks,
    Sample,
    Step,
)
from manta.cluster.private_folder import PrivateFolder
from manta.structured.frames import frame, read_frame
from manta.structured.low_priority import call_aside
from manta.structured.visible_logs import guard_process, logger_of
from manta.workers.model_info import ModelInfo

if TYPE_CHECKING:
    from manta.workers.ranks.rank_worker import AdapterHolder, RankWorker, ReadAdapter

logger = logger_of(__name__)


def _import_worker() -> None:
    """Imports what `load` needs, which takes seconds."""
    import manta.cluster.engine.executors.worker_factory  # noqa: F401


class RankActor:
    """The Ray actor of a rank. Call its methods in this order: `open_folder` on rank 0, `sees`, `open_store` on rank 0,
    `load`, `serve`. A second thread of the actor takes calls of `read_adapter` while `serve` runs.
    """

    def __init__(self, num_threads: int, yields: bool = False) -> None:
        """With `yields` its imports take no time from other engines of this machine."""
        # torch's OpenMP reads both when it loads. Threads that spin for long take cores from other threads.
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        os.environ["GOMP_SPINCOUNT"] = "1000"
        guard_process()
        gc.disable()  # what the import makes stays: collections take a quarter of its time
        call_aside(_import_worker) if yields else _import_worker()
        gc.enable()

        self._folder: PrivateFolder | None = None
        self._store: Any = None
        self._rank = 0
        self._worker: RankWorker | None = None
        self._failure: Failed | None = None
        """The failure of the last `Step`, until its `Sample` is answered."""
        self._read: dict[int, ReadAdapter] = {}
        """Adapters by the numbers under which the engine has them read."""

    def open_folder(self) -> str:
        """Makes a folder that only this user can enter, and returns its path. The folder is removed when this process
        ends.
        """
        self._folder = PrivateFolder()
        return str(self._folder.path)

    def sees(self, folder: str) -> bool:
        """Returns whether this rank can use rank 0's folder: the same machine, file system and user."""
        return os.access(folder, os.R_OK | os.W_OK | os.X_OK) and os.stat(folder).st_uid == os.geteuid()

    def open_store(self, device: str, is_one_machine: bool) -> str:
        """Opens the rendezvous of the ranks of a model on `device`, and returns its address."""
        from manta.workers.ranks.rank_worker import open_group

        assert self._folder is not None, "`open_folder` comes first"
        host = None if is_one_machine else ray.util.get_node_ip_address()
        self._store, address = open_group(device, self._folder.path, host)
        return address

    def load(self, config: EngineConfig, rank: int, group_address: str, report_key: str = "") -> ModelInfo:
        """Loads this rank's worker, and reports how far that is under a key that is not empty (`load_reports.py`).
        Raises what `make_worker` raises.
        """
        from manta.cluster.engine.executors.worker_factory import make_worker

        self._rank = rank
        with reported(report_key):
            self._worker = make_worker(config, rank, group_address)
        return self._worker.info

    def read_adapter(self, path: str, number: int, needed: list[int]) -> tuple[str, int]:
        """Reads the adapter in a folder, beside the steps, and keeps it under a number. Returns its digest, and the
        bytes of this rank's share. `needed` has the numbers of the other adapters that the engine may still hold; the
        rest are forgotten. Raises `ModelError` as `AdapterHolder.read` does, and `RankLost` if this rank takes a lost
        one's place and still loads.
        """
        if self._worker is None:
            raise RankLost("the rank still loads its model")
        self._read = {each: adapter for each, adapter in self._read.items() if each in needed}
        adapter = call_aside(lambda: self._adapters.read(path))
        self._read[number] = adapter
        return adapter.digest, adapter.num_bytes

    @property
    def _adapters(self) -> AdapterHolder:
        assert self._worker is not None, "it was loaded before"
        adapters = self._worker.adapters
        assert adapters is not None, "the options name folders of adapters"
        return adapters

    def serve(self, address: Address) -> None:
        """Serves the engine at `address` until the connection or the engine ends; then this process ends too."""
        messages = msgspec.msgpack.Decoder(Message)
        encoder = msgspec.msgpack.Encoder()
        with connect(address, self._rank) as connection, connection.makefile("rb") as stream:
            try:
                while (message := read_frame(stream)) is not None:
                    answer = self._handle(messages.decode(message))
                    if answer is not None:
                        connection.sendall(frame(encoder.encode(answer)))
            except OSError as error:
                logger.info("the engine has gone: %s", error)
        ray.actor.exit_actor()

    def _handle(self, message: Message) -> Answer | None:
        """Handles a message and returns the answer, if any. Rank 0 answers a `Step` with the answer to its `Sample`."""
        half_done = isinstance(message, Step) and self._rank == 0
        try:
            answer = self._answer(message)
        except Exception as error:
            logger.exception("rank %d failed", self._rank)
            answer = Failed(f"{type(error).__name__}: {error}")
            self._failure = answer if half_done else None
        return None if half_done else answer

    def _answer(self, message: Message) -> Answer:
        worker = self._worker
        assert worker is not None, "it was loaded before"
        match message:
            case Step():
                if self._rank == 0:
                    self._failure = None
                    worker.execute(message.step)
                else:
                    worker.adopt(message.adopted)
                    worker.execute(message.step)
                    return Output(worker.sample())
            case Sample():
                if self._failure is not None:
                    return self._failure
                return Output(worker.sample(None if message.masks is None else message.masks.batch()))
            case Register():
                worker.register_logits_processor(message.name, cloudpickle.loads(message.factory))
            case RestoreBlocks():
                keeper, parts = worker.keeper, message.parts
                return Moved([False] * len(parts) if keeper is None else keeper.restore(parts))
            case KeepBlocks():
                keeper, parts = worker.keeper, message.parts
                return Moved([True] * len(parts) if keeper is None else keeper.keep(parts))
            case DropKept():
                if worker.keeper is not None:
                    worker.keeper.drop(message.hashes)
            case HoldAdapter():
                return Held(self._adapters.hold(self._read[message.number]))
            case DropAdapter():
                self._adapters.drop(message.digest)
            case Reset():
                worker.reset()
        return Done()
