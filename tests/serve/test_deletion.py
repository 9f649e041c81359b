"""What was deleted stays deleted, whatever is read again, and whichever ingress is asked or comes late.

A model of a few lines stands beside two ingresses with one storage, which are asked in random order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from manta.cluster.serve.engine.engine_replica import EngineReplica
from manta.cluster.serve.recorded.keeper import SilenceTimes
from tests.checkpoints import checkpoint
from tests.conftest import PROVE
from tests.local_server import Handle
from tests.patience import PATIENCE_S
from tests.serve.test_resumable_streams import ANN, TwoIngresses

MODEL = checkpoint("llama").name
NUM_THINGS, NUM_STEPS, NUM_STOPS = 14, 60, 3


class StoppableIngresses(TwoIngresses):
    """Each ingress has an event loop of its own, which a test may stop for a while, as SIGSTOP stops a process."""

    def __init__(self, storage: str) -> None:
        self._loops: list[asyncio.AbstractEventLoop] = []
        super().__init__(storage)

    def add(self) -> None:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self._loops.append(loop)
        asyncio.run_coroutine_threadsafe(self._add(), loop).result(PATIENCE_S)

    def handle(self) -> Handle:
        return Handle(*(_Distant(replica, self._loop) for replica in self.replicas))

    def kill(self) -> None:
        loop = self._loops.pop(0)
        asyncio.run_coroutine_threadsafe(self._kill(), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)

    @contextlib.contextmanager
    def stopped(self, index: int) -> Iterator[None]:
        """Stops an ingress. Its port is not among those that clients are given."""
        goes_on, port = threading.Event(), self.ports[index]
        self._loops[index].call_soon_threadsafe(goes_on.wait)
        self.ports.remove(port)
        try:
            yield
        finally:
            self.ports.insert(index, port)
            goes_on.set()


class _Distant:
    """A replica whose methods run on its own event loop, whoever calls them."""

    def __init__(self, replica: EngineReplica, loop: asyncio.AbstractEventLoop) -> None:
        self._replica, self._loop = replica, loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def called(*arguments: Any) -> Any:
            return await getattr(self._replica, name)(*arguments)

        return lambda *arguments: asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called(*arguments), self._loop))


@pytest.fixture
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoppableIngresses]:
    found = StoppableIngresses(str(tmp_path_factory.mktemp("storage")))
    yield found
    found.close()


class Clients:
    """Asks any of the ingresses, and again while it does not know: it has just started, or has just lost an engine."""

    def __init__(self, two: TwoIngresses, chooser: random.Random) -> None:
        self._two = two
        self._chooser = chooser

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        until = time.monotonic() + PATIENCE_S
        while (found := self._ask(method, path, body, **headers))[0] == 503 and time.monotonic() < until:
            time.sleep(0.2)
        return found

    def _ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", "Authorization": f"Bearer {ANN}", **headers}
        port = self._chooser.choice(self._two.ports)
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, given, method=method)
        try:
            response = urllib.request.urlopen(request, timeout=PATIENCE_S)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            return response.status, {key.lower(): value for key, value in response.headers.items()}, response.read()

    def response(self, **fields: Any) -> tuple[int, dict[str, str], bytes]:
        body = {"model": MODEL, "input": "Count.", "max_output_tokens": 20, **fields}
        return self.ask("POST", "/v1/responses", body, **{"X-Resumable-S": "60"} if fields.get("stream") else {})

    def file(self) -> str:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "a"}}
        content = (
            b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            + json.dumps(line).encode()
            + b"\r\n--x--\r\n"
        )
        _, _, made = self.ask("POST", "/v1/files", content, **{"Content-Type": "multipart/form-data; boundary=x"})
        return json.loads(made)["id"]


class Thing:
    """A stored thing, and the model of it: it can be read until it is deleted, and never again."""

    is_deleted = False

    def __init__(self, clients: Clients, chooser: random.Random) -> None:
        self.kind = chooser.choice(["response", "running", "stream", "file", "batch"])
        self._clients = clients
        if self.kind == "response":
            stream = clients.response(stream=True)[1]["x-stream-id"]
            self.paths = [f"/v1/responses/{stream.replace('strm', 'resp')}", f"/v1/streams/{stream}"]
            self.paths += [f"{self.paths[0]}/input_items"]
        elif self.kind == "running":
            made = json.loads(clients.response(background=True, max_output_tokens=chooser.choice([5, 400]))[2])["id"]
            self.paths = [f"/v1/responses/{made}", f"/v1/streams/{made.replace('resp', 'strm')}"]
            self.paths += [f"{self.paths[0]}?stream=true", f"{self.paths[0]}?stream=true&starting_after=3"]
        elif self.kind == "stream":
            body = {"model": MODEL, "prompt": [5, 6], "stream": True, "max_tokens": 20}
            headers = clients.ask("POST", "/v1/completions", body, **{"X-Resumable-S": "60"})[1]
            self.paths = [f"/v1/streams/{headers['x-stream-id']}"]
        else:
            self.paths = [f"/v1/files/{clients.file()}"]
            self.paths += [f"{self.paths[0]}/content"]
            if self.kind == "batch":
                body = {"input_file_id": self.paths[0][10:], "endpoint": "/v1/completions", "completion_window": "24h"}
                self.paths = [f"/v1/batches/{json.loads(clients.ask('POST', '/v1/batches', body)[2])['id']}"]

    def delete(self) -> None:
        """Deletes it. A stream is ended, and a batch cancelled: both can still be read."""
        if self.kind == "batch":
            assert self._clients.ask("POST", f"{self.paths[0]}/cancel")[0] == 200
            return
        status, _, _ = self._clients.ask("DELETE", self.paths[0])
        assert status == (404 if self.is_deleted else 200), self.kind
        self.is_deleted = self.kind != "stream"

    def read(self) -> None:
        for path in self.paths:
            assert self._clients.ask("GET", path)[0] == (404 if self.is_deleted else 200), (self.kind, path)
        if self.paths[0].startswith("/v1/responses") and self.is_deleted:
            status, _, refused = self._clients.response(previous_response_id=self.paths[0].rpartition("/")[2])
            assert (status, b"previous_response_not_found" in refused) == (400, True)
        if self.kind == "file":
            listed = json.loads(self._clients.ask("GET", "/v1/files?limit=100")[2])["data"]
            assert (self.paths[0] in [f"/v1/files/{each['id']}" for each in listed]) is not self.is_deleted


def act(things: list[Thing], chooser: random.Random) -> None:
    chooser.choice([Thing.delete, Thing.read, Thing.read])(chooser.choice(things))


def finish(things: list[Thing]) -> None:
    """Deletes all that is left, and reads everything once more."""
    for thing in things:
        if not thing.is_deleted:
            thing.delete()
    time.sleep(0.5)  # for writers that come late
    for thing in things:
        thing.read()


@pytest.mark.parametrize("seed", range(20 if PROVE else 1))
def test_nothing_comes_back_after_its_deletion(two: StoppableIngresses, seed: int) -> None:
    chooser = random.Random(seed)
    clients = Clients(two, chooser)
    things = [Thing(clients, chooser) for _ in range(NUM_THINGS)]
    for step in range(NUM_STEPS):
        act(things, chooser)
        if step == NUM_STEPS // 2:
            two.add()
            two.kill()  # its streams go on, and are adopted by another ingress
    finish(things)


@pytest.mark.parametrize("seed", range(20 if PROVE else 1))
def test_nothing_that_was_deleted_comes_back_with_an_ingress_that_was_stopped(
    two: StoppableIngresses, seed: int
) -> None:
    """Things are deleted while they run at an ingress that does not know of it.

    A hang shows soon: where all is to be proved, as late as users see it.
    """
    if not PROVE:
        for keeper in two.keepers:
            keeper.times = SilenceTimes(silent_s=2.0, read_share=0.0)
    chooser = random.Random(seed)
    clients = Clients(two, chooser)
    for _ in range(NUM_STOPS):
        things = [Thing(clients, chooser) for _ in range(NUM_THINGS // 2)]
        with two.stopped(chooser.randrange(2)):
            for _ in range(NUM_THINGS):
                act(things, chooser)
            for thing in things:
                if not thing.is_deleted and chooser.random() < 0.5:
                    thing.delete()
        for _ in range(NUM_THINGS):
            act(things, chooser)
        finish(things)
