"""Batches where machines die: two nodes of which one does, a server with `/v1/batches`; and `ray job submit`."""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest

from benchmarks.processes import free_port
from tests.batch.test_batch import KilledBatch, arguments, line, results, write_lines
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S
from tests.processes import kill_tree, running_below
from tests.server import Server

pytestmark = pytest.mark.prove

ROOT = str(pathlib.Path(__file__).resolve().parents[2])
NUM_LINES = 2000
NUM_KILLS = 5
FROM_A_CHECKOUT = """
import os, pathlib, manta.cluster, manta.workers
from manta import LLM, SamplingParams
assert pathlib.Path(manta.cluster.__file__).is_relative_to(os.getcwd()), manta.cluster.__file__
assert not os.path.exists("cluster"), "the upload has each file once"
(output,) = LLM("demo").generate("Manta", SamplingParams(max_tokens=3, ignore_eos=True))
print("answered:", len(output.outputs[0].token_ids), "tokens")
"""


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes: the first has room for both engines, and Serve puts one on each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("PYTHONPATH", ROOT)  # for the nodes' workers
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


def engines_of(node: Any) -> list[psutil.Process]:
    """Those that run on a node."""
    (raylet,) = node.all_processes["raylet"]
    return running_below(raylet.process.pid, ":engine")


def test_a_batch_outlives_its_kills_and_a_node(nodes: Any, tmp_path: pathlib.Path, record_property) -> None:
    second = nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    batch = KilledBatch(tmp_path, NUM_LINES, "num_engine_replicas=2", RAY_ADDRESS=nodes.address)
    for number in range(NUM_KILLS):
        if number == NUM_KILLS // 2:
            process = batch.start()
            batch.wait_for(process, batch.num_written() + NUM_LINES // 20)
            assert process.poll() is None, "it ended before its node did"
            assert len(engines_of(second)) == 1
            nodes.remove_node(second, allow_graceful=False)
            died_at = batch.num_written()
            batch.wait_for(process, died_at + NUM_LINES // 20)
            process.kill()
            process.wait()
            record_property("lines when the node died", died_at)
        else:
            batch.kill(number, NUM_KILLS)
    record_property("lines before the last start", batch.num_written())
    batch.finish()


def test_a_killed_server_resumes_its_batches(tmp_path: pathlib.Path, record_property) -> None:
    """Whatever runs at a kill: every process of the server gets SIGKILL, five times, and interactive requests come
    before the lines.
    """
    num_lines, model = 300, checkpoint("llama").name
    body = {"model": model, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    lines = [line(number, **body, prompt=[number % 90 + 5, number // 90 + 5]) for number in range(num_lines)]
    options = (f"batch_storage={tmp_path}/storage", "batches.max_in_flight=8", "engine.max_num_sequences=8")
    server = Server(*options)
    chance = random.Random(1)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        content = "".join(f"{json.dumps(each)}\n" for each in lines).encode()
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        for kill in range(NUM_KILLS):
            wanted = num_lines * (kill + chance.random()) / (NUM_KILLS + 1)
            while client.batches.retrieve(batch.id).request_counts.completed < wanted:
                server.post("/v1/completions", {**body, "prompt": "interactive"})
            kill_tree(server.process.pid)
            server = Server(*options)
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        while (batch := client.batches.retrieve(batch.id)).status != "completed":
            assert batch.status in ("in_progress", "finalizing"), batch
            time.sleep(0.5)
        found = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(each["custom_id"] for each in found) == sorted(each["custom_id"] for each in lines)
        assert batch.error_file_id is None
        for each in found[:: num_lines // 20]:
            number = int(each["custom_id"].removeprefix("request-"))
            status, _, answer = server.post("/v1/completions", lines[number]["body"])
            assert (status, answer["choices"]) == (200, each["response"]["body"]["choices"])
    finally:
        server.stop()


def test_a_ray_job_answers_a_batch(tmp_path: pathlib.Path) -> None:
    """`ray job submit` to a cluster that runs: the input travels with the job, the output is on shared storage."""
    work = tmp_path / "work"
    work.mkdir()
    model = checkpoint("llama").name
    write_lines(work / "in.jsonl", [line(i, model=model, prompt=[i], max_tokens=4) for i in range(9)])
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
        deadline = time.monotonic() + PATIENCE_S
        while subprocess.run(submit, cwd=work, env=environment, check=False).returncode != 0:
            assert time.monotonic() < deadline, "the cluster takes no job"
            time.sleep(3)
        assert sorted(each["custom_id"] for each in results(target)) == [f"request-{i}" for i in range(9)]
        assert all(each["response"]["status_code"] == 200 for each in results(target))
        (work / ".gitignore").write_text("in.jsonl\n")
        hidden = subprocess.run(submit, cwd=work, env=environment, capture_output=True, text=True)
        assert hidden.returncode != 0
        assert "because .gitignore names it" in " ".join(hidden.stdout.split())
        (work / ".gitignore").unlink()
        relative = [word if word != str(target) else "out.jsonl" for word in submit]
        lost = subprocess.run(relative, cwd=work, env=environment, capture_output=True, text=True)
        assert lost.returncode == 0, lost.stdout
        assert "will be lost with it" in lost.stdout[lost.stdout.rindex("9 lines are answered") :]
        # A job of a developer: the working directory is a checkout, whose code runs instead of the installed one.
        done = subprocess.run(
            [*submit[: submit.index(".")], ROOT, "--", sys.executable, "-c", FROM_A_CHECKOUT],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "answered: 3 tokens" in done.stdout
    finally:
        kill_tree(cluster.pid)
        shutil.rmtree(folder, ignore_errors=True)
