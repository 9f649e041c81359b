"""Which engine replica gets a request: Serve asks here, in each process that has a handle of the engines.

The least busy one of those that can be trusted (`replicas.py`). Serve's own router takes the better of two at random
and knows neither a replica that hangs nor one whose connection broke a moment ago.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.engine.request import EngineRequest
from cluster.serve.replicas import known_replicas


class EngineRouter(RequestRouter):
    """Made by Serve; `deployment` is the name of the engines' deployment."""

    def initialize_state(self, deployment: str) -> None:  # type: ignore[override]
        self._deployment = deployment
        self._known = known_replicas()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._known.running[self._deployment] = frozenset(map(_name, replicas))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        good = [replica for replica in candidate_replicas if self._known.is_good(_name(replica))]
        chosen = min(good or candidate_replicas, key=lambda replica: (self._num_requests(replica), random.random()))
        if pending_request is not None and pending_request.args and isinstance(pending_request.args[0], EngineRequest):
            self._known.routed[pending_request.args[0].request_id] = _name(chosen)
        return [[chosen]]

    def _num_requests(self, replica: RunningReplica) -> int:
        """That it runs, as far as is known here, and those under way to it: of a burst Serve counts none in time."""
        known = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return known + self._known.num_routed(_name(replica))


def _name(replica: RunningReplica) -> str:
    return replica.replica_id.to_full_id_str()
