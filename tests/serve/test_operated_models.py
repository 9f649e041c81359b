"""Operators load, unload, add, change and remove models of a running server over HTTP, in the world of
`tests/serve/test_models_on_demand.py`, and events tell how the models fare.
"""

from __future__ import annotations

import asyncio
import collections
import json
import pathlib
import typing
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from manta.cluster.config import EngineConfig, ServeConfig, ServedModel
from manta.cluster.errors import ServingError
from manta.cluster.http.access.request_admission import Caller
from manta.cluster.http.app import HttpApp
from manta.cluster.http.endpoints.loading import model_events
from manta.cluster.http.exchange.all_engines import AllEngines
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.state import AppState, Models, ServerState
from manta.cluster.operated_models import FROM_FILES_ONLY, PATHS
from manta.cluster.serve.fleet.holds import Holds
from manta.cluster.serve_limits import KeyLimits
from manta.cluster.text.tokenizer import Tokenizer
from tests.async_tests import async_test
from tests.checkpoints import checkpoint
from tests.http.test_routes import RepeatingEngines
from tests.local_server import Handle
from tests.patience import until
from tests.serve.test_fleet import details
from tests.serve.test_models_on_demand import CLIENT, KEYS, OPERATOR, TURNS, fleet_of, on_demand, ready, world_of


@async_test
async def test_operators_load_and_unload() -> None:
    async with world_of(on_demand("a", "alias"), on_demand("b"), broken=("b",)) as world:
        ingress = await ready(world, api_keys=KEYS, operator_keys=("operator",), host="0.0.0.0")

        async def states() -> dict[str, str]:
            await ingress.fleet.look()
            cards = (await ingress.ask("GET", "/v1/models", CLIENT)).json()["data"]
            return {card["id"]: card["state"] for card in cards}

        async def until_state(name: str, state: str) -> None:
            while (await states())[name] != state:
                await asyncio.sleep(0)

        for path in ("/models/load", "/models/unload"):
            refused = await ingress.ask("POST", path, CLIENT, model="a")
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operators_only")
            assert (await ingress.ask("POST", path, OPERATOR, model="c")).status_code == 404
            assert (await ingress.ask("POST", path, OPERATOR, name="a")).status_code == 400
        assert (await ingress.ask("POST", "/models/load", OPERATOR, model="alias")).json() == {"success": True}
        await until_state("a", "loaded")
        assert (await ingress.ask("POST", "/models/unload", OPERATOR, model="a")).json() == {"success": True}
        await until_state("a", "unloaded")
        await ingress.ask("POST", "/models/load", OPERATOR, model="b")
        await until_state("b", "failed")
        await ingress.ask("POST", "/models/unload", OPERATOR, model="b")
        await until_state("b", "unloaded")
        assert world.deployed == ["a", "b"]


@async_test
async def test_changes_of_models_are_events() -> None:
    """In the shape of llama.cpp's router: first all models, then what changes, and only those that the key may use."""
    limits = {"client": KeyLimits(models=("a",))}
    async with world_of(on_demand("a", "alias"), on_demand("b"), broken=("b",)) as world:
        ingress = await ready(world, api_keys=KEYS, operator_keys=("operator",), key_limits=limits)
        followed = [asyncio.ensure_future(ingress.ask("GET", "/models/sse", key)) for key in (OPERATOR, CLIENT)]

        async def until_state(name: str, state: str) -> None:
            while ingress.stage_of(name) != state:
                await ingress.fleet.look()
                await asyncio.sleep(0)

        for name, path, state in (("a", "load", "loaded"), ("b", "load", "failed"), ("a", "unload", "unloaded")):
            await ingress.ask("POST", f"/models/{path}", OPERATOR, model=name)
            await until_state(name, state)
        await ingress.ask("DELETE", "/v1/models/b", OPERATOR)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        ingress.app.begin_drain()
        told: list[dict[str, list[str]]] = []
        for answer in await asyncio.gather(*followed):
            assert answer.headers["content-type"].startswith("text/event-stream")
            told.append(collections.defaultdict(list))
            for line in answer.text.splitlines():
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    told[-1][event["model"]].append(event.get("data", {}).get("status", event["event"]))
        # A load may end before anybody is told that it began.
        seen = {name: [each for each in states if each != "loading"] for name, states in told[0].items()}
        assert seen == {"a": ["unloaded", "loaded", "unloaded"], "b": ["unloaded", "failed", "model_remove"]}
        assert [*told[1]] == ["a"]


@async_test
async def test_a_silent_stream_of_events_says_that_it_lives() -> None:
    config = ServeConfig()
    state = AppState(config, None, RepeatingEngines(), Metrics("demo"), ServerState(config, bytes(32)))
    events = model_events(state, Caller(""), keep_alive_s=0.001)
    assert [(await anext(events))[:6] for _ in range(3)] == [b"data: ", b":\n\n", b":\n\n"]


