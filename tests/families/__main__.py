"""The table of all decoders of the installed transformers: equal in every history, or refused with which sentence.

    python -m tests.families              # all of them, going on where an interrupted run of the same sources stopped
    python -m tests.families gpt2 llama   # some of them, whatever was found before

The table is written to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import os
import pathlib
import sys
from typing import get_args

import msgspec

from tests.families.children import verdicts
from tests.families.judge import Result, Verdict
from tests.families.tiny import MODEL_TYPES, MODELS_WITH_PICTURES
from tests.prove import source_key

ROOT = pathlib.Path(__file__).resolve().parents[2]


def table(found: list[Verdict]) -> str:
    """Returns the table in Markdown: counts, then a row for each model type."""
    with_pictures = [each for each in found if each.model_type in MODELS_WITH_PICTURES]
    without = [each for each in found if each not in with_pictures]
    parts = {"causal language models": without, "models of text beside pictures": with_pictures}
    lines = [f"- {len(part)} {name}: {_counts(part)}" for name, part in parts.items()]
    order = list(get_args(Result))
    lines.append("")
    lines += ["| model type | architecture | result | difference | why |", "| --- | --- | --- | --- | --- |"]
    for each in sorted(found, key=lambda verdict: (order.index(verdict.result), verdict.model_type)):
        difference = "" if each.difference is None else f"{each.difference:.0e}"
        reason = each.reason.replace("|", "/")
        lines.append(f"| {each.model_type} | {each.architecture} | {each.result} | {difference} | {reason} |")
    return "\n".join(lines) + "\n"


def _counts(found: list[Verdict]) -> str:
    counted = collections.Counter(verdict.result for verdict in found)
    return ", ".join(f"{counted[result]} {result}" for result in get_args(Result) if counted[result])


def main(arguments: list[str]) -> int:
    import transformers

    parser = argparse.ArgumentParser("python -m tests.families", description="Judges the decoders of transformers.")
    parser.add_argument("names", nargs="*", metavar="MODEL_TYPE", help="some of them (default: all)")
    names: list[str] = parser.parse_args(arguments).names
    if unknown := sorted(set(names) - set(MODEL_TYPES)):
        parser.error(f"transformers {transformers.__version__} has no decoders of the type {', '.join(unknown)}")

    record = ROOT / ".prove" / f"families-{source_key(ROOT)}.jsonl"
    record.parent.mkdir(exist_ok=True)
    lines = record.read_bytes().splitlines() if record.exists() and not names else []
    found = {each.model_type: each for each in (msgspec.json.decode(line, type=Verdict) for line in lines)}
    for verdict in verdicts(name for name in names or MODEL_TYPES if name not in found):
        found[verdict.model_type] = verdict
        print(f"{verdict.model_type}: {verdict.result} {verdict.reason} ({verdict.seconds:g} s)", flush=True)
        if not names:
            with record.open("ab") as file:
                file.write(msgspec.json.encode(verdict) + b"\n")
    if not names:
        today = datetime.date.today().isoformat()
        heading = f"# The decoders of transformers {transformers.__version__} on {today}\n\n"
        how = "`python -m tests.families`; [what is compared](../../tests/families/judge.py).\n\n"
        path = ROOT / "benchmarks" / "results" / f"families-{today}.md"
        path.write_text(heading + how + table(list(found.values())))
        print(f"wrote {path.relative_to(ROOT)}")
    return int(any(verdict.result in ("different", "died") for verdict in found.values()))


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    sys.exit(main(sys.argv[1:]))
