"""Adapters that are loaded into two engines behind two ingresses, and replaced while streams run and processes die."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import pathlib
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.processes import free_port
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.serve import app
from tests.adapters import Adapters, adapters_of
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S, wait_until
from tests.processes import running_below
from tests.serve.resuming_client import History, ResumingClient

pytestmark = pytest.mark.prove

PROMPT = [30 + 7 * place % 280 for place in range(40)]
NUM_TOKENS = 6
NUM_STREAMED = 400
NUM_STREAMS = 8
NUM_CONNECTIONS = 24
"""Enough for each of two ingresses and two engines to get some."""
STREAMED = {
    "model": "live",
    "prompt": PROMPT,
    "max_tokens": NUM_STREAMED,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}
ENGINE, INGRESS = "ray::ServeReplica:manta:engine", "ray::ServeReplica:manta:ingress"


@functools.cache
def made() -> Adapters:
    adapters = adapters_of(checkpoint("llama"))
    for seed, name in enumerate(("earlier", "later")):
        adapters.add(name, 60 + seed)
    return adapters


class Address:
    """Two ingresses and two engines, or what `options` have instead, which this process has started."""

    def __init__(self, root: pathlib.Path, **options: Any) -> None:
        port = self.port = free_port()
        self.root = root
        self.url = f"http://127.0.0.1:{port}"
        self.made = made()
        engine = EngineConfig(
            model=str(checkpoint("llama")),
            dtype="float32",
            kv_cache_bytes=8 << 20,
            num_threads=1,
            adapter_roots=(str(root),),
        )
        options = options or {"num_engine_replicas": 2, "num_ingress_replicas": 2}
        app.start(ServeConfig(engine=engine, port=port, drain_timeout_s=1.0, **options))

    def put(self, adapter: str) -> None:
        shutil.copytree(self.made.folders[adapter], self.root / "live", dirs_exist_ok=True)

    def load(self, **fields: Any) -> None:
        answer = self.post("/v1/load_lora_adapter", lora_name="live", lora_path="live", **fields)
        assert answer.status_code == 200, answer.text

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Asks over a connection of its own."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE_S)

    def tokens(self, prompt: list[int]) -> list[int]:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = self.post("/v1/completions", model="live", return_token_ids=True, **body)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    def check(self, adapter: str) -> None:
        """Checks that every ingress and engine has the values of an adapter."""
        prompts = [[5 + number, *PROMPT] for number in range(NUM_CONNECTIONS)]
        with concurrent.futures.ThreadPoolExecutor(NUM_CONNECTIONS // 3) as pool:
            found = list(pool.map(self.tokens, prompts))
        assert found == [self.made.greedy(prompt, adapter, NUM_TOKENS) for prompt in prompts]

    def shares(self, series: str) -> list[float]:
        """Returns what each ingress or engine has counted in a series, whose labels begin as given."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text
        return [float(line.split()[-1]) for line in text.splitlines() if line.startswith(series)]

    def stream(self, begun: threading.Barrier) -> list[int]:
        found: list[int] = []
        with httpx.stream("POST", f"{self.url}/v1/completions", json=STREAMED, timeout=PATIENCE_S) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    if not found:
                        begun.wait(PATIENCE_S)
                    found += tokens_of(line)
        return found

    def kill(self, title: str) -> None:
        """Kills one of two processes, and waits until another one is in its place."""
        before = {each.pid for each in running_below(None, title)}
        assert len(before) == 2
        victim = running_below(None, title)[0]
        victim.kill()

        def is_replaced() -> bool:
            return len({each.pid for each in running_below(None, title)} - {victim.pid}) == 2

        wait_until(is_replaced, poll_s=0.2)


def tokens_of(line: str) -> list[int]:
    """Returns the tokens of an event with choices."""
    event = json.loads(line.removeprefix("data: "))
    return [token for choice in event["choices"] for token in choice["token_ids"]]


def tokens_read(history: History) -> list[int]:
    lines = [event.content.decode().strip() for event in history.events]
    return [token for line in lines if line.startswith("data: {") for token in tokens_of(line)]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    try:
        yield Address(tmp_path_factory.mktemp("adapters"))
    finally:
        app.stop()


def test_a_reload_reaches_everybody_at_once_and_no_running_stream(address: Address) -> None:
    address.put("earlier")
    address.load()
    address.check("earlier")
    for series in ('manta:adapter_requests_total{adapter="live"', "manta:prefix_cache_queries_total"):
        assert len(address.shares(series)) == 2
        assert min(address.shares(series)) > 0, "one of two takes no request"
    alone = address.stream(threading.Barrier(1))
    begun = threading.Barrier(NUM_STREAMS + 1)
    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(address.stream, begun) for _ in range(NUM_STREAMS)]
        begun.wait(PATIENCE_S)
        address.put("later")
        address.load(load_inplace=True)
        running_below(None, ENGINE)[0].kill()
        address.check("later")
        assert [each.result(PATIENCE_S) for each in streams] == [alone] * NUM_STREAMS


def test_whoever_starts_later_knows_it(address: Address) -> None:
    wait_until(lambda: len(running_below(None, ENGINE)) == 2, poll_s=0.2)
    address.put("earlier")
    address.load(load_inplace=True)
    shutil.rmtree(address.root / "live")
    for title in (ENGINE, INGRESS):
        address.kill(title)
        address.check("earlier")
    for controller in running_below(None, "ray::ServeController"):
        controller.kill()
    address.check("earlier")
    address.kill(ENGINE)
    address.check("earlier")
    assert address.post("/v1/unload_lora_adapter", lora_name="live").status_code == 200
    answers = [address.post("/v1/completions", model="live", prompt=PROMPT) for _ in range(NUM_CONNECTIONS)]
    assert [answer.status_code for answer in answers] == [404] * NUM_CONNECTIONS


def test_streams_that_lose_their_ingress_have_the_values_that_they_began_with(address: Address) -> None:
    """Clients read on at another ingress. Meanwhile the adapter gets other values, and an engine dies too."""
    address.put("earlier")
    address.load(load_inplace=True)
    alone = address.stream(threading.Barrier(1))
    clients = [ResumingClient([address.port], "/v1/completions", STREAMED, seed) for seed in range(2 * NUM_STREAMS)]
    with concurrent.futures.ThreadPoolExecutor(len(clients)) as pool:
        reading = [pool.submit(client.read) for client in clients]
        wait_until(lambda: all(client.history.events for client in clients))
        victim = running_below(None, INGRESS)[0]
        victim.kill()
        victim.wait(PATIENCE_S)  # until then its socket takes connections, and resets them
        address.put("later")
        address.load(load_inplace=True)
        running_below(None, ENGINE)[0].kill()
        address.check("later")
        histories = [each.result(PATIENCE_S) for each in reading]
    assert [history.problems for history in histories] == [[]] * len(clients)
    assert [tokens_read(history) for history in histories] == [alone] * len(clients)
    assert max(history.num_connections for history in histories) > 1, "somebody has lost its ingress"
