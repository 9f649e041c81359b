"""A real Prometheus in a test: it scrapes a server, or holds what a server has exposed, and answers queries.

Debian's package `prometheus` brings it, with `promtool`. A test without them is skipped, and with
`MANTA_NEEDS_PROMTOOL=1`, which `.ci/run` sets, it fails.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client.metrics_core import Metric

from benchmarks.processes import free_port
from tests.patience import PATIENCE_S, wait_until

HISTORY_S, EVERY_S = 300, 10
"""Length of a history that is made of one exposition, and the time between its samples, in seconds."""
COUNTING = ("counter", "histogram")
"""Types of metrics that only grow."""


class Active(NamedTuple):
    """An alert whose condition holds."""

    name: str
    since: float
    """Time at which the condition began to hold, in seconds since 1970."""
    fires: bool
    """Whether it has held for as long as the rule demands."""


class Prometheus:
    """A server with its files in `folder`, which has the rules that the configuration names. `stop` ends it."""

    def __init__(self, folder: pathlib.Path, configuration: Mapping[str, Any]) -> None:
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(dict(configuration)))
        port = free_port()
        self._url = f"http://127.0.0.1:{port}/api/v1"
        command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
        self._process = subprocess.Popen(command)
        wait_until(self._is_ready, poll_s=0.1)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, "Prometheus has ended"
        with contextlib.suppress(OSError):
            return self._get("status/runtimeinfo")["storageRetention"] != ""
        return False

    def _get(self, path: str, **parameters: object) -> Any:
        """Returns the data of an answer. Raises `OSError` (`HTTPError`) where Prometheus refuses."""
        url = f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            return json.load(response)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the series that an expression gives now: each with its labels (`metric`), and its time and value
        (`value`).
        """
        return self._get("query", query=expression)["result"]

    def query_range(self, expression: str, begin: float, end: float, step_s: float) -> list[dict[str, Any]]:
        """Returns the series that an expression gives in a range of time (seconds since 1970): each with its labels
        (`metric`), and with a time and a value every `step_s` seconds where it has one (`values`).
        """
        return self._get("query_range", query=expression, start=begin, end=end, step=step_s)["result"]

    def active(self) -> list[Active]:
        """Returns the alerts that are pending or fire."""
        return [
            Active(
                alert["labels"]["alertname"],
                datetime.datetime.fromisoformat(alert["activeAt"]).timestamp(),
                alert["state"] == "firing",
            )
            for alert in self._get("alerts")["alerts"]
        ]

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)


def need(program: str) -> None:
    """Skips the test if the program is not installed, or fails it where it must be."""
    if shutil.which(program) is None:
        needed = os.environ.get("MANTA_NEEDS_PROMTOOL") == "1"
        (pytest.fail if needed else pytest.skip)(f"{program} is not installed; it comes with Debian's prometheus")


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    need("promtool")
    words = ["promtool", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)


def hold(folder: pathlib.Path, families: Iterable[Metric], now: float) -> Prometheus:
    """Returns a Prometheus that scrapes nothing and holds what a server exposes, as if it had been scraped for
    `HISTORY_S` until `now` (seconds since 1970). What counts has grown evenly to its value.
    """
    lines = [
        f"{_series(sample.name, sample.labels)} {value!r} {now - HISTORY_S + EVERY_S * number:.3f}\n"
        for family in families
        for sample in family.samples
        for number, value in enumerate(_history(sample.value, family.type in COUNTING))
    ]
    (folder / "samples").write_text("".join(lines) + "# EOF\n")
    done = promtool("tsdb", "create-blocks-from", "openmetrics", folder / "samples", folder / "data")
    assert done.returncode == 0, done.stdout + done.stderr
    return Prometheus(folder, {})


def _history(value: float, grows: bool) -> list[float]:
    """Returns the values of a sample's history; the last one is `value`."""
    number = HISTORY_S // EVERY_S
    return [value * index / number if grows else value for index in range(number + 1)]


def _series(name: str, labels: Mapping[str, str]) -> str:
    return f"{name}{{{','.join(f'{label}={json.dumps(value)}' for label, value in labels.items())}}}"
