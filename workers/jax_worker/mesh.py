"""The devices of one model replica as a mesh with a single axis, `tensor`, over one process on each host.

Every process of a mesh runs the same functions on the same arrays (SPMD). JAX's coordination service runs in rank 0's
process. On CPUs, which simulate a mesh, devices of different processes communicate through gloo.
"""

from __future__ import annotations

import os
import pathlib
import socket

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from manta.workers.models.model_config import ModelError
from manta.workers.ranks.rank_worker import RankPlace

AXIS = "tensor"
"""Name of the mesh's only axis, along which heads, inner widths and vocabularies are split."""
TPU = "tpu"
"""Name of the TPU backend in JAX."""
LOOPBACK = "127.0.0.1"
"""Address of the coordination service if one machine has all processes."""
_JOIN_S = 300
"""Seconds in which all hosts of a mesh must join it."""


def open_mesh(num_devices: int, num_hosts: int = 1, place: RankPlace | None = None) -> Mesh:
    """Returns the mesh of a replica. Each of several hosts calls it with its own `place`.

    Raises `ModelError` if there are no TPUs (set `JAX_PLATFORMS=cpu` to simulate them) or fewer than `num_devices`.
    """
    if num_hosts > 1:
        _join(num_hosts, place or RankPlace())
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise ModelError(f"JAX finds no device ({error}); install the extra `tpu` on a TPU host") from error
    platform = devices[0].platform
    if platform != TPU and os.environ.get("JAX_PLATFORMS") != platform:
        raise ModelError(
            f"device tpu: JAX finds no TPU here, only {platform}; to simulate a mesh on CPUs set JAX_PLATFORMS=cpu and "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N"
        )
    if len(devices) < num_devices:
        raise ModelError(
            f"tensor_parallel_size {num_devices} needs as many devices, and JAX finds {len(devices)} of {platform}; "
            f"set tensor_parallel_size to at most {len(devices)}"
        )
    if num_hosts > 1 and len(devices) != num_devices:
        raise ModelError(
            f"{num_hosts} hosts have {len(devices)} devices together; set tensor_parallel_size to {len(devices)}"
        )
    # Auto: XLA's partitioner derives the sharding of each value between parameters and results.
    return jax.make_mesh((num_devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:num_devices])


def open_group(folder: pathlib.Path, host: str | None) -> tuple[None, str]:
    """Returns an address for JAX's coordination service, which rank 0 starts when it joins the mesh; see
    `manta.workers.ranks.rank_worker.open_group`.

    The service has no authentication, so hosts of a slice need a private network (`docs/security.md`).
    """
    address = host or LOOPBACK
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    return None, f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _join(num_hosts: int, place: RankPlace) -> None:
    if place.group_address is None:
        raise ValueError(f"rank {place.rank} of {num_hosts} needs group_address, that of JAX's coordination service")
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        place.group_address,
        num_hosts,
        place.rank,
        initialization_timeout=_JOIN_S,
        coordinator_bind_address=place.group_address,
    )


def is_tpu(mesh: Mesh) -> bool:
    return bool(mesh.devices.flat[0].platform == TPU)


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def place(mesh: Mesh, array: np.ndarray) -> jax.Array:
    """Copies a host array to every device of the mesh. All hosts must pass equal arrays."""
    if jax.process_count() == 1:
        return jax.device_put(array, replicated(mesh))
    return jax.make_array_from_process_local_data(replicated(mesh), array, array.shape)


def on_first_device(array: jax.Array) -> jax.Array:
    """Returns this process's first copy of an array that every device holds whole. Copies nothing."""
    return array.addressable_data(0)


def free_memory(mesh: Mesh) -> int | None:
    """Returns the free bytes of this process's fullest TPU, or None where devices share the host's memory."""
    if not is_tpu(mesh):
        return None
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
