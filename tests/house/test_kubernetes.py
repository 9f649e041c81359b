"""What Kubernetes gets beside a RayService, against the schemas of Kubernetes and of Prometheus' operator."""

from __future__ import annotations

import copy
import functools
import json
import lzma
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import jsonpatch
import jsonschema
import pytest
import yaml

from manta.cluster.config import ServeConfig
from tests.house.test_configs import CONFIGS, KUBERAY, ROOT, check_kuberay, closed, named, read
from tests.patience import PATIENCE_S

SCHEMAS = ROOT / "tests" / "kuberay"
DEVICES = [path.parent for path in KUBERAY]
"""Folders that `kubectl apply -k` takes."""
COMPONENTS = [CONFIGS / "kuberay" / name for name in ("production", "gcs-in-redis", "ingress")]
OPERATOR = sorted((CONFIGS / "prometheus" / "operator").glob("*-*.yaml"))


@functools.cache
def monitoring_schemas() -> dict[str, Any]:
    """The schema of each kind of Prometheus' operator."""
    return closed(json.loads(lzma.decompress((SCHEMAS / "monitoring-0.93.0.json.xz").read_bytes())))


def check_monitoring(resource: dict[str, Any]) -> None:
    """Raises `ValidationError` for what the operator's schemas refuse, and `KeyError` for a kind that it lacks."""
    assert resource["apiVersion"] == "monitoring.coreos.com/v1"
    body = {name: value for name, value in resource.items() if name != "metadata"}
    jsonschema.Draft202012Validator(monitoring_schemas()[resource["kind"]]).validate(body)


@pytest.mark.parametrize("path", **named(OPERATOR))
def test_the_operator_takes_the_file(path: pathlib.Path) -> None:
    resource = read(path)
    check_monitoring(resource)
    wrong = copy.deepcopy(resource)
    wrong["spec"]["intervall"] = "10s"
    with pytest.raises(jsonschema.ValidationError):
        check_monitoring(wrong)


def test_the_operator_gets_the_same_alerts() -> None:
    rules = yaml.safe_load((CONFIGS / "prometheus" / "rules.yml").read_text())
    assert read(CONFIGS / "prometheus" / "operator" / "prometheus-rule.yaml")["spec"] == rules


def test_one_target_is_scraped() -> None:
    """With two of them each count would be double, because an ingress answers for all."""
    applied = read(CONFIGS / "prometheus" / "operator" / "kustomization.yaml")["resources"]
    assert sum("monitor" in name for name in applied) == 1


# ---- the overlays --------------------------------------------------------------------------------------------------


def documents(path: pathlib.Path) -> list[dict[str, Any]]:
    """The documents of a file. What YAML's anchors repeat is there several times, for a patch changes one place."""
    return json.loads(json.dumps(list(yaml.safe_load_all(path.read_text()))))


def resources(folder: pathlib.Path, components: tuple[pathlib.Path, ...] = ()) -> list[dict[str, Any]]:
    """What `kubectl kustomize` makes of a folder, as far as our files go: resources, components and JSON Patches.
    `components` are added to those that the folder names.
    """
    kustomization = read(folder / "kustomization.yaml")
    found = [each for name in kustomization["resources"] for each in documents(folder / name)]
    named_components = [(folder / name).resolve() for name in kustomization.get("components", ())]
    for component in (*named_components, *components):
        content = read(component / "kustomization.yaml")
        assert content["kind"] == "Component"
        assert set(content) <= {"apiVersion", "kind", "resources", "patches"}
        found += [each for name in content.get("resources", ()) for each in documents(component / name)]
        for patch in content.get("patches", ()):
            text = patch["patch"] if "patch" in patch else (component / patch["path"]).read_text()
            (target,) = (number for number, each in enumerate(found) if each["kind"] == patch["target"]["kind"])
            found[target] = jsonpatch.apply_patch(found[target], yaml.safe_load(text))
    return found


@functools.cache
def kubernetes_schemas() -> dict[str, Any]:
    """The strict schemas of Kubernetes' own kinds: `kinds` has the name of each among `definitions`."""
    return json.loads(lzma.decompress((SCHEMAS / "kubernetes-1.34.json.xz").read_bytes()))


def check(resource: dict[str, Any]) -> None:
    """Raises `ValidationError` or `ValueError` for what Kubernetes, KubeRay or Serve would refuse."""
    if resource["kind"] == "RayService":
        check_kuberay(resource)
        return
    schemas = kubernetes_schemas()
    reference = {"$ref": f"#/definitions/{schemas['kinds'][resource['kind']]}"}
    jsonschema.Draft202012Validator(reference | {"definitions": schemas["definitions"]}).validate(resource)


