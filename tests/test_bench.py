"""The benchmarks' own arithmetic and plumbing, against figures that are known beforehand."""

from __future__ import annotations

import asyncio
import json
import mmap
import random
import threading
from collections.abc import Iterator

import pytest

from benchmarks.engine_child import resident_bytes
from benchmarks.http_load import run_load
from benchmarks.processes import BenchmarkError
from benchmarks.report import bootstrap_interval, combine, table
from benchmarks.workloads import WORKLOADS, PromptSource, Row, run_workload


def test_a_ratio_above_one_means_better_whatever_the_unit() -> None:
    manta = [[Row("a", "output", 300.0, "tok/s"), Row("a", "step", 40.0, "ms")]]
    peer = [[Row("a", "output", 200.0, "tok/s"), Row("a", "step", 60.0, "ms")]]
    assert [result.ratio for result in combine(manta, peer)] == [1.5, 1.5]


def test_the_ratio_is_paired_and_not_of_medians() -> None:
    """A machine that halves its speed in the middle slows both engines of a pair and changes no ratio."""
    speeds = [100.0, 90.0, 50.0, 45.0, 48.0]
    manta = [[Row("a", "output", 1.2 * speed, "tok/s")] for speed in speeds]
    peer = [[Row("a", "output", speed, "tok/s")] for speed in speeds]
    (result,) = combine(manta, peer)
    assert result.ratio == pytest.approx(1.2)
    assert result.interval == pytest.approx((1.2, 1.2))
    assert "1.20" in table([result], "vllm")


def test_the_interval_covers_the_true_median_about_95_times_in_100() -> None:
    generator = random.Random(1)
    covered = 0
    for _ in range(100):
        low, high = bootstrap_interval([generator.gauss(1.1, 0.1) for _ in range(30)], resamples=300)
        covered += low <= 1.1 <= high
    assert 85 <= covered <= 100


class FakeEngine:
    """Answers at once with the time that a known engine would take: 1 s a prompt token, 2 s a decode step."""

    engine = "fake"

    def __init__(self) -> None:
        self.prompts: list[list[list[int]]] = []

    def generate(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, int]:
        self.prompts.append(prompts)
        return sum(map(len, prompts)) + 2.0 * (max_tokens - 1), len(prompts) * max_tokens

    def wait_until_idle(self) -> float:
        return 0.0


def test_workload_a_separates_decoding_from_prefill() -> None:
    engines = [FakeEngine(), FakeEngine()]
    (workload,) = WORKLOADS["a"]
    first, second = run_workload(workload, engines, PromptSource(1000), 2, lambda name, share: None)  # type: ignore[arg-type]
    assert first == second
    rows = {row.metric: row.value for row in workload.figures(first[0])}
    assert rows["decode step, 32 rows"] == pytest.approx(2000.0)
    assert rows["prefill"] == pytest.approx(1.0)
    assert rows["output, 32 rows"] == pytest.approx(32 * 128 / (32 * 128 + 254))
    assert engines[0].prompts == engines[1].prompts
    seen = [tuple(prompt) for batch in engines[0].prompts for prompt in batch]
    assert len(set(seen)) == len(seen), "a prompt came twice, which a prefix cache would answer"


def test_workload_d_shares_a_prefix_where_it_says_so() -> None:
    engine = FakeEngine()
    (workload,) = WORKLOADS["d"]
    run_workload(workload, [engine], PromptSource(1000), 1, lambda name, share: None)  # type: ignore[list-item]
    unshared, cold, warm = engine.prompts
    assert {len(prompt) for batch in engine.prompts for prompt in batch} == {1056}
    assert len({tuple(prompt[:1024]) for prompt in unshared}) == 16
    assert len({tuple(prompt[:1024]) for prompt in cold + warm}) == 1
    assert len({tuple(prompt) for prompt in cold + warm}) == 32


def test_resident_bytes_counts_touched_pages_only() -> None:
    import ctypes

    with mmap.mmap(-1, 64 * mmap.PAGESIZE) as memory:
        buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
        for page in range(0, 20, 2):
            memory[page * mmap.PAGESIZE] = 1
        touched = resident_bytes(ctypes.addressof(buffer), len(memory))
        del buffer
    assert touched == 10 * mmap.PAGESIZE


class _Server:
    """Streams completions in chunks whose borders fall inside of lines, with `num_tokens` in each reply's usage."""

    def __init__(self, num_tokens: int, status: str = "200 OK") -> None:
        self.num_tokens, self.status = num_tokens, status
        self.running = self.most_running = 0
        self.loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.ready.wait()

    def _run(self) -> None:
        async def start() -> None:
            self.server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
            self.port = self.server.sockets[0].getsockname()[1]
            self.ready.set()

        self.loop.run_until_complete(start())
        self.loop.run_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        body = json.loads(await reader.readexactly(length))
        events: list[dict[str, object]] = [{"choices": [{"text": f"t{index}"}]} for index in range(body["max_tokens"])]
        events.append({"choices": [], "usage": {"completion_tokens": self.num_tokens}})
        data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        writer.write(f"HTTP/1.1 {self.status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for start in range(0, len(data), 50):
            piece = data[start : start + 50]
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(b"0\r\n\r\n")
        self.running -= 1
        writer.close()

    def stop(self) -> None:
        def end() -> None:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.call_soon(self.loop.stop)

        self.loop.call_soon_threadsafe(end)
        self.thread.join()


@pytest.fixture
def server() -> Iterator[_Server]:
    started = _Server(num_tokens=5)
    yield started
    started.stop()


def test_the_load_generator_keeps_each_stream_busy_and_counts_tokens(server: _Server) -> None:
    result = run_load(server.port, "m", [[1, 2, 3]] * 8, 5, num_streams=2)
    assert result.num_tokens == 8 * 5
    assert server.most_running == 2
    assert len(result.ttft) == 8
    assert all(0 < seconds < result.seconds for seconds in result.ttft)
    assert 0 < len(result.gaps) <= 8 * 4


def test_the_load_generator_refuses_short_replies(server: _Server) -> None:
    with pytest.raises(BenchmarkError, match="5 tokens where 6"):
        run_load(server.port, "m", [[1]], 6, num_streams=1)


def test_the_load_generator_reports_an_error_status() -> None:
    failing = _Server(num_tokens=5, status="503 Service Unavailable")
    try:
        with pytest.raises(BenchmarkError, match="503"):
            run_load(failing.port, "m", [[1]], 5, num_streams=1)
    finally:
        failing.stop()
