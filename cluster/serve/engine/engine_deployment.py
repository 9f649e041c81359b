"""The engine as a Serve deployment."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from manta.cluster.config import AutoscalingOptions, EngineConfig
from manta.cluster.engine.ranks.claims import TPU, gpu_environment, gpus_each, own_cpus, tpus_each
from manta.cluster.engine.ranks.load_reports import report_key, reported
from manta.cluster.serve.engine.model_replica import ModelReplica
from manta.cluster.serve.routing.request_router import EngineRouter
from manta.cluster.serve.scaling.autoscaling import autoscaling_config
from manta.cluster.serve.starting import warm_process
from manta.cluster.serve.starting.replica_process import REPLICA_ENVIRONMENT, ReplicaProcess


class DeployedEngine(ReplicaProcess, ModelReplica):
    """The class that Serve deploys. With `tells_load` it reports how far its start is."""

    def __init__(
        self, config: EngineConfig, is_alone: bool = False, is_awaited: bool = False, tells_load: bool = False
    ) -> None:
        with reported(_own_report_key() if tells_load else ""):
            super().__init__(config, is_alone, is_awaited)

    async def reconfigure(self, announcement: dict[str, Any]) -> None:
        """Takes what the deployment says of itself to ingresses (`cluster/serve/fleet/found.py`), which read it from
        Serve. Serve calls it for the engines of one of several models; it changes no engine.
        """


def _own_report_key() -> str:
    context = serve.get_replica_context()
    return report_key(context.app_name, context.replica_id.unique_id)


def engine_variables(config: EngineConfig) -> dict[str, str]:
    """Returns the environment variables of an engine's process; the configuration must hold `num_threads`."""
    return {
        **REPLICA_ENVIRONMENT,
        **gpu_environment(config),
        # torch reads both variables when it loads OpenMP. Ray gives an actor one thread unless told otherwise.
        "OMP_NUM_THREADS": str(config.num_threads),
        # torch's threads would spin long after each operation and keep the kernels' threads from the cores.
        "GOMP_SPINCOUNT": "1000",
    }


def engine_deployment(
    config: EngineConfig,
    num_replicas: int,
    name: str = "engine",
    autoscaling: AutoscalingOptions | None = None,
    is_alone: bool = False,
    is_forked: bool = False,
    starts_new_first: bool = False,
) -> Any:
    """Returns the Serve deployment of the engines; bind it with the configuration, which must hold `num_threads`, with
    `is_alone`, and for one of several models with `is_awaited` (`engine_replica.py`) and `tells_load`. `is_alone` says
    that there is never more than one replica. With `autoscaling` the number of replicas follows the load. If
    `is_forked`, their processes are forked from one whose imports are done, where that runs
    (`cluster/serve/starting/warm_process.py`); all nodes must have this interpreter. With `starts_new_first` an update
    starts one new engine, and only when that serves it ends an old one. Without room it would wait for ever. Otherwise
    each old engine is told to end before its successor starts.
    """
    variables = engine_variables(config)
    runtime_env: dict[str, Any] = {"env_vars": variables}
    if is_forked:
        runtime_env["py_executable"] = warm_process.own_command(variables)
    return serve.deployment(
        DeployedEngine,
        name=name,
        num_replicas=num_replicas if autoscaling is None else None,
        autoscaling_config=None if autoscaling is None else autoscaling_config(autoscaling, config),
        # The engine's own queue limit refuses requests (429), so Serve must not hold any back before.
        max_ongoing_requests=config.max_num_sequences + config.max_num_waiting + 1024,
        health_check_period_s=1,  # Serve notices a dead replica within this time and starts another one
        health_check_timeout_s=5,  # a hung replica fails three checks in a row and is replaced after 18 s
        max_surge_percent=int(starts_new_first),  # Serve rounds up, so 1% is one engine of up to a hundred
        request_router_config=RequestRouterConfig(
            request_router_class=EngineRouter,  # type: ignore[arg-type]
            request_router_kwargs={
                "deployment": name,
                "block_size": config.block_size if config.enable_prefix_caching and not is_alone else 0,
            },
        ),
        ray_actor_options={
            "num_cpus": own_cpus(config),
            "num_gpus": gpus_each(config) if config.num_ranks == 1 else 0,
            "resources": {TPU: tpus_each(config)} if config.num_ranks == 1 and tpus_each(config) else {},
            "runtime_env": runtime_env,
        },
    )
