"""Adapters over HTTP: each is a name in the table of models, and has cached prefixes of its own."""

from __future__ import annotations

import functools
import json
from typing import Any

import httpx
import pytest

from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.engine.request import EngineRequest
from manta.structured.refusals import RequestRefused
from manta.workers.model_info import AdapterInfo
from manta.workers.sampling_params import SamplingParams
from tests.adapters import Adapters, adapters_of
from tests.async_tests import async_test
from tests.checkpoints import checkpoint
from tests.engine.test_engine import make_engine
from tests.local_server import LocalServer, local_server
from tests.patience import PATIENCE_S

PROMPT = [30 + 7 * place % 280 for place in range(40)]
NUM_TOKENS = 6
NAMES = ("first", "second", "third")


@functools.cache
def made() -> Adapters:
    adapters = adapters_of(checkpoint("llama"))
    for seed, name in enumerate(NAMES):
        adapters.add(name, 20 + seed)
    return adapters


def serving(**options: Any) -> Any:
    folders = {name: made().folders[name] for name in NAMES}
    return local_server(engine_options={"adapters": folders, "block_size": 8}, **options)


async def ask(server: LocalServer, model: str) -> dict[str, Any]:
    status, body = await server.post(model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, return_token_ids=True)
    assert status == 200, body
    return json.loads(body)


async def decide(server: LocalServer, model: str) -> dict[str, Any]:
    questions = [{"type": "predicate", "instructions": "It is short."}]
    async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
        url, body = f"http://127.0.0.1:{server.port}/v1/decisions", {"input": "A", "questions": questions}
        answer = await client.post(url, json=body | {"model": model})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@async_test
async def test_every_adapter_is_a_model_beside_its_base() -> None:
    async with serving(model_aliases=("other",)) as server:
        for model, name in (
            ("first", "first"),
            (server.model, ""),
            (f"{server.model}:second", "second"),
            ("other", ""),
        ):
            answer = await ask(server, model)
            assert answer["choices"][0]["token_ids"] == made().greedy(PROMPT, name, NUM_TOKENS)
            assert answer["model"] == (name or server.model)
        assert (await ask(server, "other:third"))["model"] == "third", "none of several is left out"
        _, listed = await server.get("/v1/models")
        cards = {card["id"]: card for card in json.loads(listed)["data"]}
        assert list(cards) == [server.model, "other", *NAMES]
        assert [cards[name]["parent"] for name in ("other", "first")] == [None, server.model]
        assert {card["root"] for card in cards.values()} == {server.model}
        status, body = await server.post(model="fourth", prompt=PROMPT)
        assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
        assert await server.metric('manta:adapter_requests_total{adapter="first"') == 1
        assert await server.metric('manta:adapter_requests_total{adapter=""') == 2
        decided = {model: await decide(server, model) for model in (server.model, "first", "other:first")}
        assert [each["model"] for each in decided.values()] == [server.model, "first", "first"]
        alone, first, again = (each["answers"][0]["probability"] for each in decided.values())
        assert again == pytest.approx(first, abs=1e-6)
        assert alone != pytest.approx(first, abs=1e-6)


@async_test
async def test_adapters_share_no_cached_prefix() -> None:
    async with serving() as server:
        cached = [
            (await ask(server, model))["usage"]["prompt_tokens_details"]["cached_tokens"]
            for model in ("first", "second", server.model, "first", "second")
        ]
    assert cached == [0, 0, 0, 32, 32]


@async_test
async def test_an_ingress_that_knows_older_values_asks_again() -> None:
    """An engine that started anew may have found other values in the adapter's folder."""
    async with serving() as server:
        await ask(server, "first")
        adapters = server.replica.engine.model.adapters
        new = adapters["first"]
        adapters["first"] = AdapterInfo("folder", "00" * 16, 1, 1)
        status, body = await server.post(model="first", prompt=PROMPT, max_tokens=1)
        assert (status, json.loads(body)["error"]["code"]) == (503, "adapter_gone")
        adapters["first"] = new
        await ask(server, "first")


def test_an_engine_without_the_values_refuses_them() -> None:
    engine = make_engine("llama")
    request = EngineRequest(request_id="a", prompt_token_ids=[5], params=SamplingParams(), adapter="00" * 16)
    with pytest.raises(RequestRefused) as refused:
        engine.add_request(request)
    assert (refused.value.refusal.kind, refused.value.refusal.field) == ("adapter_gone", "model")
    assert not engine.has_unfinished


@pytest.mark.parametrize("name", ["", "llama", "other"])
def test_a_name_has_one_owner(name: str) -> None:
    engine = EngineConfig(model="models/llama", adapters={name: "folder"})
    with pytest.raises(ValueError, match=r"engine\.adapters"):
        ServeConfig(engine=engine, served_model_name="llama", model_aliases=("other",))


def test_a_root_is_of_salt_owner_and_values() -> None:
    roots = {
        EngineRequest(
            request_id="a", prompt_token_ids=[5], params=SamplingParams(), cache_root=root, adapter=adapter
        ).chain_root
        for root in (b"", b"one" * 4)
        for adapter in ("", "ab" * 16, "cd" * 16, f"{'ab' * 16}*0.5")
    }
    assert len(roots) == 8
