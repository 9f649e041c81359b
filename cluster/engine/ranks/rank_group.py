"""Places, starts and ends the actors of one engine's ranks. The engine's executor is the only caller."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from manta.cluster.config import EngineConfig
from manta.cluster.engine.ranks.actor import RankActor
from manta.cluster.engine.ranks.claims import (
    SLICE_LABEL,
    TPU,
    CannotPlace,
    free_slice,
    gpus_each,
    listed,
    node_cpus,
    rank_bundle,
    tpus_each,
)
from manta.cluster.engine.ranks.load_reports import current_key
from manta.cluster.engine.ranks.rank_channel import Listener, RankChannel, RankLost
from manta.cluster.engine.ranks.siblings import has_siblings
from manta.structured.visible_logs import logger_of
from manta.workers.model_info import ModelInfo

logger = logger_of(__name__)

PLACEMENT_S = 10.0
"""Seconds to wait for room at the first start: processes that are ending now have left by then."""
RETURN_S = 60.0
"""Seconds to wait for room at a restart: Ray gives up an unreachable node after half a minute, and then the cluster
manager restarts it.
"""
SLICE_POLL_S = 0.5
"""Seconds between two searches for a free TPU slice."""
START_S = 60.0
"""Seconds in which an actor's process must start, before it loads anything. On a lost node it never starts."""
ADAPTER_S = 300.0
"""Seconds in which a rank must have read an adapter."""
OTHER_FAILURES_S = 0.5
"""Seconds to wait for the failures of other ranks. A rank that fails to load makes the ranks that wait for it fail too,
and its own error may arrive after theirs.
"""


class ReloadTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a restart, after which a rank that loads the model again counts as hung. A first start has none: a
    model may take long to arrive.
    """

    factor: float = 10.0
    """Multiple of the first start's time."""
    shortest_s: float = 60.0
    """Shortest bound in seconds, as for the start of an actor's process."""


USUAL_TIMES = ReloadTimes()


