"""The loader of models as a Serve deployment: one replica beside the ingresses of several models, which Serve restarts
if it dies. It deploys and deletes the applications of models, and asks the ingresses and the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
from ray import serve
from ray.serve.schema import ApplicationStatus, LoggingConfig, ReplicaState

from manta.cluster.config import EngineConfig, ServedModel
from manta.cluster.engine.ranks.claims import check_room, node_cpus
from manta.cluster.engine.ranks.load_reports import forget_reports
from manta.cluster.engine.stats import EngineStats
from manta.cluster.engine_bytes import engine_bytes, serving_bytes
from manta.cluster.serve.engine.engine_deployment import engine_variables
from manta.cluster.serve.fleet.deployments import Told
from manta.cluster.serve.fleet.found import (
    FoundModel,
    application_name,
    leaving_among,
    models_among,
    serve_applications,
)
from manta.cluster.serve.fleet.listed_models import ListedModels
from manta.cluster.serve.fleet.loaded_amount import Amount
from manta.cluster.serve.fleet.loader import Loader
from manta.cluster.serve.fleet.model_application import (
    check_continues,
    has_one_node,
    model_application,
    placed_model,
)
from manta.cluster.serve.fleet.model_changes import GcsChanges
from manta.cluster.serve.fleet.shared_cores import Cores, SharedCores, shares_cores
from manta.cluster.serve.requests.engine_client import ANSWER_TIMEOUT_S, ENGINE
from manta.cluster.serve.scaling.cluster_state import is_removed
from manta.cluster.serve.starting import warm_process
from manta.cluster.serve.starting.replica_process import REPLICA_ENVIRONMENT, ReplicaProcess
from manta.cluster.serve.starting.start_failure import in_words, told_in_words
from manta.structured.host import num_cores
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

DRAIN_POLL_S = 0.5
"""Seconds between two checks whether requests still wait at a loader that ends."""
LOADER = "loader"
"""Name of the loader's deployment."""
HOLDERS = ("ingress", "batches")
"""Deployments whose replicas use models: the ingresses, and the runner of batches if there is one."""


