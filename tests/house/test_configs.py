"""The files that operators start from, each against the schema of whoever reads it: Serve, KubeRay, Ray's launcher.

A check that passes for every file proves nothing by itself, so each is shown files with one mistake, which must fail.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import lzma
import pathlib
import re
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import fillout_defaults, validate_config
from ray.serve._private.build_app import build_app
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from benchmarks.processes import free_port
from manta.cluster.serve.app import build
from manta.cluster.serve.starting.replica_process import REPLICA_ENVIRONMENT
from manta.workers.models.model_config import ModelError
from manta.workers.platforms import choose_platform
from tests.patience import PATIENCE_S
from tests.ray_cluster import RayCluster, ray_cluster, until

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
CRD = ROOT / "tests" / "kuberay" / "rayservice-1.7.0.json.xz"

SERVE = sorted(CONFIGS.glob("serve/*.yaml"))
KUBERAY = sorted(CONFIGS.glob("kuberay/*/rayservice.yaml"))
LAUNCHER = sorted(CONFIGS.glob("cluster/*.yaml"))

Edit = Callable[[dict[str, Any]], object]
"""Makes one mistake in a file."""


def named(paths: list[pathlib.Path]) -> dict[str, Any]:
    """Arguments of `parametrize`."""
    return {"argvalues": paths, "ids": [f"{path.parent.name}/{path.name}" for path in paths]}


def read(path: pathlib.Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


# ---- Ray Serve -----------------------------------------------------------------------------------------------------


def check_serve(config: dict[str, Any]) -> None:
    """As `serve deploy` reads a file, as far as it comes without a cluster. Raises `ValueError` for what it refuses,
    and for keys that it would pass over, since a later Serve might know them.
    """
    deploys = ServeDeploySchema.model_validate(config)
    unknown = set(config) - set(ServeDeploySchema.model_fields)
    for application in config["applications"]:
        unknown |= set(application) - set(ServeApplicationSchema.model_fields)
        for deployment in application.get("deployments", ()):
            unknown |= set(deployment) - set(DeploymentSchema.model_fields)
    if unknown:
        raise ValueError(f"Serve knows no {sorted(unknown)}")
    for application in deploys.applications:
        module, _, attribute = application.import_path.partition(":")
        app = getattr(importlib.import_module(module), attribute)(application.args)
        built = build_app(app, name=application.name)
        there = {deployment.name for deployment in built.deployments}
        for override in application.deployments:
            if override.name not in there:
                raise ValueError(f"there is no deployment {override.name!r}; there is {sorted(there)}")


@pytest.mark.parametrize("path", **named(SERVE))
def test_serve_builds_what_the_file_says(path: pathlib.Path) -> None:
    check_serve(read(path))


SERVE_MISTAKES: dict[str, Edit] = {
    "an unknown option": lambda app: app["args"]["engine"].update(modle="demo"),
    "an option out of range": lambda app: app["args"].update(num_engine_replicas=0),
    "another module": lambda app: app.update(import_path="manta.cluster.serve.application:build"),
    "another attribute": lambda app: app.update(import_path="manta.cluster.serve.app:biuld"),
    "no application": lambda app: app.pop("import_path"),
    "a key that Serve does not know": lambda app: app.update(runtime_environment={}),
    "a deployment that is not there": lambda app: app.update(deployments=[{"name": "engines", "num_replicas": 2}]),
    "an option that deployments lack": lambda app: app.update(deployments=[{"name": "engine", "replicas": 2}]),
}


@pytest.mark.parametrize("edit", SERVE_MISTAKES.values(), ids=SERVE_MISTAKES.keys())
def test_serve_refuses_a_file_with_a_mistake(edit: Edit) -> None:
    config = read(CONFIGS / "serve" / "one-machine.yaml")
    edit(config["applications"][0])
    with pytest.raises((ValueError, ImportError, AttributeError)):
        check_serve(config)


def test_serves_own_options_are_checked() -> None:
    config = read(CONFIGS / "serve" / "multi-node.yaml")
    for edit in ({"proxy_location": "EveryNodes"}, {"http_options": {"port": "eighty"}}, {"proxy": "EveryNode"}):
        with pytest.raises(ValueError, match=next(iter(edit))):
            check_serve({**config, **edit})


def test_every_replica_has_its_environment(tmp_path: pathlib.Path) -> None:
    """Whoever started the cluster that it runs on."""
    app = build({"batch_storage": str(tmp_path), "num_standby_replicas": 1})
    built = build_app(app, name="manta").deployments
    assert {deployment.name for deployment in built} == {"ingress", "engine", "standby", "batches"}
    for deployment in built:
        environment = deployment.ray_actor_options["runtime_env"]["env_vars"]
        assert environment.items() >= REPLICA_ENVIRONMENT.items(), deployment.name


DEPLOYED = ("autoscaling", "replicas", "tensor-parallel", "one-machine")


@pytest.mark.prove
def test_serve_deploys_each_file_in_turn(tmp_path: pathlib.Path) -> None:
    """On a cluster whose port 8000 is another one; `multi-node.yaml` needs more nodes. The engine that takes all cores
    comes last: Serve starts what an update adds before it stops what that replaces.
    """
    port = free_port()
    with ray_cluster(num_cpus=8) as cluster:
        for name in DEPLOYED:
            path = CONFIGS / "serve" / f"{name}.yaml"
            config = read(path)
            config["http_options"]["port"] = port
            (tmp_path / path.name).write_text(yaml.safe_dump(config))
            deploy = ("serve", "deploy", "--address", cluster.address, tmp_path / path.name)
            until(lambda words=deploy: cluster.run(*words).returncode == 0)  # a cluster that starts takes nothing yet
            (application,) = config["applications"]
            num_engines = application["args"].get("num_engine_replicas", 1)
            until(lambda number=num_engines: num_running_engines(cluster) == number)
            body = {"model": "demo", "prompt": "Manta", "max_tokens": 4}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=PATIENCE_S)
            assert answer.json()["usage"]["completion_tokens"] == 4
        for url in (f"{cluster.agent}/api/healthz", f"http://127.0.0.1:{port}/-/healthz"):  # as Kubernetes' probes ask
            assert httpx.get(url, timeout=PATIENCE_S).status_code == 200, url


def num_running_engines(cluster: RayCluster) -> int | None:
    """None while there are others, or the application is not ready."""
    status = yaml.safe_load(cluster.run("serve", "status", "--address", cluster.address).stdout)
    application = status["applications"].get("manta", {})
    if application.get("status") != "RUNNING":
        return None
    states = application["deployments"]["engine"]["replica_states"]
    return states["RUNNING"] if set(states) == {"RUNNING"} else None


# ---- KubeRay -------------------------------------------------------------------------------------------------------


@functools.cache
def kuberay_schema() -> dict[str, Any]:
    """The published schema, closed: Kubernetes drops the fields that it does not know, and `kubectl` refuses them."""
    return closed(json.loads(lzma.decompress(CRD.read_bytes())))


def closed(schema: Any) -> Any:
    """A schema whose objects take no fields but those that it names. Fields of a CRD whose names begin with
    `x-kubernetes-` tell how lists are merged and repeat in a language of Kubernetes' own what other fields say; where
    one says that an integer may be a string, `anyOf` says so too.
    """
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(each) for name, each in schema.items() if not name.startswith("x-kubernetes-")}
    if isinstance(found.get("properties"), dict) and found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


def check_kuberay(service: dict[str, Any]) -> None:
    """As Kubernetes takes it, and then Serve. Raises `ValidationError` or `ValueError`."""
    if (service["apiVersion"], service["kind"]) != ("ray.io/v1", "RayService"):
        raise ValueError(f"{service['apiVersion']} {service['kind']} has another schema")
    jsonschema.Draft202012Validator(kuberay_schema()).validate(service)
    groups = [service["spec"]["rayClusterConfig"][name] for name in ("headGroupSpec", "workerGroupSpecs")]
    for group in [groups[0], *groups[1]]:
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        for container in pod["containers"]:
            missing = {mount["name"] for mount in container.get("volumeMounts", ())} - volumes
            if missing:
                raise ValueError(f"{container['name']} mounts {sorted(missing)}, and the pod has no such volume")
    check_serve(yaml.safe_load(service["spec"]["serveConfigV2"]))


@pytest.mark.parametrize("path", **named(KUBERAY))
def test_kuberay_and_serve_accept_the_file(path: pathlib.Path) -> None:
    check_kuberay(read(path))


@pytest.mark.parametrize("path", **named(KUBERAY))
def test_an_engine_finds_room_on_a_worker(path: pathlib.Path) -> None:
    """Ray counts the cores of a pod's limits: what an engine claims must fit, and not all of them are an engine's."""
    service = read(path)
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert application["args"]["engine"]["num_threads"] < int(container["resources"]["limits"]["cpu"])
    assert application["args"]["num_engine_replicas"] <= group["maxReplicas"]


@pytest.mark.parametrize("path", **named(KUBERAY))
def test_a_file_for_an_unavailable_device_says_so(path: pathlib.Path) -> None:
    """And says it no longer once the engine takes the device."""
    (application,) = yaml.safe_load(read(path)["spec"]["serveConfigV2"])["applications"]
    refusal = ""
    try:
        choose_platform(application["args"]["engine"].get("device", "auto"), 1)
    except ModelError as error:
        refusal = str(error)
    assert path.read_text().startswith("# DOES NOT SERVE YET") == ("is not supported yet" in refusal)


def cluster_of(service: dict[str, Any]) -> dict[str, Any]:
    return service["spec"]["rayClusterConfig"]


def worker_of(service: dict[str, Any]) -> dict[str, Any]:
    return cluster_of(service)["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]


KUBERAY_MISTAKES: dict[str, Edit] = {
    "another kind": lambda service: service.update(kind="RayCluster"),
    "an unknown field": lambda service: service["spec"].update(serveConfig=""),
    "no cluster": lambda service: service["spec"].pop("rayClusterConfig"),
    "a number for a text": lambda service: cluster_of(service).update(rayVersion=2.6),
    "a text for a number": lambda service: cluster_of(service)["workerGroupSpecs"][0].update(maxReplicas="4"),
    "an unknown field of a pod": lambda service: worker_of(service).update(resource={}),
    "no such unit": lambda service: worker_of(service)["resources"]["limits"].update(memory="16 GB"),
    "a volume that is not there": lambda service: worker_of(service)["volumeMounts"][0].update(name="model"),
    "a mistake in Serve's part": lambda service: service["spec"].update(
        serveConfigV2=service["spec"]["serveConfigV2"].replace("num_engine_replicas", "num_engines")
    ),
}


@pytest.mark.parametrize("edit", KUBERAY_MISTAKES.values(), ids=KUBERAY_MISTAKES.keys())
def test_a_mistake_in_a_kuberay_service_is_found(edit: Edit) -> None:
    service = copy.deepcopy(read(CONFIGS / "kuberay" / "cpu" / "rayservice.yaml"))
    edit(service)
    with pytest.raises((ValueError, jsonschema.ValidationError)):
        check_kuberay(service)


# ---- Ray's cluster launcher ----------------------------------------------------------------------------------------


def check_launcher(config: dict[str, Any]) -> None:
    """As `ray up` reads a file before it asks the cloud for anything. Raises `ValidationError` or `ValueError`."""
    validate_config(fillout_defaults(copy.deepcopy(config)))


@pytest.mark.parametrize("path", **named(LAUNCHER))
def test_the_launcher_takes_the_file(path: pathlib.Path) -> None:
    check_launcher(read(path))


def test_ray_demands_its_token_in_every_file() -> None:
    for path in KUBERAY:
        assert read(path)["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    for path in LAUNCHER:
        config = read(path)
        assert "--env=RAY_AUTH_MODE=token" in config["docker"]["run_options"]
        assert "~/.ray/auth_token" in config["file_mounts"]


LAUNCHER_MISTAKES: dict[str, Edit] = {
    "an unknown field": lambda config: config.update(max_worker=4),
    "no provider": lambda config: config["provider"].pop("type"),
    "a head of no known type": lambda config: config.update(head_node_type="heads"),
    "a node without its machine": lambda config: config["available_node_types"]["worker"].pop("node_config"),
    "an unknown option of the container": lambda config: config["docker"].update(images="manta"),
    "fewer workers than there must be": lambda config: config.update(max_workers=0),
    "half a core": lambda config: config["available_node_types"]["worker"]["resources"].update(CPU=0.5),
}


@pytest.mark.parametrize("edit", LAUNCHER_MISTAKES.values(), ids=LAUNCHER_MISTAKES.keys())
@pytest.mark.parametrize("path", **named(LAUNCHER))
def test_the_launcher_refuses_a_file_with_a_mistake(path: pathlib.Path, edit: Edit) -> None:
    config = read(path)
    edit(config)
    with pytest.raises((ValueError, KeyError, jsonschema.ValidationError)):
        check_launcher(config)


# ---- all of them ---------------------------------------------------------------------------------------------------


def test_every_file_of_a_folder_is_looked_at() -> None:
    looked_at = {*SERVE, *KUBERAY, *LAUNCHER, CONFIGS / "engine.yaml"}
    elsewhere = {"grafana", "prometheus", "kuberay"}  # `tests/telemetry/` and `test_kubernetes.py` look at those
    others = {path for path in CONFIGS.rglob("*.yaml") if not elsewhere & set(path.parts)}
    assert others == {path for path in looked_at if "kuberay" not in path.parts}
    assert {path.stem for path in SERVE} == {*DEPLOYED, "multi-node", "two-models", "several-models", "tpu"}
    assert len(KUBERAY) == 4
    assert len(LAUNCHER) == 2


@pytest.mark.parametrize("path", **named([*KUBERAY, *LAUNCHER]))
def test_the_image_has_the_files_ray_version(path: pathlib.Path) -> None:
    """KubeRay asks for the version of Ray, and the image gets what pyproject.toml names."""
    (wanted,) = re.findall(r'"ray\[serve\]~=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert all(version == wanted for version in re.findall(r"rayVersion: (\S+)", path.read_text()))
