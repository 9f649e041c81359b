"""The models of an address as Serve tells them: which application has which model's engines, and how it fares.

The engines' deployment carries an announcement as its `user_config`: the address that it belongs to, and the model's
entry in the configuration. So Serve keeps the list of models, durably as its own state, and whoever deploys or deletes
a model's application changes the list of every ingress without restarting one.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
from ray.serve.context import _get_global_client as get_client
from ray.serve.schema import ApplicationStatus, ReplicaState

from manta.cluster.config import ServedModel
from manta.cluster.engine.ranks.load_reports import read_report, report_key
from manta.cluster.http.exchange.condition import Condition
from manta.cluster.serve.requests.engine_client import ENGINE
from manta.cluster.serve.starting.start_failure import cause_of
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that names of applications do not have, because actors, log files and metrics carry them."""


class Announcement(msgspec.Struct, frozen=True):
    """What the engines of one of several models say of themselves in Serve's configuration."""

    address: str
    """Name of the application that answers requests."""
    model: ServedModel
    by_loader: bool = False
    """Whether the loader of the address has deployed the engines (`loader.py`), and not an operator."""


# msgspec (0.22) describes a type when it is first used. Two threads that do so at the same time end the process.
msgspec.json.Decoder(Announcement)


class FoundModel(msgspec.Struct, frozen=True):
    """One model of an address."""

    application: str
    """Name of the Serve application with its engines; empty for a model on demand that has none now."""
    model: ServedModel
    condition: Condition
    is_settled: bool
    """Whether all its engines are of its present options."""
    by_loader: bool = False
    """Whether the loader of the address has deployed it."""


def application_name(address: str, model: str) -> str:
    """Returns the name of the application with a model's engines, a different one for each name of a model."""
    fit = _UNFIT.sub("-", model)
    return f"{address}.{fit}" if fit == model else f"{address}.{fit}-{zlib.crc32(model.encode()):08x}"


def announced(address: str, model: ServedModel, by_loader: bool = False) -> dict[str, Any]:
    """Returns the announcement as Serve's `user_config` holds it."""
    found: dict[str, Any] = msgspec.to_builtins(Announcement(address, model, by_loader))
    return found


def found_models(address: str, served: Collection[str] = ()) -> list[FoundModel]:
    """Returns the models of an address, as Serve's controller tells them now. `served` are the applications whose
    models are served already.
    """
    applications = serve_applications()
    found = models_among(applications, address, served)
    return [with_progress(each, applications[each.application]) for each in found]


def with_progress(found: FoundModel, details: Mapping[str, Any]) -> FoundModel:
    """Returns a model with how far it has loaded, if it loads: the furthest of its engines that start, by what they
    report. `details` are Serve's of its application.
    """
    if found.condition.stage != "loading":
        return found
    replicas = details["deployments"][ENGINE]["replicas"]
    starting = [each["replica_id"] for each in replicas if each["state"] == ReplicaState.STARTING]
    reports = [read_report(report_key(found.application, replica)) for replica in starting]
    furthest = max((each for each in reports if each is not None), key=lambda each: each.place, default=None)
    condition = msgspec.structs.replace(found.condition, progress=furthest)
    return msgspec.structs.replace(found, condition=condition)


def serve_applications() -> Mapping[str, Any]:
    """Returns the details of all applications, as Serve's controller tells them now."""
    client = get_client(raise_if_no_controller_running=False)
    found: Mapping[str, Any] = {} if client is None else client.get_serve_details()["applications"]
    return found


def models_among(applications: Mapping[str, Any], address: str, served: Collection[str] = ()) -> list[FoundModel]:
    """Returns the models of an address among Serve's details of all applications. Of two models with a common name the
    one that is `served` already goes on, else the one whose application's name comes first.
    """
    owners: dict[str, str] = {}
    found = []
    for name, details in sorted(applications.items(), key=lambda each: (each[0] not in served, each[0])):
        told = _announcement_of(details, address)
        if told is None or details["status"] == ApplicationStatus.DELETING:
            continue
        model = told.model
        names = names_of(model)
        taken = [each for each in names if each in owners]
        if taken:
            _tell_once(f"the model of {name} is not served: {owners[taken[0]]} has its name {taken[0]!r}")
            continue
        owners |= dict.fromkeys(names, name)
        settled = details["status"] == ApplicationStatus.RUNNING
        found.append(FoundModel(name, model, _condition(details), settled, told.by_loader))
    return found


def with_unloaded(
    found: Iterable[FoundModel], models: Iterable[ServedModel], failed: Mapping[str, str]
) -> list[FoundModel]:
    """Returns the models of an address with those of `models` that have no application now. A model one of whose names
    another one has is left out. `failed` has the reasons of models whose last load has failed, by name.
    """
    every = list(found)
    taken = {name for each in every for name in names_of(each.model)}
    unloaded = (model for model in models if taken.isdisjoint(names_of(model)))
    return [*every, *(FoundModel("", model, _without_engines(model, failed), is_settled=True) for model in unloaded)]


def _without_engines(model: ServedModel, failed: Mapping[str, str]) -> Condition:
    reason = failed.get(model.model_name)
    return Condition("unloaded") if reason is None else Condition("failed", reason)


def names_of(model: ServedModel) -> tuple[str, ...]:
    """Returns all names under which a model and its adapters are served."""
    return (*model.names, *model.engine.adapters)


def leaving_among(applications: Mapping[str, Any], address: str) -> frozenset[str]:
    """Returns the applications of an address's models that Serve is deleting, among its details of all. Serve tells no
    more of these than their names.
    """
    leaving = (name for name, each in applications.items() if each["status"] == ApplicationStatus.DELETING)
    return frozenset(name for name in leaving if name.startswith(f"{address}."))


def _announcement_of(details: Mapping[str, Any], address: str) -> Announcement | None:
    """Returns what an application says of itself, if it belongs to the address."""
    engine = details["deployments"].get(ENGINE)
    told = None if engine is None else engine["deployment_config"].get("user_config")
    if not told:
        return None
    try:
        announcement = msgspec.convert(told, Announcement)
    except msgspec.ValidationError as error:  # another version has deployed it
        _tell_once(f"the application {details['name']} is not understood: {error}")
        return None
    return announcement if announcement.address == address else None


@functools.lru_cache(maxsize=256)
def _tell_once(fault: str) -> None:
    """Logs a fault once in a process, which looks twice a second."""
    logger.error("%s", fault)


def _condition(details: Mapping[str, Any]) -> Condition:
    engine = details["deployments"][ENGINE]
    states = {replica["state"] for replica in engine["replicas"]}
    message = cause_of(engine["message"]) if engine["message"] else ""
    has_failed = details["status"] == ApplicationStatus.DEPLOY_FAILED and ReplicaState.STARTING not in states
    if ReplicaState.RUNNING in states and has_failed:
        return Condition("loaded", f"it was not updated: {message or details['message']}")
    if ReplicaState.RUNNING in states:
        return Condition("loaded", is_updating=details["status"] == ApplicationStatus.DEPLOYING)
    if has_failed:
        return Condition("failed", message or details["message"])
    if details["status"] == ApplicationStatus.RUNNING and not engine["replicas"]:
        return Condition("unloaded")
    return Condition("loading", message)
