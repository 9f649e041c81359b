"""What engines and their ranks claim: a CPU for each thread, so that Ray puts no two of them on the same cores, and a
GPU or a host's TPU chips each if the model is to run there.
"""

from __future__ import annotations

import os

import msgspec
import ray
from ray._private.state import available_resources_per_node

from cluster.config import EngineConfig

TPU = "TPU"
"""Ray's name for chips of TPUs."""
SLICE_LABEL = "ray.io/tpu-slice-name"
"""The label in which Ray names the TPU slice of a node."""


class CannotPlace(ValueError):
    """The cluster has no room for what is claimed; the message says what, what there is, and the remedy."""


def node_cpus() -> list[int]:
    """CPUs of each node of the cluster that has some, as Ray counts them, the largest first."""
    cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    return sorted((count for count in cpus if count > 0), reverse=True)


def cluster_gpus() -> int:
    """GPUs of the cluster, as Ray counts them."""
    return sum(int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"])


def cluster_tpus() -> int:
    """TPU chips of the cluster, as Ray counts them."""
    return sum(int(node["Resources"].get(TPU, 0)) for node in ray.nodes() if node["Alive"])


def with_device(config: EngineConfig, num_gpus: int, num_tpus: int = 0) -> EngineConfig:
    """`config` whose `device` is not `auto` any more: `cuda` if the cluster has `num_gpus` of at least 1, `tpu` if it
    has TPU chips, else `cpu`.

    Engines are placed by what they claim, so the device must be known before. Left to the engines' processes, several
    would take the same GPU.
    """
    if config.device != "auto":
        return config
    return msgspec.structs.replace(config, device="cuda" if num_gpus else "tpu" if num_tpus else "cpu")


def gpu_environment(config: EngineConfig) -> dict[str, str]:
    """Environment of an engine that hides the GPUs it does not claim.

    Ray 2.60 shows all GPUs to an actor that claims none. An engine whose ranks claim GPUs hides nothing, because the
    ranks inherit its environment, and Ray shows each of them its own.
    """
    return {} if config.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}


def threads_each(config: EngineConfig, num_engines: int, nodes: list[int]) -> int:
    """Threads of each engine, or of each rank where engines have several: `num_threads`, or what a node has for each of
    those that share it. Engines are spread over nodes, the smallest of which must do; `nodes` are their cores.
    """
    if config.num_threads is not None:
        return config.num_threads
    num_nodes, num_ranks = max(1, len(nodes)), config.num_ranks
    if config.placement_strategy.endswith("PACK"):
        on_a_node = -(-num_engines // num_nodes) * num_ranks
    else:
        on_a_node = -(-num_engines * num_ranks // num_nodes)
    return max(1, min(nodes, default=1) // on_a_node)


def num_claimed(config: EngineConfig, num_engines: int, nodes: list[int]) -> int:
    """CPUs that all engines claim together."""
    return threads_each(config, num_engines, nodes) * config.num_ranks * num_engines


def own_cpus(config: EngineConfig) -> int:
    """What the process of an engine claims itself, where `num_threads` is given: nothing if its ranks do."""
    return (config.num_threads or 1) if config.claims_cpus and config.num_ranks == 1 else 0


def rank_bundle(config: EngineConfig) -> dict[str, float]:
    """What a place for one rank claims, where `num_threads` is given, by Ray's names."""
    claimed = {"GPU": float(gpus_each(config)), TPU: float(tpus_each(config))}
    devices = {name: count for name, count in claimed.items() if count}
    if config.claims_cpus:
        return {"CPU": float(config.num_threads or 1)} | devices
    return devices or {"memory": 1.0}  # a byte: Ray has no place for those that claim nothing


def gpus_each(config: EngineConfig) -> int:
    """GPUs of the process that runs the model, or of each rank if there are several."""
    return int(config.device == "cuda")


def tpus_each(config: EngineConfig) -> int:
    """TPU chips of the process that runs the model, or of each host if there are several. None are claimed where
    `JAX_PLATFORMS=cpu` asks for simulated ones.
    """
    if config.device != "tpu" or os.environ.get("JAX_PLATFORMS") == "cpu":
        return 0
    return min(config.tensor_parallel_size, config.tpu_chips_per_host)


def free_slice(num_hosts: int, chips: int) -> str | None:
    """Returns the name of a TPU slice that has exactly `num_hosts` hosts, all with `chips` free; None if there is none.

    Chips of different slices cannot compute together. Ray names the slice of a node in a label.
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
    """Raises `CannotPlace` where the nodes, be they empty, have no room for the processes that run the model."""
    num_threads, num_wanted = threads_each(config, num_engines, nodes), num_engines * config.num_ranks
    if config.claims_cpus and sum(count // num_threads for count in nodes) < num_wanted:
        raise CannotPlace(
            f"engines claim {num_wanted} x {num_threads} CPUs, one a thread, and the cluster's nodes have "
            f"{listed(nodes)}; lower engine.num_threads, num_engine_replicas or engine.tensor_parallel_size, or add "
            "nodes"
        )


def listed(cpus: list[int]) -> str:
    return f"{', '.join(map(str, cpus)) or 'no'} CPUs"
