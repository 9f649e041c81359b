"""`manta bench structured`: what constraints cost, against the same engine without them.

    e           16 requests under a JSON schema, T = 1, no free whitespace, over the same lengths unconstrained
    tools       16 requests that call a tool of that schema, or may, over the same lengths unconstrained; by format
    slow        15 unconstrained requests beside one whose every mask takes longer than a step, over 16 without it
    guarded     16 requests under a schema that needs a guard, over those under the same without uniqueItems and oneOf
    vocabulary  masks under a guard with 150,000 tokens, without an engine
    masks       how long rows take to be there and how long the sampler waits for them, by pool form and rows
    demo        the demo model under its schemas: exactly right answers and tok/s, against unconstrained

Each ratio comes from turns of two to three seconds in one process, on the same engine, with prompts of 64 random
tokens; where a schema is `new`, another title makes it a new grammar each turn.
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.faults import PLUGIN, start_ray
from benchmarks.guard_masks import guard_rows
from benchmarks.report import Result, combine, header, machine, table_line, turns
from benchmarks.workloads import PromptSource, Row
from manta.cluster.chat.tool_formats import DEEPSEEK_V31, HERMES, PYTHONIC, QWEN3_CODER
from manta.cluster.chat.tool_grammar import calls_grammar
from manta.cluster.engine.step_masks import StepMasks
from manta.cluster.llm import LLM, ConstraintSpec, SamplingParams
from manta.cluster.protocol.tools import Function, Tool
from manta.structured.masks import MaskBatch
from manta.workers.step import StepInput

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
MASK_ROWS = (1, 8, 32, 128)
PARTS = ("e", "tools", "slow", "guarded", "vocabulary", "masks", "demo")
ON_ENGINE = {"e", "tools", "slow", "guarded", "masks"}
"""Parts that load the model, once for each form."""
TOOL_FORMATS = (HERMES, QWEN3_CODER, PYTHONIC, DEEPSEEK_V31)
"""One of each kind: JSON objects, tags around raw strings, Python's syntax, marks around JSON."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="manta bench structured", description="What constraints cost.")
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
    print(header(True), flush=True)
    table = Table(options.json)
    model = options.model or str(benchmark_checkpoint("qwen2.5-0.5b"))
    if "actors" in options.forms.split(",") and ON_ENGINE & set(parts):
        start_ray()
    for form in options.forms.split(","):
        if ON_ENGINE & set(parts):
            llm = LLM(model, kv_cache_bytes=2 << 30, grammar_pool={"form": form})
            prompts = PromptSource(min(150_000, llm.engine.vocab_size))
            if "e" in parts:
                _row_e(llm, prompts, options.pairs, form, table)
            if "tools" in parts:
                _tools(llm, prompts, options.pairs, form, table)
            if "slow" in parts:
                _slow(llm, prompts, options.pairs, form, table)
            if "guarded" in parts:
                _guarded(llm, prompts, options.pairs, form, table)
            if "masks" in parts:
                _masks(llm, prompts, form, table)
            del llm
    if "vocabulary" in parts:
        table.add([guard_rows()])
    if "demo" in parts:
        _demo(options.pairs, table)
    return 0


