"""`/v1/files` and `/v1/batches` by OpenAI's own client: the real application, runner and storage in this process, with
engines that repeat one text. `tests/batch/test_batch_cluster.py` kills a server over a batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import httpx2
import openai
import pytest

from manta.cluster.batch import batch_run, stored
from manta.cluster.batch import batch_runner as runner_module
from manta.cluster.batch.batch_runner import Runner
from manta.cluster.batch.line_endpoints import Endpoints
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.http.app import HttpApp
from manta.cluster.http.endpoints.files import PARSED_BYTES
from manta.cluster.http.exchange.engines import Event, GenerationRequest
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.uploads import UploadParser
from manta.cluster.serve_limits import BatchLimits
from manta.cluster.storage.local_files import PARTIAL_FOLDER
from manta.cluster.storage.records import Records
from manta.cluster.storage.retention import remove_expired
from manta.cluster.storage.storage import Storage, check_storage, with_storage
from manta.cluster.text.tokenizer import Tokenizer
from tests.batch.test_batch import line
from tests.http.test_routes import Repeating, RepeatingEngines
from tests.patience import PATIENCE_S

KEYS = ("one:0123456789abcdef", "two:fedcba9876543210")
TOKENIZER = Tokenizer("demo")


class Held(Repeating):
    """Answers while the gate is open."""

    gate: asyncio.Event

    async def __aiter__(self) -> AsyncIterator[Event]:
        await self.gate.wait()
        async for event in super().__aiter__():
            yield event


class HeldEngines(RepeatingEngines):
    """They note whose each prompt is, and answer while `gate` is open, after `num_free` answers for nothing."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        """(client, first token of the prompt)."""
        self.gate = asyncio.Event()
        self.num_free = 0

    async def submit(self, request: GenerationRequest, meter: Any = None) -> Repeating:
        self.asked.append((request.engine.client, request.prompts[0][0]))
        if len(self.asked) <= self.num_free:
            return Repeating(request.prompts, "abc")
        held = Held(request.prompts, "abc")
        held.gate = self.gate
        return held


class CountedPlaces(asyncio.Semaphore):
    """Places that say how many lines wait for one."""

    num_waiting = 0

    async def acquire(self) -> Literal[True]:
        self.num_waiting += 1
        try:
            return await super().acquire()
        finally:
            self.num_waiting -= 1


class Service:
    """A server without sockets: `restart` is what a kill and a new start come to."""

    def __init__(self, storage: str, **limits: Any) -> None:
        self.config = ServeConfig(
            engine=EngineConfig(model="demo"), batch_storage=storage, batches=BatchLimits(**limits), api_keys=KEYS
        )
        self.engines = HeldEngines()
        self.app = HttpApp(self.config, TOKENIZER, self.engines, Metrics("demo"))
        self._start()

    def _start(self) -> None:
        inside = ServeConfig(engine=EngineConfig(model="demo"), log_requests=False)
        endpoints = Endpoints(inside, TOKENIZER, self.engines, Metrics("demo"))
        records = Records(Storage(self.config.batch_storage or ""), self.config.batches)
        self.places = CountedPlaces(self.config.batches.max_in_flight or 4)
        self.runner = Runner(records, endpoints.answer, self.places, 4096)
        self._serving = asyncio.create_task(self.runner.serve())

    async def restart(self) -> None:
        await self.stop()
        self._start()

    async def stop(self) -> None:
        self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving

    def client(self, key: str = KEYS[0]) -> openai.AsyncOpenAI:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app), trust_env=False)
        options: Any = {"base_url": "http://localhost/v1", "api_key": key.partition(":")[2], "max_retries": 0}
        return openai.AsyncOpenAI(http_client=http, **options)

    async def raw(self, method: str, path: str, **options: Any) -> httpx2.Response:
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(self.app), base_url="http://localhost", trust_env=False
        ) as client:
            headers = {"authorization": f"Bearer {KEYS[0].partition(':')[2]}", **options.pop("headers", {})}
            return await client.request(method, path, headers=headers, **options)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the next look."""
    monkeypatch.setattr(runner_module, "LOOK_S", 0.01)
    monkeypatch.setattr(batch_run, "FLUSH_CHECK_S", 0.01)
    monkeypatch.setattr(stored, "FLUSH_S", 0.01)


@contextlib.asynccontextmanager
async def serving(storage: str, **limits: Any) -> AsyncIterator[Service]:
    service = Service(storage, **limits)
    try:
        yield service
    finally:
        await service.stop()


