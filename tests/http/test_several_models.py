"""Several models at one address: requests go to the model that they name, over every route, and each is listed with how
it fares. The engines are stand-ins, each of which answers with a text of its own.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from manta.cluster.batch.line_endpoints import endpoints_of_models
from manta.cluster.batch.lines import BatchRequest
from manta.cluster.config import EngineConfig, ServeConfig, ServedModel
from manta.cluster.engine.adapter_table import LoadedAdapter
from manta.cluster.errors import ServingError
from manta.cluster.http.access.keys import ApiKeys
from manta.cluster.http.access.request_admission import Caller
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange.all_engines import AllEngines
from manta.cluster.http.exchange.condition import Condition
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.state import Models
from manta.cluster.serve.adapters.adapter_directory import AdapterDirectory, NoEngines
from manta.cluster.serve_limits import KeyLimits
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.refusals import MAX_LISTED
from manta.workers.model_info import AdapterInfo, ModelInfo
from tests.http.test_routes import Repeating, RepeatingEngines
from tests.loaded_adapters import MemoryRegistry

CHAT = {"messages": [{"role": "user", "content": "a"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": CHAT | {"max_tokens": 5},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses/compact": {"input": "a"},
    "/api/chat": CHAT | {"stream": False},
    "/api/generate": {"prompt": "a", "stream": False},
    "/api/show": {},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/chat/completions/input_tokens": CHAT,
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/v1/decisions": {"input": "a", "questions": [{"type": "predicate", "instructions": "b"}]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/classify": {"input": "a"},
    "/pooling": {"input": "a"},
    "/models/load": {},
    "/models/unload": {},
}
"""A body without a model for each route that takes one."""
WITHOUT_ANSWER = ("/api/pull", "/api/delete")
"""Routes whose model answers nothing; `tests/serve/test_models_on_demand.py` asks them."""
ANSWERED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
    "/tokenize",
    "/detokenize",
)
"""Those that the stand-ins answer with their text, or whose answer needs no engine."""
REQUIRED = ("/v1/messages", "/v1/responses/compact", "/models/load", "/models/unload")
"""Routes whose API always requires a model, so that the shape of the body is refused."""
KEY = "a-secret-of-the-test"


class SayingEngines(RepeatingEngines):
    """Engines that say a text and count their requests."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_requests = 0

    async def submit(self, request: Any, meter: Any = None) -> Repeating:
        self.num_requests += 1
        return Repeating(request.prompts, self.text, request.engine.params.n)


class Address:
    """An address of the models `one`, also called `uno`, and `two`."""

    def __init__(self, default_model: str | None = None, **options: Any) -> None:
        config = ServeConfig(default_model=default_model, **options)
        models = Models(default_model)
        self.app: Any = HttpApp(config, None, AllEngines(models), Metrics(""), models=models)
        self.engines: dict[str, SayingEngines] = {}
        self.states: dict[str, Any] = {}
        for name, aliases in (("one", ("uno",)), ("two", ())):
            self.add(ServedModel(name=name, aliases=aliases, engine=EngineConfig(model="demo")))

    def add(self, model: ServedModel) -> None:
        name, config = model.model_name, ServeConfig().of_model(model)
        engines = self.engines[name] = SayingEngines(f"{name} ")
        self.states[name] = self.app.add_model(config, Tokenizer("demo"), engines, Metrics(name))
        self.states[name].condition = Condition("loaded")

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", trust_env=False) as client:
                content = None if body is None else json.dumps(body).encode()
                return await client.request(method, path, content=content, headers=headers)

        return asyncio.run(send())

    def listed(self, **headers: str) -> list[str]:
        return [card["id"] for card in self.ask("GET", "/v1/models", **headers).json()["data"]]


@pytest.fixture(scope="module")
def address() -> Address:
    return Address()


def test_every_route_with_a_model_is_asked_here(address: Address) -> None:
    document = address.ask("GET", "/openapi.json").json()
    with_model = set()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                name = content["schema"].get("$ref", "").rpartition("/")[2]
                if name and "model" in document["components"]["schemas"][name]["properties"]:
                    with_model.add(path)
    assert with_model <= {*BODIES, *WITHOUT_ANSWER}


