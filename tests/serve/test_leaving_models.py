"""Models that leave: those that operators have removed, whose requests under way go on, and those that come again. The
ingresses are those of `tests/serve/test_fleet.py` and `tests/serve/test_models_on_demand.py`.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import pathlib

import pytest

from manta.cluster.serve.fleet.model_changes import ModelChange, ModelChanges
from manta.cluster.text.kept_tokenizers import KeptTokenizers
from tests.async_tests import async_test
from tests.replicas import Replicas
from tests.serve.test_fleet import STREAM, World, named, served
from tests.serve.test_models_on_demand import TURNS, on_demand, ready, world_of

REMOVED = ModelChange(None, None, None)
LONG = {"type": "json_schema", "name": "long", "schema": {"type": "string", "minLength": 100_000}, "strict": True}
"""A format that no short text has, so that an answer is as long as `max_output_tokens`."""


@async_test
async def test_a_background_response_outlives_the_removal_of_its_model(tmp_path: pathlib.Path) -> None:
    """It is found while it runs, its stream is read again, and its end is stored. New requests get a 404."""
    replicas, made = Replicas(), World(batch_storage=str(tmp_path))
    try:
        await made.tell("manta.llama", served("llama"), await asyncio.to_thread(replicas))
        body = {"model": "llama", "input": "Count.", "background": True, "text": {"format": LONG}, "temperature": 0}
        begun = (await made.client.post("/v1/responses", json=body | {"max_output_tokens": 100})).json()
        made.changes = ModelChanges(1, {"llama": REMOVED})
        await made.fleet.look()
        assert made.fleet.is_running("llama"), "the response is to run still"
        assert await made.states() == {}
        assert (await made.client.post("/v1/completions", json=STREAM | {"model": "llama"})).status_code == 404
        path = f"/v1/responses/{begun['id']}"
        events = await made.client.get(path, params={"stream": True})
        assert "response.incomplete" in events.text
        found = (await made.client.get(path)).json()
        assert (found["status"], found["usage"]["output_tokens"]) == ("incomplete", 100)
        await made.forget("manta.llama")
        assert (await made.client.get(path)).json() == found
    finally:
        for application in list(made.applications):
            await made.forget(application)
        await asyncio.to_thread(replicas.close)


@async_test
async def test_a_model_of_a_removed_name_that_a_file_deploys_is_served(tmp_path: pathlib.Path) -> None:
    """Operators remove models of the list, and this one has an application of its own."""
    made = World()
    made.changes = ModelChanges(1, {"llama": REMOVED})
    await made.tell("its-own", named("llama", model=str(tmp_path)), None)
    assert await made.states() == {"llama": "failed"}


@async_test
async def test_what_an_ingress_holds_for_a_model_leaves_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    keeps_none = functools.partial(KeptTokenizers, max_bytes=0)
    monkeypatch.setattr("manta.cluster.serve.fleet.fleet.KeptTokenizers", keeps_none)
    async with world_of(on_demand("a"), on_demand("b"), max_loaded=1) as world:
        ingress = await ready(world)
        for name in "abab":
            await ingress.text(name)
        await ingress.fleet.look()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        gc.collect()
        assert [tokenizer() is None for tokenizer in world.tokenizers] == [True, True, True, False]


@async_test
async def test_a_tokenizer_is_read_once_for_models_that_come_again() -> None:
    async with world_of(on_demand("a"), on_demand("b"), max_loaded=1) as world:
        ingress = await ready(world)
        for name in "abab":
            await ingress.text(name)
        found = [tokenizer() for tokenizer in world.tokenizers]
        assert len(found) == 4
        assert all(each is found[0] is not None for each in found)
