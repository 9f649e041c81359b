"""Batches: OpenAI's lines in and out, each answered once whatever ends the process, and read as they are needed."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from benchmarks.processes import free_port
from cluster.batch import job
from cluster.batch.journal import BatchRefused, Journal, count_lines, read_lines
from cluster.batch.lines import BadLine, BatchResult, LineKey, encode, parse
from cluster.cli.__main__ import main
from cluster.llm import LLM, SamplingParams
from tests.checkpoints import checkpoint
from tests.conftest import PROVE

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
        ('{"custom_id": "a", "url": "/v1/embeddings", "body": {}}', "url '/v1/embeddings' is not served", "a"),
        ("\xff", "no batch request", None),
    ],
)
def test_a_line_that_is_no_request_says_why(text: str, message: str, custom_id: str | None) -> None:
    with pytest.raises(BadLine, match=message) as caught:
        parse(text.encode("latin-1"))
    assert caught.value.custom_id == custom_id


def test_lines_are_numbered_and_long_ones_are_not_held() -> None:
    text = b"first\n\n" + b"x" * 100_000 + b"\n  \nlast"
    lines = list(read_lines(io.BytesIO(text), 20))
    assert [(each.key.number, each.text) for each in lines] == [(0, b"first\n"), (2, None), (4, b"last")]


def test_a_journal_goes_on_after_a_line_that_was_cut_off(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "out.jsonl"
    keys = [LineKey.of(number, b"text") for number in (0, 7)]
    for key in keys:
        with Journal(path) as journal:
            journal.write(key, BatchResult(key.id, "a"))
    whole = path.read_bytes()
    cut = encode(BatchResult(LineKey.of(9, b"text").id, "b"))[:-5]
    path.write_bytes(whole + cut)
    with Journal(path) as journal:
        assert journal.num_done == 2
        assert [journal.has(LineKey.of(number, b"text")) for number in (0, 3, 7, 9)] == [True, False, True, False]
    assert path.read_bytes() == whole


def test_a_journal_refuses_what_is_not_its_own(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "out.jsonl"
    with Journal(path) as journal:
        with pytest.raises(BatchRefused, match="another batch is writing"):
            Journal(path)
        journal.write(LineKey.of(0, b"one"), BatchResult(LineKey.of(0, b"one").id, "a"))
    with Journal(path) as journal, pytest.raises(BatchRefused, match="another input: its line 1 was different"):
        journal.has(LineKey.of(0, b"two"))
    path.write_text('{"id": "mine"}\n')
    with pytest.raises(BatchRefused, match="holds something that is no batch's output"):
        Journal(path)
    with pytest.raises(BatchRefused, match="cannot write"):
        Journal(tmp_path)


# ---- the job ---------------------------------------------------------------------------------------------------------


class Echo:
    """An ASGI application that answers with the prompt, and fails where it is told to."""

    def __init__(self, statuses: dict[str, list[int]]) -> None:
        self.statuses = statuses
        self.asked: list[str] = []
        self.num_running = self.most_running = 0

    async def __call__(self, scope, receive, send) -> None:
        body = json.loads((await receive())["body"])
        self.asked.append(body["prompt"])
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0)
        self.num_running -= 1
        left = self.statuses.get(body["prompt"])
        status = left.pop(0) if left else 200
        answer = json.dumps({"echo": body["prompt"], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}).encode()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": answer[:5], "more_body": True})
        await send({"type": "http.response.body", "body": answer[5:]})


def run(application: Echo, source: pathlib.Path, target: pathlib.Path, num_in_flight: int = 4) -> list[job.Progress]:
    reports: list[job.Progress] = []
    with Journal(target) as journal:
        options = {"num_in_flight": num_in_flight, "max_line_bytes": MAX_BYTES, "report": reports.append}
        asyncio.run(job.run(application, source, journal, **options))
    return reports


def test_every_line_gets_one_result(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "RETRY_S", 0.0)
    lines = [line(1), "nonsense", line(2), line(3, stream=True), "", line(4), line(5), line(6, prompt="x" * MAX_BYTES)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    target = tmp_path / "out.jsonl"
    # 1 is refused for a while, 4 fails for good, 5 is the client's own fault: each is told apart.
    echo = Echo({"1": [429, 503], "4": [500] * 99, "5": [400] * 99})
    reports = run(echo, source, target)
    assert count_lines(source) == len(reports) == len(results(target)) == 7
    by_id = {each["custom_id"]: each for each in results(target)}
    assert {name: by_id[name]["response"]["status_code"] for name in map("request-{}".format, (1, 2, 4, 5))} == {
        "request-1": 200,
        "request-2": 200,
        "request-4": 500,
        "request-5": 400,
    }
    assert by_id["request-1"]["response"]["body"]["echo"] == "1"
    assert by_id[None]["error"]["code"] == by_id["request-3"]["error"]["code"] == "invalid_line"
    assert [echo.asked.count(prompt) for prompt in "1245"] == [3, 1, job.MAX_TRIES, 1]
    assert sum(report.has_failed for report in reports) == 5
    assert sum(report.num_output_tokens for report in reports) == 6
    assert echo.most_running <= 4

    again = Echo({})
    assert run(again, source, target) == []
    assert not again.asked


def test_lines_with_a_common_prefix_run_together(tmp_path: pathlib.Path) -> None:
    prompts = [f"{first}{second}" for second in range(3) for first in "abc"]
    source = write_lines(tmp_path / "in.jsonl", [line(i, prompt=prompt) for i, prompt in enumerate(prompts)])
    echo = Echo({})
    run(echo, source, tmp_path / "out.jsonl", num_in_flight=1)
    assert echo.asked == sorted(prompts)


def test_no_more_lines_are_read_than_a_window_has(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "WINDOW_LINES", 3)
    source = write_lines(tmp_path / "in.jsonl", [line(i, prompt=f"{9 - i}") for i in range(9)])
    echo = Echo({})
    run(echo, source, tmp_path / "out.jsonl", num_in_flight=1)
    assert "".join(echo.asked) == "789456123"


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl", "out.jsonl"], "cannot read missing.jsonl"),
        (["in.jsonl", "in.jsonl"], "holds something that is no batch's output"),
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


NUM_LINES = 2000 if PROVE else 60
NUM_KILLS = 5 if PROVE else 1


SETTINGS = ("engine.dtype=float32", "engine.kv_cache_bytes=8388608", "engine.num_threads=1")


def arguments(source: pathlib.Path, target: pathlib.Path) -> list[str]:
    words = ["batch", str(source), str(target), "--model", str(checkpoint("llama"))]
    return [*words, *(word for setting in SETTINGS for word in ("--set", setting))]


def start(source: pathlib.Path, target: pathlib.Path, log: pathlib.Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cluster.cli", *arguments(source, target)]
    return subprocess.Popen(command, stdout=log.open("ab"), stderr=subprocess.STDOUT, env=dict(os.environ))


@pytest.mark.timeout(900 if PROVE else 180)
def test_a_batch_that_is_killed_goes_on_where_it_was(tmp_path: pathlib.Path, record_property) -> None:
    chance = random.Random(3)
    model = checkpoint("llama")
    prompts = [[chance.randrange(100) for _ in range(8)] for _ in range(NUM_LINES)]
    lengths = [chance.randrange(8, 60) for _ in prompts]
    lines: list[dict | str] = [
        line(number, model=model.name, prompt=prompt, max_tokens=length, temperature=0, ignore_eos=True)
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    source = write_lines(tmp_path / "in.jsonl", [*lines[:20], "nonsense", *lines[20:]])
    target, log = tmp_path / "out.jsonl", tmp_path / "log"
    for kill in range(NUM_KILLS):
        process = start(source, target, log)
        wanted = chance.randrange(1, (NUM_LINES + 1) * (kill + 1) // (NUM_KILLS + 1))
        while process.poll() is None and (not target.exists() or target.read_bytes().count(b"\n") < wanted):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    record_property("lines before the last start", target.read_bytes().count(b"\n"))
    assert start(source, target, log).wait() == 0, log.read_text()
    found = results(target)
    assert len({each["id"] for each in found}) == len(found) == NUM_LINES + 1
    bodies = {each["custom_id"]: each["response"]["body"] for each in found if each["response"]}
    assert len(bodies) == NUM_LINES
    llm = LLM(model=str(model), dtype="float32", kv_cache_bytes=8 << 20, num_threads=1)
    some = range(0, NUM_LINES, NUM_LINES // 20)
    params = [SamplingParams(temperature=0.0, max_tokens=lengths[number], ignore_eos=True) for number in some]
    expected = llm.generate([prompts[number] for number in some], params)
    for number, output in zip(some, expected, strict=True):
        assert bodies[f"request-{number}"]["choices"][0]["text"] == output.outputs[0].text


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_a_ray_job_answers_a_batch(tmp_path: pathlib.Path) -> None:
    """`ray job submit` to a cluster that runs: the input travels with the job, the output is on shared storage."""
    work = tmp_path / "work"
    work.mkdir()
    write_lines(
        work / "in.jsonl", [line(i, model=checkpoint("llama").name, prompt=[i], max_tokens=4) for i in range(9)]
    )
    binaries = pathlib.Path(sys.executable).parent
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets lie there, and paths have a limit
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    ports = {name: free_port() for name in ("port", "dashboard-port", "dashboard-agent-listen-port")}
    head = [f"--{name}={port}" for name, port in ports.items()]
    start_head = [binaries / "ray", "start", "--head", "--block", "--num-cpus=2", f"--temp-dir={folder}", *head]
    with (tmp_path / "head.log").open("wb") as log:
        cluster = subprocess.Popen(start_head, env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{ports['dashboard-port']}"
    target = tmp_path / "out.jsonl"
    words = arguments(pathlib.Path("in.jsonl"), target)
    submit = [binaries / "ray", "job", "submit", "--address", address, "--working-dir", ".", "--", "manta", *words]
    try:
        deadline = time.monotonic() + 90
        while subprocess.run(submit, cwd=work, env=environment, check=False).returncode != 0:
            assert time.monotonic() < deadline, "the cluster takes no job"
            time.sleep(3)
        assert sorted(each["custom_id"] for each in results(target)) == [f"request-{i}" for i in range(9)]
        assert all(each["response"]["status_code"] == 200 for each in results(target))
    finally:
        parent = psutil.Process(cluster.pid)
        processes = [*parent.children(recursive=True), parent]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=10)
        shutil.rmtree(folder, ignore_errors=True)
