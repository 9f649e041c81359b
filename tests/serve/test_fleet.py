"""The models of an address as an ingress finds them in Serve's details: they come, change, fail and go while others
stream. Serve is a stand-in; engines, channels and the application are real and run in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import pathlib
import shutil
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from ray.serve.schema import ApplicationStatus

from manta.cluster.cli.__main__ import main
from manta.cluster.config import AutoscalingOptions, EngineConfig, ServeConfig, ServedModel, load_config
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange.all_engines import AllEngines
from manta.cluster.http.exchange.condition import Condition
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.state import Models
from manta.cluster.models_folder import with_models_dir
from manta.cluster.serve import app
from manta.cluster.serve.fleet.fleet import Fleet
from manta.cluster.serve.fleet.found import announced, application_name, models_among
from manta.cluster.serve.fleet.model_changes import ModelChanges
from manta.cluster.serve.fleet.streams_of_models import StreamsOfModels
from tests.adapters import adapters_of
from tests.async_tests import async_test
from tests.checkpoints import checkpoint
from tests.loaded_adapters import memory_registries
from tests.local_server import Handle
from tests.patience import PATIENCE_S
from tests.replicas import Replicas

ADDRESS = "manta"
FOLDER = str(pathlib.Path(__file__).parents[2] / "configs" / "demo")
"""A folder of models."""
STREAM = {"prompt": [5, 9, 17, 30], "temperature": 0, "ignore_eos": True, "max_tokens": 120, "stream": True}


# ---- what Serve tells -----------------------------------------------------------------------------------------------


def details(
    model: ServedModel | None,
    status: str = "RUNNING",
    replicas: tuple[str, ...] = ("RUNNING",),
    message: str = "",
    by_loader: bool = False,
) -> dict[str, Any]:
    """Returns Serve's details of the application with a model's engines, as far as they are read."""
    told = None if model is None else announced(ADDRESS, model, by_loader)
    engine = {
        "message": message,
        "deployment_config": {"user_config": told},
        "replicas": [{"replica_id": str(number), "state": state} for number, state in enumerate(replicas)],
    }
    return {"name": "app", "status": status, "message": "it did not start", "deployments": {"engine": engine}}


def named(name: str, *aliases: str, model: str = "demo", **options: Any) -> ServedModel:
    return ServedModel(name=name, aliases=aliases, engine=EngineConfig(model=model, **options))


@pytest.mark.parametrize(
    ("status", "replicas", "expected"),
    [
        ("RUNNING", ("RUNNING",), Condition("loaded")),
        ("DEPLOYING", ("STARTING",), Condition("loading")),
        ("DEPLOYING", ("RUNNING", "STARTING"), Condition("loaded", is_updating=True)),
        ("UNHEALTHY", (), Condition("loading")),
        ("RUNNING", (), Condition("unloaded")),
        ("DEPLOY_FAILED", (), Condition("failed", "it did not start")),
        ("DEPLOY_FAILED", ("RUNNING",), Condition("loaded", "it was not updated: it did not start")),
        ("DEPLOY_FAILED", ("STARTING",), Condition("loading")),
    ],
)
def test_a_model_fares_as_its_engines(status: str, replicas: tuple[str, ...], expected: Condition) -> None:
    """An update that has failed leaves the engines before it, which serve. An engine that served once is started again
    and again. An intended stop is no failure.
    """
    assert status in ApplicationStatus.__members__
    (found,) = models_among({"manta.a": details(named("a"), status, replicas)}, ADDRESS)
    assert (found.condition, found.is_settled) == (expected, status == "RUNNING")


def test_a_model_whose_process_was_killed_says_so() -> None:
    message = (
        "The deployment failed to start 1 times in a row. See controller logs for details. Error:\nActorDiedError()"
    )
    (found,) = models_among({"manta.a": details(named("a"), "DEPLOY_FAILED", (), message)}, ADDRESS)
    assert "its process was killed" in found.condition.reason


def test_only_the_models_of_the_address_are_found() -> None:
    other = details(None)
    other["deployments"]["engine"]["deployment_config"]["user_config"] = announced("another", named("x"))
    strange = details(None)
    strange["deployments"]["engine"]["deployment_config"]["user_config"] = {"of": "another program"}
    applications = {
        "ingress": {"name": "ingress", "status": "RUNNING", "deployments": {}},
        "another": other,
        "strange": strange,
        "batch": details(None),
        "going": details(named("going"), "DELETING"),
        "own": details(named("a", "b", dtype="float32")),
    }
    (found,) = models_among(applications, ADDRESS)
    assert (found.application, found.model) == ("own", named("a", "b", dtype="float32"))


def test_a_second_owner_of_a_name_is_not_served() -> None:
    applications = {"x": details(named("a", "b")), "y": details(named("b")), "z": details(named("c"))}
    assert [each.model.model_name for each in models_among(applications, ADDRESS)] == ["a", "c"]
    assert {each.application for each in models_among(applications, ADDRESS, ["y"])} == {"y", "z"}, "who came later"


def test_applications_have_names_that_serve_takes_and_that_differ() -> None:
    names = ["a", "org/a", "org-a", "org:a", "\u00e9"]
    found = [application_name(ADDRESS, name) for name in names]
    assert found[0] == "manta.a"
    assert len(set(found)) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-") for name in found)


# ---- an ingress -----------------------------------------------------------------------------------------------------


class World:
    """An ingress's application, and what Serve tells it of engines in this process."""

    def __init__(self, **options: Any) -> None:
        models = Models()
        self.streams = StreamsOfModels()
        self.changes = ModelChanges()
        """The fleet asks here what operators have changed."""
        config = ServeConfig(**options)
        self.app: Any = HttpApp(
            config, None, AllEngines(models), Metrics(""), models=models, streams=self.streams, prefix_secret=bytes(32)
        )
        self.applications: dict[str, dict[str, Any]] = {}
        self.handles: dict[str, Handle] = {}
        self.fleet = Fleet(
            ADDRESS,
            config,
            self.app,
            self.streams,
            find=lambda address, served: models_among(self.applications, address, served),
            changes=lambda: self.changes,
            handle_of=lambda _, application: self.handles[application],
        )
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://localhost", timeout=PATIENCE_S
        )

    async def tell(self, application: str, model: ServedModel, replica: Any, **fields: Any) -> None:
        self.handles.setdefault(application, Handle(replica))
        self.applications[application] = details(model, **fields)
        await self.fleet.look()

    async def forget(self, application: str) -> None:
        del self.applications[application]
        await self.fleet.look()

    async def text(self, model: str, **headers: str) -> str:
        """Returns the text of a stream."""
        answer = await self.client.post("/v1/completions", json=STREAM | {"model": model}, headers=headers)
        assert answer.status_code == 200, answer.text
        return "".join(text_of(line) for line in answer.text.splitlines() if line.startswith("data: {"))

    async def states(self) -> dict[str, str]:
        return {card["id"]: card["state"] for card in (await self.client.get("/v1/models")).json()["data"]}


