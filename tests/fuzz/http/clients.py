"""Clients, good and hostile, and what each does: one action after the other, drawn from the client's own seed.

An action raises where the server did something that it must not do; `campaign.py` then shows the connection's
transcript. Actions that give the server a reason to close the connection say so by `suppress(Closed)`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from tests.documented import Document, check_error
from tests.fuzz.http import bodies, extremes, forms, shapes, sockets
from tests.fuzz.http.connection import Answer, Closed, Connection, chunked, connect, encoded, request
from tests.fuzz.http.good import CATALOGUE, COMPLETIONS, Good, essence

HUGE_BYTES = 9 * 2**20
"""Length of a body above the default `max_body_bytes`."""
GARBAGE = (
    b"\r\n\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: many\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab\r\n0\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x00" * 300,
)
PATHS = ("/", "/v1", "/v1/models/%00", "/v1/models/" + "x" * 2000, "/health/", "/metrics?a=%ff", "/../etc")
METHODS = ("GET", "PUT", "DELETE", "OPTIONS", "PATCH", "POST")
FILES = "/v1/files"
FORWARDING = ("x_forwarded_for", "x_real_ip", "forwarded", "x_forwarded_proto", "x_forwarded_host")
ADDRESSES = (
    "10.1.2.3",
    "10.1.2.3, 192.0.2.1",
    "2001:db8::1",
    "unknown",
    "for=192.0.2.60;proto=http",
    "x" * 900,
    "\t",
    "1",
)
HOSTS = (
    ("localhost", True),
    ("LOCALHOST:8000", True),
    ("127.0.0.1:1", True),
    ("127.9.9.9", True),
    ("[::1]:8000", True),
    ("a.localhost", True),
    ("evil.example", False),
    ("localhost.evil.example", False),
    ("127.0.0.1.evil.example:8000", False),
    ("192.0.2.1", False),
    ("evil.example#localhost", False),
    ("localhost@evil.example", False),
)
"""Values of the Host header, and whether each is a loopback name."""
STAGES = ("before", "in the head", "after the head", "in the body", "after the body", "in the answer", "in the stream")


class World:
    """What all clients share: the server, what it documents, and how it answers alone."""

    def __init__(self, port: int, model: str, seed: int, num_examples: int) -> None:
        self.port = port
        self.model = model
        self.seed = seed
        self._num_examples = num_examples
        self.alone: dict[int, Any] = {}
        """The essence of each of `CATALOGUE`."""
        self.counts: collections.Counter[str] = collections.Counter()
        self.drawn: list[tuple[str, Any]] = []
        found = list(shapes.cases(model))
        random.Random(seed).shuffle(found)
        self.shapes = itertools.cycle(found)
        """What `send_shapes` sends, in an order that follows from the seed."""
        self.document: Document

    async def prepare(self) -> None:
        """Asks everything alone. Raises `AssertionError` if the server does not answer that."""
        connection = await connect(self.port, [])
        await connection.send(request("/openapi.json", b"", "GET"))
        self.document = Document(json.loads((await connection.answer()).body))
        for number, good in enumerate(CATALOGUE):
            await connection.send(request(good.path, good.body(self.model)))
            try:
                self.alone[number] = essence(await connection.answer())
            except TimeoutError as error:
                raise AssertionError(f"{good} has no answer alone; {await self._metrics()}") from error
        connection.close()
        self.drawn = await asyncio.to_thread(bodies.drawn, self.document.content, self.seed, self._num_examples)

    async def _metrics(self) -> str:
        """Returns what the server says of itself, over another connection."""
        connection = await connect(self.port, [])
        await connection.send(request("/metrics", b"", "GET"))
        lines = (await connection.answer()).body.decode().splitlines()
        connection.close()
        return "\n".join(line for line in lines if not line.startswith("#") and "_bucket" not in line)

    def check(self, path: str, answer: Answer) -> None:
        """Whether an answer may come from that path at all. Raises `AssertionError` or `jsonschema.ValidationError`."""
        self.counts[f"answers {answer.status}"] += 1
        assert answer.status < 500, f"{path} answers {answer.status}: {answer.body[:500]!r}"
        name = self.document.path_of(path.partition("?")[0].rstrip("/") or "/")
        if name is not None:
            self.document.check(name, answer.status, answer.content_type, answer.body)
        else:
            assert answer.status == 404, f"{path} answers {answer.status}"
            check_error(answer.body)
        if answer.content_type.startswith("text/event-stream"):
            check_events(answer.body)


LAST_EVENTS = ("[DONE]", "message_stop", "response.completed", "response.incomplete", "response.failed")


def check_events(body: bytes) -> None:
    """A stream ends with its API's last event, or with an error that is no failure of the server."""
    events = [event.rpartition(b"data: ")[2] for event in body.split(b"\n\n") if event]
    last = json.loads(events[-1]) if events[-1] != b"[DONE]" else {"type": "[DONE]"}
    has_ended = last.get("type") in LAST_EVENTS
    assert has_ended or last["error"]["type"] not in ("server_error", "api_error"), (
        f"the stream ends with {body[-500:]!r}"
    )


