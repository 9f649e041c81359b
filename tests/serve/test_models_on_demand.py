"""Models that requests load, over HTTP: ingresses, their tables and the loader are real and run in this process. Serve
and the engines are stand-ins: what is deployed loads a few turns of the event loop later.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Collection, Mapping
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest
from safetensors.numpy import load_file

from manta.cluster.batch.line_endpoints import endpoints_of_models
from manta.cluster.batch.lines import BatchRequest
from manta.cluster.config import EngineConfig, ServeConfig, ServedModel, load_config
from manta.cluster.engine_bytes import engine_bytes, serving_bytes
from manta.cluster.errors import ServingError
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange.all_engines import AllEngines
from manta.cluster.http.exchange.engines import Event
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.state import Models
from manta.cluster.serve.fleet.deployments import Told
from manta.cluster.serve.fleet.fleet import Fleet
from manta.cluster.serve.fleet.found import FoundModel, application_name, leaving_among, models_among
from manta.cluster.serve.fleet.held_back import RETRY_FAILED_S
from manta.cluster.serve.fleet.holds import Holds
from manta.cluster.serve.fleet.listed_models import ListedModels
from manta.cluster.serve.fleet.loaded_amount import Amount
from manta.cluster.serve.fleet.loader import Loader
from manta.cluster.text.tokenizer import Tokenizer
from manta.cluster.text_bytes import grammar_bytes, tokenizer_bytes
from manta.specdecode.speculative_config import SpeculativeConfig
from tests.async_tests import async_test
from tests.checkpoints import checkpoint
from tests.http.test_routes import Repeating, RepeatingEngines
from tests.local_server import Handle
from tests.patience import PATIENCE_S, until
from tests.serve.test_fleet import ADDRESS, details
from tests.serve.test_loading_models import KeptChanges

KEYS = ("operator:a-secret-of-the-test-1", "client:a-secret-of-the-test-2")
OPERATOR, CLIENT = ({"authorization": f"Bearer {key.partition(':')[2]}"} for key in KEYS)
TURNS = 20
"""Turns of the event loop that a load and an end take."""


def on_demand(name: str, *aliases: str, **options: int) -> ServedModel:
    engine = EngineConfig(model=str(checkpoint("llama")), dtype="float32", **options)
    return ServedModel(name=name, aliases=aliases, on_demand=True, engine=engine)


class World:
    """Serve with the loader of an address, and its ingresses."""

    def __init__(
        self, *models: ServedModel, max_loaded: int = 2, broken: tuple[str, ...] = (), keep_cores_s: float = 10.0
    ) -> None:
        self.models = models
        self.broken = broken
        self.applications: dict[str, dict[str, Any]] = {}
        self.deployed: list[str] = []
        self.most_there = 0
        self.num_released = 0
        self.tokenizers: list[weakref.ref[Any]] = []
        """Those that ingresses have made for their clients of engines."""
        self.ingresses: list[Ingress] = []
        self.without_handle = ""
        """Application whose deployment has no handle."""
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.has_loader = True
        self.kept = KeptChanges()
        listed, most = ListedModels(models, models, self.kept), Amount(max_loaded, None)
        self.loader = Loader(ADDRESS, listed, most, 0.0, self, step_s=0.005, keep_cores_s=keep_cores_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = asyncio.ensure_future(self.loader.run())

    def find(self, address: str, served: Collection[str]) -> list[FoundModel]:
        return models_among(self.applications, address, served)

    async def tell_ingresses(self) -> None:
        for each in self.ingresses:
            await each.fleet.look()

    def ingress(self, **options: Any) -> Ingress:
        self.ingresses.append(Ingress(self, **options))
        return self.ingresses[-1]

    async def close(self) -> None:
        for task in (self._running, *self._tasks):
            task.cancel()
        await asyncio.gather(*(each.client.aclose() for each in self.ingresses))

    # ---- the loader, as ingresses see it -----------------------------------------------------------------------------

    async def load(self, name: str, client: str, timeout_s: float, holder: str) -> None:
        if not self.has_loader:
            raise ConnectionError("the loader is being replaced")
        await self.loader.load(name, client, timeout_s, holder)

    async def begin_load(self, name: str, timeout_s: float) -> None:
        await self.loader.begin_load(name, timeout_s)

    async def begin_unload(self, name: str) -> None:
        await self.loader.begin_unload(name)

    async def add(self, entry: ServedModel) -> None:
        await self.loader.add(entry)

    async def update(self, name: str, fields: dict[str, Any]) -> None:
        await self.loader.update(name, fields)

    async def remove(self, name: str) -> None:
        await self.loader.remove(name)

    # ---- Serve, as the loader sees it --------------------------------------------------------------------------------

    async def place(self, entry: ServedModel, before: ServedModel | None) -> ServedModel:
        return entry

    async def num_bytes(self, model: ServedModel) -> int:
        raise AssertionError("nothing is bounded by it")

    async def look(self) -> Told:
        return Told(models_among(self.applications, ADDRESS), leaving_among(self.applications, ADDRESS))

    async def deploy(self, model: ServedModel) -> None:
        self.deployed.append(model.model_name)
        name = application_name(ADDRESS, model.model_name)
        self.applications[name] = details(model, "DEPLOYING", ("STARTING",), by_loader=True)
        self.most_there = max(self.most_there, len(self.applications))
        self._later(name, None if model.model_name in self.broken else model)

    async def delete(self, application: str) -> None:
        self.applications[application].update(status="DELETING", deployments={})
        self._later(application, None)

    def _later(self, application: str, model: ServedModel | None) -> None:
        task = asyncio.ensure_future(self._become(application, model, self.applications[application]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _become(self, application: str, model: ServedModel | None, before: dict[str, Any]) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        if before["status"] != "DELETING":
            await self.may_load.wait()
        if self.applications.get(application) is not before:
            return
        if before["status"] == "DELETING":
            del self.applications[application]
        elif model is None:
            before.update(status="DEPLOY_FAILED")
            before["deployments"]["engine"]["replicas"] = []
        else:
            self.applications[application] = details(model, by_loader=True)

    async def release_cores(self) -> None:
        self.num_released += 1

    async def idle_seconds(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for ingress in self.ingresses:
            for name, idle_s in ingress.holds.idle_seconds().items():
                found[name] = min(idle_s, found.get(name, idle_s))
        return found

    async def let_go(self, found: FoundModel, num_waiting: Mapping[str, int]) -> bool:
        if not found.model.on_demand:
            await self.tell_ingresses()
        answers = [ingress.holds.let_go(found.model.model_name, num_waiting) for ingress in self.ingresses]
        return all(answers)


class Engines(RepeatingEngines):
    """The engines of one application, as an ingress calls them. They say its name, and fail if it ends meanwhile."""

    def __init__(self, handle: Any, tokenizer: Any, host: str, metrics: Metrics, *_: object) -> None:
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.runs: dict[str, object] = {}
        self.max_held: int | None = None
        """Bound that came with other options; None before that."""
        self.answering = []
        self.application = handle.application
        self._handle = handle
        handle.tokenizers.append(weakref.ref(tokenizer))

    async def submit(self, request: Any, meter: Any = None) -> Repeating:
        return Answer(self._handle, request.prompts)

    def hold_at_most(self, max_held: int) -> None:
        self.max_held = max_held

    async def close(self) -> None:
        pass


class Answer(Repeating):
    def __init__(self, handle: Any, prompts: list[list[int]]) -> None:
        super().__init__(prompts, f"{handle.application} ")
        self._handle = handle

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in super().__aiter__():
            for _ in range(TURNS):
                await asyncio.sleep(0)
                assert self._handle.is_running(), "the engine ended under a request"
            yield event


class Ingress:
    """One ingress of an address, with a client of it."""

    def __init__(self, world: World, **options: Any) -> None:
        config = ServeConfig(**options)
        self.table = table = Models()
        self.app: Any = HttpApp(config, None, AllEngines(table), Metrics(""), models=table)
        self.fleet = fleet_of(world, config, self.app)
        own_id = f"ingress {len(world.ingresses)}"
        table.on_demand = self.holds = Holds(self.fleet, Handle(world), own_id, tell_others=world.tell_ingresses)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://localhost", timeout=PATIENCE_S
        )

    def stage_of(self, model: str) -> str:
        condition = self.table.named(model).condition
        assert condition is not None
        return condition.stage

    def max_held(self, model: str) -> int | None:
        """Returns the requests that may wait here for an engine of a model to start."""
        return cast("Engines", self.table.named(model).engines).max_held

    async def ask(self, method: str, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return await self.client.request(method, path, json=body or None, headers=headers)

    async def text(self, model: str) -> str:
        answer = await self.ask("POST", "/v1/completions", model=model, prompt="a")
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    async def states(self) -> dict[str, str]:
        await self.fleet.look()
        return {card["id"]: card["state"] for card in (await self.ask("GET", "/v1/models")).json()["data"]}


def fleet_of(world: World, config: ServeConfig, table: Any) -> Fleet:
    def handle_of(_: str, application: str) -> Any:
        if application == world.without_handle:
            raise ValueError("there is no such application")

        def is_running() -> bool:
            return world.applications.get(application, {}).get("status") == "RUNNING"

        async def shutdown_async() -> None:
            pass

        return SimpleNamespace(
            application=application,
            is_running=is_running,
            shutdown_async=shutdown_async,
            tokenizers=world.tokenizers,
        )

    return Fleet(
        ADDRESS,
        config,
        table,
        on_demand=world.models,
        client=Engines,  # type: ignore[arg-type]
        find=lambda address, served: world.find(address, served),
        changes=world.kept.read,
        handle_of=handle_of,
    )


@contextlib.asynccontextmanager
async def world_of(*models: ServedModel, kind: type[World] | None = None, **options: Any) -> AsyncIterator[World]:
    world = (kind or World)(*models, **options)
    try:
        yield world
    finally:
        await world.close()


async def ready(world: World, **options: Any) -> Ingress:
    ingress = world.ingress(**options)
    await ingress.fleet.look()
    return ingress


# ---- requests load models -------------------------------------------------------------------------------------------


@async_test
async def test_many_models_share_a_few_places() -> None:
    """More models than places, two ingresses and four requests at a time in random order: each is answered by its own
    model, no engine ends under a request, and only the model that fails counts as failed.
    """
    begun, names = time.monotonic(), [f"m{number}" for number in range(7)]
    draw = random.Random(5)
    async with world_of(*map(on_demand, names), max_loaded=3, broken=("m6",)) as world:
        ingresses = [await ready(world), await ready(world)]
        waiting = [draw.choice(names) for _ in range(60)]

        async def work() -> None:
            while waiting:
                name = waiting.pop()
                answer = await draw.choice(ingresses).ask("POST", "/v1/completions", model=name, prompt="a")
                if name == "m6":
                    assert answer.status_code == 503
                    assert "m6 did not start" in answer.text
                else:
                    assert answer.json()["choices"][0]["text"] == f"manta.{name} manta.{name} "

        await asyncio.gather(*(work() for _ in range(4)))
        assert world.most_there <= 3
        assert world.deployed.count("m6") <= 1 + (time.monotonic() - begun) // RETRY_FAILED_S
        states = await ingresses[0].states()
        assert states["m6"] == "failed"
        assert list(states) == names
        assert {*states.values()} <= {"loaded", "unloaded", "failed"}


@async_test
async def test_two_ingresses_that_want_the_only_place_both_get_it() -> None:
    async with world_of(on_demand("a"), on_demand("b"), max_loaded=1) as world:
        first, second = await ready(world), await ready(world)
        texts = await asyncio.gather(*(each.text(name) for name in "abab" for each in (first, second)))
        assert texts == [f"manta.{name} manta.{name} " for name in "aabbaabb"]
        assert world.most_there == 1


@async_test
async def test_a_loaded_model_is_used_without_the_loader() -> None:
    """What loads models may be away while those that are loaded answer."""
    async with world_of(on_demand("a", "alias")) as world:
        ingress = await ready(world)
        assert await ingress.text("alias") == "manta.a manta.a "
        world.has_loader = False
        assert await ingress.text("a")
        assert world.deployed == ["a"]


@async_test
async def test_a_loader_that_is_away_for_a_moment_is_asked_again() -> None:
    async with world_of(on_demand("a")) as world:
        ingress = await ready(world)
        world.has_loader = False
        with pytest.raises(ServingError) as error:
            async with ingress.holds.use("a", "", 0.0):
                pass
        assert error.value.refusal.kind == "unavailable"
        asked = asyncio.ensure_future(ingress.text("a"))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        world.has_loader = True
        assert await asked == "manta.a manta.a "


@async_test
async def test_a_request_counts_from_the_loaders_answer_on() -> None:
    """Also while the answer is under way. Only requests that wait at the loader keep no model there."""
    async with world_of(on_demand("a")) as world:
        ingress = await ready(world)
        world.may_load.clear()
        asked = asyncio.ensure_future(ingress.text("a"))
        await until(lambda: world.deployed == ["a"])
        assert ingress.holds.let_go("a", {"ingress 0": 1})
        assert not ingress.holds.let_go("a", {"ingress 1": 1})
        world.may_load.set()
        await asked
        assert ingress.holds.let_go("a", {})
        async with ingress.holds.use("a", "", PATIENCE_S):
            assert not ingress.holds.let_go("a", {})
            assert ingress.holds.idle_seconds() == {"a": 0.0}
        assert ingress.holds.let_go("a", {})


@async_test
async def test_a_request_that_waits_too_long_may_come_again() -> None:
    async with world_of(on_demand("a")) as world:
        world.may_load.clear()
        ingress = await ready(world)
        with pytest.raises(ServingError) as error:
            async with ingress.holds.use("a", "", 1.1):
                pass
        refusal = error.value.refusal
        assert (refusal.kind, (refusal.retry_after_s or 0) > 0) == ("unavailable", True)
        world.may_load.set()
        assert await ingress.text("a")
        assert world.deployed == ["a"]


@async_test
async def test_a_line_of_a_batch_loads_its_model() -> None:
    async with world_of(on_demand("a")) as world:
        endpoints = endpoints_of_models(ServeConfig(), bytes(32))
        fleet = fleet_of(world, ServeConfig(), endpoints)
        endpoints.state.models.on_demand = Holds(fleet, Handle(world), "batches")
        await fleet.look()
        body = msgspec.Raw(b'{"model": "a", "prompt": "a"}')
        line = BatchRequest(custom_id="1", method="POST", url="/v1/completions", body=body)
        response = await endpoints.answer(line, "line")
        assert (response.status_code, b"manta.a manta.a " in bytes(response.body)) == (200, True)


@async_test
async def test_lines_take_the_places_of_their_own_models() -> None:
    """Half of what the engines of all models run, whatever the engine has that models leave options out from."""
    shared = ServeConfig(engine=EngineConfig(max_num_sequences=4096))
    async with world_of(on_demand("a", max_num_sequences=2), on_demand("b", max_num_sequences=6)) as world:
        endpoints = endpoints_of_models(shared, bytes(32))
        fleet = fleet_of(world, shared, endpoints)
        endpoints.state.models.on_demand = Holds(fleet, Handle(world), "batches")
        await fleet.look()
        assert endpoints.num_places == 1 + 3
        world.may_load.clear()
        body = msgspec.Raw(b'{"model": "a", "prompt": "a"}')
        line = BatchRequest(custom_id="1", method="POST", url="/v1/completions", body=body)
        answers = [asyncio.ensure_future(endpoints.answer(line, "line")) for _ in range(3)]
        world.may_load.set()
        assert [answer.status_code for answer in await asyncio.gather(*answers)] == [200] * 3
        await world.remove("b")
        await fleet.look()
        assert endpoints.num_places == 1


@async_test
async def test_an_adapter_for_a_model_loads_the_model() -> None:
    async with world_of(on_demand("a"), on_demand("b")) as world:
        ingress = await ready(world)
        body = {"lora_name": "support", "lora_path": "support", "base_model_name": "a"}
        refused = await ingress.ask("POST", "/v1/load_lora_adapter", **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path"), "there is no root"
        assert world.deployed == ["a"]


@async_test
async def test_models_that_come_together_start_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one's files waits for no other's, and one whose handle cannot be had keeps none out."""
    together = threading.Barrier(2)

    def read(config: ServeConfig, *_: object) -> Tokenizer:
        if config.model_name != "gone":
            together.wait(PATIENCE_S)
        return Tokenizer(checkpoint("llama"))

    monkeypatch.setattr("manta.cluster.serve.fleet.fleet.tokenizer_of", read)
    async with world_of() as world:
        ingress = world.ingress()
        for name in ("a", "gone", "b"):
            world.applications[f"manta.{name}"] = details(on_demand(name))
        world.without_handle = "manta.gone"
        await ingress.fleet.look()
        assert [state.model_name for state in ingress.table] == ["a", "b"]
        world.without_handle = ""
        assert await ingress.states() == {"a": "loaded", "b": "loaded", "gone": "loaded"}


