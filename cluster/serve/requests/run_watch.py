"""Finds lost engines, and moves the requests of one ingress from them to others. `engine_client.py` owns both."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from manta.cluster.errors import Unavailable
from manta.cluster.serve.requests.prompt_run import PromptRun
from manta.cluster.serve.routing import replicas
from manta.cluster.serve.routing.replicas import Replicas
from manta.cluster.serve.starting.start_failure import in_words
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

HAND_OVER_S = 5.0
"""Seconds in which the streams of an engine that was told to end leave it, a few at a time. It goes on computing them
meanwhile; Serve gives it 20 s.
"""
LEAST_MOVING = 4
"""Streams that may be on their way from such an engine at a time. If all left at once, the last one would wait until
the prompts of all others are computed again.
"""
STRANGER_S = 2.0
"""Seconds that these streams wait for an engine that has just started to connect, so that they need not all go to those
that have streams already.
"""
REMOVAL_POLL_S = 0.5
"""Seconds between two queries whether Serve has removed the application, while requests wait and no engine runs."""


class Engines(Protocol):
    """What the watch asks of the engines. `EngineQuestions` of `engine_client.py` implements it."""

    def is_any_good(self) -> bool:
        """Returns whether some replica can take requests."""
        ...

    def is_asleep(self) -> bool:
        """Returns whether Serve has said that no engine runs."""
        ...

    async def are_gone(self) -> bool:
        """Returns whether no engine runs and none will."""
        ...


class RunWatch:
    """Finds lost engines, and moves their requests to others. Watches `runs`, which its owner changes, as long as there
    are any, and looks every `look_s` seconds. A connection that breaks is no matter of this class: `EngineClient` hears
    of it at once.
    """

    def __init__(
        self,
        runs: Mapping[str, PromptRun],
        engines: Engines,
        known_replicas: Replicas,
        look_s: float,
        greet: Callable[[], None],
    ) -> None:
        """`greet` has engines connect that are new. It is called at each look."""
        self._runs = runs
        self._engines = engines
        self._replicas = known_replicas
        self._look_s = look_s
        self._greet = greet
        self._handing_over = False
        """Whether streams are leaving engines that were told to end."""
        self._num_each_look = 0
        """Streams that leave at each look however many are on their way, so that all have left in time."""
        self._may_leave = 0.0
        """Time on `time.monotonic`'s clock from which they leave although an engine has not connected."""
        self.watching: asyncio.Task[None] | None = None
        """Ends when nothing runs any more; None while nothing is watched."""

    def begin(self) -> None:
        """Watches until nothing runs."""
        if self.watching is None:
            self.watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while self._runs:
            await asyncio.sleep(self._look_s)
            self._greet()
            self._replicas.beat({replica for _, replica in self._placed()})
            await self._kill(filter(self._replicas.is_hung, self.move()))
            if self._engines.is_asleep():
                await self._refuse_if_gone()
        self.watching = None

    def _placed(self) -> list[tuple[PromptRun, str]]:
        """Returns the runs that a replica has or was sent, each with that replica."""
        return [(run, replica) for run in self._runs.values() if (replica := run.replica) is not None]

    def move(self) -> set[str]:
        """Makes the requests of replicas that are silent or away continue on another one, if one is available, and some
        of those of replicas that are ending. Otherwise returns these replicas.
        """
        placed = self._placed()
        bad = {replica for _, replica in placed if not self._replicas.is_good(replica)}
        self._handing_over = self._handing_over and bool(bad)
        if not bad or not self._engines.is_any_good():
            return bad
        leaving: list[PromptRun] = []
        for run, replica in placed:
            if replica not in bad:
                continue
            if run.connection is not None and run.connection.is_away:  # it lost ranks, perhaps over this run
                run.lose("away")
            elif self._replicas.is_running(replica):
                run.go_on("silent")
            elif run.connection is None or self._replicas.is_avoided(replica):
                run.go_on("ending")
            else:
                leaving.append(run)
        self._hand_over(leaving)
        return set()

    def _hand_over(self, leaving: list[PromptRun]) -> None:
        """Makes some of the requests of replicas that are ending, and that compute them meanwhile, continue on others.
        The next look takes the next ones.
        """
        now = time.monotonic()
        if not self._handing_over:
            self._num_each_look, self._may_leave = 0, now + STRANGER_S
        self._handing_over = bool(leaving)
        self._num_each_look = max(self._num_each_look, math.ceil(len(leaving) * self._look_s / HAND_OVER_S))
        if now < self._may_leave and self._replicas.has_strangers():
            return
        num_moving = sum(run.is_moving for run in self._runs.values())
        for run in leaving[: max(self._num_each_look, LEAST_MOVING - num_moving)]:
            run.go_on("ending")

    async def _refuse_if_gone(self) -> None:
        """Refuses the requests that no engine has taken, if the engines are gone for good. The others go on."""
        await asyncio.sleep(REMOVAL_POLL_S)
        if await self._engines.are_gone():
            for run in list(self._runs.values()):
                if run.connection is None:
                    run.refuse(gone())

    async def _kill(self, hung: Iterable[str]) -> None:
        """Kills hung replicas, because Serve would take half a minute to notice."""
        for replica in hung:
            logger.error("replica %s says nothing and there is no other one; it is killed", replica)
            try:
                await asyncio.to_thread(replicas.kill, replica)
            except Exception as error:  # it may have ended, and Ray raises many types then
                logger.warning("replica %s was not killed: %s", replica, in_words(error))


def gone() -> Unavailable:
    """Returns the error of a request whose engines are gone for good."""
    cause = "the application was ended, and its engines with it"
    return Unavailable(Refusal("unavailable", cause=cause, remedy="ask another server"))
