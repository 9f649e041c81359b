"""Traces and the request log: what a collector receives, and which lines carry which request's id."""

from __future__ import annotations

import asyncio
import secrets
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from manta.cluster.cli import serve
from manta.cluster.engine.request import SequenceOutput
from manta.cluster.telemetry import engine_watch, exporting
from manta.cluster.telemetry.request_log import request_id_of
from manta.workers.checkpoints.model_folder import load_model_config
from tests.async_tests import async_test
from tests.checkpoints import checkpoint
from tests.engine.test_engine import make_engine
from tests.local_server import LocalServer, local_server, post, until
from tests.patience import PATIENCE_S
from tests.server import Server
from tests.telemetry.captured_log import events, request_log
from tests.telemetry.otlp_receiver import Receiver, attributes

SWITCHES = (exporting.SDK_DISABLED, exporting.EXPORTER, *exporting.ENDPOINTS, *exporting.PROTOCOLS)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SWITCHES, "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Where the environment sends spans."""
    receiver = Receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield receiver
    receiver.close()


class Client:
    """Of one trace: what it sends, and what it looks for then."""

    def __init__(self, flags: str = "01") -> None:
        self.trace_id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)
        self.request_id = f"test/{secrets.token_hex(4)}-7"
        traceparent = f"traceparent: 00-{self.trace_id}-{self.span_id}-{flags}"
        self.headers = [traceparent, f"x-request-id: {self.request_id}"]


# ---- traces --------------------------------------------------------------------------------------------------------


def seconds(span: Span) -> tuple[float, float]:
    return span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9


