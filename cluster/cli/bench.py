"""`manta bench`: finds the benchmarks, which are next to this package in a checkout, and runs them.

The benchmarks are not part of the installed package: they start whole engines and, if asked, another engine's Python.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Sequence

from manta.cluster.cli.parser import nearest
from manta.cluster.cli.refusal import Refusal
from manta.structured.visible_text import say, say_lines

SUITES = {
    "table": "Manta beside vLLM, llama.cpp, ik_llama.cpp and OpenVINO, into a file that a later run continues",
    "constraints": "what constraints cost",
    "cluster-http": "HTTP on a cluster, by the way from a client to an engine",
    "batch": "what a batch costs beside its engine",
    "schemas": "engines for JSON schemas on MaskBench",
    "objects": "what closed objects and any order of properties bring and cost",
    "faults": "what others feel when a constraint goes wrong beside them",
    "start": "what the seconds of `manta serve` go to, from the command to the first answer",
    "from-zero": "how long a request waits for a model that was unloaded",
    "several-models": "the speed of models that share an address, over their speed alone",
    "prefixes": "the first token of a known prompt after its engine was killed",
    "host": "what a step costs besides the model, by rows",
    "forms": "a lesser processor's kernels, and what the hardware allows",
    "kernel-times": "the CPU kernels against torch's operations and against floors",
    "long-contexts": "chunks, decode steps and warm first tokens of long prompts against floors, and the host's share",
    "mixers": "layers of several kinds against floors and llama.cpp, and a second turn",
    "speculative": "what drafts save",
    "adapters": "what LoRA adapters cost a step",
    "embeddings": "texts a second beside sentence-transformers and llama.cpp, and how long a text waits",
    "same-tokens": "whether another commit gives the same tokens, bit for bit",
}
"""Benchmarks with a command line of their own, and what each measures."""


def run_bench(arguments: Sequence[str]) -> int:
    """Runs `benchmarks/bench.py`, or the module in `SUITES` that the first word names, with its own command line.
    Returns its exit code. Ctrl-C and SIGTERM stop everything that it started and give 130.
    """
    root = pathlib.Path(__file__).resolve().parents[2]
    if not (root / "benchmarks" / "bench.py").exists():
        raise Refusal(
            f"the benchmarks are not part of an installed package ({root} has no benchmarks/bench.py); clone the "
            "repository, run 'pip install -e .' in it, and use its manta"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    name, rest = "bench", list(arguments)
    if rest and not rest[0].startswith("-") and rest[0] not in SUITES:
        raise Refusal(
            f"there is no part {rest[0]!r}{nearest(rest[0], list(SUITES))}; the parts are {', '.join(SUITES)}"
        )
    if rest[:1] in (["-h"], ["--help"]):
        say("manta bench measures speed, start-up, memory and HTTP. Its parts have flags of their own:\n")
        say_lines([*(f"  manta bench {part:<18}{what}" for part, what in SUITES.items()), ""], flush=True)
    if rest and rest[0] in SUITES:
        name, rest = rest[0].replace("-", "_"), rest[1:]
    interrupted_once = importlib.import_module("benchmarks.processes").interrupted_once
    try:
        with interrupted_once():
            return int(importlib.import_module(f"benchmarks.{name}").main(rest))
    except KeyboardInterrupt:
        say("manta bench: interrupted", file=sys.stderr)
        return 130
