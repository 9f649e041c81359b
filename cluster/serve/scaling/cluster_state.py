"""State of this application as Serve and Ray tell it: its deployments, what is starting, why something is not, the
nodes, and whether the application is being deleted. `/status` reads it; Serve's messages are reworded.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Mapping

import ray
from ray import serve
from ray.serve._private.common import DeploymentStatusTrigger
from ray.serve.context import _get_global_client as get_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    ServeInstanceDetails,
)

from manta.cluster.http.exchange.state import DeploymentState, NodeState
from manta.cluster.serve.starting.start_failure import in_words, last_exception, waiting_for_room

_SLOW_START = re.compile(r"has (\d+) replicas that have taken more than (\d+)s to (?:initialize|be scheduled)")


KEEP_S = 0.25
"""Least seconds between two queries to Serve's controller, because anybody may ask `/status` without a key."""


class ClusterWatch:
    """The state of the application that this process belongs to; call it in its event loop. `models` returns the
    applications with the engines of several models, and the names of these.
    """

    def __init__(self, models: Callable[[], Mapping[str, str]] = dict) -> None:
        self._models = models
        self._asking = asyncio.Lock()
        self._found: tuple[list[DeploymentState], list[NodeState]] = [], []
        self._asked_at = -math.inf

    async def __call__(self) -> tuple[list[DeploymentState], list[NodeState]]:
        async with self._asking:
            if time.monotonic() - self._asked_at > KEEP_S:
                self._found = await asyncio.to_thread(lambda: (_deployments(self._models()), _nodes()))
                self._asked_at = time.monotonic()
        return self._found


async def is_removed(application: str | None = None) -> bool:
    """Returns whether Serve is deleting an application, including its engines, or has done so; that of this replica
    unless one is named.
    """
    name = application or serve.get_replica_context().app_name
    applications = (await asyncio.to_thread(serve.status)).applications
    return name not in applications or applications[name].status == ApplicationStatus.DELETING


def _deployments(models: Mapping[str, str]) -> list[DeploymentState]:
    try:
        name = serve.get_replica_context().app_name
    except RayServeException:  # no replica: a batch job or a test
        return []
    try:
        client = get_client()
        assert client is not None, "a replica belongs to a Serve"
        details = ServeInstanceDetails(**client.get_serve_details())
    except Exception as error:  # the controller may be gone, and Ray raises many types then
        note = f"Serve's controller does not answer: {in_words(error)}"
        return [DeploymentState(name="Serve", status="UNKNOWN", replicas={}, note=note)]
    applications = details._get_status().applications
    shown = {name: "", **{of_model: f"{model}: " for of_model, model in sorted(models.items())}}
    found = []
    for each, prefix in shown.items():
        if each in applications:
            for deployment, told in details.applications[each].deployments.items():
                state = deployment_state(applications[each], deployment, told.target_num_replicas)
                state.name = f"{prefix}{deployment}"
                found.append(state)
    return found


def deployment_state(
    application: ApplicationStatusOverview, name: str, num_wanted: int | None = None
) -> DeploymentState:
    overview = application.deployments[name]
    return DeploymentState(
        name=name,
        status=overview.status.value,
        replicas={str(state): number for state, number in overview.replica_states.items() if number},
        num_wanted=num_wanted,
        note=waiting_for_room(application, name) or _note(overview),
    )


def _note(overview: DeploymentStatusOverview) -> str | None:
    """Returns Serve's message in one line; after a failed start, the replica's own message."""
    message = overview.message.strip()
    if not message:
        return None
    has_failed_check = overview.status_trigger == DeploymentStatusTrigger.HEALTH_CHECK_FAILED
    if has_failed_check and overview.status == DeploymentStatus.UNHEALTHY:
        return "a replica died or failed its health check, and Serve starts another one"
    slow = _SLOW_START.search(message)
    if slow is not None:
        return f"{slow[1]} have been starting for more than {slow[2]} s; their logs say what they do"
    return last_exception(message) if "Traceback" in message else " ".join(message.split())


def _nodes() -> list[NodeState]:
    if not ray.is_initialized():
        return []
    return [
        NodeState(
            address=node["NodeManagerAddress"],
            alive=node["Alive"],
            resources={
                name: amount
                for name, amount in node["Resources"].items()
                if not name.startswith(("node:", "object_store_memory", "accelerator_type:"))
            },
        )
        for node in ray.nodes()
    ]