# ---- what loads none ------------------------------------------------------------------------------------------------


@async_test
async def test_lists_and_questions_load_no_model() -> None:
    async with world_of(on_demand("a", "alias"), on_demand("b")) as world:
        ingress = await ready(world)
        for path in ("/v1/models", "/v1/models/a", "/api/tags", "/api/ps", "/status", "/metrics", "/", "/health"):
            assert (await ingress.ask("GET", path)).status_code == 200, path
        shown = (await ingress.ask("POST", "/api/show", model="a:latest")).json()
        assert shown["capabilities"] == ["completion", "tools"]
        unload = {"model": "a", "keep_alive": 0}
        for path in ("/api/generate", "/api/chat"):
            assert (await ingress.ask("POST", path, **unload)).json()["done_reason"] == "unload"
        unknown = await ingress.ask("POST", "/v1/completions", model="c", prompt="a")
        assert unknown.status_code == 404
        await ready(world)  # an ingress that comes
        assert (await ingress.states(), world.deployed) == ({"a": "unloaded", "alias": "unloaded", "b": "unloaded"}, [])


@async_test
async def test_a_model_that_is_not_loaded_shows_what_its_files_say() -> None:
    """Clients ask what a model can do before they send it a tool, and so before anything has loaded it."""
    models = {name: EngineConfig(model=model) for name, model in (("here", "demo"), ("gone", "/nowhere/at/all"))}
    async with world_of(
        *(ServedModel(name=name, on_demand=True, engine=each) for name, each in models.items())
    ) as world:
        ingress = await ready(world)
        here, gone = [(await ingress.ask("POST", "/api/show", model=name)).json() for name in models]
        assert (here["capabilities"], "<tool_call>" in here["template"]) == (["completion", "tools"], True)
        assert (gone["capabilities"], gone["template"]) == (["completion"], "")
        assert world.deployed == []


