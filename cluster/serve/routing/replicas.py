"""The engine replicas as one ingress knows them: which ones Serve runs, which are alive, and which got a request last.

Serve's router (`request_router.py`) reports the running replicas and asks which one gets a request. The channel reports
which replicas were heard, and what they report. Each process has one `Replicas` between the two for each application
with engines, because Serve creates the router where the ingress cannot pass it anything. Everything here may be called
from another thread, because Serve's router may run in one.
"""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Iterable

import msgspec
import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from manta.cluster.engine.kv_blocks import hash_blocks
from manta.cluster.engine.pooling_request import PoolingRequest
from manta.cluster.engine.ranks.siblings import SERVE_NAMESPACE
from manta.cluster.engine.request import EngineRequest
from manta.cluster.serve.routing.adapter_holders import adapter_key
from manta.cluster.serve.routing.placement import Placement, Prompt
from manta.cluster.serve.routing.prefix_index import block_keys
from manta.workers.adapter_key import keys_of

SILENT_BEATS = 4
"""Missed heartbeats (0.6 s) after which requests continue on another replica. A step holds up an engine's event loop
for a few ms. A delay of the ingress's own does not count, because it counts beats and not time.
"""
PATIENT_BEATS = 16
"""Most missed heartbeats (2.4 s) after which requests leave a replica that was left for its silence before, and then
was heard again. Each time the number doubles.
"""
PATIENT_S = 60.0
"""Seconds for which such a replica is given more time. On an overloaded machine processes stall for longer than
`SILENT_BEATS`, and requests that moved each time would be computed again and again.
"""
HUNG_BEATS = 20
"""Missed heartbeats (3 s) after which a replica is killed, if no other one can take its requests."""
AVOID_S = 20.0
"""Seconds for which a replica that was silent or away, or lost its connection, gets no requests while another one can.
Hearing it again ends this. Serve replaces a dead replica within that time.
"""


class ChosenReplica(msgspec.Struct, frozen=True):
    """The first argument of a call that goes to the replica of this name."""

    name: str


