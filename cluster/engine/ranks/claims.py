"""The resources that engines and their ranks claim from Ray. A CPU for each thread keeps Ray from placing two of them
on the same cores. A model on GPUs or TPUs also claims a GPU for each rank, or a host's TPU chips.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import ray
from ray._private.state import available_resources_per_node

from manta.cluster.config import EngineConfig
from manta.structured.host import num_cores

TPU = "TPU"
"""Ray's resource name for TPU chips."""
SLICE_LABEL = "ray.io/tpu-slice-name"
"""The node label that holds the name of its TPU slice."""


class CannotPlace(ValueError):
    """The cluster has no room for the claimed resources. The message names the claim, the available resources and the
    remedy.
    """


def _living_nodes() -> list[dict[str, Any]]:
    """Returns what Ray says of each living node; nothing if this process is not connected to Ray."""
    return [node for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []


def _in_cluster(resource: str) -> int:
    return sum(int(node["Resources"].get(resource, 0)) for node in _living_nodes())


def num_nodes() -> int:
    """Returns the number of living nodes of the cluster, including those without CPUs; 1 without Ray."""
    return len(_living_nodes()) or 1


def node_cpus() -> list[int]:
    """Returns the CPUs of each node that has any, as Ray counts them, largest first; this machine's cores without
    Ray.
    """
    if not ray.is_initialized():
        return [num_cores()]
    cpus = [int(node["Resources"].get("CPU", 0)) for node in _living_nodes()]
    return sorted((count for count in cpus if count > 0), reverse=True)


def cluster_gpus() -> int:
    """Returns the number of GPUs in the cluster, as Ray counts them; 0 without Ray."""
    return _in_cluster("GPU")


def cluster_tpus() -> int:
    """Returns the number of TPU chips in the cluster, as Ray counts them; 0 without Ray."""
    return _in_cluster(TPU)


def with_device(config: EngineConfig, num_gpus: int, num_tpus: int = 0) -> EngineConfig:
    """Returns `config` with `device: auto` resolved: `cuda` if the cluster has GPUs, else `tpu` if it has TPU chips,
    else `cpu`.

    Engines are placed by what they claim, so the device must be known before. If each engine's process chose by itself,
    several would take the same GPU.
    """
    if config.device != "auto":
        return config
    if num_gpus:
        return msgspec.structs.replace(config, device="cuda")
    return msgspec.structs.replace(config, device="tpu" if num_tpus else "cpu")


def gpu_environment(config: EngineConfig) -> dict[str, str]:
    """Returns environment variables that hide from an engine the GPUs that it does not claim.

    Ray 2.60 shows all GPUs to an actor that claims none. An engine whose ranks claim GPUs hides none, because the ranks
    inherit its environment, and Ray shows each rank its own GPU.
    """
    return {} if config.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}


def threads_each(config: EngineConfig, num_engines: int, nodes: list[int]) -> int:
    """Returns the number of threads of each engine, or of each rank if engines have several ranks.

    Returns `num_threads` if set. Otherwise the CPUs of the smallest node are divided by the processes that share a
    node, with engines spread over all nodes. `nodes` are the CPUs of each node.
    """
    if config.num_threads is not None:
        return config.num_threads
    num_nodes, num_ranks = max(1, len(nodes)), config.num_ranks
    if config.placement_strategy.endswith("PACK"):
        on_a_node = math.ceil(num_engines / num_nodes) * num_ranks
    else:
        on_a_node = math.ceil(num_engines * num_ranks / num_nodes)
    return max(1, min(nodes, default=1) // on_a_node)


def num_claimed(config: EngineConfig, num_engines: int, nodes: list[int]) -> int:
    """Returns the number of CPUs that all engines claim together."""
    return threads_each(config, num_engines, nodes) * config.num_ranks * num_engines


def own_cpus(config: EngineConfig) -> int:
    """Returns the CPUs that an engine's own process claims, 0 if its ranks claim them. Expects `num_threads`."""
    return (config.num_threads or 1) if config.claims_cpus and config.num_ranks == 1 else 0


def rank_bundle(config: EngineConfig) -> dict[str, float]:
    """Returns the resources of the placement bundle of one rank, by Ray's names. Expects `num_threads` to be set."""
    claimed = {"GPU": float(gpus_each(config)), TPU: float(tpus_each(config))}
    devices = {name: count for name, count in claimed.items() if count}
    if config.claims_cpus:
        return {"CPU": float(config.num_threads or 1)} | devices
    return devices or {"memory": 1.0}  # one byte, because Ray refuses empty bundles


def gpus_each(config: EngineConfig) -> int:
    """Returns the GPUs of the process that runs the model, or of each rank if there are several."""
    return int(config.device == "cuda")


def tpus_each(config: EngineConfig) -> int:
    """Returns the TPU chips of the process that runs the model, or of each host if there are several. Returns 0 where
    `JAX_PLATFORMS=cpu` asks for simulated chips.
    """
    if config.device != "tpu" or os.environ.get("JAX_PLATFORMS") == "cpu":
        return 0
    return min(config.tensor_parallel_size, config.tpu_chips_per_host)


def free_slice(num_hosts: int, chips: int) -> str | None:
    """Returns the name of a TPU slice with exactly `num_hosts` hosts and `chips` free on each; None if there is none.

    Chips of different slices cannot compute together.
    """
    free = available_resources_per_node()
    slices: dict[str, list[float]] = {}
    for node in ray.nodes():
        name = node.get("Labels", {}).get(SLICE_LABEL)
        if node["Alive"] and name is not None:
            slices.setdefault(name, []).append(free.get(node["NodeID"], {}).get(TPU, 0.0))
    fits = (name for name, hosts in sorted(slices.items()) if len(hosts) == num_hosts and min(hosts) >= chips)
    return next(fits, None)


def check_room(config: EngineConfig, num_engines: int, nodes: list[int]) -> None:
    """Raises `CannotPlace` if the nodes, even when idle, have no room for the processes that run the model."""
    num_threads, num_wanted = threads_each(config, num_engines, nodes), num_engines * config.num_ranks
    if config.claims_cpus and sum(count // num_threads for count in nodes) < num_wanted:
        raise CannotPlace(
            f"engines claim {num_wanted} x {num_threads} CPUs, one a thread, and the cluster's nodes have "
            f"{listed(nodes)}; lower engine.num_threads, num_engine_replicas or engine.tensor_parallel_size, or add "
            "nodes"
        )


def has_room_for_another(config: EngineConfig, num_engines: int) -> bool:
    """Returns whether the cluster has room for one more engine than `num_engines`, and has it now. Expects
    `num_threads`. Nodes that a cluster's autoscaler could add do not count.
    """
    if not ray.is_initialized():
        return True
    claimed = rank_bundle(config)

    def num_fitting(nodes: Iterable[Mapping[str, float]]) -> int:
        """Returns the number of ranks whose claims fit."""
        return sum(min(int(node.get(name, 0.0) // amount) for name, amount in claimed.items()) for node in nodes)

    fits_idle = num_fitting(node["Resources"] for node in _living_nodes()) >= (num_engines + 1) * config.num_ranks
    return fits_idle and num_fitting(available_resources_per_node().values()) >= config.num_ranks


def listed(cpus: list[int]) -> str:
    return f"{', '.join(map(str, cpus)) or 'no'} CPUs"