class DeployedModels:
    """The models of the application `address`, for the loader that is Serve's replica `own_id`. Implements
    `manta.cluster.serve.fleet.deployments.Deployments` with Serve. `cores` are those that models on demand share.
    """

    def __init__(self, address: str, own_id: str, cores: Cores) -> None:
        self._address = address
        self._cores = cores
        self._may_hold_cores = True
        """Whether cores may be claimed. A loader before this one may have claimed them."""
        self._own_id = own_id
        self._handles: dict[str, Any] = {}
        """Handles of the deployments whose replicas use models, by name."""
        self._num_holders: dict[str, int] = {}
        """Replicas of these deployments that run."""
        self._num_bytes: dict[bytes, tuple[int, int]] = {}
        """Memory of one engine of each model, and that of each process that uses it, by their encoded entries."""

    async def look(self) -> Told:
        applications = await asyncio.to_thread(serve_applications)
        own = applications.get(self._address)
        if own is None or own["status"] == ApplicationStatus.DELETING or not is_in_charge(own, self._own_id):
            return Told([], frozenset(), is_in_charge=False)
        self._num_holders = {name: _num_running(own, name) for name in HOLDERS if name in own["deployments"]}
        # Another application with a name of a model that is loaded hides none, or nobody would count or unload that.
        by_loader = [name for name in applications if name.startswith(f"{self._address}.")]
        return Told(models_among(applications, self._address, by_loader), leaving_among(applications, self._address))

    async def place(self, entry: ServedModel, before: ServedModel | None) -> ServedModel:
        return await asyncio.to_thread(_placed, entry, before)

    async def num_bytes(self, model: ServedModel) -> int:
        key = msgspec.json.encode(model)
        if key not in self._num_bytes:
            self._num_bytes[key] = await asyncio.to_thread(_bytes_of, model.engine)
        of_engine, of_holder = self._num_bytes[key]
        return model.max_engines * of_engine + sum(self._num_holders.values()) * of_holder

    async def deploy(self, model: ServedModel) -> None:
        name = application_name(self._address, model.model_name)
        if shares_cores(model):
            self._may_hold_cores = True
            await asyncio.to_thread(self._cores.claim, model.engine.num_threads or 1)
        made = model_application(model, self._address, by_loader=True)
        target = serve.RunTarget(made, name, None, LoggingConfig(enable_access_log=False))
        await asyncio.to_thread(serve.run_many, [target], wait_for_applications_running=False)

    async def release_cores(self) -> None:
        if not self._may_hold_cores:
            return
        applications = await asyncio.to_thread(serve_applications)  # one that was refused is not among them
        if not any(map(self._may_share, applications.items())):
            await asyncio.to_thread(self._cores.release)
            self._may_hold_cores = False

    def _may_share(self, application: tuple[str, Mapping[str, Any]]) -> bool:
        """Returns whether an application of Serve's details has, or may have, engines that share claimed cores. Serve
        does not tell of one that it is deleting which model it has.
        """
        name, details = application
        if details["status"] == ApplicationStatus.DELETING:
            return name in leaving_among({name: details}, self._address)
        return any(shares_cores(each.model) for each in models_among({name: details}, self._address))

    async def delete(self, application: str) -> None:
        await asyncio.to_thread(serve.delete, application, _blocking=False)
        try:
            await asyncio.to_thread(forget_reports, application)
        except Exception as error:  # Ray's store may be restarting, and Ray raises many types
            logger.info("what engines of %s reported stays: %s", application, in_words(error))

    async def idle_seconds(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for answer in await self._of_holders("idle_seconds"):
            if isinstance(answer, dict):
                found |= {name: min(idle_s, found.get(name, idle_s)) for name, idle_s in answer.items()}
        return found

    async def let_go(self, found: FoundModel, num_waiting: Mapping[str, int]) -> bool:
        if not found.model.on_demand:  # requests use it without asking the loader, until their process knows better
            told = await self._of_holders("refresh_models")
            if any(isinstance(each, BaseException) for each in told):
                return False
        answers = await self._of_holders("let_go", found.model.model_name, dict(num_waiting))
        return all(answer is True for answer in answers) and await self._are_idle(found)

    async def _of_holders(self, method: str, *arguments: object) -> list[Any]:
        """Returns the answers or exceptions of all replicas that use models."""
        names = [name for name, count in self._num_holders.items() if count > 0]
        for name in names:
            if name not in self._handles:
                self._handles[name] = await asyncio.to_thread(serve.get_deployment_handle, name, self._address)
        asked = (_answers(self._handles[name], self._num_holders[name], method, *arguments) for name in names)
        return [answer for answers in await asyncio.gather(*asked) for answer in answers]

    async def _are_idle(self, found: FoundModel) -> bool:
        """Returns whether a model's engines run nothing, which an ingress that is being replaced may still read."""
        if found.condition.stage != "loaded":
            return True  # there is no engine
        handle = await asyncio.to_thread(serve.get_deployment_handle, ENGINE, found.application)
        try:
            stats = await _answers(handle, 1, "stats")
        finally:
            await handle.shutdown_async()  # an open handle wakes up ten times a second
        return all(isinstance(each, EngineStats) and each.num_running + each.num_waiting == 0 for each in stats)

    async def delete_all(self) -> None:
        """Deletes the applications of all models that the loader has deployed, and forgets what operators have changed,
        because the application of their address ends.
        """
        try:
            for each in models_among(await asyncio.to_thread(serve_applications), self._address):
                if each.by_loader:
                    await self.delete(each.application)
        finally:
            await asyncio.to_thread(self._cores.release)
        await asyncio.to_thread(GcsChanges(self._address).clear)


def _bytes_of(engine: EngineConfig) -> tuple[int, int]:
    return engine_bytes(engine), serving_bytes(engine)


def _placed(entry: ServedModel, before: ServedModel | None) -> ServedModel:
    nodes = node_cpus()
    # An own Ray counts more than the machine has, so that claims of models on demand find room beside others'
    cores = [min(count, num_cores()) for count in nodes] if len(nodes) == 1 else nodes
    placed = placed_model(entry, cores)
    if before is not None:
        check_continues(before.engine, placed.engine)
    check_room(placed.engine, entry.num_initial_engines, nodes)
    return placed


def _num_running(application: Mapping[str, Any], deployment: str) -> int:
    states = [replica["state"] for replica in application["deployments"][deployment]["replicas"]]
    return states.count(ReplicaState.RUNNING)


def is_in_charge(application: Mapping[str, Any], replica_id: str) -> bool:
    """Returns whether a replica of the loader decides: Serve has not told it to stop, and no other one may still do so.
    One that starts in the place of another waits until that has ended, because both would fill the same room.
    """
    replicas = application["deployments"].get(LOADER, {"replicas": []})["replicas"]
    states = {each["replica_id"]: each["state"] for each in replicas}
    own = states.pop(replica_id, ReplicaState.STOPPING)
    return own != ReplicaState.STOPPING and all(each == ReplicaState.STARTING for each in states.values())


async def _answers(handle: Any, num_running: int, method: str, *arguments: object) -> list[Any]:
    """Returns the answers of all replicas of a deployment. There is an exception among them if not every one of the
    `num_running` replicas that Serve tells of has answered, because then nobody knows what runs there.
    """
    try:
        answers = handle.broadcast(method, *arguments)
        found: list[Any] = await answers.results_async(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True)
    except Exception as error:  # Ray raises many types
        logger.info("not every replica answers %s: %s", method, in_words(error))
        return [error]
    return found if len(found) >= num_running else [*found, LookupError("a replica was not asked")]


class DeployedLoader(ReplicaProcess):
    """The class that Serve deploys. Serve calls `__del__` of a replica that has to go, and then ends the process."""

    def __init__(
        self,
        entries: tuple[ServedModel, ...],
        placed: tuple[ServedModel, ...],
        max_loaded: int,
        min_loaded_s: float,
        max_bytes: int | None,
    ) -> None:
        super().__init__()
        with told_in_words():
            context = serve.get_replica_context()
            cores = SharedCores(context.app_name, max_loaded)
            self._deployed = DeployedModels(context.app_name, context.replica_id.unique_id, cores)
            models = ListedModels(entries, placed, GcsChanges(context.app_name))
            most = Amount(max_loaded, max_bytes)
            self._loader = Loader(context.app_name, models, most, min_loaded_s, self._deployed)
            self._engines = [model.engine for model in placed if model.on_demand]
        self._running: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Raises if the loader has ended. Serve calls it for the first time before the replica counts as ready."""
        if self._running is None:
            self._running = asyncio.create_task(self._loader.run())
            await asyncio.to_thread(self._warm_up)
        elif self._running.done():
            raise RuntimeError("the loader of models ended")

    def _warm_up(self) -> None:
        """Starts the process of which the engines of models on demand are forks, if they all run on this node."""
        if self._engines and has_one_node():
            warm_process.start_warm_process(engine_variables(self._engines[0]))

    async def load(self, name: str, client: str, timeout_s: float, holder: str) -> None:
        await self._loader.load(name, client, timeout_s, holder)

    async def begin_load(self, name: str, timeout_s: float) -> None:
        await self._loader.begin_load(name, timeout_s)

    async def begin_unload(self, name: str) -> None:
        await self._loader.begin_unload(name)

    async def add(self, entry: ServedModel) -> None:
        await self._loader.add(entry)

    async def update(self, name: str, fields: dict[str, Any]) -> None:
        await self._loader.update(name, fields)

    async def remove(self, name: str) -> None:
        await self._loader.remove(name)

    async def __del__(self) -> None:
        """Ends the models that it has deployed together with the application of their address, and leaves them to the
        next loader if this one is only replaced.
        """
        if self._running is not None:
            self._running.cancel()
        if await is_removed():
            with contextlib.suppress(Exception):  # the controller may be ending too
                await self._deployed.delete_all()


def loader_deployment() -> Any:
    """Returns the Serve deployment of the loader. Bind it with the entries of the configuration's models, with the same
    as they are deployed, and with the limits of those on demand.
    """
    return serve.deployment(
        DeployedLoader,
        name=LOADER,
        num_replicas=1,
        max_ongoing_requests=100_000,  # each is a request that waits in an ingress, where they are bounded
        graceful_shutdown_timeout_s=10,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": REPLICA_ENVIRONMENT}},
    )
