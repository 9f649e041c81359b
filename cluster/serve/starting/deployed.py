"""The applications that this process has deployed on Serve: it refuses to overwrite others, and deletes only its own.

Serve identifies an application by name alone, and would silently replace or delete another command's application. So
each command that deploys one writes a note to Ray's key-value store. It deletes the application only while that note is
there. `cluster/serve/app.py` is the only caller.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

import msgspec
from ray import get_runtime_context, serve
from ray._private.state import jobs
from ray.experimental import internal_kv
from ray.serve import RunTarget
from ray.serve.context import _get_global_client as get_client
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, LoggingConfig

from manta.cluster.serve.starting.start_failure import StartFailed, in_words_with_story
from manta.structured.visible_logs import logger_of

POLL_S = 0.5
"""Seconds between two checks of an application that another command is deleting, or of that command."""
OWNER_PATIENCE_S = 60.0
"""Seconds for which a killed command may still count as running. Ray notices a dead node after about 20 s."""

_NAMESPACE = b"manta-applications"
"""Namespace of the notes in Ray's key-value store, where an application's name is the key."""

logger = logger_of(__name__)


class _Note(msgspec.Struct):
    """A note: how the command that deployed an application describes it."""

    token: str
    """Random text, new for each deployment."""
    what: str
    """Model and port, for messages."""
    process: int
    """Process id of the command."""
    job: str
    """Ray job of the command, which ends with the command."""


class _Own(msgspec.Struct):
    """An application that this process deployed, or is about to deploy."""

    token: str
    """The token of its note."""
    updates: bool
    """Whether an application of another command ran under its name before."""
    runs: bool = False


_own: dict[str, _Own] = {}
"""The applications of this process, by name."""


def applications() -> dict[str, ApplicationStatusOverview]:
    """Returns the applications on the cluster by name, without those that Serve is deleting."""
    if get_client(raise_if_no_controller_running=False) is None:
        return {}
    found = serve.status().applications
    return {name: each for name, each in found.items() if each.status != ApplicationStatus.DELETING}


def check_name(name: str, replace: bool) -> None:
    """Raises `StartFailed` if an application of this name runs and `replace` is false. If Serve is deleting one, waits
    until it is gone.
    """
    running = applications().get(name)
    if running is not None and not replace:
        raise StartFailed(
            f"the application {name!r} runs on this cluster already ({_described(name, running)}); add --replace to "
            "replace it, or --name NAME and another --port to run beside it"
        )
    told = False
    while running is None and _exists(name):
        if not told:
            logger.warning("waiting until the application %r, which Serve is deleting, is gone", name)
            told = True
        time.sleep(POLL_S)


def check_prefix(name: str, prefix: str) -> None:
    """Raises `StartFailed` if Serve's proxies send requests below `prefix` to another application than `name`."""
    for other, details in _details().items():
        if other != name and details["route_prefix"] == prefix:
            raise StartFailed(
                f"Serve's proxies send requests below {prefix} to the application {other!r} already; give this one a "
                "port of its own (--set http_server=listener --port PORT), or deploy both with `serve deploy`, each "
                "with a route_prefix"
            )


def deploy(app: serve.Application, name: str, prefix: str | None, log: LoggingConfig, what: str) -> bool:
    """Deploys an application without waiting until it runs. Returns whether it updates a running one. `what` describes
    it in messages.
    """
    updates = name in applications()
    _note(name, what, updates)
    serve.run_many([RunTarget(app, name, prefix, log)], wait_for_applications_running=False)
    return updates


def adopt(name: str, what: str) -> None:
    """Makes the running application `name`, which a killed command left, this process's own."""
    _note(name, what, updates=False)


def wait_until_abandoned(name: str) -> None:
    """Returns when no running command has deployed or adopted the application `name`. Raises `StartFailed` if one still
    has after `OWNER_PATIENCE_S`.
    """
    deadline = time.monotonic() + OWNER_PATIENCE_S
    while (note := _note_of(name)) is not None and _runs(note):
        if time.monotonic() > deadline:
            raise StartFailed(
                f"the engines of the application {name!r} belong to a command that runs, with process id "
                f"{note.process}; wait until it has ended, or end it"
            )
        time.sleep(POLL_S)


def note_running(name: str) -> None:
    """Records that the application runs, so nothing is left of the version that it replaced."""
    _own[name].runs = True


def delete_own() -> None:
    """Deletes the applications that this process has deployed, and waits until they are gone."""
    while _own:
        name, own = _own.popitem()
        try:
            running = applications().get(name)
            if running is None:
                continue
            if not _is_still_own(name, own):
                logger.warning("the application %r goes on: another command has replaced it since", name)
            elif own.updates and not own.runs:
                logger.warning(
                    "the application %r stays as it is, for what was to be replaced may still serve; deploy it again "
                    "with --replace",
                    name,
                )
            else:
                serve.delete(name)
        except Exception as error:  # the cluster may have ended already, in one of many ways
            logger.warning("the application %r may still run on the cluster: %s", name, in_words_with_story(error))


def _note(name: str, what: str, updates: bool) -> None:
    note = _Note(secrets.token_hex(8), what, os.getpid(), get_runtime_context().get_job_id())
    _own[name] = _Own(note.token, updates)
    internal_kv._internal_kv_put(name.encode(), msgspec.json.encode(note), True, namespace=_NAMESPACE)


def _note_of(name: str) -> _Note | None:
    found = internal_kv._internal_kv_get(name.encode(), namespace=_NAMESPACE)
    return None if found is None else msgspec.json.decode(found, type=_Note)


def _runs(note: _Note) -> bool:
    """Returns whether the command that wrote the note still runs."""
    return any(job["JobID"] == note.job and not job["IsDead"] for job in jobs())


def _is_still_own(name: str, own: _Own) -> bool:
    """Returns whether nobody has since deployed another application under this name. `serve deploy` leaves no note."""
    note, details = _note_of(name), _details().get(name, {})
    return note is not None and note.token == own.token and details.get("source") != "declarative"


def _details() -> dict[str, Any]:
    """Returns Serve's details of each application, by name."""
    client = get_client(raise_if_no_controller_running=False)
    return {} if client is None else client.get_serve_details()["applications"]


def _exists(name: str) -> bool:
    return get_client(raise_if_no_controller_running=False) is not None and name in serve.status().applications


def _described(name: str, running: ApplicationStatusOverview) -> str:
    replicas = ", ".join(
        f"{sum(each.replica_states.values())} {deployment}" for deployment, each in sorted(running.deployments.items())
    )
    found = [running.status.value, f"replicas: {replicas or 'none'}"]
    note, source = _note_of(name), _details().get(name, {}).get("source")
    if source == "declarative":
        found.insert(0, "from serve deploy")
    elif note is not None:
        ended = "" if _runs(note) else ", which has ended"
        found.insert(0, f"{note.what}, from the command with process id {note.process}{ended}")
    return ", ".join(found)