def text_of(line: str) -> str:
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return choices[0]["text"] if choices else ""


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[tuple[World, Any, Any]]:
    """Yields an ingress of the models `llama`, also called `l`, and `qwen`, and the replicas of both."""
    replicas, made = Replicas(), World()
    try:
        llama = await asyncio.to_thread(replicas)
        qwen = await asyncio.to_thread(replicas, model=str(checkpoint("qwen2")))
        await made.tell("manta.llama", served("llama", "l"), llama)
        await made.tell("manta.qwen", served("qwen2"), qwen)
        yield made, llama, qwen
    finally:
        for application in list(made.applications):
            await made.forget(application)
        await asyncio.to_thread(replicas.close)


def served(family: str, *aliases: str, **options: Any) -> ServedModel:
    return named(family, *aliases, model=str(checkpoint(family)), dtype="float32", kv_cache_bytes=8 << 20, **options)


@async_test
async def test_models_come_change_fail_and_go_while_another_streams() -> None:
    async with world() as (made, _, qwen):
        alone = {name: await made.text(name) for name in ("llama", "qwen2")}
        assert len(set(alone.values())) == 2
        assert await made.text("l") == alone["llama"]

        stream = asyncio.ensure_future(made.text("llama"))
        await made.tell("manta.qwen", served("qwen2"), qwen, status="DEPLOYING", replicas=("STARTING",))
        assert await made.states() == {"llama": "loaded", "l": "loaded", "qwen2": "loading"}
        await made.tell("manta.qwen", served("qwen2"), qwen, status="DEPLOY_FAILED", replicas=())
        refused = await made.client.post("/v1/completions", json=STREAM | {"model": "qwen2"})
        assert refused.status_code == 503
        assert (await made.client.get("/health")).json()["status"] == "degraded"
        await made.tell("manta.qwen", served("qwen2", "q"), qwen, status="DEPLOYING", replicas=("RUNNING",))
        assert "q" not in await made.states()  # its engines are still of the options before
        await made.tell("manta.qwen", served("qwen2", "q"), qwen)
        assert await made.text("q") == alone["qwen2"]
        await made.forget("manta.qwen")
        assert (await made.client.post("/v1/completions", json=STREAM | {"model": "q"})).status_code == 404
        assert await stream == alone["llama"]
        assert await made.states() == {"llama": "loaded", "l": "loaded"}

        await made.tell("manta.qwen", served("qwen2"), qwen)
        assert await made.text("qwen2") == alone["qwen2"]