@async_test
async def test_a_trace_shows_each_stage_of_a_request(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-of-ours")

    async with local_server() as server:
        client = Client()
        constraint = {"structured_outputs": {"regex": "(ab){400}"}}
        status, body = await server.post(client.headers, max_tokens=12, top_p=0.5, n=2, **constraint)
        assert status == 200, body
        name = "POST /v1/completions"
        names = (name, "compile", "queue", "prefill", "decode", "masks")
        spans = await asyncio.to_thread(receiver.wait_for, client.trace_id, *names)
        assert {resource["service.name"] for resource in receiver.resources} == {"chat-of-ours"}

        root = spans.pop(name)
        assert root.kind == Span.SPAN_KIND_SERVER
        assert root.parent_span_id.hex() == client.span_id
        expected = {
            "http.request.method": "POST",
            "http.route": "/v1/completions",
            "http.response.status_code": 200,
            "manta.request_id": client.request_id,
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": server.model,
            "gen_ai.request.max_tokens": 12,
            "gen_ai.request.top_p": 0.5,
            "gen_ai.request.choice.count": 2,
            "gen_ai.usage.input_tokens": 4,
            "gen_ai.usage.output_tokens": 24,
        }
        assert expected.items() <= attributes(root).items()

        for span in spans.values():
            assert span.kind == Span.SPAN_KIND_INTERNAL
            assert span.parent_span_id == root.span_id
            assert attributes(span)["manta.request_id"] == client.request_id
        begun, ended = seconds(root)
        compiling, queue, prefill, decode, masks = (seconds(spans[name]) for name in names[1:])
        assert begun <= compiling[0] < compiling[1] == queue[0] <= queue[1]
        assert queue[1] == prefill[0] < prefill[1] == decode[0] < decode[1]
        assert masks == (prefill[0], decode[1])
        assert decode[1] <= ended + 1, "a clock is wrong"
        assert attributes(spans["prefill"])["gen_ai.usage.input_tokens"] == 4
        assert attributes(spans["decode"])["gen_ai.usage.output_tokens"] == 24
        assert attributes(spans["decode"])["gen_ai.response.finish_reasons"] == ["length"]
        assert attributes(spans["masks"])["manta.masks.late_steps"] >= 0
        await server.until_idle()


@async_test
async def test_unsampled_and_abandoned_requests_are_traced_correctly(receiver: Receiver) -> None:
    async with local_server() as server:
        silent, leaving, wrong = Client(flags="00"), Client(), Client()
        await server.post(silent.headers, max_tokens=2)
        await leave(server, leaving)
        status, _ = await server.post(wrong.headers, max_tokens=-1)
        assert status == 400
        (root,) = (await asyncio.to_thread(receiver.wait_for, wrong.trace_id, "POST /v1/completions")).values()
        assert attributes(root)["http.response.status_code"] == 400
        assert root.status.code == Status.STATUS_CODE_UNSET, "the client's mistake is none of the server's"
        names = ("POST /v1/completions", "queue", "prefill", "decode")
        spans = await asyncio.to_thread(receiver.wait_for, leaving.trace_id, *names)
        assert attributes(spans["POST /v1/completions"])["error.type"] == "client_gone"
        assert attributes(spans["decode"])["gen_ai.response.finish_reasons"] == ["abort"]
        assert not receiver.of_trace(silent.trace_id)
        await until(lambda: not server.replica._thread._watch.spans._stages)


async def leave(server: LocalServer, client: Client) -> None:
    """Reads the first event of a long stream, and no more."""
    reader, writer = await server.connect()
    writer.write(post(server.body(max_tokens=400, stream=True), headers=client.headers))
    await asyncio.wait_for(reader.readuntil(b"data: "), PATIENCE_S)
    writer.close()
    await server.until_idle()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h"}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["otlp_proto_grpc"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_TRACES_EXPORTER": "none"}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_SDK_DISABLED": "true"}, []),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ["console", "otlp_proto_http"]),
    ],
)
def test_the_environment_says_whether_and_where(
    environment: dict[str, str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert exporting.wanted() == expected
    assert exporting.missing() is None or "otlp_proto_grpc" in expected
    if not expected:
        assert exporting.open_tracer() is None


def test_a_missing_exporter_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """`manta serve` says it, and serves without traces."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setattr(exporting.metadata, "entry_points", lambda **_: [])
    assert exporting.open_tracer() is None
    assert "pip install opentelemetry-exporter-otlp-proto-http" in caplog.text
    monkeypatch.setattr(serve, "_check_port", lambda host, port: None)
    monkeypatch.setattr(serve, "_serve_until_signal", lambda config, quiet, name, replace: None)
    assert serve.run_serve(None, {}) == 0
    assert "otlp_proto_http" in capsys.readouterr().err


def test_without_traces_tokens_allocate_nothing_for_them() -> None:
    """What a step allocates for a moment does not depend on what it brought."""
    watch, scheduler = engine_watch.EngineWatch("r"), make_engine("llama").scheduler
    assert watch.spans is None

    def peak(outputs: list[SequenceOutput]) -> int:
        watch.stepped(0, outputs, scheduler)
        tracemalloc.start()
        try:
            tracemalloc.reset_peak()
            watch.stepped(0, outputs, scheduler)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak([SequenceOutput("r", 0, [1])] * 1000) == peak([]) < 1000


# ---- the request log -----------------------------------------------------------------------------------------------


class Raises:
    """A logits processor that fails when it has seen `arguments["at"]` tokens."""

    def __init__(
        self, arguments: dict[str, Any], prompt_token_ids: np.ndarray, output_token_ids: np.ndarray, vocab_size: int
    ) -> None:
        self._at: int = arguments["at"]

    def __call__(self, output_token_ids: np.ndarray, logits: torch.Tensor) -> None:
        if len(output_token_ids) >= self._at:
            raise RuntimeError("it was asked to")


@async_test
async def test_the_engine_logs_preemptions_and_failures() -> None:
    processors = {"raises": f"{__name__}:Raises"}

    # 9 blocks of 16 tokens, for the three choices of one request, which need about 5 each and run side by side.
    options = {"kv_cache_bytes": 9 * block_bytes(), "logits_processors": processors}
    async with local_server(engine_options=options) as server:
        failing, crowded = Client(), Client()
        with request_log() as lines:
            await server.post(crowded.headers, max_tokens=72, n=3)
            preempted = events(lines, "preempted")
            assert len(preempted) == server.replica.engine.scheduler.num_preemptions > 0
            assert {line["request_id"] for line in preempted} == {crowded.request_id}

            spec = {"name": "raises", "arguments": {"at": 3}}
            status, _ = await server.post(failing.headers, max_tokens=9, logits_processors=[spec])
            assert status == 500
            await until(lambda: events(lines, "failed") != [])  # the answer may be there first
            (line,) = events(lines, "failed")
            assert (line["request_id"], line["output_tokens"]) == (failing.request_id, 3)
            assert "it was asked to" in line["reason"]


@async_test
async def test_logs_carry_the_clients_request_id() -> None:
    """Both are in this process."""
    async with local_server() as server:
        leaving, moved = Client(), Client()
        with request_log() as lines:
            await leave(server, leaving)
            await until(lambda: events(lines, "aborted") != [])
            (line,) = events(lines, "aborted")
            assert line["request_id"] == leaving.request_id

            answering = asyncio.ensure_future(server.post(moved.headers, max_tokens=200))
            runs = server.ingress._client.runs
            await until(lambda: any(run.connection is not None for run in runs.values()))
            next(iter(runs.values())).go_on("silent")
            status, _ = await answering
            assert status == 200
            by_ingress, by_engine = events(lines, "continued")
            assert by_ingress["request_id"] == by_engine["request_id"] == moved.request_id
            assert by_ingress["engine_request"] == by_engine["engine_request"]
            assert by_engine["engine_request"].endswith("/1")

            await until(lambda: sum("event" not in line for line in lines) == 2)
            ended = {line["request_id"]: line["status"] for line in lines if "event" not in line}
            assert ended == {leaving.request_id: 499, moved.request_id: 200}


def block_bytes() -> int:
    """Of a KV block of the tiny model."""
    return load_model_config(checkpoint("llama")).kv_bytes_per_token("float32") * 16


def test_an_engine_requests_id_names_its_client() -> None:
    assert request_id_of("req-0011-aabbccdd-0") == "req-0011"
    assert request_id_of("a/b-1-aabbccdd-12/3") == "a/b-1"
    assert request_id_of("req-0011-aabbccdd-0~4294967296/1") == "req-0011"
    assert request_id_of("line 7") == "line 7"


# ---- in processes of their own -------------------------------------------------------------------------------------


@pytest.mark.prove
def test_ingress_and_engine_send_their_spans(receiver: Receiver) -> None:
    server = Server(folder=checkpoint("llama"))
    try:
        client = Client()
        headers = dict(line.split(": ") for line in client.headers)
        body = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        status, answered, _ = server.post("/v1/completions", body, headers)
        assert (status, answered["x-request-id"]) == (200, client.request_id)
        receiver.wait_for(client.trace_id, "POST /v1/completions", "queue", "prefill", "decode")
        assert len({resource["service.instance.id"] for resource in receiver.resources}) == 2
    finally:
        server.stop()