@async_test
async def test_ollamas_clients_load_models_and_unload_none() -> None:
    async with world_of(on_demand("a"), on_demand("b")) as world:
        ingress = await ready(world)
        loaded = await ingress.ask("POST", "/api/generate", model="a")
        assert loaded.json()["done_reason"] == "load"
        body = {"model": "a", "prompt": "a", "stream": False}
        for keep_alive in (0, "0s", "5m", -1):
            answer = await ingress.ask("POST", "/api/generate", keep_alive=keep_alive, **body)
            assert answer.json()["response"].startswith("manta.a")
        await ingress.ask("POST", "/api/generate", model="a", keep_alive=0)
        assert [each["name"] for each in (await ingress.ask("GET", "/api/ps")).json()["models"]] == ["a"]
        assert (await ingress.states(), world.deployed) == ({"a": "loaded", "b": "unloaded"}, ["a"])


# ---- configuration --------------------------------------------------------------------------------------------------


def test_a_loaded_model_takes_weights_caches_constraints_and_tokenizers() -> None:
    folder = checkpoint("llama")
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    weights = sum(tensor.size * 4 for tensor in load_file(folder / "model.safetensors").values())
    engine = EngineConfig(model=str(folder), dtype="float32", kv_cache_bytes=1000)
    text = grammar_bytes(engine, vocab_size)
    assert engine_bytes(engine) == weights + 1000 + text
    assert serving_bytes(engine) == tokenizer_bytes(vocab_size)
    assert engine_bytes(msgspec.structs.replace(engine, tensor_parallel_size=2)) == weights + 2000 + text
    drafts = SpeculativeConfig(proposers=("draft",), draft_model=str(folder))
    assert engine_bytes(msgspec.structs.replace(engine, speculative=drafts)) == 2 * weights + 1000 + text
    with pytest.raises(ValueError, match="kv_cache_bytes"):
        engine_bytes(msgspec.structs.replace(engine, kv_cache_bytes=None))


def test_the_default_model_may_be_on_demand() -> None:
    models = [{"name": "a", "on_demand": True}]
    load_config(None, {"models": models, "default_model": "a"}).check_default_model()
    with pytest.raises(ValueError, match="default_model"):
        load_config(None, {"models": models, "default_model": "b"}).check_default_model()