@async_test
async def test_each_model_loads_adapters_of_its_own(tmp_path: pathlib.Path) -> None:
    adapters = adapters_of(checkpoint("llama"))
    shutil.copytree(adapters.add("ours", 70), tmp_path / "ours")
    replicas, made, roots = Replicas(), World(), {"adapter_roots": (str(tmp_path),)}

    async def change(what: str, name: str, **fields: Any) -> tuple[int, str | None]:
        body = {"lora_name": name, **fields}
        answer = await made.client.post(f"/v1/{what}_lora_adapter", json=body)
        return answer.status_code, answer.json().get("error", {}).get("param")

    async def load(name: str, **fields: Any) -> tuple[int, str | None]:
        return await change("load", name, lora_path="ours", **fields)

    with memory_registries():
        try:
            for family, alias in (("llama", "l"), ("phi3", "p")):
                replica = await asyncio.to_thread(functools.partial(replicas, model=str(checkpoint(family)), **roots))
                await made.tell(f"manta.{family}", served(family, alias, **roots), replica)
            for name, fields, expected in (
                ("new", {}, (400, "base_model_name")),
                ("new", {"base_model_name": "else"}, (404, "base_model_name")),
                ("new", {"base_model_name": "p"}, (400, "lora_path")),
                ("p", {"base_model_name": "llama"}, (409, "lora_name")),
                ("new", {"base_model_name": "l"}, (200, None)),
                ("new", {"base_model_name": "phi3", "load_inplace": True}, (409, "lora_name")),
            ):
                assert await load(name, **fields) == expected, (name, fields)
            assert [*await made.states()] == ["llama", "l", "new", "phi3", "p"]
            texts = [await made.text(name) for name in ("new", "llama:new", "l:new", "llama", "phi3")]
            assert texts[0] == texts[1] == texts[2] != texts[3]
            await made.tell("manta.phi3", served("phi3", "p", "new", **roots), made.handles["manta.phi3"])
            assert await made.text("new") == texts[4], "a name of the configuration"
            assert await made.text("llama:new") == texts[0]
            assert await change("unload", "new") == (200, None)
            assert [*await made.states()] == ["llama", "l", "phi3", "p", "new"]
        finally:
            for application in list(made.applications):
                await made.forget(application)
            await asyncio.to_thread(replicas.close)


@async_test
async def test_a_tokenizer_that_cannot_be_read_fails_one_model_alone(tmp_path: pathlib.Path) -> None:
    async with world() as (made, llama, _):
        await made.tell("manta.bad", named("bad", model=str(tmp_path)), llama)
        await made.fleet.look()
        assert (await made.states())["bad"] == "failed"
        answer = await made.client.post("/v1/completions", json=STREAM | {"model": "bad"})
        assert answer.status_code == 503
        assert await made.text("llama")
        await made.tell("manta.bad", served("llama"), llama)  # its name is taken now
        assert "bad" not in await made.states()


@async_test
async def test_streams_are_found_by_their_ids_alone() -> None:
    async with world() as (made, _, _):
        for name in ("llama", "qwen2"):
            body = STREAM | {"model": name}
            answer = await made.client.post("/v1/completions", json=body, headers={"x-resumable-s": "60"})
            stream_id = answer.headers["x-stream-id"]
            again = await made.client.get(f"/v1/streams/{stream_id}")
            assert again.text == answer.text
        assert (await made.client.delete(f"/v1/streams/{stream_id}")).status_code == 200
        await made.forget("manta.qwen")
        gone = await made.client.get(f"/v1/streams/{stream_id}")
        assert gone.status_code in (404, 503)


# ---- what is deployed -----------------------------------------------------------------------------------------------


