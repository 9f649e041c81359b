"""A Ray cluster of one node with its dashboard, as `ray start --head` makes it, for the commands that talk to it."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.processes import free_port
from tests.patience import PATIENCE_S
from tests.processes import kill_tree

BIN = pathlib.Path(sys.executable).parent


class RayCluster:
    """`environment` is that of the commands that talk to it: Ray's token lies in a home folder of its own."""

    def __init__(self, folder: pathlib.Path) -> None:
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "HOME": str(folder), "RAY_AUTH_MODE": "token"}
        self.environment["RAY_worker_niceness"] = "0"  # else all else that runs on this machine comes before replicas
        self.port = free_port()
        """Port of the head, which `RAY_ADDRESS` names."""
        self.address = f"http://127.0.0.1:{free_port()}"
        """URL of the dashboard."""
        self.agent = f"http://127.0.0.1:{free_port()}"
        """URL of the agent of its node."""

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        """A command with its arguments."""
        words = [str(word) for word in command]
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S)

    def get(self, path: str) -> Any:
        """What the dashboard answers, decoded. Ray's commands ask it too, and take seconds to start."""
        token = (pathlib.Path(self.environment["HOME"]) / ".ray" / "auth_token").read_text().strip()
        request = urllib.request.Request(self.address + path, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())


def _autoscaler(cluster: RayCluster, node_types: dict[str, Any]) -> dict[str, Any]:
    """A file of Ray's cluster launcher whose nodes are processes of this machine, as in Ray's own tests."""
    lists = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "test",
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": f"127.0.0.1:{cluster.port}",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": "ray.head.default",  # as that provider names it
        "available_node_types": {
            **node_types,
            "ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0},
        },
        "max_workers": sum(each["max_workers"] for each in node_types.values()),
        "idle_timeout_minutes": 0.05,
        "upscaling_speed": 1.0,
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        **{f"{name}_commands": [] for name in lists},
    }


@contextlib.contextmanager
def ray_cluster(num_cpus: int, node_types: dict[str, Any] | None = None) -> Iterator[RayCluster]:
    """Its dashboard may not answer yet. `num_cpus` is what Ray is told of its head, however many there are. Ray's
    autoscaler adds nodes of `node_types`, as its cluster launcher takes them.
    """
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets lie there, and paths have a limit
    cluster = RayCluster(folder)
    cluster.run("ray", "get-auth-token", "--generate")
    ports = {"port": cluster.port, "ray-client-server-port": free_port()}
    for name, url in (("dashboard-port", cluster.address), ("dashboard-agent-listen-port", cluster.agent)):
        ports[name] = int(url.rpartition(":")[2])
    command = ["ray", "start", "--head", "--block", f"--num-cpus={num_cpus}", f"--temp-dir={folder}"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    if node_types is not None:
        config = folder / "autoscaler.json"
        config.write_text(json.dumps(_autoscaler(cluster, node_types)))
        command.append(f"--autoscaling-config={config}")
        cluster.environment |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    with (folder / "head.log").open("wb") as log:
        head = subprocess.Popen(command, env=cluster.environment, stdout=log, stderr=log)
    try:
        yield cluster
    finally:
        kill_tree(head.pid)
        shutil.rmtree(folder, ignore_errors=True)


def until(condition: Callable[[], bool], seconds: float = 450.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true within {seconds:g} s"
        time.sleep(1)
