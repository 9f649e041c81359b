"""The engine replica that gets a request: Serve asks here, in each process with a handle of the engines.

`placement.py` decides among the replicas that are trusted (`replicas.py`). Serve's own router takes the better of two
random replicas. It knows nothing of their caches, of hung replicas or of broken connections.

Serve's router makes each call a stream: the replica first accepts it, and then yields the result. At the end of a
stream, Ray blocks the replica's event loop until the caller has acknowledged every item. If the caller's node has just
died, that takes until Ray declares the node dead, which is many seconds, and the replica serves nobody meanwhile. So
calls of engines return one value, which needs no acknowledgement. Engines need not accept calls: they have a queue with
a limit of its own.
"""

from __future__ import annotations

from ray.serve._private.common import RunningReplicaInfo
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from manta.cluster.engine.pooling_request import PoolingRequest
from manta.cluster.engine.request import EngineRequest
from manta.cluster.serve.routing.replicas import ChosenReplica, known_replicas
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)


class UnaryReplica(RunningReplica):
    """A replica whose calls return one value and yield nothing."""

    async def get_queue_len(self, *, deadline_s: float) -> int:
        """Returns 0 for a replica that is connected to this process: it lives, and accepts every call.

        Serve asks a replica that got no call for ten seconds before it sends one, and chooses anew if the answer takes
        more than 0.1 s. On a busy machine a stream would wait for several such questions.
        """
        if known_replicas(self.replica_id.deployment_id.app_name).is_connected(self.replica_id.to_full_id_str()):
            return 0
        return await super().get_queue_len(deadline_s=deadline_s)

    @property
    def is_cross_language(self) -> bool:
        """Returns True, for which Serve's router does not wait until the replica has accepted a call."""
        return True

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> ReplicaResult:
        assert not with_rejection, "Serve asks no replica of another language to accept a call"
        return self._get_replica_wrapper(pr).send_request_python(pr, with_rejection=False)


class EngineRouter(RequestRouter):
    """The router that Serve creates. `deployment` is the name of the engine deployment. `block_size` is the block size
    of its prefix caches; 0 without prefix caching or with only one replica.
    """

    def initialize_state(self, deployment: str, block_size: int) -> None:  # type: ignore[override]
        self._deployment = deployment
        self._block_size = block_size
        self._known = known_replicas(self._deployment_id.app_name)
        self._known.block_sizes[deployment] = block_size
        self._listed: list[RunningReplica] = []
        self._by_name: dict[str, RunningReplica] = {}

    def create_replica_wrapper(self, replica_info: RunningReplicaInfo) -> RunningReplica:
        return UnaryReplica(replica_info)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._list(replicas)

    def _list(self, replicas: list[RunningReplica]) -> None:
        self._listed = replicas
        self._by_name = {replica.replica_id.to_full_id_str(): replica for replica in replicas}
        self._known.set_running(self._deployment, self._by_name)
        self._known.nodes[self._deployment] = frozenset(replica.node_id for replica in replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        try:
            return [[self._chosen(candidate_replicas, pending_request)]]
        except Exception:  # Serve would drop the request silently, and its caller would wait until its deadline
            logger.exception("no engine could be chosen; Serve takes any")
            return [candidate_replicas]

    def _chosen(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None
    ) -> RunningReplica:
        if candidate_replicas is not self._listed:  # Serve makes a new list whenever a replica comes or goes
            self._list(candidate_replicas)
        chosen = self._by_name.get(self._choose(pending_request))
        if chosen is None:  # another handle of this process has learned of a replica before this one
            self._list(candidate_replicas)
            chosen = self._by_name[self._choose(pending_request)]
        return chosen

    def _choose(self, pending: PendingRequest | None) -> str:
        """Returns the replica for a call. The call then carries the requests as that replica gets them; those of the
        caller stay as they are.
        """
        if pending is None or pending.future.done() or not pending.args:  # the caller no longer waits, or asks anybody
            return self._known.pick(self._deployment)
        asked, *others = pending.args
        if isinstance(asked, ChosenReplica):
            return asked.name
        if isinstance(asked, EngineRequest):
            replica, (placed,) = self._known.place([asked], self._deployment, self._block_size)
            pending.args = [placed, *others]
        elif isinstance(asked, PoolingRequest):
            replica = self._known.place_texts(asked, self._deployment)
        elif isinstance(asked, list):
            replica, asked[:] = self._known.place(asked, self._deployment, self._block_size)
        else:
            return self._known.pick(self._deployment)
        return replica
