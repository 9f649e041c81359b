"""The engines as a batch calls them: at the lowest priority, many lines in one call, and with answers that are read
whole.

A call through Serve costs more than everything else that is done for a line. Lines therefore wait for each other and
share a call as a group; the engine runs other groups meanwhile. A group has one task, its lines have none.
"""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any, NamedTuple

import msgspec

from manta.cluster.engine.pooling_request import PoolingRequest, PoolingResult
from manta.cluster.engine.request import EngineRequest
from manta.cluster.http.exchange.engines import UNMETERED, GenerationRequest, Meter
from manta.cluster.http.exchange.metrics import RequestMetrics, Unmeasured
from manta.cluster.serve.channel.packed import Packed
from manta.cluster.serve.channel.token_channel import RequestResult
from manta.cluster.serve.requests.engine_client import EngineClient, answer_of
from manta.cluster.serve.requests.prompt_run import LAST_FRAME_TIMEOUT_S, OVERDUE_S, Call, PromptRun, overdue_error
from manta.cluster.serve.requests.submission import Submission

PRIORITY = 1000
"""Added to each line's priority, which puts it behind interactive requests."""
MAX_GROUP, GROUP_SHARE = 64, 8
"""Size of a group. A call carries at most `MAX_GROUP` requests. A group waits for no more than one `GROUP_SHARE`th of
all open requests, so that the rest keeps the engines busy.
"""
LINGER_S = 0.25
"""Longest time, in seconds, that a group waits for more requests."""

UNMEASURED = Unmeasured()


class BatchEngineClient(EngineClient):
    """Sends lines to the engines in groups. A refused line is told so only when the last request of its group has
    ended.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: _LineGroup | None = None
        """The group that waits for more requests."""

    async def submit(self, request: GenerationRequest, meter: Meter = UNMETERED) -> Submission:
        asked = request.engine
        asked = msgspec.structs.replace(asked, priority=asked.priority + PRIORITY, reads_whole=True)
        return await super().submit(msgspec.structs.replace(request, engine=asked), meter)

    async def pool(self, request: PoolingRequest) -> PoolingResult:
        return await super().pool(msgspec.structs.replace(request, priority=request.priority + PRIORITY))

    def measure(self, num_choices: int) -> RequestMetrics:
        return UNMEASURED

    def call(self, run: PromptRun, request: EngineRequest, pause_s: float) -> Call:
        if request.continued is not None:  # its engine is gone, and others may wait for the result
            return super().call(run, request, pause_s)
        group = self._open
        if group is None or not group.requests:  # all of them were given up
            group = self._open = _LineGroup()
            group.task = asyncio.get_running_loop().create_task(self._run(group), context=contextvars.Context())
        group.requests[run] = request
        if len(group.requests) == MAX_GROUP:
            self._close(group)
        elif len(group.requests) >= len(self.runs) / GROUP_SHARE:
            asyncio.get_running_loop().call_soon(self._close, group)  # requests of the same turn join the group
        return _Place(group, run)

    def cancel_later(self, call: Any) -> None:
        if not isinstance(call, _Place):
            super().cancel_later(call)
        elif call.leave() and not call.group.requests:
            super().cancel_later(call.group.task)

    async def _run(self, group: _LineGroup) -> None:
        """Runs a group from its first request to the end of its last one."""
        asyncio.get_running_loop().call_later(LINGER_S, self._close, group)
        await group.is_closed.wait()
        sent = dict(group.requests)
        overdue = asyncio.timeout(max(request.deadline_s or 0.0 for request in sent.values()) + OVERDUE_S)
        try:
            async with overdue:
                results = await self._generate(list(sent.values()))
        except Exception as error:
            for run in group.leave_open():
                run.has_returned(overdue_error() if overdue.expired() else error)
            return
        for run, result in zip(sent, results, strict=True):
            if result.refusal is not None and group.leave(run):
                run.has_returned(result)
        await self._see_last_frames(group)

    async def _generate(self, requests: list[EngineRequest]) -> list[RequestResult]:
        """Runs a group's requests in one call; see `EngineClient.generate`."""
        address, left_s = await self._ready(requests[0])
        if left_s != requests[0].deadline_s:
            requests = [msgspec.structs.replace(each, deadline_s=left_s) for each in requests]
        return await answer_of(self.serving.generate_group.remote(Packed(EngineRequest, requests), address))

    async def _see_last_frames(self, group: _LineGroup) -> None:
        """Waits for the last frames of the group's requests, because a result may arrive before them."""
        try:
            async with asyncio.timeout(LAST_FRAME_TIMEOUT_S):
                for run in list(group.requests):
                    await run.has_all_frames.wait()
        except TimeoutError as error:
            for run in group.leave_open():
                run.has_returned(error)

    def _close(self, group: _LineGroup) -> None:
        """Closes a group to further requests."""
        group.is_closed.set()
        if self._open is group:
            self._open = None


class _LineGroup:
    """Requests of one call. The call lasts until its longest request ends, or until all were given up."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.requests: dict[PromptRun, EngineRequest] = {}
        """Requests that have not been given up."""
        self.is_closed = asyncio.Event()

    def leave(self, run: PromptRun) -> bool:
        """Removes `run`, so that it is told nothing more. Returns False if it had left before."""
        return self.requests.pop(run, None) is not None

    def leave_open(self) -> list[PromptRun]:
        """Removes all runs, and returns those that have not ended."""
        runs = [run for run in self.requests if not run.has_all_frames.is_set()]
        self.requests.clear()
        return runs


class _Place(NamedTuple):
    """A request's place in a group; `PromptRun` uses it as the request's call."""

    group: _LineGroup
    run: PromptRun

    def leave(self) -> bool:
        return self.group.leave(self.run)

    def cancel(self) -> None:
        if self.leave() and not self.group.requests:
            self.group.task.cancel()