class Table:
    """Prints and writes rows as they come."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._results: list[Result] = []

    def add(self, manta: list[list[Row]], peer: list[list[Row]] | None = None, against: str | None = None) -> None:
        results = combine(manta, peer, against)
        self._results += results
        for result in results:
            print(table_line(result, True), flush=True)
        if self._path:
            lines = [json.dumps(result.as_json()) + "\n" for result in self._results]
            pathlib.Path(self._path).write_text("".join(lines))


def _speed(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[float, list[int]]:
    """(tok/s, output tokens of each)."""
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    for output in outputs:
        if output.outputs[0].error is not None:
            raise RuntimeError(f"a request failed: {output.outputs[0].error}")
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    return sum(lengths) / seconds, lengths


def _row_e(llm: LLM, prompts: PromptSource, pairs: int, form: str, table: Table) -> None:
    for name in ("cached", "new"):
        rows: tuple[list[list[Row]], list[list[Row]]] = ([], [])
        for pair in turns(pairs + 1, f"e, {name} schema, {form}"):
            schema = copy.deepcopy(SCHEMA) | {"title": f"S{pair if name == 'new' else 0}"}
            spec = ConstraintSpec(kind="json_schema", text=json.dumps(schema), any_whitespace=False)
            wanted = [SamplingParams(max_tokens=OUTPUT, constraint=spec, seed=100 * pair + i) for i in range(ROWS)]
            speed, lengths = _speed(llm, prompts(ROWS, PROMPT), wanted)
            same = [SamplingParams(max_tokens=length, ignore_eos=True, seed=i) for i, length in enumerate(lengths)]
            plain, _ = _speed(llm, prompts(ROWS, PROMPT), same)
            if pair:
                metric = f"16 rows under a {name} schema, {form}"
                rows[0].append([Row("e", metric, speed, "tok/s")])
                rows[1].append([Row("e", metric, plain, "tok/s")])
        table.add(rows[0], rows[1], "unconstrained")


def _tools(llm: LLM, prompts: PromptSource, pairs: int, form: str, table: Table) -> None:
    """Each answer is a call, or text that might have been one."""
    tools = [Tool(Function("save_person", "Saves a person.", SCHEMA)), Tool(Function("stop"))]
    cases = [(tool_format, True) for tool_format in TOOL_FORMATS] + [(HERMES, False)]
    for tool_format, required in cases:
        grammar = calls_grammar(tool_format, tools, llm.tokenizer.token_to_id, parallel=False, required=required)
        spec = ConstraintSpec(kind="lark", text=grammar)
        what = "calls" if required else "text beside tools"
        metric = f"16 rows of {what}, {tool_format.name}, {form}"
        rows: tuple[list[list[Row]], list[list[Row]]] = ([], [])
        for pair in turns(pairs + 1, f"tools, {tool_format.name}, {what}, {form}"):
            wanted = [SamplingParams(max_tokens=OUTPUT, constraint=spec, seed=100 * pair + i) for i in range(ROWS)]
            speed, lengths = _speed(llm, prompts(ROWS, PROMPT), wanted)
            same = [SamplingParams(max_tokens=length, ignore_eos=True, seed=i) for i, length in enumerate(lengths)]
            plain, _ = _speed(llm, prompts(ROWS, PROMPT), same)
            if pair:
                rows[0].append([Row("tools", metric, speed, "tok/s")])
                rows[1].append([Row("tools", metric, plain, "tok/s")])
        table.add(rows[0], rows[1], "unconstrained")


def _guarded(llm: LLM, prompts: PromptSource, pairs: int, form: str, table: Table) -> None:
    """Both sides write up to `OUTPUT` tokens of the same shape."""
    metric = f"16 rows under a guarded schema, {form}"
    rows: tuple[list[list[Row]], list[list[Row]]] = ([], [])
    for pair in turns(pairs + 1, f"guarded, {form}"):
        speeds = []
        for schema in (GUARDED, UNGUARDED):
            spec = ConstraintSpec(kind="json_schema", text=json.dumps(schema), any_whitespace=False)
            wanted = [SamplingParams(max_tokens=OUTPUT, constraint=spec, seed=100 * pair + i) for i in range(ROWS)]
            speeds.append(_speed(llm, prompts(ROWS, PROMPT), wanted)[0])
        if pair:
            rows[0].append([Row("guarded", metric, speeds[0], "tok/s")])
            rows[1].append([Row("guarded", metric, speeds[1], "tok/s")])
    table.add(rows[0], rows[1], "the schema without its guard")


def _slow(llm: LLM, prompts: PromptSource, pairs: int, form: str, table: Table) -> None:
    """The slow request's own tokens do not count."""
    step = _step_seconds(llm, prompts)
    text = json.dumps({"allowed": [300, 301], "at": {str(i): 3 * step for i in range(OUTPUT)}})
    slow = SamplingParams(max_tokens=OUTPUT, constraint=ConstraintSpec(kind="regex", text=text, backend="example"))
    rows: tuple[list[list[Row]], list[list[Row]]] = ([], [])
    for pair in turns(pairs + 1, f"slow, {form}"):
        for index, last in enumerate((slow, None)):
            llm.add_request("last", prompts(1, PROMPT)[0], last or SamplingParams(max_tokens=OUTPUT, ignore_eos=True))
            speed = _plain_speed(llm, prompts(ROWS - 1, PROMPT))
            llm.abort("last")
            if pair:
                rows[index].append([Row("slow", f"15 rows beside a slow grammar, {form}", speed, "tok/s")])
    table.add(rows[0], rows[1], "no slow grammar")


