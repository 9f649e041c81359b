"""The engine replicas as one ingress knows them: which Serve runs, which live, and which got a request last.

Serve's router (`request_router.py`) tells which replicas run and asks which of them gets a request; the channel tells
who was heard, and what engines report. One `Replicas` stands between both in each process: Serve makes the router where
the ingress cannot pass it anything. Everything here may be asked from another thread, since Serve's router may run in
one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from cluster.engine.kv_blocks import hash_blocks
from cluster.engine.request import EngineRequest
from cluster.serve.routing.placement import Placement, Prompt
from cluster.serve.routing.prefix_index import block_keys

SERVE_NAMESPACE = "serve"
"""Where Serve's actors have their names."""
SILENT_BEATS = 4
"""So many signs of life must be missing (0.6 s) before requests go on elsewhere. A step holds up an engine's event loop
for a few ms, and what held up the ingress itself does not count.
"""
HUNG_BEATS = 20
"""After so many (3 s) a replica is killed if no other one can take its requests."""
AVOID_S = 20.0
"""A replica that was silent or away, or whose connection broke, gets nothing for so long while another one runs, unless
it is heard again. Meanwhile Serve replaces it if it is dead.
"""


class Replicas:
    """Of all deployments of engines. A replica's name is the one of its actor."""

    def __init__(self) -> None:
        self.running: dict[str, frozenset[str]] = {}
        """By deployment, those that Serve runs, less those that it told to go. Deployments of which it has said."""
        self.nodes: dict[str, frozenset[str]] = {}
        """By deployment, where they run, as Ray names nodes."""
        self.routed: dict[str, str] = {}
        """Request to the replica that it was sent to, until this has taken it."""
        self.placement = Placement()
        self._num_missed: dict[str, int] = {}
        """Signs of life, in a row, of replicas that owe some."""
        self._avoided: dict[str, float] = {}
        """Until when, on `time.monotonic`'s clock."""

    # ---- who lives -----------------------------------------------------------------------------------------------

    def hear(self, replica: str, is_away: bool = False) -> None:
        """It lives. One that is away starts its ranks anew, which takes seconds."""
        if self._num_missed:
            self._num_missed.pop(replica, None)
        if is_away:
            self.avoid(replica)
        elif self._avoided:
            self._avoided.pop(replica, None)

    def beat(self, owing: set[str]) -> None:
        """Called every `BEAT_S` with the replicas that run requests, and so should be heard until the next call."""
        self._num_missed = {replica: self._num_missed.get(replica, 0) + 1 for replica in owing}
        for replica, count in self._num_missed.items():
            if count > SILENT_BEATS:
                self.avoid(replica)

    def avoid(self, replica: str) -> None:
        self._avoided[replica] = time.monotonic() + AVOID_S

    def set_running(self, deployment: str, replicas: Iterable[str]) -> None:
        """Those that Serve runs now."""
        self.running[deployment] = frozenset(replicas)
        self.placement.set_running(deployment, self.running[deployment])

    def is_good(self, replica: str) -> bool:
        """Whether requests should stay with it: it runs, and nothing speaks against it."""
        if self._avoided.get(replica, 0.0) > time.monotonic():
            return False
        return not self.running or any(replica in names for names in self.running.values())

    def is_hung(self, replica: str) -> bool:
        """True in the one beat in which its patience is over."""
        return self._num_missed.get(replica) == HUNG_BEATS

    def is_any_good(self, deployment: str) -> bool:
        """Whether some replica of a deployment can take requests."""
        return any(map(self.is_good, self.running.get(deployment, ())))

    # ---- who gets what -------------------------------------------------------------------------------------------

    def place(self, requests: list[EngineRequest], deployment: str, block_size: int) -> str:
        """The replica of a deployment that gets some requests, all where the first one should go. Each learns how much
        of its prompt is to be computed.
        """
        first, *others = requests
        replica, first.num_new_tokens = self.placement.place(
            _prompt(first, block_size), deployment, self._now_avoided()
        )
        for request in others:
            request.num_new_tokens = self.placement.follow(_prompt(request, block_size), replica)
        self.routed.update(dict.fromkeys((request.request_id for request in requests), replica))
        return replica

    def pick(self, deployment: str) -> str:
        """The replica that answers a question which any of them can answer."""
        return self.placement.pick(deployment, self._now_avoided())

    def _now_avoided(self) -> list[str]:
        now, avoided = time.monotonic(), list(self._avoided.items())
        for replica, until in avoided:
            if until <= now:
                self._avoided.pop(replica, None)
        return [replica for replica, until in avoided if until > now]


def _prompt(request: EngineRequest, block_size: int) -> Prompt:
    """What is computed first. Of a continued choice that is its output too."""
    token_ids = request.prompt_token_ids
    if request.continued:
        token_ids = token_ids + request.continued[0].token_ids
    # The last token is computed in any case, and prompts that are reported are not read from the cache.
    is_cached = block_size > 0 and request.params.prompt_logprobs is None
    num_blocks = (len(token_ids) - 1) // block_size if is_cached else 0
    return Prompt(
        request_id=request.request_id,
        keys=block_keys(hash_blocks(token_ids, num_blocks, block_size, root=request.cache_root)) if num_blocks else (),
        num_tokens=len(token_ids),
        block_size=block_size,
        num_sequences=request.params.n,
        client=request.client,
        session=request.session,
    )


@functools.cache
def known_replicas() -> Replicas:
    """Of the engines that this process calls. A function, since Serve copies the router's class with all that it refers
    to but functions of modules.
    """
    return Replicas()


def own_name() -> str:
    """The name of the replica that this process is; empty outside Serve."""
    try:
        return serve.get_replica_context().replica_id.to_full_id_str()
    except RayServeException:
        return ""


def kill(replica: str) -> None:
    """Ends a replica that hangs; Serve starts another one. Raises `ValueError` if it is gone."""
    ray.kill(ray.get_actor(replica, SERVE_NAMESPACE))
