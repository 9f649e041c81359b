"""The engine deployments as one ingress asks them: which one serves now, whether one runs, and what engines answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from manta.cluster.engine.stats import EngineStats
from manta.cluster.errors import QueueFull, RequestRefused, Unavailable
from manta.cluster.serve.routing import replicas
from manta.cluster.serve.scaling.waking import Waker
from manta.cluster.serve.starting.start_failure import in_words
from manta.structured.constraint import ConstraintSpec
from manta.workers.model_info import ModelInfo

logger = logging.getLogger(__name__)

ENGINE, STANDBY = "engine", "standby"
"""Names of the two engine deployments."""

ANSWER_TIMEOUT_S = 3.0
"""Longest time, in seconds, that replicas get to answer with their statistics; all are asked at once."""
REMOVAL_POLL_S = 0.5
"""Seconds between two queries whether Serve has removed the application, while requests wait and no engine runs."""


async def answer_of(call: Any) -> Any:
    """Returns the result of a call through a handle, and cancels the call when the caller is cancelled.

    Raises `ConnectionError` if the replica has cancelled the call, because its connection to this process broke.
    """
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            call.cancel()
            raise
        raise ConnectionError("the engine has lost its connection to this process") from None


class EngineQuestions:
    """The handles of the engines and of those that serve while no other engine can. Up to `max_held` requests wait for
    an engine to start if none runs. `is_removed` finds out whether the engines are gone for good; then no request
    waits.
    """

    def __init__(self, engine: Any, standby: Any, max_held: int, is_removed: Callable[[], Awaitable[bool]]) -> None:
        self._handles = {ENGINE: engine} if standby is None else {ENGINE: engine, STANDBY: standby}
        self._replicas = replicas.known_replicas()
        self._is_removed = is_removed
        self._waker = Waker(self.is_asleep, lambda: self.serving.start_seconds.remote(), max_held)

    @property
    def num_engine_nodes(self) -> int:
        """Number of nodes that run engines, as far as Serve has told."""
        return len(frozenset().union(*self._replicas.nodes.values()))

    @property
    def replicas_running(self) -> frozenset[str]:
        """Names of the engine replicas that run, as far as Serve has told."""
        return frozenset().union(*self._replicas.running.values())

    def is_asleep(self) -> bool:
        """Returns whether Serve has said that no engine runs."""
        return ENGINE in self._replicas.running and not any(self._replicas.running.values())

    @property
    def serving(self) -> Any:
        """The handle of the deployment that serves now."""
        known = self._replicas
        needs_standby = ENGINE in known.running and not known.is_any_good(ENGINE) and known.is_any_good(STANDBY)
        return self._handles[STANDBY if needs_standby else ENGINE]

    @property
    def num_held(self) -> int:
        """Requests that wait here for an engine to start."""
        return self._waker.num_held

    def is_any_good(self) -> bool:
        """Returns whether some replica can take requests."""
        return any(map(self._replicas.is_any_good, self._handles))

    async def are_gone(self) -> bool:
        """Returns whether no engine runs and none will. Serve itself would let calls wait for the engines that it has
        ended.
        """
        if not self.is_asleep():
            return False
        try:
            return await self._is_removed()
        except Exception as error:  # the controller may be restarting, and Ray raises many types
            logger.info("Serve does not say whether the application is to end: %s", in_words(error))
            return False

    async def resolve(self, spec: ConstraintSpec, client: str = "") -> tuple[ConstraintSpec, list[str]]:
        """Returns the constraint with its backend, and the keywords that the backend does not enforce.

        Raises `RequestRefused` if no backend can enforce the constraint, and `QueueFull` if too many constraints wait.
        """
        try:
            return await self._answer(self.serving.resolve.remote(spec, client))
        except QueueFull as error:
            raise QueueFull(str(getattr(error, "cause", error))) from error
        except RequestRefused as error:
            refusal = getattr(error, "cause", error)  # Ray raises a copy whose text is a whole traceback
            raise RequestRefused(str(refusal), refusal.param) from error

    async def model(self) -> ModelInfo:
        return await self._answer(self.serving.model.remote())

    async def _answer(self, response: Any) -> Any:
        """Returns an engine's answer to a call. Raises `Unavailable` if the engines are gone for good."""
        call = asyncio.ensure_future(answer_of(response))
        try:
            while not (await asyncio.wait([call], timeout=REMOVAL_POLL_S))[0]:
                if await self.are_gone():
                    raise gone()
            return call.result()
        finally:
            call.cancel()

    async def stats(self) -> list[EngineStats]:
        """Returns the statistics of every replica that answers; an empty list if Serve runs none.

        Raises `Unavailable` if replicas run and none answers.
        """
        if self.is_asleep():
            return []
        answers = await asyncio.gather(*map(self._stats_of, self._handles.values()))
        found = [answer for answers_of_one in answers for answer in answers_of_one]
        stats = [each for each in found if isinstance(each, EngineStats)]
        if not stats:
            reasons = sorted({type(error).__name__ for error in found})
            raise Unavailable(f"no engine answers: {', '.join(reasons) or 'there is none'}")
        starts = [sum(each.service.start_seconds.values()) for each in stats if each.service is not None]
        if starts:
            self._waker.measured(max(starts))
        return stats

    async def _stats_of(self, handle: Any) -> list[Any]:
        answers = handle.broadcast("stats")
        try:  # in a thread, because awaiting would turn one silent replica into an error of all
            return await asyncio.to_thread(answers.results, timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True)
        except Exception as error:
            return [error]


def gone() -> Unavailable:
    """Returns the error of a request whose engines are gone for good."""
    return Unavailable("the application was ended, and its engines with it; ask another server")