def pods(service: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]


def ray_service(folder: pathlib.Path) -> dict[str, Any]:
    (service,) = (each for each in resources(folder, tuple(COMPONENTS[1:])) if each["kind"] == "RayService")
    return service


@pytest.mark.parametrize("folder", DEVICES, ids=lambda folder: folder.name)
def test_kubernetes_takes_every_overlay(folder: pathlib.Path) -> None:
    found = resources(folder, tuple(COMPONENTS[1:]))
    kinds = {"RayService", "NetworkPolicy", "PersistentVolumeClaim", "ServiceAccount", "Ingress"}
    assert {resource["kind"] for resource in found} - {"PodDisruptionBudget"} == kinds
    for resource in found:
        check(resource)
        wrong = copy.deepcopy(resource) | {"specs": {}}
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)
    assert "redisAddress" in ray_service(folder)["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]


@pytest.mark.parametrize("folder", DEVICES, ids=lambda folder: folder.name)
def test_kustomize_makes_the_same(folder: pathlib.Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=PATIENCE_S)
    if "unknown field" in done.stderr or "components" in done.stderr:
        pytest.skip(f"this kubectl's kustomize knows no components: {done.stderr}")
    assert done.returncode == 0, done.stderr
    key = "{0[kind]} {0[metadata][name]}".format
    made = sorted(yaml.safe_load_all(done.stdout), key=key)
    assert made == sorted(resources(folder), key=key)


@pytest.mark.parametrize("folder", DEVICES, ids=lambda folder: folder.name)
def test_pods_have_no_rights_beyond_their_work(folder: pathlib.Path) -> None:
    """As the profile "restricted" of Kubernetes' pod security standards demands, and with a read-only root."""
    accounts = {each["metadata"]["name"] for each in resources(folder) if each["kind"] == "ServiceAccount"}
    for pod in pods(ray_service(folder)):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["serviceAccountName"] in accounts
        made = {pathlib.Path(word).name for each in spec["initContainers"] for word in each["command"][1:]}
        for container in (*spec["initContainers"], *spec["containers"]):
            rights = container["securityContext"]
            assert not rights["allowPrivilegeEscalation"]
            assert rights["readOnlyRootFilesystem"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert container["image"] == spec["containers"][0]["image"]
            assert {mount["subPath"] for mount in container["volumeMounts"] if "subPath" in mount} <= made
        assert {"/tmp", "/home/manta/.cache"} <= {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}


EXCUSED = {
    "CKV_K8S_15": "the image has a version, which is pushed once",
    "CKV_K8S_35": "keys and tokens are variables of the environment",
    "CKV_K8S_38": "the head's account changes the number of workers",
    "CKV_K8S_40": "the image's user is 1000",
    "CKV_K8S_43": "whoever builds the image knows its digest",
}
"""Policies of checkov that the files do not keep, and why."""


@pytest.mark.parametrize("folder", DEVICES, ids=lambda folder: folder.name)
def test_a_linter_of_policies_finds_nothing_else(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """It knows pods and no RayService, so it gets the pods of that. `pip install checkov` brings it."""
    checkov = shutil.which("checkov")
    if checkov is None:
        pytest.skip("checkov is not installed")
    linted = []
    for resource in resources(folder, (COMPONENTS[2],)):
        if resource["kind"] != "RayService":
            linted.append(resource | {"metadata": resource["metadata"] | {"namespace": "manta"}})
            continue
        for number, pod in enumerate(pods(resource)):
            named_pod = pod["metadata"] | {"name": f"pod-{number}", "namespace": "manta"}
            linted.append({"apiVersion": "v1", "kind": "Pod", "metadata": named_pod, "spec": pod["spec"]})
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(linted))
    command = [checkov, "--framework", "kubernetes", "--directory", tmp_path, "--output", "json", "--skip-download"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    found = json.loads(done.stdout)
    assert found["summary"]["passed"] > 100, done.stderr
    assert {each["check_id"] for each in found["results"]["failed_checks"]} == EXCUSED.keys()


@pytest.mark.parametrize("folder", DEVICES, ids=lambda folder: folder.name)
def test_a_pod_has_time_for_its_drain(folder: pathlib.Path) -> None:
    _, worker = pods(ray_service(folder))
    config, grace_s = ServeConfig(), worker["spec"]["terminationGracePeriodSeconds"]
    (_, _, command) = worker["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    (deadline_s,) = map(int, re.findall(r"--deadline-remaining-seconds (\d+)", command))
    assert config.drain_notice_s + config.drain_timeout_s < deadline_s < grace_s


PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
AGENT, PROXY = {"path": "/api/healthz", "port": 52365}, {"path": "/-/healthz", "port": 8000}
"""What probes ask: Ray's agent on every node, and Serve's proxy where requests arrive. What both answer on a real
cluster is in `tests/house/test_configs.py`.
"""


@pytest.mark.parametrize("folder", DEVICES, ids=lambda folder: folder.name)
def test_every_pod_has_its_own_probes(folder: pathlib.Path) -> None:
    """A pod gets longer to start, and to answer again, than the busiest machine needs. A drained one gets no request
    before its ingress refuses them.
    """
    head, worker = ([pod["spec"]["containers"][0][name] for name in PROBES] for pod in pods(ray_service(folder)))
    assert [probe["httpGet"] for probe in head] == [AGENT] * 3
    assert [probe["httpGet"] for probe in worker] == [AGENT, AGENT, PROXY]
    for probe in (*head, *worker):
        assert set(probe) == {"httpGet", "periodSeconds", "timeoutSeconds", "failureThreshold"}
    for starts, lives, _ in (head, worker):
        assert starts["periodSeconds"] * starts["failureThreshold"] >= 300
        assert lives["periodSeconds"] * lives["failureThreshold"] >= 300
    assert worker[2]["periodSeconds"] * worker[2]["failureThreshold"] < ServeConfig().drain_notice_s


@pytest.mark.parametrize("folder", DEVICES, ids=lambda folder: folder.name)
def test_workers_of_a_device_are_placed_where_it_is(folder: pathlib.Path) -> None:
    """By a label of the node and by the resource that they claim; engines of CPUs run anywhere."""
    _, worker = pods(ray_service(folder))
    claimed = {name for name in worker["spec"]["containers"][0]["resources"]["limits"] if "/" in name}
    assert len(claimed) == ("cpu" not in folder.name)
    assert bool(worker["spec"].get("nodeSelector")) == bool(claimed)
    if "nvidia.com/gpu" in claimed:
        assert any(each["key"] == "nvidia.com/gpu" for each in worker["spec"]["tolerations"])


@pytest.mark.parametrize("folder", DEVICES, ids=lambda folder: folder.name)
def test_an_upgrade_lets_the_old_clusters_requests_end(folder: pathlib.Path) -> None:
    """KubeRay makes a new cluster for a changed image, and would delete the old one 60 s after the move."""
    spec = ray_service(folder)["spec"]
    for application in yaml.safe_load(spec["serveConfigV2"])["applications"]:
        longest_s = application["args"].get("request_timeout_s", ServeConfig().request_timeout_s)
        assert spec["rayClusterDeletionDelaySeconds"] > longest_s
    assert "upgradeStrategy" not in spec, "the default moves the service once the new cluster serves"


@pytest.mark.parametrize("folder", DEVICES, ids=lambda folder: folder.name)
def test_policies_select_the_pods(folder: pathlib.Path) -> None:
    found = resources(folder, tuple(COMPONENTS[1:]))
    labels = [pod["metadata"]["labels"] for pod in pods(ray_service(folder))]
    (policy,) = (each["spec"] for each in found if each["kind"] == "NetworkPolicy")
    for each in labels:
        assert policy["podSelector"]["matchLabels"] == each


@pytest.mark.parametrize("folder", DEVICES, ids=lambda folder: folder.name)
def test_nodes_can_be_drained_and_not_all_at_once(folder: pathlib.Path) -> None:
    """A budget of pods whose owner has no `scale` (a RayCluster) must be a number of pods that stay: with others
    Kubernetes lets none go (https://github.com/ray-project/kuberay/issues/2662), and so it does if all must stay.
    """
    (group,) = ray_service(folder)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    budgets = [each["spec"] for each in resources(folder) if each["kind"] == "PodDisruptionBudget"]
    assert len(budgets) == (group["replicas"] > 1)
    for budget in budgets:
        assert "maxUnavailable" not in budget
        assert type(budget["minAvailable"]) is int
        assert 0 < budget["minAvailable"] < group["replicas"]
        worker = group["template"]["metadata"]["labels"] | {"ray.io/node-type": "worker"}  # KubeRay adds the second
        assert budget["selector"]["matchLabels"] == worker
