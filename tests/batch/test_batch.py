"""Batches: OpenAI's lines in and out, each answered once whatever ends the process, and read as they are needed."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import os
import pathlib
import pickle
import random
import signal
import subprocess
import sys
import time
import types
from typing import Any, BinaryIO

import httpx2
import msgspec
import pytest
from ray.exceptions import RayActorError

from manta.cluster.batch import batch_client, batch_job
from manta.cluster.batch.journal import BatchRefused, Journal, count_lines, read_lines
from manta.cluster.batch.line_endpoints import batch_endpoints
from manta.cluster.batch.lines import BadLine, BatchRequest, BatchResponse, BatchResult, LineKey, parse
from manta.cluster.cli.__main__ import main
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.engine.request import EngineRequest, FinishStatus, SequenceOutput, Usage
from manta.cluster.errors import ServingError
from manta.cluster.http.access.keys import ApiKeys
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange.engines import Event, GenerationRequest
from manta.cluster.http.exchange.metrics import Unmeasured
from manta.cluster.llm import LLM, SamplingParams
from manta.cluster.serve.channel.packed import Packed
from manta.cluster.serve.channel.token_channel import Address, RequestResult
from manta.cluster.serve.engine.engine_replica import EngineReplica
from manta.cluster.serve.requests.gathering import Gathering, joined
from manta.cluster.serve.requests.submission import Answers
from manta.cluster.serve.starting.ray_job import fate_of
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.constraint import ConstraintSpec
from manta.structured.refusals import Refusal
from manta.workers.step import TokenLogprobs
from tests.checkpoints import checkpoint
from tests.conftest import PROVE
from tests.local_server import Handle, until
from tests.replicas import Replicas

MAX_BYTES = 4096


def line(number: int, **body: object) -> dict:
    body = {"model": "m", "prompt": f"{number}", **body}
    return {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def write_lines(path: pathlib.Path, lines: list[dict | str]) -> pathlib.Path:
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    return path


def results(path: pathlib.Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


# ---- lines and files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message", "custom_id"),
    [
        ("nonsense", "JSON is malformed", None),
        ('{"custom_id": "a"}', "missing required field `url`", "a"),
        ('{"custom_id": 3, "url": "/v1/completions", "body": {}}', "Expected `str`, got `int`", None),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', "method 'GET'", "a"),
        ('{"custom_id": "a", "url": "/v1/images", "body": {}}', "url '/v1/images' is not served", "a"),
        ("\xff", "no batch request", None),
    ],
)
def test_a_line_that_is_no_request_says_why(text: str, message: str, custom_id: str | None) -> None:
    with pytest.raises(BadLine, match=message) as caught:
        parse(text.encode("latin-1"))
    assert caught.value.custom_id == custom_id


def test_lines_are_numbered_and_long_ones_not_held() -> None:
    text = b"first\n\n" + b"x" * 100_000 + b"\n  \nlast"
    lines = list(read_lines(io.BytesIO(text), 20))
    assert [(each.key.number, each.text) for each in lines] == [(0, b"first\n"), (2, None), (4, b"last")]


# ---- the job ---------------------------------------------------------------------------------------------------------


class Echo:
    """Answers with the prompt, and fails where it is told to."""

    def __init__(self, statuses: dict[str, list[int]]) -> None:
        self.statuses = statuses
        self.asked: list[str] = []
        self.num_running = self.most_running = 0

    async def __call__(self, request: BatchRequest, request_id: str, client: str) -> BatchResponse:
        body = json.loads(bytes(request.body))
        self.asked.append(body["prompt"])
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0)
        self.num_running -= 1
        left = self.statuses.get(body["prompt"])
        status = left.pop(0) if left else 200
        answer = json.dumps({"echo": body["prompt"], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}).encode()
        return BatchResponse(status, request_id, msgspec.Raw(answer))


def run(echo: Echo, source: pathlib.Path, target: pathlib.Path, num_in_flight: int = 4) -> list[batch_job.LineProgress]:
    reports: list[batch_job.LineProgress] = []

    async def answer_all(journal: Journal, lines: BinaryIO) -> None:
        places = asyncio.Semaphore(num_in_flight)
        await batch_job.run(batch_job.BatchJob(echo, journal, places, MAX_BYTES, reports.append), lines)

    with source.open("rb") as lines, Journal(target, lines, MAX_BYTES) as journal:
        asyncio.run(answer_all(journal, lines))
    return reports


def test_every_line_gets_one_result(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_job, "RETRY_S", 0.0)
    lines = [line(1), "nonsense", line(2), line(3, stream=True), "", line(4), line(5), line(6, prompt="x" * MAX_BYTES)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    target = tmp_path / "out.jsonl"
    # 1 is refused for a while, 4 fails for good, 5 is the client's own fault: each is told apart.
    echo = Echo({"1": [429, 503], "4": [500] * 99, "5": [400] * 99})
    reports = run(echo, source, target)
    assert len(reports) == len(results(target)) == 7
    by_id = {each["custom_id"]: each for each in results(target)}
    assert {name: by_id[name]["response"]["status_code"] for name in map("request-{}".format, (1, 2, 4, 5))} == {
        "request-1": 200,
        "request-2": 200,
        "request-4": 500,
        "request-5": 400,
    }
    assert by_id["request-1"]["response"]["body"]["echo"] == "1"
    assert by_id[None]["error"]["code"] == by_id["request-3"]["error"]["code"] == "invalid_line"
    assert [echo.asked.count(prompt) for prompt in "1245"] == [3, 1, batch_job.MAX_TRIES, 1]
    assert sum(report.has_failed for report in reports) == 5
    assert sum(report.num_output_tokens for report in reports) == 6
    assert echo.most_running <= 4

    again = Echo({})
    assert run(again, source, target) == []
    assert not again.asked
    with source.open("rb") as text, Journal(target, text, MAX_BYTES) as journal:
        assert (journal.num_lines, journal.num_done) == (7, 7)
        assert count_lines(io.BytesIO(text.read() + b"{}"), MAX_BYTES, journal) == (8, 7)
        with pytest.raises(BatchRefused, match="another input: its line 1 was different"):
            count_lines(io.BytesIO(b"one"), MAX_BYTES, journal)


def test_an_input_without_its_last_lines_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"custom_id": str(n), "url": "/v1/completions", "body": {}}).encode() for n in range(3)]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    with (tmp_path / "in.jsonl").open("rb") as source, Journal(tmp_path / "out.jsonl", source, MAX_BYTES) as journal:
        for number, line in enumerate(lines):
            key = LineKey.of(number, line)
            journal.write(key, BatchResult(key.id, str(number)))
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines[:2]))
    assert main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "out.jsonl holds 3 results, and the input has only 2 of their lines; give the whole input again" in said


def test_lines_with_a_common_prefix_run_together(tmp_path: pathlib.Path) -> None:
    prompts = [f"{first}{second}" for second in range(3) for first in "abc"]
    source = write_lines(tmp_path / "in.jsonl", [line(i, prompt=prompt) for i, prompt in enumerate(prompts)])
    echo = Echo({})
    run(echo, source, tmp_path / "out.jsonl", num_in_flight=1)
    assert echo.asked == sorted(prompts)


def test_only_a_windows_lines_are_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_job, "WINDOW_LINES", 3)
    source = write_lines(tmp_path / "in.jsonl", [line(i, prompt=f"{9 - i}") for i in range(9)])
    echo = Echo({})
    run(echo, source, tmp_path / "out.jsonl", num_in_flight=1)
    assert "".join(echo.asked) == "789456123"


# ---- the engines -----------------------------------------------------------------------------------------------------


def events_of(
    outputs: list[SequenceOutput], params: SamplingParams, is_behind: bool, found: list[Event] | None = None
) -> list[Event]:
    """What the reader of a body with one prompt gets, in `found`: each output as it comes, or all at last."""
    found = [] if found is None else found
    asked = EngineRequest(request_id="request", prompt_token_ids=[], params=params)
    request = GenerationRequest(prompts=[[5, 6]], engine=asked)
    submission = Answers(Tokenizer("demo"), request, lambda _: Unmeasured())
    (prompt,) = submission._prompts
    prompt.run = types.SimpleNamespace(release=lambda: None)  # type: ignore[assignment]

    async def read() -> None:
        events = aiter(submission)
        for output in outputs:
            submission._tell(prompt, output)
            if not is_behind:
                found.append(await anext(events))
        if is_behind:
            async for event in events:
                found.append(event)

    asyncio.run(read())
    return found


def test_an_answer_in_fewer_pieces_is_the_same() -> None:
    """With choices that end apart, log-probabilities, and several tokens at once."""
    params = SamplingParams(n=2, logprobs=0, prompt_logprobs=0)
    entry = [TokenLogprobs(7, -1.0, 1, [], [])]
    usage = Usage(2, 1, 0)
    outputs = [SequenceOutput("r", 0, [], prompt_logprobs=entry)]
    outputs += [SequenceOutput("r", i, [20 + i], entry, usage=usage) for i in (0, 1)]
    outputs += [SequenceOutput("r", 0, [30 + step, 31], entry * 2) for step in range(5)]
    outputs += [SequenceOutput("r", 1, [40 + step], entry) for step in range(5)]
    for index, finish in ((1, FinishStatus.FINISHED_STOPPED), (0, FinishStatus.FINISHED_LENGTH)):
        outputs.append(SequenceOutput("r", index, [50], entry, finish=finish, usage=Usage(2, 12, 0)))
    gathering = Gathering()
    copies = lambda: [copy.deepcopy(output) for output in outputs]  # noqa: E731
    gathered = [output for output in copies() if gathering.add(output)]
    assert len(gathered) == 4, "the first and the last of each choice"

    def whole(events: list[Event]) -> list[Any]:
        found = []
        for index in (0, 1):
            own = [event for event in events if event.index == index]
            found.append("".join(event.text for event in own))
            for field in ("token_ids", "logprobs", "prompt_logprobs"):
                found.append([each for event in own for each in getattr(event, field) or ()])
            found.append(own[-1].finish)
        return found

    one_by_one = events_of(copies(), params, is_behind=False)
    assert len(one_by_one) == len(outputs)
    assert whole(events_of(gathered, params, is_behind=False)) == whole(one_by_one)
    at_once = events_of(copies(), params, is_behind=True)
    assert len(at_once) == 2
    assert whole(at_once) == whole(one_by_one)


def test_results_before_a_failure_are_read_first() -> None:
    outputs = [SequenceOutput("r", 0, [20]), SequenceOutput("r", 0, [21])]
    outputs.append(SequenceOutput("r", 0, [], finish=FinishStatus.FINISHED_INTERNAL_ERROR, error="x"))
    for copies in (copy.deepcopy(outputs), [joined(joined(*copy.deepcopy(outputs[:2])), copy.deepcopy(outputs[2]))]):
        found: list[Event] = []
        with pytest.raises(ServingError, match="choice 0 failed: x"):
            events_of(copies, SamplingParams(), is_behind=True, found=found)
        assert [event.token_ids for event in found] == [[20, 21]]


def test_requests_arrive_as_they_were_sent() -> None:
    """Also with text that msgpack cannot carry: the engine refuses that one, and no other of its call."""
    params = [
        SamplingParams(temperature=0, seed=-(2**63), logit_bias={5: -1.5}, stop=("é",), bad_words_token_ids=((1, 2),)),
        SamplingParams(constraint=ConstraintSpec(kind="regex", text="[a-z]", begin_after=(3,))),
        SamplingParams(stop=("\ud800",)),
    ]
    requests = [EngineRequest(request_id="a", prompt_token_ids=[5, 6], params=each, deadline_s=1.0) for each in params]
    assert len(pickle.dumps(Packed(EngineRequest, requests[:2]))) < len(pickle.dumps(requests[:2])) / 2
    for sent in (requests[:2], requests[1:], [requests[0], requests[2]]):
        assert pickle.loads(pickle.dumps(Packed(EngineRequest, sent))) == sent


class CountingHandle(Handle):
    """Notes how many requests came in each call."""

    def __init__(self, replica: EngineReplica) -> None:
        super().__init__(replica)
        self.calls: list[int] = []

    @property
    def generate_group(self) -> Any:
        def remote(requests: list[EngineRequest], address: Address) -> Any:
            self.calls.append(len(requests))
            return super(CountingHandle, self).__getattr__("generate_group").remote(requests, address)

        return types.SimpleNamespace(remote=remote)


OPTIONS = {"dtype": "float32", "kv_cache_bytes": 8 << 20, "num_threads": 1, "max_num_sequences": 8}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
DIGITS = {"structured_outputs": {"regex": "[0-9]{3}"}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "hello", "n": 2, "logprobs": 2, "echo": True, "max_tokens": 5, "seed": 3}),
    ("completions", {"prompt": [[5, 6], [7, 8, 9]], "max_tokens": 30, "stop": ["e", "a"]}),
    ("completions", {"prompt": "hello", "max_tokens": 40, **DIGITS}),
    ("completions", {"prompt": "hello", "prompt_logprobs": 1, "max_tokens": 2}),
    ("completions", {"prompt": "hello", "bad_words": ["a"], "max_tokens": 5}),
    ("completions", {"prompt": [5] * 9, "max_tokens": 10**6}),
    ("completions", {"prompt": "hello", "allowed_token_ids": [10**30]}),
    ("completions", {"prompt": "hello", "temperature": 9}),
    ("completions", {"prompt": "hello", "colour": "red"}),
    ("completions", {"prompt": "hello", "model": "another"}),
    ("chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 1, "seed": 4, "temperature": 1}),
    ("chat/completions", {**CHAT, "max_tokens": 40, "response_format": {"type": "json_object"}}),
    ("chat/completions", {**CHAT, "max_tokens": 40, **DIGITS}),
    ("chat/completions", {**CHAT, "tools": [TOOL]}),
    ("chat/completions", {**CHAT, "structured_outputs": {"regex": "["}}),
]


def test_a_line_means_the_same_as_over_http(new_replica: Replicas) -> None:
    model = checkpoint("llama")
    # Without a cache neither reads what the other one has computed.
    config = ServeConfig(engine=EngineConfig(model=str(model), enable_prefix_caching=False, **OPTIONS))

    def same(answer: bytes) -> dict[str, Any]:
        """Log-probabilities may differ in rounding."""
        fields = json.loads(answer, parse_float=lambda _: None)
        return {key: value for key, value in fields.items() if key not in ("id", "created")}

    async def scenario() -> list[int]:
        replica = await asyncio.to_thread(new_replica, config.engine)
        endpoints, client = batch_endpoints(config, Handle(replica), "127.0.0.1")
        state = endpoints.state
        transport = httpx2.ASGITransport(HttpApp(state.config, state.tokenizer, client, state.metrics))
        statuses = []
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost/v1", trust_env=False) as http:
            for path, fields in BODIES:
                content = json.dumps({"model": model.name, "temperature": 0, **fields}).encode()
                asked, line = await asyncio.gather(
                    http.post(path, content=content),
                    endpoints.answer(BatchRequest("a", f"/v1/{path}", msgspec.Raw(content)), "line"),
                )
                assert (line.status_code, same(bytes(line.body))) == (asked.status_code, same(asked.content)), fields
                statuses.append(line.status_code)
        await client.close()
        return statuses

    assert asyncio.run(scenario()) == [200] * 5 + [400] * 3 + [200, 404] + [200] * 4 + [400]


def test_a_failed_calls_lines_continue_one_by_one(new_replica: Replicas) -> None:
    """The first call ends with its engine's death and the second one in an unknown way."""
    config = ServeConfig(engine=EngineConfig(model=str(checkpoint("llama")), **OPTIONS))
    failures: list[Exception] = [RayActorError(), ValueError("unknown")]

    class FailingHandle(Handle):
        def __getattr__(self, name: str) -> Any:
            if name != "generate_group" or not failures:
                return super().__getattr__(name)
            error = failures.pop(0)

            async def fail(requests: list[EngineRequest], _: Address) -> None:
                raise error

            return types.SimpleNamespace(remote=lambda *arguments: asyncio.ensure_future(fail(*arguments)))

    async def scenario() -> None:
        replica = await asyncio.to_thread(new_replica, config.engine)
        endpoints, client = batch_endpoints(config, FailingHandle(replica), "127.0.0.1")
        body = msgspec.Raw(json.dumps({"model": config.model_name, "prompt": [5, 6], "max_tokens": 3}).encode())
        ask = lambda: endpoints.answer(BatchRequest("1", "/v1/completions", body), "line")  # noqa: E731
        assert [(await ask()).status_code for _ in range(3)] == [200, 500, 200]
        assert not client.runs
        await client.close()

    asyncio.run(scenario())


