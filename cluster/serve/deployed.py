"""The applications that this process has deployed on Serve: it refuses to overwrite others, and deletes only its own.

Serve knows an application by its name alone, and would replace or delete the running application of another command
without a word. So an application is this process's own only as long as Serve's time of its last deployment is the one
that this process caused. `cluster/serve/app.py` is the only caller.
"""

from __future__ import annotations

import logging
import time

import msgspec
from ray import serve
from ray.serve import RunTarget
from ray.serve.context import _get_global_client as get_client
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, LoggingConfig

from cluster.serve.start_failure import StartFailed, in_words

POLL_S = 0.5
"""Seconds between two looks at an application that another command is deleting."""

logger = logging.getLogger(__name__)


class _Own(msgspec.Struct):
    """An application that this process deployed, or is about to deploy."""

    deployed_at: float | None = None
    """Serve's time of the deployment, in seconds since the epoch; None until Serve has said it."""
    updates: bool = False
    """Whether an application of another command ran under its name before."""
    runs: bool = False


_own: dict[str, _Own] = {}
"""By name."""


def applications() -> dict[str, ApplicationStatusOverview]:
    """Those that run on the cluster, without those that Serve is deleting."""
    if get_client(raise_if_no_controller_running=False) is None:
        return {}
    found = serve.status().applications
    return {name: each for name, each in found.items() if each.status != ApplicationStatus.DELETING}


def check_name(name: str, replace: bool) -> None:
    """Raises `StartFailed` if an application of this name runs and is not to be replaced. If Serve is deleting one,
    returns when it is gone.
    """
    running = applications().get(name)
    if running is not None and not replace:
        raise StartFailed(
            f"the application {name!r} runs on this cluster already ({_described(running)}); add --replace to replace "
            "it, or --name NAME and another --port to run beside it"
        )
    told = False
    while running is None and _exists(name):
        if not told:
            logger.warning("waiting until the application %r, which Serve is deleting, is gone", name)
            told = True
        time.sleep(POLL_S)


def check_prefix(name: str, prefix: str) -> None:
    """Raises `StartFailed` if Serve's proxies send requests below `prefix` to another application than `name`."""
    client = get_client(raise_if_no_controller_running=False)
    found = {} if client is None else client.get_serve_details()["applications"]
    for other, details in found.items():
        if other != name and details["route_prefix"] == prefix:
            raise StartFailed(
                f"Serve's proxies send requests below {prefix} to the application {other!r} already; give this one a "
                "port of its own (--set http_server=listener --port PORT), or deploy both with `serve deploy`, each "
                "with a route_prefix"
            )


def deploy(app: serve.Application, name: str, prefix: str | None, log: LoggingConfig) -> bool:
    """Deploys without waiting until the application runs. Returns whether it updates one that runs."""
    own = _own[name] = _Own(updates=name in applications())
    serve.run_many([RunTarget(app, name, prefix, log)], wait_for_applications_running=False)
    adopt(name)
    return own.updates


def adopt(name: str) -> None:
    """Makes the running application `name` this process's own."""
    _own.setdefault(name, _Own()).deployed_at = serve.status().applications[name].last_deployed_time_s


def note_running(name: str) -> None:
    """The application runs; from now on nothing is left of what it replaced."""
    _own[name].runs = True


def delete_own() -> None:
    """Deletes what this process has deployed, and waits until it is gone."""
    while _own:
        name, own = _own.popitem()
        try:
            running = applications().get(name)
            if running is None:
                continue
            if own.deployed_at not in (None, running.last_deployed_time_s):
                logger.warning("the application %r goes on: another command has replaced it since", name)
            elif own.updates and not own.runs:
                logger.warning(
                    "the application %r stays as it is, for what was to be replaced may still serve; deploy it again "
                    "with --replace",
                    name,
                )
            else:
                serve.delete(name)
        except Exception as error:  # the cluster may have ended before, and every end of it looks different
            logger.warning("the application %r may still run on the cluster: %s", name, in_words(error))


def _exists(name: str) -> bool:
    return get_client(raise_if_no_controller_running=False) is not None and name in serve.status().applications


def _described(running: ApplicationStatusOverview) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(running.last_deployed_time_s))
    replicas = ", ".join(
        f"{sum(each.replica_states.values())} {name}" for name, each in sorted(running.deployments.items())
    )
    return f"{running.status.value}, deployed {since}, replicas: {replicas or 'none'}"
