"""Lists of models in the application of an address, as `serve deploy` applies them: a changed list changes the models
that differ, and a deleted address takes its models along.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve.config import ProxyLocation
from ray.serve.context import _get_global_client as get_client

from benchmarks.processes import free_port
from manta.cluster import own_ray
from manta.cluster.serve import app
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.prove

BODY = {"prompt": [5, 9, 17, 30], "temperature": 0, "ignore_eos": True, "max_tokens": 20}


class Address:
    """An address whose list of models is deployed again and again."""

    def __init__(self) -> None:
        self._port = free_port()
        self._url = f"http://127.0.0.1:{self._port}"

    def deploy(self, *models: dict[str, Any]) -> None:
        engine = {"dtype": "float32", "kv_cache_bytes": 8 << 20, "model": str(checkpoint("llama"))}
        listed = [{**model, "engine": engine | model.get("engine", {})} for model in models]
        options = {"http_server": "listener", "port": self._port, "drain_notice_s": 1.0, "models": listed}
        options["model_roots"] = [str(checkpoint("llama").parent)]
        serve.run_many([serve.RunTarget(app.build_address(options), app.APP_NAME, None)])

    def change(self, method: str, path: str = "", **fields: Any) -> None:
        url = f"{self._url}/v1/models{path}"
        answer = httpx.request(method, url, json=fields or None, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text

    def states(self) -> dict[str, str]:
        cards = httpx.get(f"{self._url}/v1/models", timeout=PATIENCE_S).json()["data"]
        return {card["id"]: card["state"] for card in cards}

    def until(self, **states: str) -> None:
        wait_until(lambda: self.states() == states, poll_s=0.5)

    def text(self, model: str) -> str:
        answer = httpx.post(f"{self._url}/v1/completions", json=BODY | {"model": model}, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text


def applications() -> dict[str, Any]:
    client = get_client()
    assert client is not None
    found: dict[str, Any] = client.get_serve_details()["applications"]
    return found


def engines_of(model: str) -> set[int]:
    replicas = applications()[f"{app.APP_NAME}.{model}"]["deployments"]["engine"]["replicas"]
    return {replica["pid"] for replica in replicas}


@pytest.fixture
def address() -> Iterator[Address]:
    own_ray.start(2)
    try:
        serve.start(ProxyLocation.Disabled)
        yield Address()
    finally:
        own_ray.stop()


def test_a_changed_list_changes_the_models_that_differ(address: Address) -> None:
    address.deploy({"name": "kept"}, {"name": "wanted", "on_demand": True})
    address.until(kept="loaded", wanted="unloaded")
    text = address.text("kept")
    assert address.text("wanted") == text
    engines = {name: engines_of(name) for name in ("kept", "wanted")}

    address.deploy({"name": "kept"}, {"name": "wanted", "on_demand": True}, {"name": "new"})
    address.until(kept="loaded", wanted="loaded", new="loaded")
    assert {name: engines_of(name) for name in ("kept", "wanted")} == engines

    address.deploy({"name": "wanted", "on_demand": True, "engine": {"max_model_len": 64}}, {"name": "new"})
    address.until(wanted="loaded", new="loaded")
    assert address.text("wanted") == address.text("new") == text
    wait_until(lambda: not engines_of("wanted") & engines["wanted"], poll_s=0.5)

    serve.delete(app.APP_NAME)
    wait_until(lambda: not applications(), poll_s=0.5)


def test_what_operators_have_changed_counts_until_the_list_has_another_entry(address: Address) -> None:
    listed = {"name": "kept"}, {"name": "gone"}
    address.deploy(*listed)
    address.until(kept="loaded", gone="loaded")
    address.change("PATCH", "/kept", aliases=["k"])
    address.change("DELETE", "/gone")
    address.change("POST", name="added", on_demand=True, engine={"model": checkpoint("llama").name})
    address.until(kept="loaded", k="loaded", added="unloaded")
    wait_until(lambda: set(applications()) == {app.APP_NAME, f"{app.APP_NAME}.kept"}, poll_s=0.5)
    engines = engines_of("kept")

    address.deploy(*listed)
    address.until(kept="loaded", k="loaded", added="unloaded")
    assert engines_of("kept") == engines

    address.deploy({"name": "kept", "aliases": ["other"]}, {"name": "gone"})
    address.until(kept="loaded", other="loaded", added="unloaded")
    assert address.text("added") == address.text("other")

    serve.delete(app.APP_NAME)
    wait_until(lambda: not applications(), poll_s=0.5)
    address.deploy(*listed)
    address.until(kept="loaded", gone="loaded")