def test_each_model_is_an_application_of_its_own() -> None:
    """A model without `num_threads` shares the cores: it may use all, and claims none."""
    options = {"name": "a", "aliases": ["b"], "model": "demo", "engine": {"kv_cache_bytes": "8MiB"}}
    built = app.build_model(options | {"address": "front"})
    deployment = built._bound_deployment
    (found,) = models_among({"x": details_of(deployment.user_config)}, "front")
    assert found.model.names == ("a", "b")
    assert found.model.engine.kv_cache_bytes == 8 << 20
    assert deployment.ray_actor_options["num_cpus"] == 0
    claiming = app.build_model(options | {"engine": {"num_threads": 1}})
    assert claiming._bound_deployment.ray_actor_options["num_cpus"] == 1
    assert models_among({"x": details_of(claiming._bound_deployment.user_config)}, ADDRESS)
    assert app.build_address({"http_server": "listener"})._bound_deployment.name == "ingress"


def details_of(user_config: Any) -> dict[str, Any]:
    found = details(None)
    found["deployments"]["engine"]["deployment_config"]["user_config"] = user_config
    return found


@pytest.mark.parametrize(
    ("build", "options", "word"),
    [
        (app.build, {"models": [{"name": "a"}]}, "build_model"),
        (app.build_address, {"engine": {"model": "demo"}}, "engine"),
        (app.build_address, {"served_model_name": "a"}, "served_model_name"),
        (app.build_model, {"nam": "a"}, "`nam`"),
        (app.build_model, {"name": ""}, "name"),
        (app.build_model, {"model": "demo", "engine": {"model": "other"}}, "engine.model"),
    ],
)
def test_options_that_belong_elsewhere_are_refused(build: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        build(options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"models": [{"model": "demo"}, {"model": "demo"}]}, "a name of demo and of demo"),
        ({"models": [{"name": "a"}, {"name": "b", "aliases": ["a"]}]}, "'a' is a name of a and of b"),
        ({"models": [{"name": "a"}], "served_model_name": "b"}, "served_model_name"),
        ({"models": [{"name": "a"}], "num_standby_replicas": 1}, "num_standby_replicas"),
        ({"models": [{"name": "a"}], "model": "demo"}, "engine.model"),
        ({"models": [{"name": "a"}], "default_model": "b"}, "default_model"),
        ({"models": [{"name": "a", "modle": "demo"}]}, "modle"),
        ({"models": [{"name": "a", "num_engine_replicas": 2, "autoscaling": {}}]}, "num_engine_replicas"),
        ({"models": {"a": "demo"}}, "models"),
    ],
)
def test_a_list_of_models_that_contradicts_itself_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_config(None, options)


def test_models_take_what_they_leave_out_from_the_shared_engine() -> None:
    speculative = {"proposers": ["ngram"], "max_draft_tokens": 3}
    config = load_config(
        None,
        {
            "engine.dtype": "float32",
            "engine.speculative": speculative,
            "models": [
                {"model": "demo", "aliases": ["d"], "autoscaling": {"min_replicas": 0, "max_replicas": 2}},
                {"name": "b", "engine": {"dtype": "bfloat16", "speculative": {"max_draft_tokens": 2}}},
            ],
            "default_model": "d",
        },
    )
    first, second = config.of_each_model
    assert (first.model_name, first.model_aliases, first.engine.dtype) == ("demo", ("d",), "float32")
    assert first.autoscaling == AutoscalingOptions(min_replicas=0, max_replicas=2)
    assert (second.model_name, second.engine.dtype) == ("b", "bfloat16")
    for each, expected in ((first, 3), (second, 2)):
        assert each.engine.speculative is not None
        assert each.engine.speculative.max_draft_tokens == expected


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["demo"], {"engine.model": "demo"}),
        (["a=demo"], {"engine.model": "demo", "served_model_name": "a"}),
        (["demo", "b=demo"], {"models": [{"model": "demo"}, {"name": "b", "model": "demo"}]}),
        (["--models-dir", FOLDER], {"models_dir": FOLDER}),
        (["b=demo", "--models-dir", FOLDER], {"models": [{"name": "b", "model": "demo"}], "models_dir": FOLDER}),
    ],
)
def test_the_command_takes_several_models(
    arguments: list[str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ServeConfig] = []
    for name in ("check_machine", "check_quickly", "_check_port"):
        monkeypatch.setattr(f"manta.cluster.cli.serve.{name}", lambda *_: None)
    monkeypatch.setattr("manta.cluster.cli.serve._serve_until_signal", lambda config, *_: seen.append(config))
    assert main(["serve", *arguments]) == 0
    assert seen == [with_models_dir(load_config(None, options))]
    assert main(["serve", "demo", "a=", "--quiet"]) == 2
