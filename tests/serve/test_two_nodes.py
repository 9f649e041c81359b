"""A cluster of two nodes with addresses of their own: requests to both, a link that is cut, and a node that dies."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import msgspec
import pytest
import yaml

from manta.cluster.cli.status import lines
from manta.cluster.http.endpoints.status import Status
from tests.checkpoints import checkpoint
from tests.house.test_configs import CONFIGS
from tests.patience import PATIENCE_S
from tests.processes import kill_all
from tests.ray_cluster import BIN, until
from tests.two_nodes import Node, TwoNodes, wait_for_line

pytestmark = pytest.mark.prove

PORT = 8000
NUM_TOKENS = 480
NUM_STREAMS = 16
NODE_ID = """
import sys, ray
ray.init(logging_level="ERROR")
print(*(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == sys.argv[1]))
"""
"""Prints the id of the node with an address."""


@pytest.fixture(scope="module")
def server(namespaces: TwoNodes) -> Iterator[subprocess.Popen[str]]:
    """An engine and an ingress on each node."""
    command = [
        sys.executable,
        "-m",
        "manta.cluster.cli",
        "serve",
        "--quiet",
        str(checkpoint("llama")),
        "--port",
        str(PORT),
    ]
    settings = ["host=0.0.0.0", "num_engine_replicas=2", "engine.num_threads=1", "engine.dtype=float32"]
    settings += ["engine.kv_cache_bytes=8388608"]
    for setting in settings:
        command += ["--set", setting]
    process = namespaces.head.popen(command, namespaces.environment)
    wait_for_line(process, "Ctrl-C stops it.")
    yield process
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)


def body(seed: int) -> dict[str, object]:
    return {
        "model": checkpoint("llama").name,
        "prompt": [5, 9, 17, 30 + seed],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def stream(client: httpx.AsyncClient, address: str, seed: int) -> str:
    """The whole text of a stream; raises where it breaks or ends with an error."""
    pieces: list[str] = []
    is_whole = False
    async with client.stream("POST", f"http://{address}:{PORT}/v1/completions", json=body(seed)) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        async for line in response.aiter_lines():
            is_whole = is_whole or line == "data: [DONE]"
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                pieces += [choice["text"] for choice in event["choices"]]
    assert is_whole
    return "".join(pieces)


async def streams(address: str) -> list[str | BaseException]:
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
        tasks = (stream(client, address, seed) for seed in range(NUM_STREAMS))
        return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("seconds", [1, 5])
def test_a_cut_link_only_pauses_the_heads_clients(
    namespaces: TwoNodes, server: subprocess.Popen[str], seconds: int, record_property
) -> None:
    """Some of their streams run on the other node's engine: they go on at the head's, which has no cut before it."""
    expected = asyncio.run(streams(namespaces.head.address))

    async def load() -> tuple[list[str | BaseException], float]:
        """What all streams were, and how long they took."""
        begun, task = time.monotonic(), asyncio.ensure_future(streams(namespaces.head.address))
        await asyncio.sleep(0.3)
        with namespaces.worker.cut_off():
            await asyncio.sleep(seconds)
        return await task, time.monotonic() - begun

    found, took_s = asyncio.run(load())
    record_property("seconds of all streams", round(took_s, 1))
    assert found == expected
    deadline = time.monotonic() + PATIENCE_S
    while asyncio.run(streams(namespaces.worker.address)) != expected:
        assert time.monotonic() < deadline, "the other node's ingress does not serve again"


def test_one_dead_engine_of_two_is_told_as_degraded(namespaces: TwoNodes, server: subprocess.Popen[str]) -> None:
    """By both nodes, in every answer until Serve has replaced it; and its death is one sentence on the terminal."""
    engines = [
        process
        for process in namespaces.head.processes()
        if " ".join(process.cmdline()).startswith("ray::ServeReplica:manta:engine")
    ]
    assert len(engines) == 1
    urls = [f"http://{node.address}:{PORT}" for node in (namespaces.head, namespaces.worker)]
    with httpx.Client(trust_env=False, timeout=PATIENCE_S) as client:
        states = []

        def is_well() -> bool:
            answers = [client.get(f"{url}/health") for url in urls]
            assert [answer.status_code for answer in answers] == [200, 200]
            status = msgspec.json.decode(client.get(f"{urls[1]}/status").content, type=Status)
            states.append((tuple(answer.json().get("reason") for answer in answers), "\n".join(lines(status, urls[1]))))
            return all(answer.json()["status"] == "ok" for answer in answers)

        assert is_well()
        kill_all(engines)
        until(lambda: not is_well())
        until(is_well)
    assert any(reasons == ("1 of 2 engines serve",) * 2 for reasons, _ in states)
    assert any("degraded, 1 of 2" in shown for _, shown in states)
    assert not any("unhealthy" in shown for _, shown in states)
    assert "Ray says: " in wait_for_line(server, "Its whole text is in")


def test_one_nodes_death_costs_the_others_clients_nothing(namespaces: TwoNodes, server: subprocess.Popen[str]) -> None:
    for node in (namespaces.head, namespaces.worker):
        assert httpx.get(f"http://{node.address}:{PORT}/-/healthz", trust_env=False).text == "success"
        assert httpx.get(f"http://{node.address}:{PORT}/health", trust_env=False, timeout=PATIENCE_S).status_code == 200
    expected = asyncio.run(streams(namespaces.worker.address))
    assert expected == asyncio.run(streams(namespaces.head.address))
    assert all(isinstance(text, str) and text for text in expected)

    async def load() -> tuple[list[str | BaseException], list[str | BaseException]]:
        """Of both nodes' clients, while the worker dies."""
        tasks = [asyncio.ensure_future(streams(node.address)) for node in (namespaces.head, namespaces.worker)]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(namespaces.worker.kill)
        of_head, of_worker = await asyncio.gather(*tasks)
        return of_head, of_worker

    begun = time.monotonic()
    of_head, of_worker = asyncio.run(load())
    assert of_head == expected, f"after {time.monotonic() - begun:.1f} s"
    assert any(isinstance(each, httpx.HTTPError) for each in of_worker), "it died under load"
    metrics = httpx.get(f"http://{namespaces.head.address}:{PORT}/metrics", trust_env=False, timeout=PATIENCE_S).text
    moved = [line for line in metrics.splitlines() if line.startswith("manta:continuations_total")]
    assert sum(float(line.split()[-1]) for line in moved) > 0, "some of the head's streams ran on the node that died"
    assert asyncio.run(streams(namespaces.head.address)) == expected