@pytest.mark.parametrize("path", ANSWERED)
def test_the_named_model_answers(address: Address, path: str) -> None:
    for name, model in (("one", "one"), ("uno", "one"), ("two", "two")):
        before = {each: engines.num_requests for each, engines in address.engines.items()}
        answer = address.ask("POST", path, BODIES[path] | {"model": name})
        assert answer.status_code == 200, answer.text
        asked = {each for each, engines in address.engines.items() if engines.num_requests > before[each]}
        if "tokenize" not in path:
            assert asked == {model}
            assert f"{model} {model} " in answer.text


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_model_is_refused_in_the_shape_of_the_api(address: Address, path: str) -> None:
    answer = address.ask("POST", path, BODIES[path] | {"model": "three"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    if path.startswith("/api/"):
        assert isinstance(error, str)
    else:
        assert (error["type"], error["code"], error["param"]) == ("not_found_error", "model_not_found", "model")
    assert "one, uno, two" in answer.text


@pytest.mark.parametrize("path", [path for path in BODIES if not path.startswith("/api/")])
def test_a_missing_model_is_refused_with_the_models(address: Address, path: str) -> None:
    for body in (BODIES[path], BODIES[path] | {"model": ""}):
        answer = address.ask("POST", path, body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "model"
        if path not in REQUIRED or "model" in body:
            assert "one, uno, two" in answer.text


def test_the_refusal_is_data() -> None:
    address, caller = Address(), Caller("")
    models = address.states["one"].models
    with pytest.raises(ServingError) as missing:
        models.find(None, caller)
    assert (missing.value.refusal.kind, missing.value.refusal.field) == ("required", "model")
    assert missing.value.refusal.bound == ("one", "uno", "two")
    with pytest.raises(ServingError) as unknown:
        models.find("three", caller)
    assert (unknown.value.refusal.kind, unknown.value.refusal.value) == ("unknown_model", "three")


def test_ten_thousand_adapters_cost_a_request_nothing() -> None:
    """A request asks its caller's key about one name, and a refusal that lists names does not list all of them."""

    class Counting(Caller):
        num_asked = 0

        def may_use(self, names: Any, name: str) -> bool:
            self.num_asked += 1
            return super().may_use(names, name)

    address, caller = Address(), Counting("here")
    address.states["one"].serve_adapters([f"adapter-{number}" for number in range(10_000)])
    for name in ("two", "adapter-9999", "one:adapter-5"):
        assert address.states["one"].models.find(name, caller).model_name == ("two" if name == "two" else "one")
    assert caller.num_asked == 3
    for unknown in ("else", None):
        with pytest.raises(ServingError) as refused:
            address.states["one"].models.find(unknown, caller)
        assert len(str(refused.value)) < 5000
    assert str(refused.value).count("adapter-") < 2 * MAX_LISTED


def test_a_default_model_answers_who_names_none() -> None:
    address = Address(default_model="two")
    assert "two two " in address.ask("POST", "/v1/completions", {"prompt": "a"}).text
    assert address.ask("POST", "/v1/completions", {"prompt": "a", "model": "three"}).status_code == 404


def test_ollamas_tag_is_left_out(address: Address) -> None:
    answer = address.ask("POST", "/api/chat", BODIES["/api/chat"] | {"model": "uno:latest"})
    assert answer.json()["message"]["content"] == "one one "


def test_all_models_are_listed_with_their_state() -> None:
    address = Address()
    assert address.listed() == ["one", "uno", "two"]
    address.states["two"].condition = Condition("failed", "its files are gone")
    one, uno, two = address.ask("GET", "/v1/models").json()["data"]
    assert [card["state"] for card in (one, uno, two)] == ["loaded", "loaded", "failed"]
    assert two["reason"] == "its files are gone"
    assert address.ask("GET", "/v1/models/uno").json()["id"] == "uno"
    assert address.ask("GET", "/v1/models/three").status_code == 404
    assert [model["name"] for model in address.ask("GET", "/api/tags").json()["models"]] == ["one", "two"]
    assert [model["name"] for model in address.ask("GET", "/api/ps").json()["models"]] == ["one"]
    status = address.ask("GET", "/status").json()
    assert status["models"] == [
        {"name": "one", "state": "loaded", "aliases": ["uno"]},
        {"name": "two", "state": "failed", "reason": "its files are gone"},
    ]


def test_a_failed_model_takes_no_other_one_with_it() -> None:
    address = Address()
    address.states["two"].condition = Condition("failed", "its files are gone")
    answer = address.ask("POST", "/v1/completions", {"prompt": "a", "model": "two"})
    assert answer.status_code == 503
    assert "its files are gone" in answer.json()["error"]["message"]
    assert address.ask("POST", "/v1/completions", {"prompt": "a", "model": "one"}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/two", "/api/tags", "/api/ps", "/status", "/metrics", "/"])
def test_a_list_wakes_no_model(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped model costs nothing until a request names it."""
    address = Address()
    address.states["two"].condition = Condition("unloaded")

    async def woken() -> ModelInfo:
        raise AssertionError("its engines were asked")

    monkeypatch.setattr(address.engines["two"], "model", woken)
    assert address.ask("GET", path).status_code == 200


def test_models_come_and_go() -> None:
    address = Address()
    address.add(ServedModel(name="three", engine=EngineConfig(model="demo")))
    assert "three three " in address.ask("POST", "/v1/completions", {"prompt": "a", "model": "three"}).text
    address.app.remove_model("one")
    assert address.listed() == ["two", "three"]
    for name in ("one", "uno"):
        assert address.ask("POST", "/v1/completions", {"prompt": "a", "model": name}).status_code == 404
    address.app.remove_model("two")
    address.app.remove_model("three")
    assert address.listed() == []
    assert address.ask("POST", "/v1/completions", {"prompt": "a"}).status_code == 400
    assert address.ask("GET", "/").json()["model"] is None
    assert address.ask("GET", "/health").status_code == 503


def test_a_key_may_use_the_models_that_its_limits_name() -> None:
    """Names of models and of keys are apart: a model may be called like a key."""
    address = Address(api_keys=(f"two:{KEY}-1", f"everything:{KEY}-2"), key_limits={"two": KeyLimits(models=("uno",))})
    limited, free = ({"authorization": f"Bearer {KEY}-{number}"} for number in (1, 2))
    assert address.listed(**limited) == ["one", "uno"]
    assert address.listed(**free) == ["one", "uno", "two"]
    body = {"prompt": "a", "model": "one"}
    assert address.ask("POST", "/v1/completions", body, **limited).status_code == 200
    refused = address.ask("POST", "/v1/completions", body | {"model": "two"}, **limited)
    assert refused.status_code == 404
    assert "'two' is not served here; one, uno is" in refused.json()["error"]["message"]
    assert address.ask("GET", "/v1/models/two", **limited).status_code == 404
    assert address.ask("POST", "/v1/completions", body | {"model": "two"}, **free).status_code == 200
    text = "\n".join(line for line in address.ask("GET", "/metrics").text.splitlines() if "client_requests" in line)
    assert 'manta:client_requests_total{client="everything",model_name="two"} 1.0' in text
    assert 'manta:client_requests_total{client="two",model_name="one"} 1.0' in text


def test_a_key_of_a_server_of_one_model_may_not_use_it() -> None:
    limits = {"other": KeyLimits(models=("another",))}
    config = ServeConfig(api_keys=(f"other:{KEY}",), key_limits=limits)
    app: Any = HttpApp(config, Tokenizer("demo"), RepeatingEngines(), Metrics("demo"))

    async def send(method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers, **options)

    assert asyncio.run(send("GET", "/v1/models")).json()["data"] == []
    assert asyncio.run(send("POST", "/v1/completions", json={"prompt": "a"})).status_code == 404


class OverlappingEngines(NoEngines):
    """Have read an adapter, while another ingress loads one of the same name for another model."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__("application")
        self._meanwhile = meanwhile

    async def read_adapter(self, path: str, wakes: bool) -> list[Any]:
        self._meanwhile()
        return [LoadedAdapter(path, "ab" * 16)]


def test_of_two_loads_of_one_name_for_two_models_one_is_refused() -> None:
    address = Address()
    registries = {name: MemoryRegistry() for name in address.states}
    first, _ = registries.values()
    elsewhere = first.table.changed({"x": LoadedAdapter("/other", "cd" * 16)}, 0, 0)
    engines = OverlappingEngines(lambda: first.replace(elsewhere))
    for name, registry in registries.items():
        address.states[name].use_adapters(AdapterDirectory(engines, registry, 60.0, settling_s=0.0))
    body = {"lora_name": "x", "lora_path": "/adapter", "base_model_name": "two"}
    answer = address.ask("POST", "/v1/load_lora_adapter", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (409, "lora_name")
    assert [[*each.table.loaded] for each in registries.values()] == [["x"], []]
    assert address.listed() == ["one", "uno", "x", "two"]


def test_a_key_to_an_adapter_opens_neither_its_base_nor_another_one() -> None:
    engine = EngineConfig(model="demo", adapters={"support": "a", "sales": "b"})
    limits = {"support": KeyLimits(models=("support",)), "all": KeyLimits(models=("demo",))}
    config = ServeConfig(engine=engine, api_keys=(f"support:{KEY}-1", f"all:{KEY}-2"), key_limits=limits)
    engines = RepeatingEngines()
    infos = {name: AdapterInfo(name, digest * 16, 1, 1) for name, digest in (("support", "ab"), ("sales", "cd"))}
    engines.loaded = msgspec.structs.replace(engines.loaded, adapters=infos)
    app: Any = HttpApp(config, Tokenizer("demo"), engines, Metrics("demo"))

    async def send(number: int, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}-{number}"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers, **options)

    for number, opened in ((1, ["support"]), (2, ["demo", "support", "sales"])):
        listed = asyncio.run(send(number, "GET", "/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == opened
        for name in ("demo", "support", "sales", "demo:support", "demo:sales"):
            body = {"prompt": "a", "model": name}
            status = asyncio.run(send(number, "POST", "/v1/completions", json=body)).status_code
            assert status == (200 if name.rpartition(":")[2] in opened else 404), (number, name)


def test_a_deleted_response_takes_its_kept_blocks_along(tmp_path: pathlib.Path) -> None:
    """Nothing in the request says which model has them, so all are told."""
    address = Address(batch_storage=str(tmp_path))
    engine = EngineConfig(model="demo", prefix_store_bytes=1 << 20, block_size=8)
    address.add(ServedModel(name="keeping", engine=engine))
    response = address.ask("POST", "/v1/responses", {"model": "keeping", "input": "Count to ten. " * 5}).json()
    assert address.ask("DELETE", f"/v1/responses/{response['id']}").status_code == 200
    assert address.engines["keeping"].dropped


def test_lines_of_batches_go_to_the_models_that_they_name() -> None:
    config = ServeConfig(
        default_model="two", api_keys=(f"limited:{KEY}",), key_limits={"limited": KeyLimits(models=("one",))}
    )
    lines = endpoints_of_models(config, bytes(32))
    for name in ("one", "two"):
        model = ServedModel(name=name, engine=EngineConfig(model="demo"))
        of_model = config.of_model(model)
        lines.add_model(of_model, Tokenizer("demo"), SayingEngines(f"{name} "), Metrics(name))
    owner = ApiKeys(config.api_keys or ()).owner_of("limited")

    def answered(owner: str = "", **body: Any) -> tuple[int, str]:
        content = msgspec.Raw(json.dumps({"prompt": "a"} | body).encode())
        request = BatchRequest(custom_id="1", method="POST", url="/v1/completions", body=content)
        response = asyncio.run(lines.answer(request, "line", owner))
        return response.status_code, bytes(response.body).decode()

    for name, model in (("one", "one"), ("two", "two"), (None, "two")):
        status, text = answered(**({} if name is None else {"model": name}))
        assert (status, f"{model} {model} " in text) == (200, True)
    assert answered(model="three")[0] == 404
    assert [answered(owner, model=name)[0] for name in ("one", "two")] == [200, 404]
    lines.remove_model("one")
    assert answered(model="one")[0] == 404


def test_metrics_have_the_models_name(address: Address) -> None:
    address.ask("POST", "/v1/completions", {"prompt": "a", "model": "two"})
    text = address.ask("GET", "/metrics").text
    for name in ("one", "two"):
        assert f'manta:num_requests_running{{model_name="{name}"}} 0.0' in text