@async_test
async def test_a_model_of_the_start_stays() -> None:
    config = ServeConfig()
    table = Models()
    application: Any = HttpApp(config, None, AllEngines(table), Metrics(""), models=table)
    async with world_of() as world:
        fleet = fleet_of(world, config, application)
        fixed = ServedModel(name="fixed", engine=EngineConfig(model=str(checkpoint("llama"))))
        world.applications["manta.fixed"] = details(fixed)
        await fleet.look()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://localhost") as client:
            assert (await client.post("/models/load", json={"model": "fixed"})).json() == {"success": True}
            refused = await client.post("/models/unload", json={"model": "fixed"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


@async_test
async def test_operators_change_the_list_of_models_while_it_is_served() -> None:
    root, folder = str(checkpoint("llama").parent), checkpoint("llama").name
    async with world_of(on_demand("a")) as world:
        ingress, other = await ready(world, model_roots=(root,)), await ready(world, model_roots=(root,))
        stream = asyncio.ensure_future(ingress.text("a"))
        entry = {"name": "kept", "engine": {"model": folder, "dtype": "float32"}}
        assert (await ingress.ask("POST", "/v1/models", **entry)).json() == {"id": "kept", "object": "model"}
        assert "kept" in await other.states()
        assert (await ingress.ask("POST", "/models", **entry)).status_code == 200, "it is there as it is to be"
        later = {"name": "later", "on_demand": True, "engine": {"model": str(checkpoint("llama"))}}
        assert (await other.ask("POST", "/v1/models", **later)).status_code == 200
        assert (await ingress.states())["later"] == "unloaded"
        assert await ingress.text("later") == "manta.later manta.later "
        changed = await ingress.ask("PATCH", "/v1/models/later", aliases=["l"])
        assert changed.json() == {"id": "later", "object": "model"}
        while (await other.states()).get("l") != "loaded":
            await asyncio.sleep(0)
        assert await other.text("l") == "manta.later manta.later "

        while (await ingress.states())["kept"] != "loaded":
            await asyncio.sleep(0)
        last = asyncio.ensure_future(ingress.text("kept"))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        removed = await other.ask("DELETE", "/v1/models/kept")
        assert removed.json() == {"id": "kept", "object": "model", "deleted": True}
        for each in (ingress, other):
            refused = await each.ask("POST", "/v1/completions", model="kept", prompt="a")
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert await last == "manta.kept manta.kept ", "its engines stay until it has ended"
        await until(lambda: "manta.kept" not in world.applications)
        assert await stream == "manta.a manta.a "
        assert [*await ingress.states()] == ["a", "later", "l"]


class Unread:
    """The models of a process that cannot read which ones there are."""

    def is_served(self, name: str) -> bool:
        return False

    def is_running(self, name: str) -> bool:
        return False

    async def look(self) -> None:
        raise ConnectionError("the store does not answer")


@async_test
async def test_an_operator_is_told_that_a_change_is_made_although_it_cannot_be_read_yet() -> None:
    async with world_of(on_demand("a")) as world:
        holds = Holds(Unread(), Handle(world), "ingress")
        with pytest.raises(ServingError) as refused:
            await holds.update("a", {"aliases": ["b"]})
        assert refused.value.refusal.kind == "unavailable"
        assert "the change is made" in refused.value.refusal.cause
        assert [*world.kept.changes.of] == ["a"]


@async_test
async def test_what_operators_may_send_is_bounded(tmp_path: pathlib.Path) -> None:
    """Paths lie below the roots wherever links lead. What runs code or opens addresses comes from files alone."""
    root = tmp_path / "models"
    (root / "empty").mkdir(parents=True)
    (root / "out").symlink_to(checkpoint("llama"))
    (root / "notes.txt").write_text("")
    async with world_of(on_demand("a")) as world:
        ingress = await ready(world, model_roots=(str(root),), api_keys=KEYS, operator_keys=("operator",))
        bare = await ready(world)
        for engine, status, field in (
            ({"model": "/etc"}, 400, "engine.model"),
            ({"model": ".."}, 400, "engine.model"),
            ({"model": "out"}, 400, "engine.model"),
            ({"model": "a\0"}, 400, "engine.model"),
            ({"model": "org/of-the-hub"}, 404, "engine.model"),
            ({"model": "notes.txt"}, 404, "engine.model"),
            ({"model": "empty", "tokenizer": "/etc"}, 400, "engine.tokenizer"),
            ({"model": "empty", "speculative": {"draft_model": "/etc"}}, 400, "engine.speculative.draft_model"),
            ({"model": "empty", "logits_processors": {"x": "os:system"}}, 400, "engine.logits_processors"),
            ({"model": "empty", "adapter_roots": ["/"]}, 400, "engine.adapter_roots"),
            ({"model": "empty", "kv_events": {"endpoint": "tcp://*:5557"}}, 400, "engine.kv_events"),
            ({"model": "empty", "max_model_length": 3}, 400, None),
            ({"model": 5}, 400, None),
            ({"dtype": "float32"}, 400, "engine.model"),
        ):
            refused = await ingress.ask("POST", "/v1/models", OPERATOR, name="x", engine=engine)
            assert (refused.status_code, refused.json()["error"]["param"]) == (status, field), engine
        for method, path, body in (
            ("POST", "/v1/models", {"engine": {"model": "empty"}}),
            ("PATCH", "/v1/models/a", {"aliases": ["x"]}),
            ("DELETE", "/v1/models/a", {}),
        ):
            refused = await ingress.ask(method, path, CLIENT, **body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operators_only")
        refused = await ingress.ask("POST", "/v1/models", OPERATOR, model="owner/repository:Q4_K_M")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        refused = await ingress.ask("POST", "/v1/models", OPERATOR, name="x\n", engine={"model": "demo"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name")
        assert (await ingress.ask("PATCH", "/v1/models/z", OPERATOR, aliases=["y"])).status_code == 404
        refused = await bare.ask("POST", "/v1/models", engine={"model": "empty"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "engine.model")
        assert world.kept.changes.of == {}
        demo = {"engine": {"model": "demo"}, "on_demand": True}
        assert (await ingress.ask("POST", "/v1/models", OPERATOR, **demo)).json()["id"] == "demo"


@async_test
async def test_ollamas_clients_pull_what_is_here_and_operators_delete() -> None:
    async with world_of(on_demand("a", "alias"), on_demand("b")) as world:
        ingress = await ready(world, api_keys=KEYS, operator_keys=("operator",))
        for name in ("a", "alias:latest"):
            pulled = await ingress.ask("POST", "/api/pull", CLIENT, model=name)
            assert [json.loads(line)["status"] for line in pulled.text.splitlines()] == ["pulling manifest", "success"]
        assert (await ingress.ask("POST", "/api/pull", CLIENT, model="a", stream=False)).json() == {"status": "success"}
        for stream in (True, False):
            refused = await ingress.ask("POST", "/api/pull", OPERATOR, model="llama3.2", stream=stream, insecure=False)
            assert (refused.status_code, [*refused.json()]) == (400, ["error"])
            assert "manta models add" in refused.json()["error"], "Ollama's clients show it"
        for name, status in (("alias", 400), ("c", 404)):
            assert (await ingress.ask("DELETE", "/api/delete", OPERATOR, model=name)).status_code == status
        assert (await ingress.ask("DELETE", "/api/delete", CLIENT, model="a")).status_code == 403
        deleted = await ingress.ask("DELETE", "/api/delete", OPERATOR, model="a:latest")
        assert (deleted.status_code, deleted.content) == (200, b"")
        assert ([state.model_name for state in ingress.table], world.deployed) == (["b"], [])


@async_test
async def test_a_server_of_one_model_changes_none() -> None:
    config = ServeConfig()
    application: Any = HttpApp(config, Tokenizer(checkpoint("llama")), RepeatingEngines(), Metrics("demo"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://localhost") as client:
        for method, path in (("POST", "/v1/models"), ("PATCH", "/v1/models/demo"), ("DELETE", "/v1/models/demo")):
            refused = await client.request(method, path, json=None if method == "DELETE" else {})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


def test_every_option_that_is_a_text_is_a_path_or_comes_from_files() -> None:
    """A new option of an engine that names a file, code or an address must be in one of the two lists."""

    def structs_in(kind: Any) -> list[Any]:
        kinds = (kind, *typing.get_args(kind))
        return [each for each in kinds if isinstance(each, type) and issubclass(each, msgspec.Struct)]

    def texts(kind: Any, path: str = "") -> Iterator[str]:
        for field in msgspec.structs.fields(kind):
            if not structs_in(field.type) and "str" in repr(field.type):
                yield f"{path}{field.name}"
            for each in structs_in(field.type):
                yield from texts(each, f"{path}{field.name}.")

    assert {each for each in texts(EngineConfig) if each.partition(".")[0] not in FROM_FILES_ONLY} == {*PATHS}


@async_test
async def test_each_model_has_bounds_of_its_own() -> None:
    async with world_of(*(on_demand(name, max_num_sequences=1, max_num_waiting=0) for name in "ab")) as world:
        ingress = await ready(world)
        world.may_load.clear()
        asked = [asyncio.ensure_future(ingress.text("a")) for _ in range(2)]
        for _ in range(TURNS):
            await asyncio.sleep(0)
        refused = await ingress.ask("POST", "/v1/completions", model="a", prompt="a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        world.may_load.set()
        await asyncio.gather(*asked)
        await world.update("a", {"engine": {"max_num_waiting": 7}})
        while ingress.max_held("a") != 7:
            await ingress.fleet.look()
            await asyncio.sleep(0)