def _plain_speed(llm: LLM, prompts: list[list[int]]) -> float:
    """tok/s of these requests, whatever else runs."""
    for index, prompt in enumerate(prompts):
        llm.add_request(f"plain-{index}", prompt, SamplingParams(max_tokens=48, ignore_eos=True, seed=index))
    remaining = {f"plain-{index}" for index in range(len(prompts))}
    started = time.perf_counter()
    while remaining:
        remaining -= {output.request_id for output in llm.step() if output.finished}
    return len(prompts) * 48 / (time.perf_counter() - started)


def _step_seconds(llm: LLM, prompts: PromptSource) -> float:
    speed, _ = _speed(llm, prompts(ROWS, PROMPT), [SamplingParams(max_tokens=32, ignore_eos=True)] * ROWS)
    return ROWS / speed


def _masks(llm: LLM, prompts: PromptSource, form: str, table: Table) -> None:
    """From the moment of asking to the row being there, beside a running model, and what `collect` waited."""
    spec = ConstraintSpec(kind="json_schema", text=json.dumps(SCHEMA), any_whitespace=False)
    masks = llm.engine.masks
    for index in turns(len(MASK_ROWS), f"masks, {form}"):
        rows = MASK_ROWS[index]
        waits: list[float] = []
        asked: list[float] = []
        begin = masks.begin

        def timed_begin(step: StepInput) -> StepMasks:
            started = time.perf_counter()
            found = begin(step)  # noqa: B023
            asked.append(time.perf_counter() - started)  # noqa: B023
            collect = found.collect

            def timed_collect(is_computing: Callable[[], bool]) -> MaskBatch | None:
                started = time.perf_counter()
                batch = collect(is_computing)
                waits.append(time.perf_counter() - started)  # noqa: B023
                return batch

            found.collect = timed_collect  # type: ignore[method-assign]
            return found

        masks.begin = timed_begin  # type: ignore[method-assign]
        late = masks.num_late
        params = [SamplingParams(max_tokens=24, constraint=spec, seed=i) for i in range(rows)]
        _speed(llm, prompts(rows, 16), params)
        waits.clear()
        asked.clear()
        _speed(llm, prompts(rows, 16), params)
        masks.begin = begin  # type: ignore[method-assign]
        ordered = sorted(waits)
        table.add(
            [
                [
                    Row("masks", f"{rows} rows, begin p50, {form}", statistics.median(asked) * 1e3, "ms"),
                    Row("masks", f"{rows} rows, collect p50, {form}", statistics.median(waits) * 1e3, "ms"),
                    Row("masks", f"{rows} rows, collect p99, {form}", ordered[int(0.99 * len(ordered))] * 1e3, "ms"),
                    Row("masks", f"{rows} rows, late, {form}", masks.num_late - late, "rows"),
                ]
            ]
        )


def _demo(pairs: int, table: Table) -> None:
    """The demo model's extractions: free, and under the schema of the task."""
    from benchmarks.demo_model.data import CONTACT_SCHEMA, ORDER_SCHEMA, held_out

    llm = LLM("demo", kv_cache_bytes=2**28)
    for task, schema in (("order", ORDER_SCHEMA), ("contact", CONTACT_SCHEMA)):
        samples = held_out(task, 64)
        prompts = [llm.tokenizer.apply_chat_template(list(sample.messages)) for sample in samples]
        spec = ConstraintSpec(kind="json_schema", text=json.dumps(schema), any_whitespace=False)
        free = [SamplingParams(temperature=0, max_tokens=160)] * len(samples)
        under = [SamplingParams(temperature=0, max_tokens=160, constraint=spec)] * len(samples)
        rows: tuple[list[list[Row]], list[list[Row]]] = ([], [])
        for pair in turns(min(pairs, 5) + 1, f"demo, {task}"):
            for index, params in enumerate((under, free)):
                started = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - started
                right = sum(o.outputs[0].text == s.answer for o, s in zip(outputs, samples, strict=True))
                tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                if pair:
                    rows[index].append(
                        [
                            Row("demo", f"{task}, under its schema", tokens / seconds, "tok/s"),
                            Row("demo", f"{task}, exactly right of 64", right, "answers"),
                        ]
                    )
        table.add(rows[0], rows[1], "unconstrained")


if __name__ == "__main__":
    sys.exit(main())