class Replicas:
    """The replicas of all engine deployments. A replica is named after its actor."""

    def __init__(self) -> None:
        self.running: dict[str, frozenset[str]] = {}
        """Replicas that Serve runs and has not told to end, by deployment; only deployments that Serve has reported."""
        self.nodes: dict[str, frozenset[str]] = {}
        """Ray node ids of the replicas, by deployment."""
        self.block_sizes: dict[str, int] = {}
        """Block sizes of the prefix caches, by deployment; 0 without prefix caching or with only one replica."""
        self.routed: dict[str, str] = {}
        """Replica to which each request was sent, until the replica has taken it."""
        self.placement = Placement()
        self._num_missed: dict[str, int] = {}
        """Missed heartbeats in a row, of replicas that owe heartbeats."""
        self._silent: set[str] = set()
        """Replicas that were left for their silence and have not been heard since."""
        self._patience: dict[str, tuple[int, float]] = {}
        """Heartbeats that a replica may miss, if they are more than `SILENT_BEATS`, and the time until which it may, on
        `time.monotonic`'s clock.
        """
        self._num_connections: collections.Counter[str] = collections.Counter()
        """Open connections of the channel by replica. For a moment a replica may have two."""
        self._avoided: dict[str, float] = {}
        """Time until which each replica is avoided, on `time.monotonic`'s clock."""

    # ---- who lives -----------------------------------------------------------------------------------------------

    def hear(self, replica: str, is_away: bool = False) -> None:
        """Notes a heartbeat. A replica that `is_away` completes no step for some seconds and is avoided."""
        if self._num_missed:
            self._num_missed.pop(replica, None)
        if replica in self._silent:
            self._silent.discard(replica)
            num_beats = min(2 * self._num_allowed(replica), PATIENT_BEATS)
            self._patience[replica] = num_beats, time.monotonic() + PATIENT_S
        if is_away:
            self.avoid(replica)
        elif self._avoided:
            self._avoided.pop(replica, None)

    def beat(self, owing: set[str]) -> None:
        """Counts a beat for the replicas `owing` a heartbeat, which are those that run requests. Called every
        `BEAT_S`.
        """
        self._num_missed = {replica: self._num_missed.get(replica, 0) + 1 for replica in owing}
        for replica, count in self._num_missed.items():
            if count > self._num_allowed(replica):
                self._silent.add(replica)
                self.avoid(replica)

    def _num_allowed(self, replica: str) -> int:
        """Returns the number of heartbeats that a replica may miss before its requests leave."""
        if replica not in self._patience:
            return SILENT_BEATS
        num_beats, until = self._patience[replica]
        if until > time.monotonic():
            return num_beats
        del self._patience[replica]
        return SILENT_BEATS

    def connected(self, replica: str) -> None:
        """Notes that a replica has connected to this process."""
        self._num_connections[replica] += 1

    def disconnected(self, replica: str) -> None:
        """Notes that a connection of a replica has ended."""
        self._silent.discard(replica)
        self._patience.pop(replica, None)
        self._num_connections -= collections.Counter((replica,))  # subtraction drops replicas without a connection

    def is_connected(self, replica: str) -> bool:
        """Returns whether the replica's process lives, as far as its connection tells."""
        return replica in self._num_connections

    def avoid(self, replica: str) -> None:
        self._avoided[replica] = time.monotonic() + AVOID_S

    def set_running(self, deployment: str, replicas: Iterable[str]) -> None:
        """Sets the replicas that Serve runs now."""
        self.running[deployment] = frozenset(replicas)
        self.placement.set_running(deployment, self.running[deployment])

    def is_good(self, replica: str) -> bool:
        """Returns whether requests should stay with the replica: it runs and is not avoided."""
        return not self.is_avoided(replica) and self.is_running(replica)

    def is_avoided(self, replica: str) -> bool:
        """Returns whether the replica was silent or away, or lost its connection."""
        return self._avoided.get(replica, 0.0) > time.monotonic()

    def has_strangers(self) -> bool:
        """Returns whether a running replica has not connected to this process."""
        return not all(self.is_connected(replica) for names in self.running.values() for replica in names)

    def is_running(self, replica: str) -> bool:
        """Returns whether Serve runs the replica and has not told it to end, as far as Serve has told anything."""
        return not self.running or any(replica in names for names in self.running.values())

    def is_hung(self, replica: str) -> bool:
        """Returns True only at the beat at which the replica counts as hung."""
        return self._num_missed.get(replica) == HUNG_BEATS

    def is_any_good(self, deployment: str) -> bool:
        """Returns whether some replica of a deployment can take requests."""
        return any(map(self.is_good, self.running.get(deployment, ())))

    # ---- who gets what -------------------------------------------------------------------------------------------

    def place(self, requests: list[EngineRequest], deployment: str, block_size: int) -> tuple[str, list[EngineRequest]]:
        """Chooses a replica for requests of one call; all go where the first one should go. Returns the replica, and
        the requests as it gets them: with `num_new_tokens`.
        """
        first, *others = (_prompt(request, block_size) for request in requests)
        avoided = self._now_avoided()
        if requests[0].continued is not None:
            avoided += self._strangers(deployment, avoided)
        replica, num_new_tokens = self.placement.place(first, deployment, avoided)
        estimates = [num_new_tokens, *(self.placement.follow(prompt, replica) for prompt in others)]
        self.routed.update(dict.fromkeys((request.request_id for request in requests), replica))
        placed = zip(requests, estimates, strict=True)
        return replica, [msgspec.structs.replace(request, num_new_tokens=number) for request, number in placed]

    def place_texts(self, request: PoolingRequest, deployment: str) -> str:
        """Chooses a replica for texts, which no replica has cached. They count as under way until
        `self.placement.end`.
        """
        prompt = Prompt(
            request_id=request.request_id,
            keys=(),
            num_tokens=request.num_tokens,
            block_size=0,
            num_sequences=1,
            client=request.client,
            session="",
        )
        replica, _ = self.placement.place(prompt, deployment, self._now_avoided())
        self.routed[request.request_id] = replica
        return replica

    def pick(self, deployment: str) -> str:
        """Returns the replica that gets a call which any replica can answer."""
        return self.placement.pick(deployment, self._now_avoided())

    def _strangers(self, deployment: str, avoided: list[str]) -> list[str]:
        """Returns the replicas that have not connected to this process, if others have that are not avoided. Serve
        would ask such a replica first, and it may be slow to answer, so a stream does not wait for it.
        """
        good = self.running.get(deployment, frozenset()) - set(avoided)
        strangers = [replica for replica in good if not self.is_connected(replica)]
        return strangers if len(strangers) < len(good) else []

    def _now_avoided(self) -> list[str]:
        now, avoided = time.monotonic(), list(self._avoided.items())
        for replica, until in avoided:
            if until <= now:
                self._avoided.pop(replica, None)
        return [replica for replica, until in avoided if until > now]


def _prompt(request: EngineRequest, block_size: int) -> Prompt:
    """Returns the prompt to place. For a continued choice it includes the output so far, which is computed again."""
    token_ids = request.prompt_token_ids
    if request.continued:
        token_ids = token_ids + request.continued[0].token_ids
    # The last token is always computed, and so are those whose log-probabilities are wanted.
    num_readable = len(token_ids) - 1
    if request.params.prompt_logprobs is not None:
        num_readable = min(num_readable, request.num_prompt_logprobs)
    num_blocks = num_readable // block_size if block_size else 0
    return Prompt(
        request_id=request.request_id,
        keys=block_keys(hash_blocks(token_ids, num_blocks, block_size, root=request.chain_root)) if num_blocks else (),
        num_tokens=len(token_ids),
        block_size=block_size,
        num_sequences=request.params.n,
        client=request.client,
        session=request.session,
        adapter=adapter_key(keys_of(request.adapter)[0].digest) if request.adapter else 0,
    )


@functools.cache
def known_replicas(application: str) -> Replicas:
    """Returns the engines of an application that this process calls. It is a function because Serve copies the router's
    class with everything that it refers to, except functions of modules.
    """
    return Replicas()


def own_name() -> str:
    """Returns the name of the replica that runs in this process; empty outside Serve."""
    try:
        return serve.get_replica_context().replica_id.to_full_id_str()
    except RayServeException:
        return ""


def own_application() -> str:
    """Returns the name of the application of the replica that runs in this process; empty outside Serve."""
    try:
        return str(serve.get_replica_context().app_name)
    except RayServeException:
        return ""


def own_node() -> str:
    """Returns the id of the Ray node that this process runs on; empty without Ray."""
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""


def kill(replica: str) -> None:
    """Kills a hung replica, so that Serve starts another one. Raises `ValueError` if it is gone."""
    ray.kill(ray.get_actor(replica, SERVE_NAMESPACE))
