"""The batch runner as a Serve deployment: one replica beside the ingresses, which Serve restarts if it dies.

It has a process of its own, so that no batch delays a stream. The engines admit its requests after all others.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray import serve

from manta.cluster.batch.batch_client import BatchEngineClient
from manta.cluster.batch.batch_runner import Runner
from manta.cluster.batch.line_endpoints import batch_endpoints, endpoints_of_models
from manta.cluster.batch.line_places import LinePlaces
from manta.cluster.config import ServeConfig, ServedModel
from manta.cluster.serve.adapters.adapter_directory import open_directory
from manta.cluster.serve.fleet.fleet import Fleet
from manta.cluster.serve.fleet.holds import Holds
from manta.cluster.serve.fleet.model_changes import GcsChanges
from manta.cluster.serve.starting.replica_process import REPLICA_ENVIRONMENT, ReplicaProcess, yield_to_engines
from manta.cluster.serve.starting.start_failure import told_in_words
from manta.cluster.storage.kept_responses import KeptResponses
from manta.cluster.storage.records import Records
from manta.cluster.storage.storage import Storage


class BatchRunner:
    """Runs batches. `engine` and `standby` are the handles of the engines and of the standby engines; without `engine`
    it runs lines of the models whose engines name its application as their address. `prefix_secret` is the
    application's. `on_demand` are models that requests load, and `loader` is the handle of what loads and changes
    models.
    """

    def __init__(
        self,
        config: ServeConfig,
        engine: Any,
        standby: Any,
        prefix_secret: bytes,
        on_demand: tuple[ServedModel, ...] = (),
        loader: Any = None,
    ) -> None:
        assert config.batch_storage is not None
        with told_in_words():
            self._fleet: Fleet | None = None
            self._holds: Holds | None = None
            if engine is None:
                endpoints = endpoints_of_models(config, prefix_secret)
                address = serve.get_replica_context().app_name
                self._fleet = Fleet(
                    address,
                    endpoints.state.config,
                    endpoints,
                    on_demand=on_demand,
                    client=BatchEngineClient,
                    changes=GcsChanges(address).read,
                )
                if loader is not None:
                    own_id = serve.get_replica_context().replica_id.unique_id
                    endpoints.state.models.on_demand = self._holds = Holds(self._fleet, loader, own_id)
            else:
                host = ray.util.get_node_ip_address()
                endpoints, client = batch_endpoints(config, engine, host, standby, prefix_secret=prefix_secret)
                client.loaded_adapters = open_directory(config, client)
                endpoints.state.use_adapters(client.loaded_adapters)
            self._state = endpoints.state
            self._engines = endpoints.state.engines
            places = LinePlaces(lambda: config.batches.max_in_flight or endpoints.num_places)
            storage = Storage(config.batch_storage)
            self._runner = Runner(
                Records(storage, config.batches),
                endpoints.answer,
                places,
                config.max_body_bytes,
                KeptResponses(storage, config),
                endpoints.pace,
            )
            self._limits = endpoints.limits
        self._serving: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Raises if the runner cannot work or has ended. Serve calls it for the first time before the replica counts as
        ready.
        """
        with told_in_words():
            if self._fleet is not None:
                await self._fleet.start()
            await self._engines.check_reachable()
        if self._serving is None:
            self._serving = asyncio.create_task(self._runner.serve())
        elif self._serving.done():
            raise RuntimeError("the runner of batches ended")

    async def refresh_adapters(self) -> None:
        """Learns which adapters are loaded. The ingress that has loaded or unloaded one calls it."""
        if self._fleet is not None:
            await self._fleet.refresh_adapters()
        else:
            await self._state.refresh_adapters()

    async def refresh_models(self) -> None:
        """Learns which models are served. The ingress that has changed them calls it."""
        if self._fleet is not None:
            await self._fleet.look()

    async def idle_seconds(self) -> dict[str, float]:
        """Answers the loader of models as `manta.cluster.serve.ingress.Ingress.idle_seconds` does."""
        return {} if self._holds is None else self._holds.idle_seconds()

    async def let_go(self, model: str, num_waiting: dict[str, int]) -> bool:
        """Answers the loader of models as `manta.cluster.serve.ingress.Ingress.let_go` does."""
        return self._holds is None or self._holds.let_go(model, num_waiting)

    async def exchange_rates(self, peer: str, taken: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """Notes what an ingress has counted for each API key since it started, and returns what lines of batches were
        charged.
        """
        self._limits.note_peer(peer, taken)
        return {name: (each.requests, each.tokens) for name, each in self._limits.taken().items()}


class DeployedBatchRunner(ReplicaProcess, BatchRunner):
    """The class that Serve deploys, in a process that yields to the engines."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        yield_to_engines()


def batch_deployment(config: ServeConfig) -> Any:
    """Returns the Serve deployment of the batch runner; bind it with the configuration, which names a storage, and the
    engines.
    """
    return serve.deployment(
        DeployedBatchRunner,
        name="batches",
        num_replicas=1,
        health_check_period_s=5,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": REPLICA_ENVIRONMENT}},
    )
