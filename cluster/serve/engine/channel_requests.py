"""The requests that reach an engine over the token channel, without a call of Serve for each.

They run as those of `EngineReplica.generate`, and their results go back over the channel. Only the replica's event loop
uses this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from manta.cluster.engine.request import EngineRequest, SequenceOutput
from manta.cluster.serve.channel.token_channel import Address, EngineFailed, RequestResult
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

POLL_S = 0.5
"""Seconds between two looks whether requests of an ingress still run."""

Results = list[tuple[str, RequestResult]]


class ChannelRequests:
    """Runs requests by `run`, which takes several and returns as many results, and has `send` send their results."""

    def __init__(
        self,
        run: Callable[[list[EngineRequest], Address], Awaitable[list[RequestResult]]],
        send: Callable[[Address, list[SequenceOutput], Results], None],
    ) -> None:
        self._run = run
        self._send = send
        self._running: dict[str, tuple[Address, asyncio.Task[None]]] = {}
        """Requests without a result, by id."""
        self._results: dict[Address, Results] = {}
        """Results that are sent in this turn of the event loop. Those of one step share a frame."""

    def begin(self, request: EngineRequest, address: Address) -> None:
        """Runs a request of the ingress at `address`."""
        task = asyncio.ensure_future(self._answer(request, address))
        self._running[request.request_id] = address, task
        task.add_done_callback(lambda _: self._running.pop(request.request_id))

    def cancel(self, request_id: str) -> bool:
        """Aborts a request. Returns whether it came over the channel and runs."""
        found = self._running.get(request_id)
        return found is not None and found[1].cancel()

    async def until_none(self, address: Address) -> None:
        """Waits until two looks, `POLL_S` apart, find no request of an ingress."""
        was_quiet = False
        while True:
            is_quiet = all(each != address for each, _ in self._running.values())
            if is_quiet and was_quiet:
                return
            was_quiet = is_quiet
            await asyncio.sleep(POLL_S)

    async def _answer(self, request: EngineRequest, address: Address) -> None:
        try:
            (result,) = await self._run([request], address)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            result = RequestResult(failure="the call was cancelled in the engine")  # by nobody who knows of the ingress
        except (EngineFailed, OSError) as error:  # another engine may run it
            result = RequestResult(failure=str(error))
        except Exception as error:
            logger.exception("request %s failed in the engine", request.request_id)
            cause = f"the engine failed: {type(error).__name__}: {error}"
            result = RequestResult(refusal=Refusal("engine_failed", cause=cause))
        if address not in self._results:
            self._results[address] = []
            asyncio.get_running_loop().call_soon(self._flush, address)
        self._results[address].append((request.request_id, result))

    def _flush(self, address: Address) -> None:
        self._send(address, [], self._results.pop(address))