class Client:
    """Number `number` of a campaign. `transcript` is what the action under way has sent and received."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.num_actions = 0
        self.action = ""
        self.transcript: list[str] = []
        self._random = random.Random(f"{world.seed} {number}")

    async def act(self) -> None:
        """The next action. Raises what it found."""
        names, weights = zip(*ACTIONS.items(), strict=True)
        (self.action,) = self._random.choices(names, weights)
        self.num_actions += 1
        self.transcript = []
        self.world.counts[self.action] += 1
        act: Callable[[], Awaitable[None]] = getattr(self, self.action)
        await act()

    # ---- tools ---------------------------------------------------------------------------------------------------

    def _good(self, streams: bool = False) -> tuple[int, Good]:
        found = [(number, good) for number, good in enumerate(CATALOGUE) if good.streams or not streams]
        return self._random.choice(found)

    def _check_good(self, number: int, answer: Answer) -> None:
        """As it was alone."""
        self.world.check(CATALOGUE[number].path, answer)
        found, expected = essence(answer), self.world.alone[number]
        assert found == expected, f"alone the answer was {expected}, now it is {found}"
        self.world.counts["equal answers"] += 1

    @contextlib.asynccontextmanager
    async def _connected(self, slow: bool = False) -> AsyncIterator[Connection]:
        connection = await connect(self.world.port, self.transcript, slow)
        try:
            yield connection
        finally:
            connection.close()

    async def _ask(self, path: str, body: bytes, method: str = "POST") -> None:
        """Anything that has to be answered somehow."""
        async with self._connected() as connection:
            await connection.send(request(path, body, method))
            self.world.check(path, await connection.answer())

    def _pieces(self, data: bytes) -> list[bytes]:
        cuts = sorted(self._random.randrange(len(data) + 1) for _ in range(self._random.randint(0, 6)))
        return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    # ---- good clients --------------------------------------------------------------------------------------------

    async def whole(self) -> None:
        number, good = self._good()
        async with self._connected() as connection:
            await connection.send(request(good.path, good.body(self.world.model)))
            self._check_good(number, await connection.answer())

    async def streamed(self) -> None:
        number, good = self._good(streams=True)
        async with self._connected() as connection:
            await connection.send(request(good.path, good.body(self.world.model, stream=True)))
            self._check_good(number, await connection.answer())

    async def read_slowly(self) -> None:
        number, good = self._good(streams=True)
        async with self._connected(slow=True) as connection:
            await connection.send(request(good.path, good.body(self.world.model, stream=True)))
            await asyncio.sleep(self._random.choice((0, 0.5)))
            self._check_good(number, await connection.answer(pause_s=self._random.choice((0.001, 0.01, 0.02))))

    async def send_in_pieces(self) -> None:
        number, good = self._good()
        data = request(good.path, good.body(self.world.model))
        async with self._connected() as connection:
            await connection.send_slowly(data, self._random.choice((1, 3, 50)))
            self._check_good(number, await connection.answer())

    async def send_chunks(self) -> None:
        number, good = self._good()
        async with self._connected() as connection:
            await connection.send(chunked(good.path, self._pieces(good.body(self.world.model))))
            self._check_good(number, await connection.answer())

    async def ask_in_turn(self) -> None:
        """Good requests and bad ones on one connection."""
        async with self._connected() as connection:
            for _ in range(self._random.randint(2, 4)):
                number, good = self._good()
                await connection.send(request(good.path, good.body(self.world.model)))
                self._check_good(number, await connection.answer())
                await connection.send(request(good.path, self._random.choice(bodies.NO_JSON)))
                self.world.check(good.path, await connection.answer())

    async def ask_ahead(self) -> None:
        """All requests before the first answer, which come in order."""
        asked = [self._good() for _ in range(self._random.randint(2, 6))]
        streamed = [good.streams and self._random.random() < 0.5 for _, good in asked]
        wrong = self._random.randrange(len(asked))
        data = b""
        for place, (_, good) in enumerate(asked):
            body = b"{" if place == wrong else good.body(self.world.model, streamed[place])
            data += request(good.path, body)
        async with self._connected() as connection:
            await connection.send(data)
            for place, (number, good) in enumerate(asked):
                answer = await connection.answer()
                if place == wrong:
                    assert answer.status == 400, answer
                    self.world.check(good.path, answer)
                else:
                    self._check_good(number, answer)

    async def look_around(self) -> None:
        for path in ("/health", "/metrics", "/v1/models", f"/v1/models/{self.world.model}", "/openapi.json"):
            async with self._connected() as connection:
                await connection.send(request(path, b"", "GET"))
                answer = await connection.answer()
            self.world.check(path, answer)
            assert answer.status == 200, f"{path} answers {answer.status}: {answer.body[:500]!r}"

    # ---- wrong bodies --------------------------------------------------------------------------------------------

    async def send_no_json(self) -> None:
        _, good = self._good()
        await self._ask(good.path, self._random.choice(bodies.NO_JSON))

    async def send_wrong_values(self) -> None:
        _, good = self._good()
        fields = {"model": self.world.model, **good.fields}
        if good.streams and self._random.random() < 0.3:
            fields["stream"] = True
        await self._ask(good.path, bodies.changed(fields, self._random))

    async def send_what_is_drawn(self) -> None:
        path, body = self._random.choice(self.world.drawn)
        await self._ask(path, encoded(bodies.tamed(path, body, self.world.model)))

    async def send_shapes(self) -> None:
        """The next body of all that the types of the routes give, whichever client it is."""
        case = next(self.world.shapes)
        body = encoded(shapes.short(case))
        if not case.path.startswith("ws:"):
            await self._ask(case.path, body)
            return
        status = sockets.status_of(await sockets.last_event(self.world.port, body, self.transcript))
        self.world.counts[f"last events {status}"] += 1
        assert status < 500, f"{case} ends with {status}"

    async def send_frames(self) -> None:
        await sockets.send_frames(self.world.port, self._random, self.transcript)

    async def send_extremes(self) -> None:
        path, body = extremes.drawn(self.world.document.content, self.world.model, self._random)
        await self._ask(path, body)

    # ---- uploads, hosts and proxies ------------------------------------------------------------------------------

    async def upload(self) -> None:
        """A file is stored as it was sent, unless there are too many, and is removed again."""
        form = forms.good(self._random)
        async with self._connected() as connection:
            await connection.send(request(FILES, form.body, content_type=form.content_type))
            answer = await connection.answer()
            self.world.check(FILES, answer)
            if answer.status != 200:
                assert answer.status in (400, 404), f"an upload is answered {answer.status}: {answer.body[:500]!r}"
                return
            path = f"{FILES}/{json.loads(answer.body)['id']}"
            await connection.send(request(f"{path}/content", b"", "GET"))
            stored = await connection.answer()
            assert (stored.status, stored.body) == (200, form.content), "the file is not what was sent"
            await connection.send(request(path, b"", "DELETE"))
            self.world.check(path, await connection.answer())
        self.world.counts["equal files"] += 1

    async def send_form(self) -> None:
        form = forms.drawn(self._random)
        async with self._connected() as connection:
            await connection.send(request(FILES, form.body, content_type=form.content_type))
            answer = await connection.answer()
            self.world.check(FILES, answer)
            if answer.status == 200:
                await connection.send(request(f"{FILES}/{json.loads(answer.body)['id']}", b"", "DELETE"))
                self.world.check(f"{FILES}/x", await connection.answer())

    async def leave_an_upload(self) -> None:
        form = forms.good(self._random)
        data = request(FILES, form.body, content_type=form.content_type)
        await self._break_off(data, self._random.randrange(len(data)))

    async def claim_an_address(self) -> None:
        """Whatever a client says of itself, it gets its answer."""
        number, good = self._good()
        headers = {name: self._random.choice(ADDRESSES) for name in FORWARDING if self._random.random() < 0.7}
        async with self._connected() as connection:
            await connection.send(request(good.path, good.body(self.world.model), **headers))
            self._check_good(number, await connection.answer())

    async def name_a_host(self) -> None:
        """A server without keys on a loopback address answers to loopback names only."""
        number, good = self._good()
        host, is_own = self._random.choice(HOSTS)
        async with self._connected() as connection:
            await connection.send(request(good.path, good.body(self.world.model), host=host))
            answer = await connection.answer()
        if is_own:
            self._check_good(number, answer)
        else:
            self.world.check(good.path, answer)
            assert answer.status in (400, 403), f"Host {host!r} is answered {answer.status}"

    async def send_too_much(self) -> None:
        _, good = self._good()
        await self._ask(good.path, b'{"prompt": "' + b" " * HUGE_BYTES + b'"}')

    async def go_astray(self) -> None:
        path = self._random.choice((*PATHS, COMPLETIONS, "/tokenize", "/openapi.json"))
        await self._ask(path, b"{}", self._random.choice(METHODS))

    # ---- wrong connections ---------------------------------------------------------------------------------------

    async def close_half(self) -> None:
        """The server takes it for a client that left, and ends the connection."""
        _, good = self._good(streams=True)
        async with self._connected() as connection:
            await connection.send(request(good.path, good.body(self.world.model, self._random.random() < 0.5)))
            await asyncio.sleep(self._random.choice((0, 0.01, 0.1)))
            connection.half_close()
            self._check_is_no_failure(await connection.rest())

    async def send_garbage(self) -> None:
        async with self._connected() as connection:
            with contextlib.suppress(Closed):
                await connection.send(self._random.choice(GARBAGE))
            connection.half_close()
            self._check_is_no_failure(await connection.rest())

    async def break_chunks_off(self) -> None:
        _, good = self._good()
        data = chunked(good.path, self._pieces(good.body(self.world.model)))
        await self._break_off(data, self._random.randrange(len(data) - 1))

    async def send_less_than_announced(self) -> None:
        _, good = self._good()
        body = good.body(self.world.model)
        await self._break_off(request(good.path, body, content_length=len(body) + self._random.randint(1, 5000)))

    async def send_more_than_announced(self) -> None:
        """The rest is no request."""
        _, good = self._good()
        body = good.body(self.world.model)
        await self._break_off(request(good.path, body, content_length=self._random.randrange(len(body))))

    async def _break_off(self, data: bytes, length: int | None = None) -> None:
        async with self._connected() as connection:
            with contextlib.suppress(Closed):
                await connection.send(data[:length])
            if self._random.random() < 0.5:
                connection.leave()
                return
            connection.half_close()
            self._check_is_no_failure(await connection.rest())

    def _check_is_no_failure(self, received: bytes) -> None:
        """Whatever came before the connection ended, if anything."""
        for part in received.split(b"HTTP/1.1 ")[1:]:
            self.world.counts[f"answers {part[:3].decode()}"] += 1
            assert part[:1] in b"24", f"the server answers {part[:500]!r}"

    async def leave(self) -> None:
        """At some stage, by a reset."""
        self.world.counts["disconnects"] += 1
        stage = self._random.choice(STAGES)
        _, good = self._good(streams=True)
        body = good.body(self.world.model, stream=stage == "in the stream")
        data = request(good.path, body)
        head = len(data) - len(body)
        ends = {"before": 0, "in the head": self._random.randrange(head), "after the head": head}
        ends["in the body"] = head + self._random.randrange(len(body))
        async with self._connected(slow=stage.startswith("in the ")) as connection:
            await self._leave_at(connection, stage, data[: ends.get(stage, len(data))])

    async def _leave_at(self, connection: Connection, stage: str, data: bytes) -> None:
        await connection.send(data)
        await asyncio.sleep(self._random.choice((0, 0, 0.02, 0.2)))
        if stage in ("in the answer", "in the stream"):
            await connection.some(self._random.choice((1, 10, 300, 2000)))
        connection.leave()

    async def crowd_and_leave(self) -> None:
        """Many at once."""
        await asyncio.gather(*(self.leave() for _ in range(self._random.randint(5, 20))))


ACTIONS = {
    "whole": 20,
    "streamed": 20,
    "read_slowly": 6,
    "send_in_pieces": 6,
    "send_chunks": 6,
    "ask_in_turn": 4,
    "ask_ahead": 6,
    "look_around": 3,
    "send_no_json": 6,
    "send_wrong_values": 40,
    "send_what_is_drawn": 40,
    "send_extremes": 60,
    "send_shapes": 60,
    "send_frames": 4,
    "upload": 12,
    "send_form": 30,
    "leave_an_upload": 6,
    "claim_an_address": 10,
    "name_a_host": 10,
    "send_too_much": 0.3,
    "go_astray": 6,
    "close_half": 8,
    "send_garbage": 6,
    "break_chunks_off": 6,
    "send_less_than_announced": 5,
    "send_more_than_announced": 5,
    "leave": 16,
    "crowd_and_leave": 3,
}
"""Methods of a client, and how often."""
