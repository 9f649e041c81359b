"""The benchmarks' own arithmetic and plumbing, against figures that are known beforehand."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import pathlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from benchmarks.engine_child import resident_bytes
from benchmarks.http_load import run_load
from benchmarks.processes import BenchmarkError, Timing
from benchmarks.report import Result, Table, bootstrap_interval, combine, header, in_turns, table_line
from benchmarks.workloads import WORKLOADS, PromptSource, Row, alternate, run_workload, step_seconds
from manta.cluster.cli.bench import run_bench


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_every_part_of_bench_unwinds_when_terminated(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = []

    def main(arguments: list[str]) -> int:
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        finally:
            ended.append(arguments)
        return 0

    monkeypatch.setattr("benchmarks.host.main", main)
    assert run_bench(["host", "--steps", "1"]) == 130
    assert ended == [["--steps", "1"]]
    assert capsys.readouterr().err == "manta bench: interrupted\n"


def test_a_ratio_above_one_always_means_better() -> None:
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
    assert "1.200" in table_line(result, compared=True)


def test_a_bar_is_met_within_the_tolerance() -> None:
    def verdict(low: float, pairs: int = 30, against: str = "vllm") -> str:
        return Result("b", "output, 1 row", "tok/s", 50.0, pairs, against, 49.0, low, (low, low + 0.01)).verdict()

    assert verdict(0.931) == "bar 0.95 met, goal 1.1 not met"
    assert verdict(0.929) == "bar 0.95 not met, goal 1.1 not met"
    assert verdict(1.09) == "bar 0.95 met, goal 1.1 met"
    assert verdict(1.09, pairs=29).endswith("(29 pairs)")
    assert verdict(1.09, against="manta") == "", "the bars are ratios to vLLM"
    assert Result("start", "new process to LLM ready", "s", 6.0, 1).verdict() == "bar 15 met, goal 5 not met"


def test_lines_stand_under_the_header() -> None:
    row = Result("a", "prefill", "tok/s", 1234.0, 30, "vllm", 1000.0, 1.234, (1.2, 1.3))
    title, _ = header(compared=True).split("\n")
    line = table_line(row, compared=True)
    for name, text in (("peer", "1,000 tok/s"), ("ratio", "1.234"), ("95% interval", "1.200 to 1.300")):
        assert title.index(name) + len(name) == line.index(text) + len(text)


def test_an_interval_knows_that_starts_differ() -> None:
    """Ten equal pairs of each of three starts are three observations, and not thirty."""
    ratios = [ratio for start in (0.97, 1.0, 1.03) for ratio in [start] * 10]
    assert bootstrap_interval(ratios, num_starts=3) == (0.97, 1.03)
    low, high = bootstrap_interval(ratios)
    assert high - low < 0.04


@pytest.mark.prove
def test_the_interval_covers_the_median_in_95_percent() -> None:
    generator = random.Random(1)
    covered = 0
    for _ in range(100):
        low, high = bootstrap_interval([generator.gauss(1.1, 0.1) for _ in range(30)], resamples=300)
        covered += low <= 1.1 <= high
    assert 85 <= covered <= 100


class FakeEngine:
    """Answers at once with the time that a known engine would take: 1 s a prompt token, 2 s a decode step."""

    engine = "fake"

    def __init__(self, name: str = "fake", diary: list[str] | None = None) -> None:
        self.name, self.diary = name, [] if diary is None else diary
        self.prompts: list[list[list[int]]] = []
        self.resting = False

    def generate(self, prompts: list[list[int]], max_tokens: int, n: int = 1, temperature: float = 0.0) -> Timing:
        assert not self.resting
        self.diary.append(self.name)
        self.prompts.append(prompts)
        first = float(sum(map(len, prompts)))
        rows = len(prompts) * n
        steps = [(first + 2.0 * step, rows) for step in range(max_tokens)]
        return Timing(steps[-1][0], rows * max_tokens, steps)

    def rest(self) -> None:
        self.resting = True

    def wake(self) -> None:
        self.resting = False


def heard_nothing(text: str) -> None:
    pass


def test_workload_a_separates_decoding_from_prefill() -> None:
    engines = [FakeEngine(), FakeEngine()]
    steady, whole = WORKLOADS["a"]
    first, second = run_workload(steady, engines, PromptSource(1000), 2, heard_nothing)  # type: ignore[arg-type]
    assert first == second
    rows = {row.metric: row.value for row in first[0]}
    assert rows["decode step, 32 rows"] == pytest.approx(2000.0)
    assert rows["prefill"] == pytest.approx(1.0)
    (measured,) = run_workload(whole, engines[:1], PromptSource(1000), 1, heard_nothing)[0][0]  # type: ignore[arg-type]
    assert rows["output, 32 rows, from the two below"] == pytest.approx(measured.value)
    assert measured.value == pytest.approx(32 * 128 / (32 * 128 + 254))


def test_workload_c_draws_choices_of_one_prompt() -> None:
    engine = FakeEngine()
    (workload,) = WORKLOADS["c"]
    (repetitions,) = run_workload(workload, [engine], PromptSource(1000), 30, heard_nothing)  # type: ignore[list-item]
    assert len(repetitions) == 5, "whole runs of a long workload are repeated less often"
    rows = {row.metric: row.value for row in repetitions[0]}
    assert rows["output, n = 64"] == pytest.approx(64 * 64 / (512 + 2 * 63))
    assert rows["decoding of n = 64 over that of 64 requests"] == pytest.approx(1.0)
    assert [(len(batch), len(batch[0])) for batch in engine.prompts[:2]] == [(1, 512), (64, 1)]


def test_prompts_are_fresh_and_equal_for_both_engines() -> None:
    engines = [FakeEngine(), FakeEngine()]
    (workload,) = WORKLOADS["b"]
    run_workload(workload, engines, PromptSource(1000), 3, heard_nothing)  # type: ignore[arg-type]
    assert engines[0].prompts == engines[1].prompts
    seen = [tuple(prompt) for batch in engines[0].prompts for prompt in batch]
    assert len(seen) == 4
    assert len(set(seen)) == 4, "a prompt came twice, which a prefix cache would answer"


def test_workload_d_shares_its_prefix() -> None:
    engine = FakeEngine()
    (workload,) = WORKLOADS["d"]
    run_workload(workload, [engine], PromptSource(1000), 1, heard_nothing)  # type: ignore[list-item]
    warm_up, (cold, warm) = engine.prompts[:2], engine.prompts[2:]
    assert {len(prompt) for batch in engine.prompts for prompt in batch} == {1056}
    assert len({tuple(prompt[:1024]) for prompt in cold + warm}) == 1
    assert len({tuple(prompt) for prompt in cold + warm}) == 32
    assert warm_up[0][0][:1024] != cold[0][:1024], "the second repetition's prefix has been seen"


def test_sides_of_one_process_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    diary: list[str] = []

    def side(name: str) -> Callable[[int], int]:
        def run(turn: int) -> int:
            diary.append(name)
            return turn

        return run

    assert in_turns({name: side(name) for name in "AB"}, 2, "letters") == {"A": [1, 2], "B": [1, 2]}
    assert "".join(diary) == "AB" + "BA" + "AB"
    assert "letters: 100%" in capsys.readouterr().err


def test_a_table_has_its_rows_in_a_file_at_once(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(str(tmp_path / "rows.jsonl"))
    for value in (1.0, 2.0):
        table.add([[Row("a", "prefill", value, "tok/s")]], [[Row("a", "prefill", 1.0, "tok/s")]], "peer")
        rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        assert [row["ratio"] for row in rows] == [1.0, 2.0][: len(rows)]
        assert rows[-1]["value"] == value
    head, line, *printed = capsys.readouterr().out.splitlines()
    assert (head.split()[0], set(line), len(printed)) == ("workload", {"-"}, 2)


def test_turns_alternate_while_the_others_rest() -> None:
    diary: list[str] = []
    engines = [FakeEngine("A", diary), FakeEngine("B", diary)]

    def run(engine: FakeEngine, block: int) -> tuple[str, int]:
        assert [other.resting for other in engines if other is not engine] == [True]
        engine.generate([[block]], 1)
        return engine.name, block

    blocks = iter([[1, 2], [3, 4], [5, 6]])
    results = alternate(engines, 2, lambda: next(blocks), run, heard_nothing)  # type: ignore[type-var]
    assert "".join(diary) == "ABAB" + "BABA" + "ABAB"
    assert results == [[[(name, 3), (name, 4)], [(name, 5), (name, 6)]] for name in "AB"]


def test_an_engine_rests_between_two_turns_of_its_own() -> None:
    """Otherwise only every other turn would begin with waking it."""
    engines = [FakeEngine("A"), FakeEngine("B")]
    woken: list[str] = []
    for engine in engines:
        engine.wake = lambda engine=engine: woken.append(engine.name) or setattr(engine, "resting", False)  # type: ignore[method-assign,misc]

    def run(engine: FakeEngine, block: int) -> None:
        assert [each.resting for each in engines] == [each is not engine for each in engines]

    alternate(engines, 2, lambda: [0], run, heard_nothing)  # type: ignore[type-var]
    assert "".join(woken) == "AB" + "BA" + "AB"


def test_a_step_counts_where_all_rows_take_part() -> None:
    """Chunked prefill delays some rows: steps with fewer rows, before and after, are not what is asked for."""
    steps = [(1.0, 2), (5.0, 2), (6.0, 4), (6.5, 4), (7.0, 4), (9.0, 2)]
    assert step_seconds([Timing(9.0, 18, steps)], 4) == pytest.approx(0.5)
    with pytest.raises(BenchmarkError, match="8 rows"):
        step_seconds([Timing(9.0, 18, steps)], 8)


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


def test_the_load_generator_keeps_streams_busy(server: _Server) -> None:
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
