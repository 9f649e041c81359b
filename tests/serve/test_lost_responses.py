"""A background response that no process runs any more is run again, once its model on demand is loaded."""

from __future__ import annotations

import pathlib
from typing import Any

import httpx
import msgspec

from manta.cluster.config import ServeConfig
from manta.cluster.http.access.request_admission import EVERYBODY
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange.all_engines import AllEngines
from manta.cluster.http.exchange.engines import Meter
from manta.cluster.http.exchange.exchange import response_id
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.recordings import NoStreams, Opening, Recording, encode_opening
from manta.cluster.http.exchange.state import Models
from manta.cluster.serve.fleet.holds import Holds
from manta.cluster.storage.kept_responses import KeptResponses, StoredResponse
from manta.cluster.storage.storage import Storage
from tests.async_tests import async_test
from tests.http.test_stored_responses import response
from tests.local_server import Handle
from tests.serve.stream_world import opening
from tests.serve.test_models_on_demand import World, fleet_of, on_demand, world_of


class Streams(NoStreams):
    """Recorded streams, of which none runs. It notes the models that are loaded when one begins."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.loaded: list[list[str]] = []
        self._world = world

    def begin(self, opening: Opening, meter: Meter | None = None, is_repeated: bool = False) -> Recording:
        self.loaded.append(list(self._world.deployed))
        return Recording(opening)

    def follow(self, recording: Recording) -> Recording:
        return recording


@async_test
async def test_a_lost_response_is_run_again_once_its_model_is_loaded(tmp_path: pathlib.Path) -> None:
    async with world_of(on_demand("a"), on_demand("b")) as world:
        config, table, streams = ServeConfig(batch_storage=str(tmp_path)), Models(), Streams(world)
        app: Any = HttpApp(config, None, AllEngines(table), Metrics(""), models=table, streams=streams)
        fleet = fleet_of(world, config, app)
        table.on_demand = Holds(fleet, Handle(world), "ingress")
        await fleet.look()
        lost = msgspec.structs.replace(opening(8, owner=EVERYBODY), model="b", path="/v1/responses")
        kept = KeptResponses(Storage(str(tmp_path)), config)
        begun = msgspec.structs.replace(response(1), id=response_id(lost.stream_id), status="queued")
        kept.create(EVERYBODY, StoredResponse(begun, [], encode_opening(lost)))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.get(f"/v1/responses/{begun.id}")
        assert (answer.status_code, answer.json()["status"]) == (200, "queued")
        assert streams.loaded == [["b"]]
