"""Case after case from consecutive seeds: progress, what occurred how often, and failures shrunk to files."""

from __future__ import annotations

import collections
import pathlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from manta.workers.sampling_params import SamplingParams
from tests.fuzz import cases
from tests.fuzz.cases import Case
from tests.fuzz.compare import differences
from tests.fuzz.engines import Run
from tests.fuzz.shrink import shrink

FOLDER = pathlib.Path(__file__).parents[2] / ".fuzz"
"""Folder of failing cases."""
SHRINK_SECONDS = 300.0
PROGRESS_EVERY = 20
"""Cases a line."""

FEATURES = (
    *(f"accepted {name} drafts" for name in ("forced", "ngram", "draft")),
    *(f"rejected {name} drafts" for name in ("forced", "ngram", "draft")),
    *(f"constraint {kind}" for kind in ("json_schema", "json_object", "regex", "choice", "lark", "ebnf")),
    "constraint structural_tag",
    *(f"backend {name}" for name in ("llguidance", "xgrammar", "example")),
    *(f"ends: {status}" for status in ("stop", "length", "abort", "error")),
    *(f"fault raise_{place}" for place in ("in_forward", "after_forward", "after_sample")),
    *(f"fault {kind}" for kind in ("nan_block", "late_masks", "kill_worker", "no_slots")),
    *("aborts", "deadlines", "refused", "forks", "beam searches", "preemptions", "prefix cache hits"),
    *("late rows", "workers replaced", "stop strings", "stop tokens", "logprobs", "prompt logprobs"),
    *("priorities", "pool of threads", "steps overlapped by a thread", "steps overlapped by a device"),
    *(f"param {name}" for name in SamplingParams.__struct_fields__),
)
"""Features that must occur in a long campaign, which would otherwise prove nothing about them."""


class Report(NamedTuple):
    """What one case came to."""

    problems: list[str]
    counts: collections.Counter[str]


Check = Callable[[Case], Report]
"""Runs a case and judges it; a campaign knows nothing else of what it tests."""


def check_engine(case: Case) -> Report:
    """On an engine in this process."""
    run = Run(case)
    run.run()
    return Report(differences(run), run.counts)


class Campaign:
    """Its failures and counts so far; `run` goes on with further seeds."""

    def __init__(
        self,
        check: Check,
        generate: Callable[[int], Case],
        command: str = "make fuzz",
        shrink_seconds: float = SHRINK_SECONDS,
    ) -> None:
        self._check = check
        self._generate = generate
        self._shrink_seconds = shrink_seconds
        self._command = command
        """The command that runs a case again."""
        self.counts: collections.Counter[str] = collections.Counter()
        self.failed: list[int] = []
        """Seeds."""

    def run(self, seeds: Iterable[int], seconds: float = float("inf")) -> None:
        """Until the seeds or the time is over."""
        started = time.monotonic()
        for seed in seeds:
            if time.monotonic() - started > seconds:
                break
            report = self._check(self._generate(seed))
            self.counts += report.counts
            self.counts["cases"] += 1
            if report.problems:
                self.failed.append(seed)
                self.report_failure(self._generate(seed), report.problems)
            if self.counts["cases"] % PROGRESS_EVERY == 0:
                self._say(f"{self.counts['cases']} cases, {self.counts['tokens']} tokens, seed {seed}")

    def report_failure(self, case: Case, problems: list[str]) -> None:
        """Shrinks the case and says how to run it again."""
        path = FOLDER / f"{case.seed}.json"
        cases.save(case, path)
        self._say(f"\nseed {case.seed} fails:", *problems[:5], f"again: {self._command} CASE={path}", "shrinking ...")
        small = shrink(case, lambda candidate: bool(self._check(candidate).problems), self._shrink_seconds)
        small_path = FOLDER / f"{case.seed}-small.json"
        cases.save(small, small_path)
        self._say(*self._check(small).problems[:5], msgspec.json.encode(small).decode())
        self._say(f"again: {self._command} CASE={small_path}\n")

    @property
    def missing(self) -> list[str]:
        """Features that did not occur."""
        return [name for name in FEATURES if not self.counts[name]]

    def table(self) -> str:
        """How often what occurred."""
        names = ["cases", "requests", "tokens", "steps", *FEATURES]
        others = sorted(set(self.counts) - set(names))
        rows = [f"{self.counts[name]:>9}  {name}" for name in (*names, *others)]
        seeds = f": seeds {', '.join(map(str, self.failed))}" if self.failed else ""
        return "\n".join([*rows, f"{len(self.failed):>9}  failed{seeds}"])

    @staticmethod
    def _say(*lines: str) -> None:
        print(*lines, sep="\n", flush=True, file=sys.stderr)
