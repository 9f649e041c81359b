"""The record of `make prove`: which tests have passed for exactly these sources, so that an interrupted run goes on.

Each passed test is written to `.prove/` at once, under a key of all sources; the next run leaves those tests out. When
a session ends, all that is recorded for the key becomes a dated table in `benchmarks/results/`. Figures that a
test gives with pytest's `record_property` become part of its row.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import pathlib
from typing import Any

import pytest

from manta.structured.host import num_cores

SHOWN_SECONDS = 5.0
"""A quicker test is a row of the table only if it gives figures."""
SOURCES = ("cluster", "specdecode", "workers", "structured", "configs", "tests")


def source_key(root: pathlib.Path) -> str:
    """A hash of every source file and of the dependencies' list; another source means that nothing is proven."""
    digest = hashlib.sha256((root / "pyproject.toml").read_bytes())
    for room in SOURCES:
        for path in sorted((root / room).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(root)).encode() + b"\0")
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class ProofRecord:
    """A pytest plugin: leaves out what has passed, records what passes, writes the table."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.path = root / ".prove" / f"{source_key(root)}.jsonl"
        self.passed: dict[str, dict[str, Any]] = {}
        self.failed: list[str] = []
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                entry = json.loads(line)
                self.passed[entry["test"]] = entry

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if item.nodeid in self.passed]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item.nodeid not in self.passed]

    def pytest_report_header(self) -> str:
        return f"proving: {len(self.passed)} tests have passed for these sources already ({self.path})"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        if report.when != "call" or not report.passed:
            return
        entry = {"test": report.nodeid, "seconds": round(report.duration, 2), "figures": dict(report.user_properties)}
        self.passed[report.nodeid] = entry
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.passed:
            session.exitstatus = pytest.ExitCode.OK  # all that was asked for has passed before
        if not self.passed and not self.failed:
            return
        folder = self.root / "benchmarks" / "results"
        folder.mkdir(parents=True, exist_ok=True)
        today = datetime.date.today().isoformat()
        (folder / f"prove-{today}.md").write_text(self.table(today))

    def table(self, today: str) -> str:
        """Markdown: failures, a row for each test that gives figures or took a while, and a count of the others."""
        cores = num_cores()
        lines = [
            f"# Proven on {today}",
            "",
            f"Sources {self.path.stem}, {cores} cores. {len(self.passed)} tests passed.",
            "",
        ]
        if self.failed:
            lines += ["Failed:", "", *(f"- `{name}`" for name in sorted(set(self.failed))), ""]
        shown = {n: e for n, e in sorted(self.passed.items()) if e["figures"] or e["seconds"] >= SHOWN_SECONDS}
        lines += [
            f"{len(self.passed) - len(shown)} of them took less than {SHOWN_SECONDS:g} s and give no figures.",
            "",
        ]
        lines += ["| test | s | figures |", "| --- | --- | --- |"]
        for name, entry in shown.items():
            figures = ", ".join(f"{key} = {value}" for key, value in entry["figures"].items())
            lines.append(f"| `{name}` | {entry['seconds']} | {figures} |")
        return "\n".join(lines) + "\n"