def test_the_end_of_a_pod_loses_no_stream(namespaces: TwoNodes, server: subprocess.Popen[str]) -> None:
    """Its node is drained by the command that Kubernetes runs before it ends the pod, with less time, and then told to
    end. Clients of either node have streams meanwhile.
    """
    namespaces.keep_worker()
    until(lambda: num_engines(namespaces) == 2 and takes_requests(namespaces.worker))
    operations = yaml.safe_load((CONFIGS / "kuberay" / "production" / "workers.yaml").read_text())
    (hook,) = (each["value"]["preStop"] for each in operations if each["path"].endswith("/lifecycle"))
    drain = re.sub(r"(--deadline-remaining-seconds) \d+", r"\1 30", hook["exec"]["command"][-1].partition(";")[0])
    # Ray finds a pod's node by what it has written to the pod's own /tmp, which both nodes share here.
    finding = namespaces.head.popen([sys.executable, "-c", NODE_ID, namespaces.worker.address], namespaces.environment)
    printed, _ = finding.communicate(timeout=PATIENCE_S)
    drain = f"{drain} --node-id {printed.split()[-1]}"
    path = os.pathsep.join((str(BIN), namespaces.environment["PATH"]))
    expected = asyncio.run(streams(namespaces.head.address))
    with concurrent.futures.ThreadPoolExecutor() as clients:
        of_worker = clients.submit(asyncio.run, streams(namespaces.worker.address))
        time.sleep(0.3)
        pod = namespaces.worker.popen(["bash", "-c", drain], namespaces.environment | {"PATH": path})
        while any(" ".join(each.cmdline()).startswith("ray::ServeReplica") for each in namespaces.worker.processes()):
            assert asyncio.run(streams(namespaces.head.address)) == expected
        printed, _ = pod.communicate(timeout=PATIENCE_S)
        assert pod.returncode == 0, printed
        of_head = clients.submit(asyncio.run, streams(namespaces.head.address))
        time.sleep(0.3)
        namespaces.worker.ray.send_signal(signal.SIGTERM)
        namespaces.worker.ray.communicate(timeout=PATIENCE_S)
        assert of_worker.result() == of_head.result() == expected
    assert asyncio.run(streams(namespaces.head.address)) == expected


def takes_requests(node: Node) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://{node.address}:{PORT}/-/healthz", trust_env=False).status_code == 200
    return False


def num_engines(namespaces: TwoNodes) -> int:
    """Engines that answer the head's ingress."""
    answer = httpx.get(f"http://{namespaces.head.address}:{PORT}/status", trust_env=False, timeout=PATIENCE_S)
    return len(msgspec.json.decode(answer.content, type=Status).engines)
