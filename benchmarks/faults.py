"""`manta bench faults`: what the others feel when a constraint goes wrong beside them.

Blocks of steps with and without a fault take turns on one engine, under the same plain and constrained requests. The
others' tokens must not change, and their time between tokens is compared. `tests/engine/test_faults.py` runs the same
blocks and judges the tokens alone.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import json
import os
import pathlib
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.report import in_turns, machine, markdown_head, markdown_row
from manta.cluster.engine.request import FinishStatus
from manta.cluster.errors import RequestRefused
from manta.cluster.llm import LLM, ConstraintSpec, RequestOutput, SamplingParams

PLUGIN = pathlib.Path(__file__).resolve().parents[1] / "tests" / "plugin"
NUM_PLAIN, NUM_CONSTRAINED = 8, 4
FAULT_STEP = 5


def _spec(kind: str, value: Any, **fields: Any) -> ConstraintSpec:
    return ConstraintSpec(kind=kind, text=value if isinstance(value, str) else json.dumps(value), **fields)


def _example(**options: Any) -> ConstraintSpec:
    return _spec("regex", {"allowed": list(range(20, 60)), **options}, backend="example")


ENDLESS = _example(at={"compile": "hang"})
COSTLY = {
    "regex": _spec("regex", "[ab]*a[ab]{13}", backend="xgrammar"),
    "nesting": _spec("json_schema", "[" * 10_000 + "]" * 10_000),
    "megabytes": _spec("json_schema", {"description": "x" * 5_000_000}),
    "enum": _spec("json_schema", {"enum": [str(number) for number in range(100_000)]}),
    "recursion": _spec("json_schema", {"$ref": "#"}),
    "endless": ENDLESS,
}
"""Constraints that must be refused, or compiled, without anybody else's noticing."""


