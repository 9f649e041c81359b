"""How far models have loaded: what engines report into Ray's store while they load, and what clients are told of it, in
the shape of llama.cpp's router.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from manta.cluster.engine.ranks import load_reports
from manta.cluster.engine.ranks.load_reports import current_key, forget_reports, read_report, report_key, reported
from manta.cluster.serve.fleet.found import FoundModel, models_among, with_progress
from manta.workers.load_meter import LOAD_METER, SPEC_MODEL, TEXT_MODEL, LoadProgress
from tests.async_tests import async_test
from tests.patience import wait_until
from tests.serve.test_fleet import ADDRESS, details
from tests.serve.test_models_on_demand import TURNS, Ingress, World, on_demand, ready, world_of

REPORT_S = 0.001
BOTH = (TEXT_MODEL, SPEC_MODEL)


class ReportStore:
    """In place of Ray's store, whose functions have these names."""

    def __init__(self) -> None:
        self.found: dict[str, bytes] = {}

    def _internal_kv_put(self, key: str, value: bytes, *, namespace: str) -> bool:
        self.found[key] = value
        return True

    def _internal_kv_get(self, key: str, *, namespace: str) -> bytes | None:
        return self.found.get(key)

    def _internal_kv_del(self, key: str, *, del_by_prefix: bool = False, namespace: str) -> None:
        for each in [each for each in self.found if each == key or (del_by_prefix and each.startswith(key))]:
            del self.found[each]


class Reporting(World):
    """Serve with engines that report."""

    def find(self, address: str, served: Collection[str]) -> list[FoundModel]:
        return [with_progress(each, self.applications[each.application]) for each in super().find(address, served)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> ReportStore:
    store = ReportStore()
    monkeypatch.setattr(load_reports, "internal_kv", store)
    return store


def test_a_load_is_reported_while_it_goes_on(store: ReportStore) -> None:
    key = report_key("manta.a", "1")
    LOAD_METER.begin(*BOTH)
    with reported(key, REPORT_S):
        assert current_key() == key
        LOAD_METER.enter(TEXT_MODEL)
        LOAD_METER.expect(200)
        LOAD_METER.add(50)
        wait_until(lambda: read_report(key) == LoadProgress(BOTH, TEXT_MODEL, 0.25))
        LOAD_METER.add(100)
        wait_until(lambda: read_report(key) == LoadProgress(BOTH, TEXT_MODEL, 0.75))
        LOAD_METER.enter(SPEC_MODEL)
        wait_until(lambda: read_report(key) == LoadProgress(BOTH, SPEC_MODEL, 0.0))
        LOAD_METER.add(1)  # of unknown many
        LOAD_METER.expect(1)
        wait_until(lambda: read_report(key) == LoadProgress(BOTH, SPEC_MODEL, 1.0))
    assert (store.found, current_key()) == ({}, "")


def test_a_store_that_fails_ends_no_load(store: ReportStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def put(key: str, *_: object, **__: object) -> None:
        asked.append(key)
        raise ConnectionError("the GCS restarts")

    monkeypatch.setattr(store, "_internal_kv_put", put)
    LOAD_METER.begin(TEXT_MODEL)
    with reported("a", REPORT_S):
        wait_until(lambda: asked == ["a"])
    with reported(""):
        assert current_key() == ""


def test_what_killed_engines_have_left_goes_with_their_application(store: ReportStore) -> None:
    for key in (report_key("manta.a", "1"), report_key("manta.a", "2"), report_key("manta.ab", "1")):
        store.found[key] = b"{}"
    forget_reports("manta.a")
    assert [*store.found] == [report_key("manta.ab", "1")]
    assert read_report(report_key("manta.ab", "1")) is None, "another version has written it"


def test_of_several_engines_that_start_the_furthest_counts(store: ReportStore) -> None:
    told = {"0": LoadProgress(BOTH, TEXT_MODEL, 0.9), "1": LoadProgress(BOTH, SPEC_MODEL, 0.1)}
    store.found = {report_key("manta.a", each): msgspec.json.encode(report) for each, report in told.items()}
    for replicas, expected in (
        (("STARTING", "STARTING", "STARTING"), told["1"]),
        (("STARTING", "STOPPING"), told["0"]),
    ):
        application = details(on_demand("a"), "DEPLOYING", replicas)
        (found,) = models_among({"manta.a": application}, ADDRESS)
        assert with_progress(found, application).condition.progress == expected
    loaded = details(on_demand("a"))
    (found,) = models_among({"manta.a": loaded}, ADDRESS)
    assert with_progress(found, loaded) is found


@async_test
async def test_clients_see_how_far_a_model_is(store: ReportStore) -> None:
    """In `/v1/models` and as events, which tell a fraction once, and none of a model that is loaded."""

    async def card(ingress: Ingress) -> dict[str, Any]:
        await ingress.fleet.look()
        (found,) = (await ingress.ask("GET", "/v1/models")).json()["data"]
        return {name: found[name] for name in ("state", "progress") if name in found}

    async with world_of(on_demand("a"), kind=Reporting) as world:
        ingress = await ready(world)
        followed = asyncio.ensure_future(ingress.ask("GET", "/models/sse"))
        world.may_load.clear()
        await ingress.ask("POST", "/models/load", model="a")
        while (await card(ingress)) != {"state": "loading"}:
            await asyncio.sleep(0)
        for value in (0.25, 0.75, 0.75):
            store.found[report_key("manta.a", "0")] = msgspec.json.encode(
                LoadProgress((TEXT_MODEL,), TEXT_MODEL, value)
            )
            told = {"stages": ["text_model"], "current": "text_model", "value": value}
            assert await card(ingress) == {"state": "loading", "progress": told}
            for _ in range(TURNS):
                await asyncio.sleep(0)
        world.may_load.set()
        while (await card(ingress)) != {"state": "loaded"}:
            await asyncio.sleep(0)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        ingress.app.begin_drain()
        lines = [line for line in (await followed).text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line.removeprefix("data: "))["data"] for line in lines]
        states = [(each["status"], each.get("progress", {}).get("value")) for each in events]
        assert states == [
            ("unloaded", None),
            ("loading", None),
            ("loading", 0.25),
            ("loading", 0.75),
            ("loaded", None),
        ]
