"""`manta bench prefixes`: the time to the first token of a known prompt, from an engine that replaced a killed one.

Two servers take turns: one keeps prefixes in files (`engine.prefix_store_bytes`), and one does not. Each is asked the
prompt twice. Then its engine is killed, and the replacement answers a short request, so that its start does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.processes import BenchmarkError, ServerProcess, Setup, free_port
from benchmarks.report import machine, markdown_head, markdown_row, say_failure
from benchmarks.start import ENGINE
from manta.workers.cache_folder import cache_entry

MODEL = "qwen2.5-0.5b"
CACHE_BYTES, KEPT_BYTES = 1 << 30, 4 << 30
REPLACED_S = 120.0
"""Seconds within which Serve must have replaced an engine."""


WRITTEN_S = 60.0
"""Seconds within which an idle engine must have written a prompt."""
BLOCK_TOKENS = 16
"""Tokens of a block, by default."""


def num_kept() -> int:
    """Returns how many files the node's prefix store has."""
    return len(os.listdir(cache_entry("prefixes")))


class KeepingServer(ServerProcess):
    """A server whose engine can be killed. With `keeps` it keeps prefixes."""

    def __init__(self, model: str, keeps: bool) -> None:
        self.keeps = keeps
        kept = {"engine.prefix_store_bytes": KEPT_BYTES if keeps else 0}
        super().__init__("manta", model, Setup(kv_cache_bytes=CACHE_BYTES), free_port(), kept)

    def ask(self, prompt: list[int]) -> tuple[float, int]:
        """Returns the seconds to the first token after a prompt, and how many of its tokens were cached."""
        body = {"model": self.model_name, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        url, headers = f"http://127.0.0.1:{self.port}/v1/completions", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        started, first, cached = time.perf_counter(), 0.0, 0
        try:
            response = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=600)
        except urllib.error.HTTPError as error:
            raise self.fail(f"a prompt was not answered: {error.read().decode()}") from error
        with response:
            for line in response:
                if line.startswith(b"data: {"):
                    event: dict[str, Any] = json.loads(line[6:])
                    first = first or time.perf_counter() - started
                    if event.get("usage"):
                        cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        return first, cached

    def replace_engine(self) -> None:
        """Kills the engine, and returns when another one answers."""
        killed = self._engine_pid()
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        deadline = time.perf_counter() + REPLACED_S
        while self._engine_pid() in (None, killed):
            if time.perf_counter() > deadline:
                raise self.fail(f"no engine came within {REPLACED_S:.0f} s")
            time.sleep(0.1)
        self.ask([5])

    def _engine_pid(self) -> int | None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith(ENGINE):
                    return process.pid
        return None


def measure(server: KeepingServer, num_tokens: int, num_kills: int) -> tuple[list[float], list[int]]:
    """Returns the seconds to the first token after each kill, and the tokens that were cached."""
    found = []
    for _ in range(num_kills):
        system = random.choices(range(10, 500), k=num_tokens)  # others each time, because the last run's are kept
        kept_before = num_kept()
        for question in range(2):
            server.ask([*system, 5, 6 + question])
        deadline = time.perf_counter() + WRITTEN_S
        while server.keeps and num_kept() < kept_before + num_tokens // BLOCK_TOKENS:
            if time.perf_counter() > deadline:
                raise server.fail(f"the prompt was not kept within {WRITTEN_S:.0f} s")
            time.sleep(0.1)
        server.replace_engine()
        found.append(server.ask([*system, 5, 9]))
    return [seconds for seconds, _ in found], [cached for _, cached in found]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="manta bench prefixes",
        description="The time to the first token of a known prompt after an engine's death.",
    )
    parser.add_argument("--model", metavar="FOLDER", help="default: a random model of half a billion parameters")
    parser.add_argument("--tokens", type=int, default=2000, metavar="N", help="of the known prompt (default: 2000)")
    parser.add_argument("--kills", type=int, default=5, metavar="N", help="of each server's engine (default: 5)")
    options = parser.parse_args(arguments)
    print(machine(), file=sys.stderr)
    markdown_head("prefixes", "first token, s", "median", "cached tokens")
    try:
        for keeps in (False, True):
            server = KeepingServer(options.model or str(benchmark_checkpoint(MODEL)), keeps)
            try:
                seconds, cached = measure(server, options.tokens, options.kills)
            finally:
                server.stop()
            each, median = ", ".join(f"{one:.2f}" for one in seconds), statistics.median(seconds)
            markdown_row("kept" if keeps else "not kept", each, f"{median:.2f}", f"{min(cached)}")
    except BenchmarkError as error:
        say_failure(f"manta bench prefixes: {error}")
        return 1
    return 0
