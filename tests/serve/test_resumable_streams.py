"""Streams outlive their client's socket and the ingress that runs them: every client gets each byte once.

Two ingresses and two engines in this process, over real sockets. `tests/serve/test_resume.py` kills processes.
"""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import openai
import pytest

from benchmarks.processes import free_port
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.engine.request import SequenceOutput
from manta.cluster.http.access.prefix_scope import new_secret
from manta.cluster.serve.engine.engine_replica import EngineReplica
from manta.cluster.serve.ingress import ListeningIngress
from manta.cluster.serve.recorded import copies, keeper, streams
from manta.cluster.serve.recorded.keeper import Keeper
from manta.cluster.serve.recorded.recorder import ENTRIES_AT_ONCE, Recorder
from manta.cluster.serve.requests.turn_budget import TurnBudget
from manta.cluster.serve_limits import KeyLimits, StreamLimits
from tests.checkpoints import checkpoint
from tests.local_server import Handle
from tests.patience import PATIENCE_S, wait_until
from tests.serve.fault_streams import Stream, bodies
from tests.serve.resuming_client import ResumingClient, check, read_all

KEYS = ("ann:key-of-ann-0123456789", "ben:key-of-ben-0123456789")
ANN, BEN = (key.partition(":")[2] for key in KEYS)
NUM_EVENTS = 20
"""After so many events at most a connection is broken."""


async def _nothing(*_: Any) -> None:
    """Waits for ever."""
    await asyncio.Future()


class TwoIngresses:
    """Two ingresses before two engines, of which the first one gets all requests. Both engines keep recordings."""

    def __init__(self, storage: str) -> None:
        engine = EngineConfig(
            model=str(checkpoint("llama")), dtype="float32", kv_cache_bytes=8 << 20, num_threads=1, max_num_sequences=64
        )
        self.config = ServeConfig(
            engine=engine,
            api_keys=KEYS,
            key_limits={"*": KeyLimits(tokens_per_minute=10**9)},
            log_requests=False,
            streams=StreamLimits(max_client_bytes=1 << 20, max_bytes=2 << 20, max_unread_s=600.0),
            batch_storage=storage,
        )
        self.ports: list[int] = []
        self.ingresses: list[ListeningIngress] = []
        self._secret = new_secret()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.replicas = [EngineReplica(engine) for _ in range(2)]
        for _ in range(2):
            self.add()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def add(self) -> None:
        self.run(self._add())

    async def _add(self) -> None:
        port = free_port()
        config = msgspec.structs.replace(self.config, port=port)
        ingress = ListeningIngress(config, self.handle(), self._secret)
        await ingress.check_health()
        await ingress._client.until_greeted()
        self.ports.append(port)
        self.ingresses.append(ingress)

    def handle(self) -> Handle:
        return Handle(*self.replicas)

    def kill(self) -> None:
        """Ends the first ingress as if its process had died: it says no goodbye to anybody."""
        self.run(self._kill())

    async def _kill(self) -> None:
        ingress = self.ingresses.pop(0)
        self.ports.pop(0)
        client = ingress._client
        streams, receiver = ingress.streams, client._receiver
        for task in streams._tasks:
            task.cancel()
        streams._own.clear()
        ingress._app._answer = _nothing  # it answers no request that it has accepted just now
        for server in ingress._listener.servers:
            server.close()
        self._abort(ingress)
        ingress._listener.should_exit = ingress._listener.force_exit = True
        assert receiver._server is not None
        receiver._server.close()
        for opened in receiver.connections:
            opened._writer.transport.abort()
        assert ingress._listener._serving is not None
        await ingress._listener._serving
        self._abort(ingress)

    def _abort(self, ingress: ListeningIngress) -> None:
        for connection in list(ingress._listener.server_state.connections):
            connection.transport.abort()

    @property
    def keepers(self) -> list[Keeper]:
        return [replica._keeper for replica in self.replicas]

    @property
    def num_kept(self) -> int:
        return sum(each.num_streams for each in self.keepers)

    def close(self) -> None:
        while self.ingresses:
            self.kill()
        self.run(asyncio.sleep(0.2))
        for replica in self.replicas:
            replica.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ingresses count as having been there for a while, although they have just started."""
    monkeypatch.setattr(copies, "MOVE_S", 0.0)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoIngresses]:
    found = TwoIngresses(str(tmp_path_factory.mktemp("storage")))
    yield found
    found.close()


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Streams of every API: plain, constrained, with tools, n > 1, stop strings and log-probabilities."""
    model = checkpoint("llama").name
    given = bodies(model)[:6]
    text = {"model": model, "stream": True, "temperature": 1}
    message = [{"role": "user", "content": "Count."}]
    return [
        *given,
        ("/v1/responses", {**text, "input": "Count.", "max_output_tokens": 90}),
        ("/v1/messages", {**text, "messages": message, "max_tokens": 90}),
        (
            "/v1/completions",
            {**text, "prompt": [[5, 6], [7, 8, 9]], "max_tokens": 60, "stream_options": {"include_usage": True}},
        ),
    ]


