"""The replica of a model that pools: remote calls on the event loop, and a thread of its own that runs the steps.

An answer is the result of its call, so nothing goes over the token channel. A lost replica loses nothing: its callers
ask another one. They also do so when a step is so late that it may hang, because the replica then ends their calls.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import ray

from manta.cluster.config import EngineConfig
from manta.cluster.engine.executors.deadline import STEP_HANGS
from manta.cluster.engine.pooling_queue import PoolingJob
from manta.cluster.engine.pooling_request import PooledInput, PoolingRequest, PoolingResult
from manta.cluster.engine.ranks.siblings import has_siblings
from manta.cluster.engine.stats import EngineStats
from manta.cluster.errors import QueueFull, RequestRefused
from manta.cluster.serve.channel.token_channel import BEAT_S
from manta.cluster.serve.engine.meter import LoadMeter
from manta.cluster.serve.routing.replicas import own_name
from manta.cluster.serve.starting.start_failure import told_in_words
from manta.structured.visible_logs import logger_of
from manta.workers.model_info import ModelInfo
from manta.workers.phases import Phases

logger = logger_of(__name__)

IDLE_WAIT_S = 1.0
"""Longest wait in seconds for texts before the thread looks whether it is to end."""


class PoolingReplica:
    """One replica of a model that pools. `phases` measures the start, which began before the constructor."""

    def __init__(self, config: EngineConfig, phases: Phases) -> None:
        with told_in_words():
            from manta.cluster.engine.pooling_engine import PoolingEngine  # it imports torch

            phases.end("imports")
            self.engine = PoolingEngine(config)
            phases.end("engine")
        self._phases = phases
        self._meter = LoadMeter()
        self._node = ray.util.get_node_ip_address()
        self._is_open = True
        self._calls: set[asyncio.Future[PoolingResult]] = set()
        """The results of calls of `pool` that have not returned."""
        self._watching: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run_steps, name="engine", daemon=True)
        self._warm_up()
        phases.end("warm_up")
        self._thread.start()

    def _warm_up(self) -> None:
        text = PooledInput([0] * min(16, self.engine.model.max_model_len), 16)
        self.engine.add(PoolingRequest(request_id="warm-up", texts=[text]), lambda job, result: None)
        while self.engine.step():
            pass

    def _run_steps(self) -> None:
        """Ends when the replica is closed, or when the model is broken: then Serve replaces the replica."""
        try:
            while self._is_open:
                if not self.engine.step():
                    self.engine.wait(IDLE_WAIT_S)
        except Exception:
            logger.exception("the thread that runs the steps ends")

    def close(self) -> None:
        """Ends the thread after its step. Serve ends the process instead."""
        self._is_open = False
        self._thread.join()

    # ---- remote calls --------------------------------------------------------------------------------------------

    async def pool(self, request: PoolingRequest) -> PoolingResult:
        """Returns the numbers of a request's texts, or why there are none. Cancelling the call aborts the request.
        Raises `ConnectionError` if a step may hang and there is another replica to ask.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[PoolingResult] = loop.create_future()

        def note(result: PoolingResult) -> None:
            if not ended.done():
                ended.set_result(result)

        def on_end(_: PoolingJob, result: PoolingResult) -> None:
            loop.call_soon_threadsafe(note, result)

        try:
            job = self.engine.add(request, on_end)
        except QueueFull as error:
            return PoolingResult(refusal=self._meter.with_retry(error.refusal, self.engine.stats().num_waiting))
        except RequestRefused as error:
            return PoolingResult(refusal=error.refusal)
        self._meter.arrived(request.request_id, request.num_tokens)
        self._calls.add(ended)
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        try:
            result = await ended
            if result.refusal is None:
                self._meter.has_first_token(request.request_id)
            return result
        finally:
            self._calls.discard(ended)
            self.engine.abort(job)
            self._meter.ended(request.request_id)

    async def _watch(self) -> None:
        """Looks for a late step while calls are open. The calls that are open then end, once, if there is another
        replica. Calls that come later wait for the end of the step, because their callers had no better replica.
        """
        has_ended_calls = False
        while self._calls:
            await asyncio.sleep(BEAT_S)
            if not self.engine.is_away:
                has_ended_calls = False
            elif not has_ended_calls and await asyncio.to_thread(has_siblings):
                has_ended_calls = True
                logger.warning("a step is late: %d requests are to be asked of another engine", len(self._calls))
                for call in self._calls:
                    if not call.done():
                        call.set_exception(ConnectionError("a step of the engine may hang"))
        self._watching = None

    async def connect(self, address: Any) -> None:
        """Does nothing: no tokens go from here to an ingress."""

    async def drop_kept(self, hashes: list[bytes]) -> None:
        """Does nothing: a model that pools keeps no prefixes."""

    async def model(self) -> ModelInfo:
        return self.engine.model

    async def stats(self) -> EngineStats:
        service = self._meter.service(own_name(), self._node, self._phases.seconds, self.engine.config)
        stats = msgspec.structs.replace(self.engine.stats(), service=service)
        return stats if self._thread.is_alive() else msgspec.structs.replace(stats, alive=False)

    async def start_seconds(self) -> float:
        """Returns the seconds from the start of the process to the end of its constructor."""
        return sum(self._phases.seconds.values())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the load that `cluster/serve/scaling/decision.py` reads."""
        return self._meter.load(self.engine.stats())

    async def check_health(self) -> None:
        """Raises `RuntimeError` if the thread has ended or a step hangs. Serve calls it, and then replaces the
        replica.
        """
        if not self._thread.is_alive():
            raise RuntimeError("the thread that runs the steps has ended")
        if self.engine.is_hung:
            raise RuntimeError(STEP_HANGS)