def test_lines_share_calls_but_not_failures(monkeypatch: pytest.MonkeyPatch, new_replica: Replicas) -> None:
    """Of 60 lines 20 are refused, and 8 of those that take long are left: their engine ends them, and no other."""
    monkeypatch.setattr(batch_client, "GROUP_SHARE", 4)
    model = checkpoint("llama")
    config = ServeConfig(engine=EngineConfig(model=str(model), **OPTIONS))

    def request(number: int, **fields: object) -> BatchRequest:
        body = {"model": model.name, "prompt": [5, number + 6], "temperature": 0, "ignore_eos": True, **fields}
        return BatchRequest(str(number), "/v1/completions", msgspec.Raw(json.dumps(body).encode()))

    async def scenario() -> None:
        replica = await asyncio.to_thread(new_replica, config.engine)
        handle = CountingHandle(replica)
        endpoints, client = batch_endpoints(config, handle, "127.0.0.1")
        ask = lambda number, **fields: endpoints.answer(request(number, **fields), f"line-{number}")  # noqa: E731
        kept = [asyncio.ensure_future(ask(number, max_tokens=4 + number % 9)) for number in range(40)]
        refused = [ask(number, max_tokens=4, allowed_token_ids=[10_000]) for number in range(40, 60)]
        left = [asyncio.ensure_future(ask(number, max_tokens=400)) for number in range(60, 68)]
        answers = asyncio.gather(*kept, *refused)
        await until(lambda: sum(handle.calls) > 60)
        for each in left:
            each.cancel()
        found = await answers
        assert [each.status_code for each in found] == [200] * 40 + [400] * 20
        assert len(handle.calls) < sum(handle.calls) / 2
        for number in range(0, 40, 5):
            text = json.loads(bytes(found[number].body))["choices"][0]["text"]
            assert json.loads(bytes((await ask(number, max_tokens=4 + number % 9)).body))["choices"][0]["text"] == text
        await until(lambda: replica.engine.stats().num_running == replica.engine.stats().num_waiting == 0)
        replica.engine.check_integrity()
        await client.close()

    asyncio.run(scenario())