def requests(count: int, *others: dict | str) -> bytes:
    lines = [line(number, model="demo", prompt=[number + 5]) for number in range(count)]
    return "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in (*lines, *others)).encode()


async def started(client: openai.AsyncOpenAI, content: bytes, window: Any = "24h") -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window=window, metadata={"for": "a test"}
    )


async def ended(client: openai.AsyncOpenAI, batch: Any) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def completed(client: openai.AsyncOpenAI, batch: Any, count: int) -> None:
    """Until so many answers are stored."""
    async with asyncio.timeout(PATIENCE_S):
        while (await client.batches.retrieve(batch.id)).request_counts.completed < count:
            await asyncio.sleep(0.01)


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict]:
    if file_id is None:
        return []
    return [json.loads(text) for text in (await client.files.content(file_id)).text.splitlines()]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("form", ["folder", "file://", "memory://"])
def test_openais_client_runs_a_batch(form: str, tmp_path: pathlib.Path) -> None:
    storage = {"folder": str(tmp_path), "file://": f"file://{tmp_path}", "memory://": "memory://openais_client"}[form]

    async def main() -> None:
        async with serving(storage) as service:
            service.engines.gate.set()
            client = service.client()
            content = requests(9, "nonsense", {**line(99), "url": "/v1/chat/completions"}, line(98, model="other"))
            batch = await started(client, content)
            assert (batch.status, batch.metadata) == ("validating", {"for": "a test"})
            batch = await ended(client, batch)
            counts = batch.request_counts
            assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 12, 9, 3)
            good, bad = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
            assert sorted(each["custom_id"] for each in good) == [f"request-{number}" for number in range(9)]
            assert {each["response"]["body"]["choices"][0]["text"] for each in good} == {"abcabc"}
            found = {each["custom_id"]: each["error"] or each["response"]["status_code"] for each in bad}
            assert found.keys() == {None, "request-99", "request-98"}
            assert found["request-98"] == 404
            assert "is not the batch's endpoint" in found["request-99"]["message"]

            listed = [file async for file in client.files.list()]
            assert {file.id for file in listed} == {batch.input_file_id, batch.output_file_id, batch.error_file_id}
            assert (await client.files.content(batch.input_file_id)).content == content
            assert (await client.files.retrieve(batch.input_file_id)).bytes == len(content)
            assert [each.id async for each in client.batches.list()] == [batch.id]
            assert (await client.files.delete(batch.input_file_id)).deleted
            with pytest.raises(openai.NotFoundError):
                await client.files.content(batch.input_file_id)
            records = Records(Storage(storage), service.config.batches)
            assert not records.open_batches()

    asyncio.run(main())


