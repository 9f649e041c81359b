"""`manta bench constraints`: what constraints cost, against the same engine without them.

    e           16 requests under a JSON schema, T = 1, no free whitespace, over the same lengths unconstrained
    tools       16 requests that call a tool of that schema, or may, over the same lengths unconstrained; by format
    slow        15 unconstrained requests beside one whose every mask takes longer than a step, over 16 without it
    guarded     16 requests under a schema that needs a guard, over those under the same without uniqueItems and oneOf

Each ratio comes from turns of two to three seconds in one process, on the same engine, with prompts of 64 random
tokens; where a schema is `new`, another title makes it a new grammar each turn.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.faults import PLUGIN, start_ray
from benchmarks.report import Table, in_turns, machine
from benchmarks.workloads import PromptSource, Row
from manta.cluster.chat.tool_formats import DEEPSEEK_V31, HERMES, PYTHONIC, QWEN3_CODER
from manta.cluster.chat.tool_grammar import calls_grammar
from manta.cluster.llm import LLM, ConstraintSpec, SamplingParams
from manta.cluster.protocol.tools import Function, Tool

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
UNGUARDED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 6, "maxItems": 12},
        "price": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 4},
    },
    "required": ["sizes", "price", "tags"],
    "additionalProperties": False,
}
GUARDED: dict[str, Any] = copy.deepcopy(UNGUARDED)
"""The same with `uniqueItems`, and a price that is no integer."""
GUARDED["properties"]["sizes"]["uniqueItems"] = True
GUARDED["properties"]["tags"]["uniqueItems"] = True
GUARDED["properties"]["price"] = {"oneOf": [{"type": "number"}, {"type": "integer"}]}
ROWS, PROMPT, OUTPUT = 16, 64, 40
PLAIN_OUTPUT = 48
"""Tokens of a request of `slow`."""
TOOL_FORMATS = (HERMES, QWEN3_CODER, PYTHONIC, DEEPSEEK_V31)
"""One of each kind: JSON objects, tags around raw strings, Python's syntax, marks around JSON."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="manta bench constraints", description="What constraints cost.")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--model", help="folder of the model (default: random weights in Qwen2.5-0.5B's shape)")
    parser.add_argument("--pairs", type=int, default=30, help="turns of each side (default: 30)")
    parser.add_argument("--forms", default="threads,actors", help="pool forms (default: threads,actors)")
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE, one JSON object a line")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"unknown part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    sys.path.append(str(PLUGIN))  # before the first compile process, which searches the same path
    print(machine(), file=sys.stderr)
    model = options.model or str(benchmark_checkpoint("qwen2.5-0.5b"))
    table = Table(options.json)
    if "actors" in options.forms.split(","):
        start_ray()
    for form in options.forms.split(","):
        compared = Compared(LLM(model, kv_cache_bytes=2 << 30, grammar_pool={"form": form}), form, options.pairs, table)
        for part in parts:
            PARTS[part](compared)
        del compared
    return 0


class Compared:
    """One engine, on which two kinds of requests take turns."""

    def __init__(self, llm: LLM, form: str, pairs: int, table: Table) -> None:
        self.llm, self.form = llm, form
        self.prompts = PromptSource(min(150_000, llm.engine.vocab_size))
        self._pairs = pairs
        self._table = table

    def add(
        self, part: str, metric: str, ours: Callable[[int], float], others: Callable[[int], float], against: str
    ) -> None:
        """Measures tok/s of both sides, which are functions of the turn, and prints the ratio."""
        speeds = in_turns({"ours": ours, "others": others}, self._pairs, f"{part}, {metric}, {self.form}")
        rows = [[[Row(part, f"{metric}, {self.form}", speed, "tok/s")] for speed in each] for each in speeds.values()]
        self._table.add(rows[0], rows[1], against)

    def speed(self, params: list[SamplingParams]) -> tuple[float, list[int]]:
        """Runs one request for each of `params`. Returns tok/s, and the output tokens of each."""
        started = time.perf_counter()
        outputs = self.llm.generate(self.prompts(len(params), PROMPT), params, use_tqdm=False)
        seconds = time.perf_counter() - started
        for output in outputs:
            if output.outputs[0].error is not None:
                raise RuntimeError(f"a request failed: {output.outputs[0].error}")
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        return sum(lengths) / seconds, lengths

    def add_over_unconstrained(self, part: str, metric: str, spec_of: Callable[[int], ConstraintSpec]) -> None:
        """Compares requests under the turn's constraint with unconstrained ones of the lengths that these had last."""
        lengths = [OUTPUT] * ROWS

        def constrained(turn: int) -> float:
            speed, lengths[:] = self.speed(under(spec_of(turn), turn))
            return speed

        def free(turn: int) -> float:
            params = [SamplingParams(max_tokens=each, ignore_eos=True, seed=i) for i, each in enumerate(lengths)]
            return self.speed(params)[0]

        self.add(part, metric, constrained, free, "unconstrained")


