"""What Kubernetes gets beside a RayService, against the schemas of Kubernetes and of Prometheus' operator."""

from __future__ import annotations

import copy
import functools
import json
import lzma
import pathlib
from typing import Any

import jsonschema
import pytest
import yaml

from tests.house.test_configs import CONFIGS, ROOT, closed, named, read

SCHEMAS = ROOT / "tests" / "kuberay"
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
