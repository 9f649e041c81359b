"""Waits until an application runs, and decides which failure of a replica ends its start.

Until the application has served, the first replica that cannot start ends the start, although Serve would try twice
more. Once an engine and an ingress have been ready, clients may be at work, so no failure ends the start any more.
Serve then replaces failed replicas, and the driver logs a warning. `cluster/serve/app.py` is the only caller.
"""

from __future__ import annotations

import enum
import queue
import re
import threading
import time

from ray import serve
from ray._private import worker
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    ReplicaState,
)

from manta.cluster.serve.starting.ray_messages import RayMessages
from manta.cluster.serve.starting.start_failure import (
    FULL_MEMORY,
    StartFailed,
    cause_and_log,
    logs_folder,
    unexpected,
    waiting_for_room,
)
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

POLL_S = 0.25
"""Seconds between two checks of Serve's status. Serve itself checks its replicas every 0.1 to 0.5 s."""
_SERVING = ("engine", "ingress")
"""Deployments that answer requests. An application of `start_engines` has no ingress."""
_CANNOT_START = ("A replica failed to start", "The deployment failed to start")
"""Beginnings of Serve's status message of a deployment once one of its replicas has failed to start."""
_TRIED_FOR_EVER = "A replica failed to start with exception. Retrying. "
"""Beginning of that message if a replica of the deployment's version was ready before."""
_GIVEN_UP = "rolling update"
"""Words in that message if Serve has stopped an update because the new version failed."""


class Outcome(enum.Enum):
    """State of a start after one check of Serve's status."""

    WAITS = enum.auto()
    RUNS = enum.auto()
    """All replicas are ready, or requests are answered while a replica keeps failing."""
    FAILED = enum.auto()


class Start:
    """Record of a start: which deployments have had a ready replica.

    `updates` says that an earlier version of the application may run. Its ready replicas prove nothing about the new
    version; only Serve's status does.
    """

    def __init__(self, updates: bool = False) -> None:
        self._updates = updates
        self._has_been_ready: set[str] = set()
        self._has_served = False

    def look(self, application: ApplicationStatusOverview) -> tuple[Outcome, dict[str, str]]:
        """Returns the outcome, and Serve's messages about replicas that cannot start, by deployment."""
        deployments = application.deployments
        self._has_been_ready |= {name for name, each in deployments.items() if self._is_or_was_ready(each)}
        serving = [name for name in _SERVING if name in deployments]
        self._has_served |= bool(serving) and self._has_been_ready.issuperset(serving)
        failures = {name: each.message for name, each in deployments.items() if _cannot_start(each)}
        if application.status == ApplicationStatus.RUNNING:
            return Outcome.RUNS, {}
        fatal = {name: text for name, text in failures.items() if self.ends_the_start(name) or _GIVEN_UP in text}
        if fatal:
            return Outcome.FAILED, fatal
        if not deployments and application.status == ApplicationStatus.DEPLOY_FAILED:
            return Outcome.FAILED, {"application": application.message}
        answers = self._has_served and all(_num_ready(deployments[name]) for name in serving)
        return (Outcome.RUNS if answers and failures else Outcome.WAITS), failures

    def ends_the_start(self, deployment: str) -> bool:
        """Returns whether a replica of the deployment that cannot start ends the start."""
        return not self._has_served and deployment not in self._has_been_ready

    def _is_or_was_ready(self, deployment: DeploymentStatusOverview) -> bool:
        if deployment.message.startswith(_TRIED_FOR_EVER):
            return True
        return not self._updates and (_num_ready(deployment) > 0 or _has_died(deployment))


def _has_died(deployment: DeploymentStatusOverview) -> bool:
    """Returns whether a ready replica died; Serve checks the health of ready replicas only."""
    return deployment.status_trigger == "HEALTH_CHECK_FAILED"


def _cannot_start(deployment: DeploymentStatusOverview) -> bool:
    failed = deployment.status == DeploymentStatus.DEPLOY_FAILED and not _has_died(deployment)
    return failed or deployment.message.startswith(_CANNOT_START)


def _num_ready(deployment: DeploymentStatusOverview) -> int:
    return deployment.replica_states.get(ReplicaState.RUNNING, 0)


def wait_until_running(name: str, updates: bool = False) -> None:
    """Returns when the application `name` runs. Raises `StartFailed` if its start has failed.

    A thread asks Serve, because the answer may never come. If memory runs out, Ray may end Serve's controller too, and
    only a new controller would answer. Meanwhile this thread reads the raylet's log.
    """
    start = Start(updates)
    outcome: queue.SimpleQueue[StartFailed | None] = queue.SimpleQueue()
    raylet = _Raylet(name)
    # Ray would print at length how a process ended; one sentence here says it.
    worker.print_to_stdstream = lambda *_, **__: None
    threading.Thread(target=_watch, args=(name, start, outcome), name="start", daemon=True).start()
    running = False
    while not running:
        try:
            failure = outcome.get(timeout=1)
            running = failure is None
        except queue.Empty:
            failure = raylet.killed(start)
        if failure is not None:
            raise failure
    worker.print_to_stdstream = RayMessages().tell


def _watch(name: str, start: Start, outcome: queue.SimpleQueue[StartFailed | None]) -> None:
    """Puts None into `outcome` once the application runs, or the failure if it does not start."""
    begun = time.time()
    told: set[str] = set()
    try:
        while True:
            application = serve.status().applications.get(name)
            if application is None:
                outcome.put(StartFailed(f"the application {name!r} was removed from Serve while it started"))
                return
            found, failures = start.look(application)
            if found == Outcome.FAILED:
                deployment, message = next(iter(failures.items()))
                cause = cause_and_log(name, deployment, message, begun)
                outcome.put(StartFailed(f"the {deployment} did not start: {cause}"))
                return
            remarks = {
                message: f"a replica of the {deployment} did not start, and Serve tries again: "
                + cause_and_log(name, deployment, message, begun)
                for deployment, message in failures.items()
                if message not in told
            }
            waits = waiting_for_room(application)
            if waits is not None and "room" not in told:
                remarks["room"] = waits
            told |= remarks.keys()
            for remark in remarks.values():
                logger.warning("%s", remark)
            if found == Outcome.RUNS:
                outcome.put(None)
                return
            time.sleep(POLL_S)
    except Exception as error:
        outcome.put(unexpected(error))


class _Raylet:
    """Reads the log of this machine's raylet from now on. If memory runs out the raylet ends processes, and only its
    log says so.
    """

    def __init__(self, application: str) -> None:
        folder = logs_folder()
        self._log = folder / "raylet.out" if folder is not None else None
        self._begin = self._log.stat().st_size if self._log is not None and self._log.is_file() else 0
        self._killed = re.compile(rf"Selected to kill: .*SERVE_REPLICA::{re.escape(application)}#(\w+)#")

    def killed(self, start: Start) -> StartFailed | None:
        """Returns the failure if the raylet has killed a replica whose death ends the start, else None."""
        if self._log is None or not self._log.is_file():
            return None
        found = self._killed.findall(self._log.read_bytes()[self._begin :].decode(errors="replace"))
        fatal = [deployment for deployment in found if start.ends_the_start(deployment)]
        if not fatal:
            return None
        name = "engine" if "engine" in fatal else fatal[0]
        return StartFailed(f"the {name} did not start: {FULL_MEMORY}. The whole story is in {self._log}")