def under(spec: ConstraintSpec, turn: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=OUTPUT, constraint=spec, seed=100 * turn + i) for i in range(ROWS)]


def json_schema(schema: dict[str, Any]) -> ConstraintSpec:
    return ConstraintSpec(kind="json_schema", text=json.dumps(schema), any_whitespace=False)


def row_e(compared: Compared) -> None:
    metric = f"{ROWS} rows under a {{}} schema"
    compared.add_over_unconstrained("e", metric.format("cached"), lambda _: json_schema(SCHEMA))
    compared.add_over_unconstrained(
        "e", metric.format("new"), lambda turn: json_schema({**SCHEMA, "title": f"S{turn}"})
    )


def tools(compared: Compared) -> None:
    """Each answer is a call, or text that might have been one."""
    given = [Tool(Function("save_person", "Saves a person.", SCHEMA)), Tool(Function("stop"))]
    token_to_id = compared.llm.tokenizer.token_to_id
    for each, required in [*((each, True) for each in TOOL_FORMATS), (HERMES, False)]:
        grammar = calls_grammar(each, given, token_to_id, parallel=False, required=required)
        spec = ConstraintSpec(kind="lark", text=grammar)
        metric = f"{ROWS} rows of {'calls' if required else 'text beside tools'}, {each.name}"
        compared.add_over_unconstrained("tools", metric, lambda _, spec=spec: spec)  # type: ignore[misc]


def guarded(compared: Compared) -> None:
    """Both sides write up to `OUTPUT` tokens of the same shape."""
    with_guard, without = json_schema(GUARDED), json_schema(UNGUARDED)
    compared.add(
        "guarded",
        "16 rows under a guarded schema",
        lambda turn: compared.speed(under(with_guard, turn))[0],
        lambda turn: compared.speed(under(without, turn))[0],
        "the schema without its guard",
    )


def slow(compared: Compared) -> None:
    """The slow request's own tokens do not count."""
    plain_speed, _ = compared.speed([SamplingParams(max_tokens=32, ignore_eos=True)] * ROWS)
    step = ROWS / plain_speed
    text = json.dumps({"allowed": [300, 301], "at": {str(i): 3 * step for i in range(OUTPUT)}})
    slow_spec = ConstraintSpec(kind="regex", text=text, backend="example")
    is_slow = SamplingParams(max_tokens=OUTPUT, constraint=slow_spec)
    is_plain = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    compared.add(
        "slow",
        f"{ROWS - 1} rows beside a slow grammar",
        lambda _: _speed_beside(compared, is_slow),
        lambda _: _speed_beside(compared, is_plain),
        "no slow grammar",
    )


def _speed_beside(compared: Compared, last: SamplingParams) -> float:
    """tok/s of all requests but the last."""
    llm = compared.llm
    llm.add_request("last", compared.prompts(1, PROMPT)[0], last)
    for index, prompt in enumerate(compared.prompts(ROWS - 1, PROMPT)):
        params = SamplingParams(max_tokens=PLAIN_OUTPUT, ignore_eos=True, seed=index)
        llm.add_request(f"plain-{index}", prompt, params)
    remaining = {f"plain-{index}" for index in range(ROWS - 1)}
    started = time.perf_counter()
    while remaining:
        remaining -= {output.request_id for output in llm.step() if output.finished}
    speed = (ROWS - 1) * PLAIN_OUTPUT / (time.perf_counter() - started)
    llm.abort("last")
    return speed


PARTS: dict[str, Callable[[Compared], None]] = {"e": row_e, "tools": tools, "slow": slow, "guarded": guarded}


if __name__ == "__main__":
    sys.exit(main())
