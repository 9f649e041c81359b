"""The longest step of an engine while adapters are loaded beside it, over the longest one without loads.

In turns an engine decodes with nothing beside it, and while a thread loads one adapter after the other as a replica
does: it reads and checks the folder, keeps a copy, and has the adapter held between two steps, where others may have to
leave. What is done between two steps counts to the next step.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pathlib
import secrets
import shutil
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from benchmarks.report import in_turns, markdown_head, markdown_row, ratio_of
from manta.cluster.llm import LLM, SamplingParams
from manta.structured.low_priority import lower_priority
from manta.workers.adapters.adapter_copies import AdapterCopies
from manta.workers.cache_folder import cache_entry
from manta.workers.ranks.rank_worker import ReadAdapter

PROMPT_TOKENS = 16
WARM_UP_STEPS = 3
STEPS = 30
"""Steps of a turn. A load takes as long as several of 32 rows, and as long as ten of one row."""
WITHOUT, DURING = "without loads", "during loads"


class Turn(NamedTuple):
    longest_s: float
    median_s: float
    num_loads: int


class Loads:
    """Loads adapters of an engine in a thread, one after the other, as long as somebody asks for the next."""

    def __init__(self, llm: LLM, folders: Sequence[str], max_bytes: int) -> None:
        self._llm = llm
        self._folders = itertools.cycle(folders)
        self._name = secrets.token_hex(16)
        self._copies = AdapterCopies(self._name, max_bytes)
        self._reader = ThreadPoolExecutor(1, "adapters", lower_priority)
        self._reading: Future[ReadAdapter] | None = None
        self.num_held = 0

    def __enter__(self) -> Loads:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.shutdown()
        shutil.rmtree(cache_entry("adapters") / self._name)

    def between_steps(self) -> None:
        """Has the adapter that was read be held, and begins with the next one."""
        if self._reading is not None and self._reading.done():
            if self._llm.engine.adapters.hold(self._reading.result()):
                self.num_held += 1
            self._reading = None
        if self._reading is None:
            self._reading = self._reader.submit(self._read, next(self._folders))

    def wait(self) -> None:
        """Returns when nothing is read any more."""
        if self._reading is not None:
            self._reading.result()

    def _read(self, folder: str) -> ReadAdapter:
        adapter = self._llm.engine.executor.read_adapter(folder)
        self._copies.drop(adapter.digest)
        self._copies.keep(pathlib.Path(folder), adapter.digest)
        return adapter


def measure_loads(
    model: pathlib.Path, folders: Sequence[str], counts: Sequence[int], options: argparse.Namespace
) -> None:
    """Prints the longest steps, for batches of some numbers of rows."""
    most = max(1, sum(_bytes_of(folder) for folder in folders) // 2)  # half of them have to leave again and again
    columns = "ms a step, median", "longest without loads", "longest during loads", "loads a turn", "ratio (95%)"
    markdown_head("weights", "rows", *columns, "pairs")
    kinds = options.weights.split(",")
    for weights in kinds:
        roots = tuple({str(pathlib.Path(each).parent) for each in folders})
        llm = LLM(
            str(model),
            dtype="bfloat16",
            weights=weights,
            adapter_roots=roots,
            max_adapter_bytes=most,
            kv_cache_bytes=256 << 20,
        )
        with Loads(llm, folders, most) as loads:
            for count in counts:
                sides = {
                    WITHOUT: functools.partial(_turn, llm, count, None),
                    DURING: functools.partial(_turn, llm, count, loads),
                }
                limit_s = options.seconds / (len(kinds) * len(counts))
                turns = in_turns(sides, options.turns, f"{weights}, {count} rows, loads", limit_s)
                longest = {side: [each.longest_s for each in of_side] for side, of_side in turns.items()}
                times = (
                    statistics.median(each.median_s for each in turns[WITHOUT]),
                    *(statistics.median(longest[side]) for side in (WITHOUT, DURING)),
                )
                num_loads = statistics.median(each.num_loads for each in turns[DURING])
                ratio = ratio_of(longest[DURING], longest[WITHOUT])
                figures = (*(f"{each * 1e3:.2f}" for each in times), f"{num_loads:g}", ratio)
                markdown_row(weights, count, *figures, len(longest[DURING]))


def _bytes_of(folder: str) -> int:
    return (pathlib.Path(folder) / "adapter_model.safetensors").stat().st_size


def _turn(llm: LLM, num_rows: int, loads: Loads | None, number: int) -> Turn:
    """Decodes `STEPS` steps of rows without an adapter, perhaps with loads beside them."""
    params = SamplingParams(temperature=0, max_tokens=STEPS + 2 * WARM_UP_STEPS, ignore_eos=True)
    for row in range(num_rows):
        llm.add_request(f"row-{row}", [100 + row] * PROMPT_TOKENS, params)
    for _ in range(WARM_UP_STEPS):
        llm.step()
    before, seconds = 0 if loads is None else loads.num_held, []
    for _ in range(STEPS):
        started = time.perf_counter()
        if loads is not None:
            loads.between_steps()
        llm.step()
        seconds.append(time.perf_counter() - started)
    for row in range(num_rows):
        llm.abort(f"row-{row}")
    if loads is None:
        return Turn(max(seconds), statistics.median(seconds), 0)
    num_loads = loads.num_held - before
    loads.wait()
    return Turn(max(seconds), statistics.median(seconds), num_loads)