def undisturbed(two: TwoIngresses, path: str, body: dict[str, Any]) -> Stream:
    stream = Stream()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ANN}"}
    request = urllib.request.Request(f"http://127.0.0.1:{two.ports[0]}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        for line in response:
            if line.startswith(b"data: {"):
                stream.add(json.loads(line.removeprefix(b"data: ")))
    return stream


def whole(two: TwoIngresses, stream_id: str) -> bytes:
    """All events of a stream, as the last ingress writes them."""
    url = f"http://127.0.0.1:{two.ports[-1]}/v1/streams/{stream_id}"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {ANN}"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return response.read()


def test_every_byte_comes_once_despite_losses(two: TwoIngresses) -> None:
    asked = [
        (
            path,
            {**body, "seed": number}
            if path != "/v1/messages" and path != "/v1/responses"
            else {**body, "temperature": 0},
        )
        for number, (path, body) in enumerate(requests())
    ]
    expected = [undisturbed(two, path, body) for path, body in asked]
    clients = [ResumingClient(two.ports, path, body, number, ANN) for number, (path, body) in enumerate(asked)]
    killer = threading.Thread(
        target=lambda: (wait_until(lambda: all(len(c.history.events) > 8 for c in clients)), two.add(), two.kill())
    )
    killer.start()
    histories = read_all(clients, lambda chooser: chooser.randrange(1, NUM_EVENTS))
    killer.join()
    verdict = check(histories, expected)
    assert verdict.is_good, "\n".join([*verdict.lost, *verdict.twice, *verdict.different])
    assert min(history.num_connections for history in histories) > 1
    for history in histories:
        seen = b"".join(
            b"id: %s:%d\n%s" % (history.stream_id.encode(), event.number, event.content) for event in history.events
        )
        assert whole(two, history.stream_id) == seen


def ask(
    two: TwoIngresses, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers in lower case, body) from the last ingress."""
    data = None if body is None else json.dumps(body).encode()
    given = {"Content-Type": "application/json", "Authorization": f"Bearer {ANN}", **headers}
    request = urllib.request.Request(f"http://127.0.0.1:{two.ports[-1]}{path}", data, given, method=method)
    try:
        response = urllib.request.urlopen(request, timeout=PATIENCE_S)
    except urllib.error.HTTPError as error:
        response = error
    with response:
        return response.status, {key.lower(): value for key, value in response.headers.items()}, response.read()


def charged(ingresses: Sequence[ListeningIngress]) -> float:
    """Tokens that these ingresses have charged to Ann's key."""
    taken = [ingress._app.admission.rate_limits.taken() for ingress in ingresses]
    return sum(each["ann"].tokens for each in taken if "ann" in each)


def completion(**fields: Any) -> dict[str, Any]:
    return {
        "model": checkpoint("llama").name,
        "prompt": [5, 9, 17],
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **fields,
    }


def test_a_second_offer_leaves_the_only_copy(two: TwoIngresses) -> None:
    """The keeper offers an orphan to one ingress after another. The second one answers when the first one has it."""
    client = ResumingClient(two.ports[:1], "/v1/completions", completion(max_tokens=300, n=4), 0, ANN)
    client.read_once(3)
    stream_id = client.history.stream_id
    streams = two.ingresses[1].streams

    async def offer() -> None:
        for connection in list(streams.copies.connections):
            await streams._adopt(stream_id, connection)

    two.run(offer())
    two.run(offer())
    path = f"/v1/streams/{stream_id}"
    assert ask(two, "GET", path)[0] == 200
    client.read()
    assert [event.number for event in client.history.events] == list(range(len(client.history.events)))
    assert client.history.has_ended


def test_an_adopted_ended_stream_is_charged_once(two: TwoIngresses) -> None:
    client = ResumingClient(two.ports[:1], "/v1/completions", completion(max_tokens=5), 0, ANN)
    client.read()
    two.add()
    others = two.ingresses[1:]
    before = charged(others)
    assert charged(two.ingresses[:1]) >= 3 + 5
    two.kill()
    wait_until(lambda: any(client.history.stream_id in each.streams._own for each in others))
    two.run(asyncio.sleep(0))
    assert charged(others) == before
    assert ask(two, "GET", f"/v1/streams/{client.history.stream_id}")[0] == 200


def test_a_stream_is_unknown_if_all_engines_agree(two: TwoIngresses) -> None:
    """An ingress that has just started may not be connected to the engine that has the only copy."""
    replicas, path = two.ingresses[-1]._client._replicas, f"/v1/streams/strm_{'0' * 38}"
    before = dict(replicas.running)
    replicas.running["engine"] = frozenset({"one that is not connected yet"})
    try:
        assert ask(two, "GET", path)[0] == 503
    finally:
        replicas.running.clear()
        replicas.running.update(before)
    assert ask(two, "GET", path)[0] == 404


def test_only_the_key_that_asked_finds_a_stream(two: TwoIngresses) -> None:
    status, headers, body = ask(two, "POST", "/v1/completions", completion(max_tokens=5), **{"X-Resumable-S": "30"})
    stream_id = headers["x-stream-id"]
    assert (status, body.count(b"id: strm_")) == (200, 6)
    path = f"/v1/streams/{stream_id}"
    assert ask(two, "GET", path)[2] == body
    status, _, repeated = ask(two, "POST", "/v1/completions", completion(), **{"Last-Event-ID": f"{stream_id}:2"})
    assert (status, repeated) == (200, body[body.index(f"id: {stream_id}:3".encode()) :])
    as_ben = {"Authorization": f"Bearer {BEN}"}
    unknown = f"/v1/streams/strm_{'0' * 38}"
    for method in ("GET", "DELETE"):
        status, _, refusal = ask(two, method, path, **as_ben)
        assert status == 404
        assert refusal.replace(stream_id.encode(), b"strm_" + b"0" * 38) == ask(two, method, unknown, **as_ben)[2]
        assert ask(two, method, path, Authorization="Bearer nobody")[0] == 401
    assert ask(two, "GET", path)[2] == body


def test_a_stream_is_followed_only_while_read(two: TwoIngresses) -> None:
    client = ResumingClient(two.ports[:1], "/v1/completions", completion(max_tokens=400, n=8), 0, ANN)
    client.read_once(3)
    path, followed = f"/v1/streams/{client.history.stream_id}", two.ingresses[1].streams._following
    assert ask(two, "GET", path, Authorization=f"Bearer {BEN}")[0] == 404
    assert not followed, "another key's request must not keep a stream going"
    assert ask(two, "DELETE", path)[0] == 200
    assert not followed
    assert b"the stream was cancelled" in ask(two, "GET", path)[2]
    wait_until(lambda: not followed)


@pytest.mark.parametrize(
    ("value", "fields", "words"),
    [
        ("soon", {}, "'soon' must be a number of seconds from 1 to 600 (streams.max_unread_s)"),
        ("601", {}, "must be a number of seconds from 1 to 600"),
        ("0.9", {}, "must be a number of seconds from 1 to 600"),
        ("nan", {}, "must be a number of seconds"),
        ("1_0", {}, "must be a number of seconds"),
        ("5", {"stream": False}, "is only allowed with streams; send stream: true"),
    ],
)
def test_a_wrong_header_is_refused(two: TwoIngresses, value: str, fields: dict[str, Any], words: str) -> None:
    body = completion(max_tokens=2, **fields)
    status, _, answer = ask(two, "POST", "/v1/completions", body, **{"X-Resumable-S": value})
    assert status == 400
    error = json.loads(answer)["error"]
    assert (error["param"], words in error["message"]) == ("x-resumable-s", True)


def test_an_unread_stream_is_aborted_and_forgotten(two: TwoIngresses) -> None:
    wait_until(lambda: not any(ingress._client.runs for ingress in two.ingresses))
    kept, client = (
        two.num_kept,
        ResumingClient(two.ports[-1:], "/v1/completions", completion(max_tokens=400, n=8), 0, ANN),
    )
    client.unread_s = 1.0
    before = charged(two.ingresses[-1:])
    client.read_once(3)
    assert len(client.history.events) == 3
    stream_id = client.history.stream_id
    wait_until(lambda: stream_id not in two.ingresses[-1].streams._own)  # to ask for it would be to read it
    assert ask(two, "GET", f"/v1/streams/{stream_id}")[0] == 404
    assert charged(two.ingresses[-1:]) >= before + 3 + 3, "the prompt and what was read"
    wait_until(lambda: two.num_kept <= kept and two.replicas[0].engine.stats().num_running == 0)


def test_reading_a_long_stream_lets_others_run(two: TwoIngresses, monkeypatch: pytest.MonkeyPatch) -> None:
    client = ResumingClient(two.ports[-1:], "/v1/completions", completion(max_tokens=60, n=8), 0, ANN)
    client.read()
    streams, num_turns = two.ingresses[-1].streams, 0
    monkeypatch.setattr(streams, "_catching_up", TurnBudget(ENTRIES_AT_ONCE))

    async def others() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async def read_again() -> int:
        recording = streams._own[client.history.stream_id].recording
        reader, other = streams.read(recording), asyncio.ensure_future(others())
        num_events = len([event async for event in reader])
        other.cancel()
        reader.close()
        return num_events

    assert two.run(read_again()) >= 300
    assert num_turns >= 300 // ENTRIES_AT_ONCE


@pytest.mark.parametrize("how", ["cancelled", "given up"])
def test_a_cancelled_stream_takes_no_output(two: TwoIngresses, how: str) -> None:
    client = ResumingClient(two.ports[-1:], "/v1/completions", completion(max_tokens=400, n=8), 0, ANN)
    client.read_once(3)
    stream_id, engine_client = client.history.stream_id, two.ingresses[-1]._client
    streams = two.ingresses[-1].streams

    async def end_before_an_output() -> None:
        own = streams._own[stream_id]
        recording = own.recording
        num_bytes = streams.shares.held(recording.opening.client) - own.room.amount
        request_id = f"{recording.opening.generation.engine.request_id}-0"
        connection = engine_client.runs[request_id].connection
        if how == "cancelled":
            streams._cancel(own)
            num_bytes += own.room.amount
        else:
            streams.on_kept([(stream_id, recording.num_safe)], [stream_id])
        entries = [*recording.entries]
        engine_client._on_outputs([SequenceOutput(request_id, 0, [7])], connection)
        assert recording.entries == entries
        assert streams.shares.held(recording.opening.client) == num_bytes
        streams.copies.drop(stream_id, own.epoch)

    two.run(end_before_an_output())


def test_a_client_with_too_many_recordings_is_refused(two: TwoIngresses) -> None:
    body, answers = completion(prompt=[7] * 200, max_tokens=1), []
    for _ in range(300):
        answers.append(ask(two, "POST", "/v1/completions", body, **{"X-Resumable-S": "3"}))
        if answers[-1][0] != 200:
            break
    status, _, answer = answers[-1]
    assert (status, json.loads(answer)["error"]["code"]) == (429, "too_many_streams"), len(answers)
    assert "streams.max_client_bytes" in json.loads(answer)["error"]["message"]
    assert ask(two, "POST", "/v1/completions", completion(max_tokens=1))[0] == 200
    wait_until(lambda: two.ingresses[-1].streams.shares.total < two.config.streams.max_client_bytes // 2)
    assert ask(two, "POST", "/v1/completions", body, **{"X-Resumable-S": "1"})[0] == 200


def test_a_deleted_stream_ends_and_says_so(two: TwoIngresses) -> None:
    client = ResumingClient(two.ports[-1:], "/v1/completions", completion(max_tokens=400, n=8), 0, ANN)
    client.read_once(3)
    path = f"/v1/streams/{client.history.stream_id}"
    assert json.loads(ask(two, "DELETE", path)[2])["deleted"]
    assert b"the stream was cancelled" in ask(two, "GET", path)[2]


def test_an_orphan_that_is_deleted_ends(two: TwoIngresses, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper has no owner to tell, and would offer the stream only later."""
    monkeypatch.setattr(keeper, "GRACE_S", 5.0)
    for each in two.keepers:
        monkeypatch.setattr(each, "_has_died", keeper._nobody_knows)
    client = ResumingClient(two.ports[:1], "/v1/completions", completion(max_tokens=400, n=8), 0, ANN)
    client.read_once(3)
    two.add()
    two.kill()
    stream_id = client.history.stream_id
    copies = [copy for each in two.keepers if (copy := each._streams.get(stream_id)) is not None]
    wait_until(lambda: all(copy.owner is None for copy in copies))
    path = f"/v1/streams/{stream_id}"
    assert json.loads(ask(two, "DELETE", path)[2])["deleted"]
    assert b"the stream was cancelled" in ask(two, "GET", path)[2]


def test_an_unanswered_delete_is_not_called_done(two: TwoIngresses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CANCEL_S", 0.2)
    monkeypatch.setattr(two.ingresses[0].streams, "_cancel", lambda own: None)
    client = ResumingClient(two.ports[:1], "/v1/completions", completion(max_tokens=400, n=32), 0, ANN)
    client.read_once(3)
    assert ask(two, "DELETE", f"/v1/streams/{client.history.stream_id}")[0] == 503


def test_a_failing_recorder_ends_its_stream(
    two: TwoIngresses, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(recorder: Recorder) -> None:
        raise RuntimeError("a broken recorder")

    monkeypatch.setattr(Recorder, "_take", broken)
    status, _, answer = ask(two, "POST", "/v1/completions", completion(), **{"X-Resumable-S": "30"})
    assert (status, b"a broken recorder" in answer) == (500, True)
    assert "RuntimeError: a broken recorder" in caplog.text


def test_an_adopted_stream_ends_with_its_failure(
    two: TwoIngresses, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = ResumingClient(two.ports[:1], "/v1/completions", completion(max_tokens=400, n=8), 0, ANN)
    client.read_once(3)
    two.add()

    def broken(*_: Any) -> Recorder:
        raise RuntimeError("a broken start")

    monkeypatch.setattr(streams, "Recorder", broken)
    two.kill()
    assert b"a broken start" in whole(two, client.history.stream_id)
    assert "RuntimeError: a broken start" in caplog.text


def test_background_responses_survive_their_ingress(two: TwoIngresses) -> None:
    if len(two.ingresses) < 2:
        two.add()
    first, last = (
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=ANN, max_retries=0)
        for port in (two.ports[0], two.ports[-1])
    )
    given: Any = {"model": checkpoint("llama").name, "input": "Count.", "temperature": 0, "max_output_tokens": 300}
    expected = last.responses.create(**given)
    begun = [first.responses.create(background=True, **given) for _ in range(8)]
    first.responses.delete(begun.pop().id)
    cancelled = last.responses.cancel(begun.pop().id)
    assert cancelled.status in ("cancelled", expected.status)
    assert first.responses.retrieve(cancelled.id).status == cancelled.status
    live = [event.sequence_number for event in last.responses.retrieve(begun[0].id, stream=True, starting_after=3)]
    assert live == list(range(4, 4 + len(live)))
    begun += [first.responses.create(background=True, **given) for _ in range(8)]
    two.kill()
    for each in begun:
        wait_until(lambda each=each: last.responses.retrieve(each.id).status == expected.status)  # type: ignore[misc]
        found = last.responses.retrieve(each.id)
        assert (found.output_text, found.usage.total_tokens) == (expected.output_text, expected.usage.total_tokens)


def test_the_three_apis_carry_the_same_tokens(two: TwoIngresses) -> None:
    """The APIs of responses and messages have no seed, so that the tokens are those of temperature 0."""
    shared = {"model": checkpoint("llama").name, "temperature": 0}
    messages = [{"role": "user", "content": "Count."}]
    bodies_of = {
        "/v1/chat/completions": {**shared, "messages": messages, "max_tokens": 24},
        "/v1/responses": {**shared, "input": "Count.", "max_output_tokens": 24},
        "/v1/messages": {**shared, "messages": messages, "max_tokens": 24},
    }
    texts, numbers = set(), set()
    for path, body in bodies_of.items():
        whole_answer = json.loads(ask(two, "POST", path, body)[2])
        usage = {"stream_options": {"include_usage": True}} if path.endswith("completions") else {}
        stream = undisturbed(two, path, {**body, "stream": True, **usage})
        texts |= {_text_of(whole_answer), stream.texts[0]}
        numbers |= {stream.num_tokens, _num_tokens_of(whole_answer["usage"])}
    assert len(texts) == len(numbers) == 1, (texts, numbers)


def _text_of(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"]
    (item,) = answer.get("output") or [answer]
    return item["content"][0]["text"]


def _num_tokens_of(usage: dict[str, Any]) -> int:
    return usage.get("completion_tokens") or usage["output_tokens"]
