"""The engines as a batch calls them: after everybody else, many lines in one call, and with nobody who reads an answer
before its end.

A call through Serve costs more than all else that is done for a line. So lines wait for each other, a group for each
call; the engine has others to run meanwhile. A group has one task, and its lines have none.
"""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any, NamedTuple

import msgspec

from cluster.engine.request import EngineRequest
from cluster.http.exchange.engines import GenerationRequest
from cluster.http.exchange.metrics import RequestMetrics, Unmeasured
from cluster.serve.streams.engine_client import EngineClient, answer_of
from cluster.serve.streams.packed import Packed
from cluster.serve.streams.prompt_run import LAST_FRAME_TIMEOUT_S, OVERDUE_S, Call, PromptRun, overdue_error
from cluster.serve.streams.submission import Submission
from cluster.serve.streams.token_channel import RequestResult

PRIORITY = 1000
"""Added to that of each line: below what interactive requests ask for."""
MAX_GROUP, GROUP_SHARE = 64, 8
"""Requests of one call: no more than so many. It waits for no more than the eighth part of all that are under way: the
rest keeps the engines busy.
"""
LINGER_S = 0.25
"""A group waits no longer for its last one."""

UNMEASURED = Unmeasured()


class BatchEngineClient(EngineClient):
    """A line that is refused learns so when the last one of its group has ended."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: _Group | None = None
        """Waits for more."""

    def submit(self, request: GenerationRequest) -> Submission:
        priority = request.priority + PRIORITY
        return super().submit(msgspec.structs.replace(request, priority=priority, reads_whole=True))

    def measure(self, num_choices: int) -> RequestMetrics:
        return UNMEASURED

    def call(self, run: PromptRun, request: EngineRequest, pause_s: float) -> Call:
        if request.continued is not None:  # its engine is gone, and others may wait for what becomes of it
            return super().call(run, request, pause_s)
        group = self._open
        if group is None or not group.requests:  # all of them were given up
            group = self._open = _Group()
            group.task = asyncio.get_running_loop().create_task(self._run(group), context=contextvars.Context())
        group.requests[run] = request
        if len(group.requests) == MAX_GROUP:
            self._close(group)
        elif len(group.requests) >= len(self.runs) / GROUP_SHARE:
            asyncio.get_running_loop().call_soon(self._close, group)  # what comes with it comes along
        return _Place(group, run)

    def cancel_later(self, call: Any) -> None:
        if not isinstance(call, _Place):
            super().cancel_later(call)
        elif call.leave() and not call.group.requests:
            super().cancel_later(call.group.task)

    async def _run(self, group: _Group) -> None:
        """From its first line to the end of its last one."""
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
            if (result.refused or result.queue_full) is not None and group.leave(run):
                run.has_returned(result)
        await self._see_last_frames(group)

    async def _generate(self, requests: list[EngineRequest]) -> list[RequestResult]:
        """As `EngineClient.generate`."""
        address, left_s = await self._ready(requests[0])
        if left_s != requests[0].deadline_s:
            requests = [msgspec.structs.replace(each, deadline_s=left_s) for each in requests]
        return await answer_of(self._engine.generate_group.remote(Packed(EngineRequest, requests), address))

    async def _see_last_frames(self, group: _Group) -> None:
        """A result may overtake them."""
        try:
            async with asyncio.timeout(LAST_FRAME_TIMEOUT_S):
                for run in list(group.requests):
                    await run.has_all_frames.wait()
        except TimeoutError as error:
            for run in group.leave_open():
                run.has_returned(error)

    def _close(self, group: _Group) -> None:
        """It waits for no more."""
        group.is_closed.set()
        if self._open is group:
            self._open = None


class _Group:
    """Requests of one call, which lasts as long as the longest of them, unless nobody waits for any."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.requests: dict[PromptRun, EngineRequest] = {}
        """Those for which somebody waits."""
        self.is_closed = asyncio.Event()

    def leave(self, run: PromptRun) -> bool:
        """Nothing is told to `run` any more. False if it had left before."""
        return self.requests.pop(run, None) is not None

    def leave_open(self) -> list[PromptRun]:
        """All leave; returns those that have not ended."""
        runs = [run for run in self.requests if not run.has_all_frames.is_set()]
        self.requests.clear()
        return runs


class _Place(NamedTuple):
    """Of one request in a group; what `PromptRun` has for its call."""

    group: _Group
    run: PromptRun

    def leave(self) -> bool:
        return self.group.leave(self.run)

    def cancel(self) -> None:
        if self.leave() and not self.group.requests:
            self.group.task.cancel()
