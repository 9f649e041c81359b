"""One rank: a Ray actor that holds a worker. Ray places, starts and ends it; steps come over a separate TCP connection.

The actor imports torch when it starts, not when this module is imported, so a process that starts actors needs no
torch.
"""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any, cast

import msgspec
import ray
from ray import cloudpickle

from manta.cluster.config import EngineConfig
from manta.cluster.engine.ranks.rank_channel import Address, connect
from manta.cluster.engine.ranks.rank_messages import (
    Answer,
    Done,
    DropKept,
    Failed,
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
from manta.structured.visible_logs import guard_process, logger_of
from manta.workers.model_info import ModelInfo

if TYPE_CHECKING:
    from manta.workers.ranks.rank_worker import KeepingWorker, RankWorker

logger = logger_of(__name__)


class RankActor:
    """The Ray actor of a rank. Call its methods in this order: `open_folder` on rank 0, `sees`, `open_store` on rank 0,
    `load`, `serve`.
    """

    def __init__(self, num_threads: int) -> None:
        # torch's OpenMP reads both when it loads. Threads that spin for long take cores from other threads.
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        os.environ["GOMP_SPINCOUNT"] = "1000"
        guard_process()
        gc.disable()  # what the import makes stays: collections take a quarter of its time
        import manta.cluster.engine.executors.worker_factory  # noqa: F401  # takes seconds, so it comes before `load`

        gc.enable()

        self._folder: PrivateFolder | None = None
        self._store: Any = None
        self._rank = 0
        self._worker: RankWorker | None = None
        self._failure: Failed | None = None
        """The failure of the last `Step`, until its `Sample` is answered."""

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

    def load(self, config: EngineConfig, rank: int, group_address: str) -> ModelInfo:
        """Loads this rank's worker. Raises what `make_worker` raises."""
        from manta.cluster.engine.executors.worker_factory import make_worker

        self._rank = rank
        self._worker = make_worker(config, rank, group_address)
        return self._worker.info

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
                return Moved(cast("KeepingWorker", worker).restore_blocks(message.parts))
            case KeepBlocks():
                return Moved(cast("KeepingWorker", worker).keep_blocks(message.parts))
            case DropKept():
                cast("KeepingWorker", worker).drop_kept(message.hashes)
            case Reset():
                worker.reset()
        return Done()