class RankGroup:
    """The actors of one engine's ranks. `config.num_threads` must be set; each rank gets and claims as many CPUs.

    The first start waits up to `placement_s` seconds for room.
    """

    def __init__(
        self, config: EngineConfig, placement_s: float = PLACEMENT_S, times: ReloadTimes = USUAL_TIMES
    ) -> None:
        self.times = times
        self._config = config
        self._placement_s = placement_s
        self._num_ranks = config.num_ranks
        self._placement: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._first_start_s: float | None = None
        """Seconds that the first start took, without the wait for room; None before it."""

    def start(self) -> tuple[ModelInfo, RankChannel]:
        """Ends the present actors and starts new ones.

        Raises `CannotPlace` if there is no room for them, any error of loading the model, and `RankLost` if one dies
        meanwhile.
        """
        self._kill()
        placement = self._place(self._placement_s if self._first_start_s is None else RETURN_S)
        began = time.monotonic()
        yields = has_siblings()
        self._actors = [self._start_actor(placement, rank, yields) for rank in range(self._num_ranks)]
        try:
            info, channel = self._load()
        except BaseException:
            self._kill()
            raise
        # After a restart, the scheduler relies on the same number of blocks, however much memory is free then.
        self._config = msgspec.structs.replace(
            self._config, dtype=info.dtype, kv_cache_bytes=info.kv_cache_bytes, max_model_len=info.max_model_len
        )
        if self._first_start_s is None:
            self._first_start_s = time.monotonic() - began
        return info, channel

    def _load(self) -> tuple[ModelInfo, RankChannel]:
        _results([actor.__ray_ready__.remote() for actor in self._actors], START_S)
        times, first_s = self.times, self._first_start_s
        seconds = None if first_s is None else max(times.shortest_s, times.factor * first_s)
        (folder,) = _results([self._actors[0].open_folder.remote()], seconds)
        is_one_machine = all(_results([actor.sees.remote(folder) for actor in self._actors], seconds))
        (group_address,) = _results([self._actors[0].open_store.remote(self._config.device, is_one_machine)], seconds)
        keys = [current_key()] + [""] * (self._num_ranks - 1)  # rank 0 tells how far all are
        loading = [
            actor.load.remote(self._config, rank, group_address, key)
            for rank, (actor, key) in enumerate(zip(self._actors, keys, strict=True))
        ]
        info, *_ = _results(loading, seconds)
        listener = Listener(ray.util.get_node_ip_address())
        for actor in self._actors:
            actor.serve.remote(listener.address)
        return info, RankChannel(listener.accept(self._num_ranks))

    def read_adapter(self, path: str, number: int, needed: list[int]) -> list[tuple[str, int]]:
        """Makes every rank read an adapter (`RankActor.read_adapter`), and returns their answers. Any thread may call
        it. Raises what a rank raises, and `RankLost` if one dies meanwhile or is not there.
        """
        if not self._actors:
            raise RankLost("the ranks are being started")
        return _results([actor.read_adapter.remote(path, number, needed) for actor in self._actors], ADAPTER_S)

    def _start_actor(self, placement: PlacementGroup, rank: int, yields: bool) -> Any:
        """Starts one actor in its bundle of the placement group, which has claimed its resources. `yields` says whether
        other engines compute meanwhile.
        """
        place = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=rank)
        # An actor sees only the GPUs that it claims itself
        chips = {TPU: tpus_each(self._config)} if tpus_each(self._config) else {}
        claims: dict[str, Any] = {"num_cpus": 0, "num_gpus": gpus_each(self._config), "resources": chips}
        num_threads = 2 if self._config.adapter_roots else 1  # one serves steps, the other one reads adapters
        options = claims | {"max_restarts": 0, "max_concurrency": num_threads}
        actor_class: Any = ray.remote(**options)(RankActor)
        return actor_class.options(scheduling_strategy=place).remote(self._config.num_threads, yields)

    def _place(self, seconds: float) -> PlacementGroup:
        """Returns the ranks' placement group, or a new one if a node is gone. Raises `CannotPlace` if `seconds` do not
        suffice.
        """
        if self._placement is not None and placement_group_table(self._placement)["state"] == "CREATED":
            return self._placement
        self._remove_placement()
        claims = [rank_bundle(self._config)] * self._num_ranks
        self._placement = placement = placement_group(claims, **self._placement_options(seconds))
        if not placement.wait(seconds):
            self._remove_placement()
            free = int(ray.available_resources().get("CPU", 0))
            raise CannotPlace(
                f"{self._num_ranks} ranks with {self._config.num_threads} CPUs each find no place as "
                f"{self._config.placement_strategy}: the cluster's nodes have {listed(node_cpus())}, of which "
                f"{free} are free; lower num_threads or tensor_parallel_size, choose another placement_strategy, or "
                "add nodes"
            )
        return placement

    def _placement_options(self, seconds: float) -> dict[str, Any]:
        """Returns the options of the placement group; hosts of a TPU slice are separate nodes.

        Raises `CannotPlace` if no slice is free within `seconds`.
        """
        chips = tpus_each(self._config)
        if not chips:
            return {"strategy": self._config.placement_strategy}
        deadline = time.monotonic() + seconds
        while (name := free_slice(self._num_ranks, chips)) is None and time.monotonic() < deadline:
            time.sleep(SLICE_POLL_S)
        if name is None:
            raise CannotPlace(
                f"no TPU slice of {self._num_ranks} hosts has {chips} free chips on each; set tensor_parallel_size to "
                "the chips of a slice and tpu_chips_per_host to those of a host, or add a slice"
            )
        return {"strategy": "STRICT_SPREAD", "bundle_label_selector": [{SLICE_LABEL: name}] * self._num_ranks}

    def stop(self) -> None:
        """Ends all actors and removes their placement group. Does nothing if Ray has ended."""
        if ray.is_initialized():
            self._kill()
            self._remove_placement()

    def _kill(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            with contextlib.suppress(ray.exceptions.ActorHandleNotFoundError):
                ray.kill(actor)

    def _remove_placement(self) -> None:
        placement, self._placement = self._placement, None
        if placement is not None:
            remove_placement_group(placement)


def _results(references: list[Any], seconds: float | None = None) -> list[Any]:
    """Returns the results of all actors. Raises the error of the first that fails, or `RankLost` if one dies or takes
    longer than `seconds`.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    pending = list(references)
    while pending:
        done, pending = ray.wait(pending, timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not done:
            raise RankLost(f"{len(pending)} ranks did not answer within {seconds:g} s; they hang, or a node is gone")
        error = _error(done[0])
        if error is not None:
            raise _cause(error, pending)
    return ray.get(references)


def _cause(error: Exception, pending: list[Any]) -> Exception:
    """Returns the error to report. An error of the model itself is preferred, because a rank that dies or waits in vain
    may only be a consequence.
    """
    others = ray.wait(pending, num_returns=len(pending), timeout=OTHER_FAILURES_S)[0] if pending else []
    errors = [error, *(other for reference in others if (other := _error(reference)) is not None)]
    return next((each for each in errors if isinstance(each, ValueError)), error)


def _error(reference: Any) -> Exception | None:
    try:
        ray.get(reference)
    except RayTaskError as error:
        return error.cause if isinstance(error.cause, Exception) else error
    except RayActorError as error:
        return RankLost(f"a rank died meanwhile: {error}")
    return None