class FaultLoad:
    """Plain and constrained requests, and faults beside them. `block` checks every token of theirs."""

    def __init__(self, llm: LLM, num_tokens: int) -> None:
        self.llm = llm
        self.num_tokens = num_tokens
        self._expected: list[list[int]] | None = None
        self._num_kills = 0
        self.faults: dict[str, Callable[[], object]] = {
            "raise": lambda: self._misbehave("raise"),
            "hang": lambda: self._misbehave("hang"),
            **{name: lambda spec=spec: self._resolve(spec) for name, spec in COSTLY.items()},  # type: ignore[misc]
        }
        if llm.config.grammar_pool.form == "actors":
            self.faults["kill"] = self._kill
        self._resolving: list[tuple[ConstraintSpec, Future[Any]]] = []
        self._ended: dict[str, RequestOutput] = {}
        self._num_blocks = 0

    def block(self, fault: str | None) -> list[float]:
        """Seconds between tokens of the load. Raises `AssertionError` where a token changed or something leaked."""
        self._num_blocks += 1
        ids = [f"{self._num_blocks}-{index}" for index in range(NUM_PLAIN + NUM_CONSTRAINED)]
        for index, request_id in enumerate(ids):
            self.llm.add_request(request_id, [5 + index] * 16, self._params(index))
        seconds = []
        for step in range(10**9):
            if step == FAULT_STEP and fault is not None:
                self.faults[fault]()
            started = time.perf_counter()
            outputs = self.llm.step()
            if 0 < step < self.num_tokens:
                seconds.append(time.perf_counter() - started)
            self._ended |= {output.request_id: output for output in outputs if output.finished}
            if all(request_id in self._ended for request_id in ids):
                break
        self._check([self._ended[request_id] for request_id in ids])
        self._drain(fault)
        return seconds

    def _params(self, index: int) -> SamplingParams:
        if index < NUM_PLAIN:
            return SamplingParams(seed=index, max_tokens=self.num_tokens, ignore_eos=True)
        spec = _spec("regex", f"[a-z]{{{20 * self.num_tokens}}}")
        return SamplingParams(seed=index, max_tokens=self.num_tokens, constraint=spec)

    def _check(self, outputs: list[RequestOutput]) -> None:
        tokens = [output.outputs[0].token_ids for output in outputs]
        if self._expected is None:
            self._expected = tokens
        assert [len(each) for each in tokens] == [self.num_tokens] * len(tokens)
        assert tokens == self._expected, "a fault changed the tokens of somebody else"

    def _drain(self, fault: str | None) -> None:
        """Until the victim has ended as it must, and nothing is left."""
        while self.llm.engine.has_unfinished:
            self._ended |= {output.request_id: output for output in self.llm.step() if output.finished}
        victim = self._ended.pop("victim", None)
        assert (victim is not None) == (fault in ("raise", "hang"))
        if victim is not None:
            assert victim.outputs[0].finish_reason is FinishStatus.FINISHED_INTERNAL_ERROR
        for spec, future in self._resolving:
            try:
                future.result(timeout=60)
                assert spec is COSTLY["regex"], f"{spec.text[:40]} was accepted"
            except RequestRefused:
                pass
        self._resolving.clear()
        self._ended.clear()
        self.llm.step()
        self.llm.engine.check_integrity()
        stats, pool = self.llm.engine.stats(), self.llm.engine.masks.pool
        assert stats.num_free_blocks == stats.num_blocks
        assert pool is None or pool.session_ids == []

    def _misbehave(self, how: str) -> None:
        params = SamplingParams(max_tokens=30, constraint=_example(at={"3": how}))
        self.llm.add_request("victim", [7], params)

    def _resolve(self, spec: ConstraintSpec) -> None:
        """From another thread, as the server does."""

        def resolve() -> None:
            # Another text each time: a refusal is remembered.
            fresh = ConstraintSpec(kind=spec.kind, text=spec.text + " " * self._num_blocks, backend=spec.backend)
            self._resolving.append((spec, self.llm.engine.constraints.resolve(fresh)))

        thread = threading.Thread(target=resolve)
        thread.start()
        thread.join()

    def _kill(self) -> None:
        pool = self.llm.engine.masks.pool
        assert pool is not None
        self._num_kills += 1
        workers = [worker for worker in pool.workers.active if worker.sessions and worker.transport.pid]
        os.kill(workers[self._num_kills % len(workers)].transport.pid or 0, signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="manta bench faults", description="What a failing constraint costs others.")
    parser.add_argument("--model", help="folder of the model (default: random weights in Qwen2.5-0.5B's shape)")
    parser.add_argument("--tokens", type=int, default=60, help="steps of a block (default: 60)")
    parser.add_argument("--rounds", type=int, default=5, help="blocks with each fault (default: 5)")
    parser.add_argument("--forms", default="threads,actors", help="pool forms (default: threads,actors)")
    options = parser.parse_args(arguments)
    sys.path.append(str(PLUGIN))
    model = options.model or str(benchmark_checkpoint("qwen2.5-0.5b"))
    print(machine(), file=sys.stderr)
    markdown_head("pool", "fault", "steps", "p50, ms", "p99, ms", "p99 without, ms", "ratio of p99")
    for form in options.forms.split(","):
        _table(form, model, options.tokens, options.rounds)
    return 0


def _table(form: str, model: str, num_tokens: int, rounds: int) -> None:
    if form == "actors":
        start_ray()
    pool = {"form": form, "mask_seconds": 2.0}  # a starting actor beside full steps may need one
    load = FaultLoad(
        LLM(model, kv_cache_bytes=1 << 30, grammar_pool=pool, constraints={"compile_seconds": 2}), num_tokens
    )
    load.block(None)
    with_fault: dict[str, list[float]] = {}
    without: list[float] = []
    for name in load.faults:
        sides = {"fault": lambda _, name=name: load.block(name), "none": lambda _: load.block(None)}  # type: ignore[misc]
        blocks = in_turns(sides, rounds, f"faults, {form}, {name}")
        with_fault[name] = list(itertools.chain(*blocks["fault"]))
        without += itertools.chain(*blocks["none"])
    everything = list(itertools.chain(*with_fault.values()))
    for name, seconds in [*with_fault.items(), ("all", everything)]:
        ratio = _p99(seconds) / _p99(without)
        figures = [statistics.median(seconds) * 1e3, _p99(seconds) * 1e3, _p99(without) * 1e3, ratio]
        markdown_row(form, name, len(seconds), *(f"{figure:.2f}" for figure in figures))


def start_ray() -> None:
    """A Ray whose actors find the example backend and are no nicer than the engine, as behind `manta serve`."""
    from manta.cluster import own_ray

    paths = [str(PLUGIN), str(PLUGIN.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    own_ray.start(num_cpus=4)
    atexit.register(own_ray.stop)


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * len(seconds))]


if __name__ == "__main__":
    sys.exit(main())
