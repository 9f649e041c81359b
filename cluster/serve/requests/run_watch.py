"""The watch over an ingress's running requests: it finds lost engines, and moves their requests to others.

A connection that breaks is no matter of this module: `engine_client.py` hears of it at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from manta.cluster.serve.channel.token_channel import BEAT_S
from manta.cluster.serve.requests.engine_questions import REMOVAL_POLL_S, EngineQuestions, gone
from manta.cluster.serve.requests.prompt_run import PromptRun
from manta.cluster.serve.routing import replicas
from manta.cluster.serve.starting.start_failure import in_words

logger = logging.getLogger(__name__)


class RunWatch:
    """Watches `runs`, which its owner changes, as long as there are any."""

    def __init__(
        self, runs: Mapping[str, PromptRun], engines: EngineQuestions, known_replicas: replicas.Replicas
    ) -> None:
        self._runs = runs
        self._engines = engines
        self._replicas = known_replicas
        self.watching: asyncio.Task[None] | None = None
        """Ends when nothing runs any more; None while nothing is watched."""

    def begin(self) -> None:
        """Watches until nothing runs."""
        if self.watching is None:
            self.watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        """Checks the replicas every `BEAT_S` while anything runs. Requests on a replica that is silent, away or ending
        continue on another one, if one is available. Otherwise a hung replica is killed.
        """
        while self._runs:
            await asyncio.sleep(BEAT_S)
            runs = [(run, replica) for run in self._runs.values() if (replica := run.replica) is not None]
            owing = {replica for _, replica in runs}
            self._replicas.beat(owing)
            bad = {replica for replica in owing if not self._replicas.is_good(replica)}
            if bad and self._engines.is_any_good():
                for run in (run for run, replica in runs if replica in bad):
                    if run.connection is not None and run.connection.is_away:  # it lost ranks, perhaps over this run
                        run.lose()
                    else:
                        run.go_on()
            else:
                await self._kill(filter(self._replicas.is_hung, bad))
            if self._engines.is_asleep():
                await self._refuse_if_gone()
        self.watching = None

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