def test_a_batch_has_the_weight_of_its_key() -> None:
    engine = EngineConfig(model=str(checkpoint("llama")))
    keys = ("boss:a-secret-of-the-test", "team:another-secret-of-it")
    config = ServeConfig(engine=engine, api_keys=keys, client_weights={"boss": 3})
    weights: list[float] = []

    async def generate_group(requests: list[EngineRequest], _: Address) -> list[RequestResult]:
        weights.extend(each.weight for each in requests)
        return [RequestResult(refusal=Refusal("unfit", cause="not now"))] * len(requests)

    async def model() -> Any:
        return types.SimpleNamespace(max_model_len=64, vocab_size=64, sampling_defaults={}, pooling=None)

    async def scenario() -> None:
        handle: Any = Handle(types.SimpleNamespace(generate_group=generate_group, model=model))
        without_keys = msgspec.structs.replace(config, api_keys=None)  # as `manta batch` reads it
        assert batch_endpoints(without_keys, handle, "127.0.0.1")[0].state.config.client_weights == {}
        endpoints, client = batch_endpoints(config, handle, "127.0.0.1")
        body = msgspec.Raw(json.dumps({"model": config.model_name, "prompt": "a"}).encode())
        for name in ("team", "boss"):
            owner = ApiKeys(keys).owner_of(name)
            answer = await endpoints.answer(BatchRequest("1", "/v1/completions", body), "1", owner)
            assert answer.status_code == 400
        await client.close()

    asyncio.run(scenario())
    assert weights == [1, 3]


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl", "out.jsonl"], "cannot read missing.jsonl"),
        (["in.jsonl", "in.jsonl"], "is the input of the batch"),
        (["in.jsonl", "out.jsonl", "--model", "nowhere"], "cannot be served"),
    ],
)
def test_the_command_refuses_before_anything_starts(
    arguments: list[str], message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", [line(1)])
    assert main(["batch", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.fixture
def ray_job(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of a Ray job whose upload left out what these files name, in the environment that Ray gives a job."""
    (tmp_path / "data").mkdir()
    (tmp_path / ".gitignore").write_text("*.jsonl\n!kept.jsonl\nbig/\n")
    (tmp_path / "data" / ".rayignore").write_text("/private\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    config = {"runtime_env": {"working_dir": "gcs://_ray_pkg_0123456789abcdef.zip"}, "metadata": {}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(config))
    return tmp_path


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("words", "ignore_file"),
    [
        (["in.jsonl", "out"], ".gitignore"),
        (["./data/in.jsonl", "out"], ".gitignore"),
        (["big/of/mine", "out"], ".gitignore"),
        (["data/private/in", "out"], "data/.rayignore"),
        (["in", "out", "--config", "big/config.yaml"], ".gitignore"),
        (["in", "out", "--model", "big/model"], ".gitignore"),
        (["kept.jsonl", "out"], None),
        (["/nowhere/in.jsonl", "out"], None),
    ],
)
def test_a_job_says_when_its_upload_left_a_file_out(
    words: list[str], ignore_file: str | None, ray_job: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert main(["batch", *words]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"because {ignore_file} names it" in said if ignore_file else "left it out" not in said
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")  # no job, but another program on a cluster
    assert main(["batch", *words]) == 2
    assert "left it out" not in " ".join(capsys.readouterr().err.split())


def test_a_job_says_that_its_output_will_be_lost(ray_job: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = fate_of(pathlib.Path("data/out.jsonl"))
    assert said.startswith(f"{ray_job}/data/out.jsonl on ")
    assert "will be lost" in said
    assert fate_of(pathlib.Path("/shared/out.jsonl")) == ""
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")
    assert fate_of(pathlib.Path("out.jsonl")) == ""


NUM_LINES = 2000 if PROVE else 60
NUM_KILLS = 5 if PROVE else 1


SETTINGS = ("engine.dtype=float32", "engine.kv_cache_bytes=8388608", "engine.num_threads=1")


def arguments(source: pathlib.Path, target: pathlib.Path, *settings: str) -> list[str]:
    words = ["batch", str(source), str(target), "--model", str(checkpoint("llama"))]
    return [*words, *(word for setting in (*SETTINGS, *settings) for word in ("--set", setting))]


class KilledBatch:
    """`num_lines` requests and one line that is none, in a file; `manta batch` answers them and is killed meanwhile.

    `settings` and `environment` are the command's, `chance` draws lengths and moments.
    """

    def __init__(self, folder: pathlib.Path, num_lines: int, *settings: str, **environment: str) -> None:
        self.chance = random.Random(3)
        self.num_lines = num_lines + 1
        self.target = folder / "out.jsonl"
        self._log = folder / "log"
        self._prompts = [[self.chance.randrange(100) for _ in range(8)] for _ in range(num_lines)]
        self._lengths = [self.chance.randrange(8, 60) for _ in self._prompts]
        model = checkpoint("llama").name
        lines: list[dict | str] = [
            line(number, model=model, prompt=prompt, max_tokens=length, temperature=0, ignore_eos=True)
            for number, (prompt, length) in enumerate(zip(self._prompts, self._lengths, strict=True))
        ]
        source = write_lines(folder / "in.jsonl", [*lines[:20], "nonsense", *lines[20:]])
        self._command = [sys.executable, "-m", "manta.cluster.cli", *arguments(source, self.target, *settings)]
        self._environment = {**os.environ, **environment}

    def start(self) -> subprocess.Popen[bytes]:
        log = self._log.open("ab")
        return subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, env=self._environment)

    def num_written(self) -> int:
        return self.target.read_bytes().count(b"\n") if self.target.exists() else 0

    def wait_for(self, process: subprocess.Popen[bytes], num_written: int) -> None:
        while process.poll() is None and self.num_written() < num_written:
            time.sleep(0.01)

    def kill(self, number: int, num_kills: int) -> None:
        """Starts the command and kills it at a random point of the first `(number + 1) / (num_kills + 1)`."""
        process = self.start()
        self.wait_for(process, self.chance.randrange(1, self.num_lines * (number + 1) // (num_kills + 1)))
        process.send_signal(signal.SIGKILL)
        process.wait()

    def finish(self) -> None:
        """Lets the command end, and looks at the answers."""
        assert self.start().wait() == 0, self._log.read_text()
        found = results(self.target)
        assert len({each["id"] for each in found}) == len(found) == self.num_lines
        bodies = {each["custom_id"]: each["response"]["body"] for each in found if each["response"]}
        assert len(bodies) == self.num_lines - 1
        llm = LLM(model=str(checkpoint("llama")), dtype="float32", kv_cache_bytes=8 << 20, num_threads=1)
        some = range(0, len(self._prompts), len(self._prompts) // 20)
        params = [SamplingParams(temperature=0.0, max_tokens=self._lengths[i], ignore_eos=True) for i in some]
        expected = llm.generate([self._prompts[i] for i in some], params)
        for number, output in zip(some, expected, strict=True):
            assert bodies[f"request-{number}"]["choices"][0]["text"] == output.outputs[0].text


def test_a_killed_batch_resumes_where_it_was(tmp_path: pathlib.Path, record_property) -> None:
    batch = KilledBatch(tmp_path, NUM_LINES)
    for number in range(NUM_KILLS):
        batch.kill(number, NUM_KILLS)
    record_property("lines before the last start", batch.num_written())
    batch.finish()
