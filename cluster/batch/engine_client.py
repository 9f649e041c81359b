"""The engines as a batch calls them: after everybody else, many lines in one call, and with nobody who reads an answer
before its end.

A call through Serve costs more than all else that is done for a line. So lines wait for each other, a group for each
call; the engine has others to run meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import Any

from cluster.engine.request import EngineRequest
from cluster.serve.channel import Address, RequestResult
from cluster.serve.engine_client import EngineClient, answer_of
from cluster.serve.submission import Submission
from workers.sampling_params import SamplingParams

PRIORITY = 1000
"""Added to that of each line: below what interactive requests ask for."""
MAX_GROUP, GROUP_SHARE = 64, 8
"""Requests of one call: no more than so many, nor than the eighth part of all that are under way: the rest keeps the
engines busy.
"""
LINGER_S = 0.25
"""A group waits no longer for its last one."""


class BatchEngineClient(EngineClient):
    """A line that is refused learns so when the last one of its group has ended."""

    reads_whole = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: _Group | None = None
        """Waits for more."""

    def submit(
        self, request_id: str, prompts: list[list[int]], params: SamplingParams, *, priority: int, **options: Any
    ) -> Submission:
        return super().submit(request_id, prompts, params, priority=priority + PRIORITY, **options)

    async def _call(self, request: EngineRequest, address: Address) -> RequestResult:
        if request.continued is not None:  # its engine is gone, and others may wait for what becomes of it
            return await super()._call(request, address)
        group = self._open
        if group is None:
            group = self._open = _Group()
            group.call = asyncio.ensure_future(self._send(group, address))
        index = len(group.requests)
        group.requests.append(request)
        if len(group.requests) >= min(MAX_GROUP, len(self.runs) / GROUP_SHARE):
            self._close(group)
        try:
            return (await asyncio.shield(group.call))[index]
        except asyncio.CancelledError:
            group.num_left += 1
            if group.num_left == len(group.requests):
                self._close(group)
                group.call.cancel()
            raise

    async def _send(self, group: _Group, address: Address) -> list[RequestResult]:
        asyncio.get_running_loop().call_later(LINGER_S, self._close, group)
        await group.is_closed.wait()
        return await answer_of(self._engine.generate_group.remote(group.requests, address))

    def _close(self, group: _Group) -> None:
        """It waits for no more."""
        group.is_closed.set()
        if self._open is group:
            self._open = None


class _Group:
    """Requests of one call, which lasts as long as the longest of them, unless nobody waits for any."""

    call: asyncio.Task[list[RequestResult]]

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self.is_closed = asyncio.Event()
        self.num_left = 0
        """That nobody waits for any more."""