def test_a_killed_server_neither_loses_nor_repeats_lines(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with serving(str(tmp_path), max_in_flight=2) as service:
            client, engines = service.client(), service.engines
            engines.num_free = 10
            batch = await started(client, requests(30))
            for kill in range(3):
                expected = 10 * (kill + 1)
                await completed(client, batch, expected)
                asked = len(engines.asked)
                engines.num_free = asked + 10
                await service.restart()
            engines.gate.set()
            batch = await ended(client, batch)
            good = await lines_of(client, batch.output_file_id)
            assert sorted(each["custom_id"] for each in good) == sorted(f"request-{number}" for number in range(30))
            assert batch.request_counts.completed == 30
            # What was under way at a kill, and nothing else, was asked again.
            times = Counter(token for _, token in engines.asked)
            assert len(times) == 30
            assert sum(times.values()) <= 30 + 3 * 2

    asyncio.run(main())


def test_a_cancelled_batch_keeps_what_it_has(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            client = service.client()
            service.engines.num_free = 5
            running, waiting = await started(client, requests(20)), await started(client, requests(3))
            await until(lambda: len(service.engines.asked) >= 9)
            for batch, answered, given_up in ((waiting, 0, 3), (running, 5, 15)):
                assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
                batch = await ended(client, batch)
                assert batch.status == "cancelled"
                assert len(await lines_of(client, batch.output_file_id)) == answered
                codes = [each["error"]["code"] for each in await lines_of(client, batch.error_file_id)]
                assert codes == ["batch_cancelled"] * given_up
                with pytest.raises(openai.ConflictError, match="has ended"):
                    await client.batches.cancel(batch.id)

    asyncio.run(main())


def test_a_batch_whose_time_is_over_expires(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            client = service.client()
            service.engines.num_free = 5
            batch = await started(client, requests(20), "1m")
            await completed(client, batch, 5)
            await service.stop()
            now = runner_module.time.time
            monkeypatch.setattr(runner_module.time, "time", lambda: now() + 61)
            service._start()
            batch = await ended(client, batch)
            assert (batch.status, batch.request_counts.failed) == ("expired", 15)
            assert {each["error"]["code"] for each in await lines_of(client, batch.error_file_id)} == {"batch_expired"}

    asyncio.run(main())


def test_an_input_without_a_line_fails(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            client = service.client()
            batch = await ended(client, await started(client, b"\n \n"))
            assert batch.status == "failed"
            assert "holds no line" in batch.errors.data[0].message

    asyncio.run(main())


def test_clients_see_only_their_own_and_take_turns(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with serving(str(tmp_path), max_in_flight=1) as service:
            one, two = service.client(KEYS[0]), service.client(KEYS[1])
            first = await started(one, requests(40))
            await until(lambda: len(service.engines.asked) == 1)
            second = await started(two, requests(3))
            await until(lambda: service.places.num_waiting == 2)  # each has its next line at hand
            service.engines.gate.set()
            await ended(two, second)
            await ended(one, first)
            names = [client for client, _ in service.engines.asked[:7]]
            assert [name == names[0] for name in names] == [True, True, False, True, False, True, False]
            for call in (
                two.files.retrieve(first.input_file_id),
                two.files.content(first.input_file_id),
                two.files.delete(first.input_file_id),
                two.batches.retrieve(first.id),
                two.batches.cancel(first.id),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call
            with pytest.raises(openai.BadRequestError, match="none of your files"):
                await two.batches.create(
                    input_file_id=first.input_file_id, endpoint="/v1/completions", completion_window="24h"
                )
            assert [each.id async for each in two.batches.list()] == [second.id]
            assert first.input_file_id not in [file.id async for file in two.files.list()]

    asyncio.run(main())


def test_what_a_client_may_keep_is_bounded(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with serving(str(tmp_path), max_file_bytes=100_000, max_files=3, max_open_batches=1) as service:
            client = service.client()
            with pytest.raises(openai.APIStatusError, match=r"raise batches\.max_file_bytes") as caught:
                await client.files.create(file=("in.jsonl", b"x" * 400_000), purpose="batch")
            assert caught.value.status_code == 413
            assert not [path for path in (tmp_path / "files").rglob("*") if path.is_file()]
            await started(client, requests(3))
            file = await client.files.create(file=("in.jsonl", requests(3)), purpose="batch")
            with pytest.raises(openai.BadRequestError, match="wait for some, or cancel them"):
                await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            await client.files.create(file=("in.jsonl", b""), purpose="batch")
            with pytest.raises(openai.BadRequestError, match="3 files are kept for you"):
                await client.files.create(file=("in.jsonl", b""), purpose="batch")
            assert (tmp_path / "files").stat().st_mode & 0o077 == 0

    asyncio.run(main())


def test_old_files_and_batches_are_removed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            service.engines.gate.set()
            client = service.client()
            batch = await ended(client, await started(client, requests(3)))
            records = Records(Storage(str(tmp_path)), service.config.batches)
            await asyncio.to_thread(remove_expired, records)
            assert len([file async for file in client.files.list()]) == 2
            now = runner_module.time.time
            monkeypatch.setattr(runner_module.time, "time", lambda: now() + 31 * 86_400)
            with pytest.raises(openai.NotFoundError):
                await client.files.retrieve(batch.input_file_id)
            await asyncio.to_thread(remove_expired, records)
            assert not [path for path in tmp_path.rglob("*") if path.is_file()]

    asyncio.run(main())


BATCH = {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"completion_windows": 1}, "completion_windows"),
        ({}, "input_file_id"),
        ({"input_file_id": "../../secret"}, "input_file_id"),
    ],
)
def test_a_wrong_batch_is_refused(change: dict, param: str, tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            answer = await service.raw("POST", "/v1/batches", json={**BATCH, **change})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    asyncio.run(main())


FORM = b'--b\r\ncontent-disposition: form-data; name="file"; filename="C:\\a\\x.jsonl"\r\n\r\n1\n\r\n--b\r\n'
PURPOSE = b'content-disposition: form-data; name="purpose"\r\n\r\n%s\r\n--b--\r\n'


@pytest.mark.parametrize(
    ("content_type", "body", "message"),
    [
        ("application/json", b"{}", "is not valid multipart/form-data"),
        ("multipart/form-data", b"", "is not valid multipart/form-data"),
        ("multipart/form-data; boundary=b", b"", "is not valid multipart/form-data"),
        ("multipart/form-data; boundary=b", b"nonsense", "is not valid multipart/form-data"),
        ("multipart/form-data; boundary=b", FORM, "is not valid multipart/form-data"),
        ("multipart/form-data; boundary=b", b"--b\r\n" + PURPOSE % b"batch", "file is missing"),
        ("multipart/form-data; boundary=b", FORM + PURPOSE % b"vision", "purpose 'vision' is not supported"),
        (
            "multipart/form-data; boundary=b",
            FORM + PURPOSE % (b"x" * 2000),
            "the limit is 1024; shorten",
        ),
        (
            "multipart/form-data; boundary=b",
            FORM + FORM[5:] + PURPOSE % b"batch",
            "upload one at a time",
        ),
        ("multipart/form-data; boundary=b", FORM + (PURPOSE[:-4] % b"batch" + b"\r\n") * 17, "the limit is 16; send"),
        ("multipart/form-data; boundary=b", b"--b\r\nx-long: " + b"x" * 4096, "the limit is 4096; shorten"),
        ("multipart/form-data; boundary=b", b"--b\r\n" + b"x: y\r\n" * 10_000, "Maximum header count"),
    ],
)
def test_a_wrong_upload_is_refused(content_type: str, body: bytes, message: str, tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            headers = {"content-type": content_type}
            answer = await service.raw("POST", "/v1/files", content=body, headers=headers)
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]
            assert not [path for path in (tmp_path / "files").rglob("*") if path.is_file()]

    asyncio.run(main())


def test_concurrent_uploads_block_the_event_loop_only_briefly(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content that looks like boundaries costs the parser most."""
    parsed: Counter[int] = Counter()
    turn = 0
    feed = UploadParser.feed

    def counted(parser: UploadParser, piece: bytes) -> bytes:
        parsed[turn] += len(piece)
        return feed(parser, piece)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            counting = asyncio.ensure_future(count_turns())
            headers = {"content-type": "multipart/form-data; boundary=b"}
            form = FORM.replace(b"1\n", b"\r\n--" * 50_000) + PURPOSE % b"batch"
            asking = (service.raw("POST", "/v1/files", content=form, headers=headers) for _ in range(8))
            answers = await asyncio.gather(*asking)
            counting.cancel()
            assert {answer.json()["bytes"] for answer in answers} == {200_000}
        assert sum(parsed.values()) == 8 * len(form)
        assert max(parsed.values()) <= PARSED_BYTES

    monkeypatch.setattr(UploadParser, "feed", counted)
    asyncio.run(main())


def test_a_forms_fields_may_follow_its_file(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with serving(str(tmp_path)) as service:
            headers = {"content-type": "multipart/form-data; boundary=b"}
            answer = await service.raw("POST", "/v1/files", content=FORM + PURPOSE % b"batch", headers=headers)
            file = answer.json()
            assert (file["filename"], file["bytes"], file["purpose"]) == ("x.jsonl", 2, "batch")

    asyncio.run(main())


def test_a_server_without_a_storage_says_so() -> None:
    async def main() -> None:
        app = HttpApp(ServeConfig(engine=EngineConfig(model="demo")), TOKENIZER, HeldEngines(), Metrics("demo"))
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app), base_url="http://localhost", trust_env=False
        ) as client:
            for method, path in (("GET", "/v1/files"), ("GET", "/v1/batches"), ("GET", "/v1/files/x/content")):
                answer = await client.request(method, path)
                assert answer.status_code == 404
                assert "batch_storage" in answer.json()["error"]["message"]
            answer = await client.post("/v1/files", files={"file": b"x"}, data={"purpose": "batch"})
            assert answer.json()["error"]["code"] == "no_batch_storage"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("url", "message"), [("memory://x", "one process"), ("nowhere://x", "nowhere"), ("gcs://x", "gcsfs")]
)
def test_a_storage_that_cannot_be_used_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_storage(ServeConfig(batch_storage=url))


def test_unwritable_storage_is_refused_before_the_start(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/below cannot be written to \(NotADirectoryError"):
        check_storage(str(tmp_path / "file" / "below"))
    check_storage(str(tmp_path / "new"))
    assert [path for path in (tmp_path / "new").iterdir() if path.name != PARTIAL_FOLDER] == []
