"""Nodes that come with the load: Ray's autoscaler adds one for an engine that finds no room, an ingress follows it, and
when the load is gone engine, ingress and node go too. The nodes are processes of this machine.
"""

from __future__ import annotations

import concurrent.futures
import signal
import threading
from typing import Any

import httpx
import pytest

from benchmarks.processes import free_port
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S
from tests.ray_cluster import ray_cluster, until
from tests.serve.test_start_failures import serve

pytestmark = pytest.mark.prove

NODE_TYPES = {"worker": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 1, "max_workers": 2}}
AUTOSCALING = "{max_replicas: 3, target_ongoing_requests: 2, look_back_s: 2, upscale_delay_s: 0, downscale_delay_s: 2}"
NUM_CLIENTS = 8


def numbers(url: str) -> tuple[int, int, int]:
    """(engines, ingresses, nodes) that serve."""
    status = httpx.get(f"{url}/status", timeout=PATIENCE_S, trust_env=False).json()
    running = {each["name"]: each["replicas"].get("RUNNING", 0) for each in status["deployments"]}
    return running["engine"], running["ingress"], sum(node["alive"] for node in status["nodes"])


def test_a_node_starts_and_stops_with_its_engine() -> None:
    port = free_port()
    url, ended = f"http://127.0.0.1:{port}", threading.Event()
    body = {"model": checkpoint("llama").name, "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}

    def ask() -> list[int]:
        found = []
        while not ended.is_set():
            found.append(
                httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False).status_code
            )
        return found

    with ray_cluster(num_cpus=1, node_types=NODE_TYPES) as cluster:
        address = f"127.0.0.1:{cluster.port}"
        until(lambda: "1 worker" in cluster.run("ray", "status", "--address", address).stdout)
        settings = [f"engine.model={checkpoint('llama')}", f"port={port}", f"autoscaling={AUTOSCALING}"]
        settings.append("engine.dtype=float32")
        environment: dict[str, Any] = {"RAY_ADDRESS": address, "HOME": cluster.environment["HOME"]}
        server = serve(*settings, **environment)
        try:
            assert server.stdout is not None
            assert any("Ctrl-C stops it." in line for line in server.stdout)
            assert numbers(url) == (1, 2, 2)
            with concurrent.futures.ThreadPoolExecutor() as clients:
                asking = [clients.submit(ask) for _ in range(NUM_CLIENTS)]
                try:
                    until(lambda: numbers(url) == (3, 3, 3))
                finally:
                    ended.set()
            statuses = [status for each in asking for status in each.result()]
            assert statuses.count(200) == len(statuses) > NUM_CLIENTS
            until(lambda: numbers(url) == (1, 2, 2))
        finally:
            server.send_signal(signal.SIGTERM)
            printed, error = server.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in printed + error
