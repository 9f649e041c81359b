"""An ingress calls engines over the token channel, with the answers and errors of calls through Serve.

Serve ends a replica that answers no call, so while requests run on a replica, one call through Serve holds it. Called
by `engine_client.py`, which calls through Serve where this module cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from manta.cluster.engine.request import EngineRequest
from manta.cluster.serve.channel.token_channel import Connection, Control, EngineFailed, RequestResult, Run
from manta.cluster.serve.routing.replicas import ChosenReplica, Replicas
from manta.cluster.serve.starting.start_failure import in_words
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

HOLD_AGAIN_S = 0.5
"""Seconds after which a replica that could not be held is called again."""


class ChannelCalls:
    """The calls of one ingress. `hold` calls a replica through Serve, and returns when it runs none of their requests.
    Everything here runs on the ingress's event loop.
    """

    def __init__(self, known: Replicas, hold: Callable[[ChosenReplica], Awaitable[None]]) -> None:
        self._known = known
        self._hold = hold
        self.connections: dict[str, Connection] = {}
        """The latest connection of each replica that takes requests over it."""
        self._open: dict[str, tuple[Connection, asyncio.Future[RequestResult]]] = {}
        """Requests without a result, by id."""
        self._holding: dict[str, asyncio.Task[None]] = {}
        """Calls that hold replicas."""

    @property
    def num_open(self) -> int:
        """Number of requests without a result."""
        return len(self._open)

    @property
    def num_held(self) -> int:
        """Number of replicas that are held."""
        return len(self._holding)

    def is_open(self, request_id: str) -> bool:
        """Returns whether a request has no result yet. An output may still be under way when the ingress has ended it
        at a stop string; aborting it then would cancel the result.
        """
        return request_id in self._open

    def connected(self, connection: Connection) -> None:
        if connection.takes_requests:
            self.connections[connection.replica] = connection

    def lost(self, connection: Connection) -> None:
        """Ends the calls over a connection that broke, which raise `ConnectionError`."""
        if self.connections.get(connection.replica) is connection:
            del self.connections[connection.replica]
        for over, result in self._open.values():
            if over is connection and not result.done():
                result.set_exception(ConnectionError("the engine has lost its connection to this process"))

    def returned(self, results: list[tuple[str, RequestResult]]) -> None:
        for request_id, result in results:
            _, waiting = self._open.get(request_id, (None, None))
            if waiting is not None and not waiting.done():
                waiting.set_result(result)

    async def generate(self, request: EngineRequest, deployment: str) -> RequestResult | None:
        """Runs a request to its end on the best replica of a deployment, and aborts it if this call is cancelled.
        Returns None if it can only be called through Serve: if a replica is not connected, or is of another version.

        Raises `EngineFailed` if the engine fails, and `ConnectionError` if its connection breaks.
        """
        running = self._known.running.get(deployment)
        if not running or not running <= self.connections.keys():
            return None
        try:
            replica, (placed,) = self._known.place([request], deployment, self._known.block_sizes[deployment])
        except LookupError:  # Serve has just ended the last one
            return None
        connection = self.connections.get(replica)
        if connection is None:  # Serve has just started it
            return None
        try:
            connection.send(Run(placed))
        except (OverflowError, ValueError):  # an int beyond 64 bits or a lone surrogate: the engine refuses the request
            return None
        return await self._result(request.request_id, connection)

    async def _result(self, request_id: str, connection: Connection) -> RequestResult:
        waiting: asyncio.Future[RequestResult] = asyncio.get_running_loop().create_future()
        self._open[request_id] = connection, waiting
        if connection.replica not in self._holding:
            self._holding[connection.replica] = asyncio.ensure_future(self._hold_replica(connection.replica))
        try:
            result = await waiting
        except asyncio.CancelledError:
            connection.send(Control(request_id))
            raise
        finally:
            del self._open[request_id]
        if result.failure:
            raise EngineFailed(result.failure)
        return result

    async def _hold_replica(self, replica: str) -> None:
        try:
            while any(connection.replica == replica for connection, _ in self._open.values()):
                try:
                    await self._hold(ChosenReplica(replica))
                except Exception as error:  # it may have ended, and Ray raises many types then
                    logger.info("replica %s is not held: %s", replica, in_words(error))
                    if not self._known.is_running(replica):
                        return
                    await asyncio.sleep(HOLD_AGAIN_S)
        finally:
            del self._holding[replica]
