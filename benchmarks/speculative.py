"""`manta bench speculative`: the gain from drafts, against the same engine without them.

    demo      the demo model with its draft, with n-grams, and with both in a chain, over its own tasks
    history   the demo model with earlier answers, over new tasks and over tasks that come again each turn
    h         n-grams in the large shape, on prompts that repeat 32 tokens 8 times
    json      forced tokens, in the large shape, under a schema whose text is mostly fixed, T = 1
    losses    each proposer where drafts hardly help, on the tiny model: draws among 8 tokens, whose last ones have
              always occurred before, and drafts of a model and of a head with other random weights. The bar of each
              ratio is 0.98

Engines without drafts, with adaptive and with fixed lengths take turns of a few seconds in one process, with the same
requests, at each number of sequences. Ratios are to the engine without drafts. Each row also has the tokens that a
sequence gained per step, and the acceptance rate by place after the last token.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.checkpoints import benchmark_checkpoint, made_once, random_draft, random_eagle3
from benchmarks.report import Table, in_turns, machine
from benchmarks.workloads import PromptSource, Row
from manta.cluster.engine.stats import DraftCounts
from manta.cluster.llm import LLM, ConstraintSpec, SamplingParams

PARTS = ("demo", "history", "h", "json", "losses")
ROWS = (1, 4, 16, 32)
DEMO = pathlib.Path(__file__).resolve().parents[1] / "configs" / "demo"
DEMO_TASKS = ("order", "contact", "sorting", "question")
DEMO_REQUESTS = 16
"""Fewest requests of one turn of the demo model."""
PERIOD, REPEATS, OUTPUT = 32, 8, 256
NOISE_IDS = tuple(range(400, 408))
"""Tokens that `losses` draws."""
NOISE_PROMPT = 64
SHOWN_PLACES = 8

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"enum": ["A-1001", "B-2002", "C-3003"]},
        "is_an_active_subscription": {"type": "boolean"},
        "preferred_language_of_the_customer": {"enum": ["English", "German", "Greek"]},
        "shipping_and_billing_information": {
            "type": "object",
            "properties": {
                "delivery_window_in_working_days": {"enum": [1, 2, 5, 10]},
                "requires_signature_on_delivery": {"type": "boolean"},
            },
            "required": ["delivery_window_in_working_days", "requires_signature_on_delivery"],
            "additionalProperties": False,
        },
    },
    "required": [
        "customer_identification_number",
        "is_an_active_subscription",
        "preferred_language_of_the_customer",
        "shipping_and_billing_information",
    ],
    "additionalProperties": False,
}

Requests = tuple[list[list[int]], list[SamplingParams]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="manta bench speculative", description="What drafts save.")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--model", help="folder of h's model (default: random weights in Qwen2.5-0.5B's shape)")
    parser.add_argument("--pairs", type=int, default=20, help="turns of each engine (default: 20)")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of sequences (default: 1,4,16,32)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the demo model (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE, one JSON object a line")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"unknown part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    rows = [int(count) for count in options.rows.split(",")]
    print(machine(), file=sys.stderr)
    table = Table(options.json)
    if "demo" in parts:
        draft = {"draft_model": str(DEMO / "draft")}
        for name, fields in (
            ("draft", {"proposers": ["draft"], **draft}),
            ("n-gram", {"proposers": ["ngram"]}),
            ("chain", {"proposers": ["ngram", "draft"], **draft}),
        ):
            engines = _engines("demo", fields, 2**28)
            make = _demo_requests(engines["plain"], options.temperature)
            for count in rows:
                _compare(engines, f"demo, {name}", count, make, options.pairs, table)
            del engines
    if "history" in parts:
        engines = _engines("demo", {"proposers": ["history"]}, 2**28)
        make = _demo_requests(engines["plain"], options.temperature)
        for count in rows:
            _compare(engines, "history, new tasks", count, make, options.pairs, table)
            _compare(engines, "history, the same", count, lambda count, turn: make(count, -1), options.pairs, table)
        del engines
    if "losses" in parts:
        losing: dict[str, dict[str, Any]] = {
            "ngram": {},
            "history": {},
            "draft": {"draft_model": str(made_once("tiny-llama-draft", random_draft))},
            "eagle3": {"draft_model": str(made_once("tiny-llama-eagle3", random_eagle3))},
        }
        for name, more in losing.items():
            engines = _engines(str(benchmark_checkpoint("tiny-llama")), {"proposers": [name], **more}, 2**28)
            del engines["fixed"]
            # A draft model draws with the noise of the model's own draws, so that drafts differ only without any.
            make = functools.partial(_noise, temperature=0.0 if more else 1.0)
            for count in rows:
                _compare(engines, f"losses, {name}", count, make, options.pairs, table)
            del engines
    for part, proposer, kind in (("h", "ngram", _repetitive), ("json", "forced", _mostly_fixed)):
        if part in parts:
            model = options.model or str(benchmark_checkpoint("qwen2.5-0.5b"))
            engines = _engines(model, {"proposers": [proposer]}, 2**30)
            make = kind(PromptSource(min(150_000, engines["plain"].engine.vocab_size)))
            for count in rows:
                _compare(engines, part, count, make, options.pairs, table)
            del engines
    return 0


def _engines(model: str, speculative: dict[str, Any], kv_cache_bytes: int) -> dict[str, LLM]:
    return {
        "plain": LLM(model, kv_cache_bytes=kv_cache_bytes),
        "adaptive": LLM(model, kv_cache_bytes=kv_cache_bytes, speculative=speculative),
        "fixed": LLM(model, kv_cache_bytes=kv_cache_bytes, speculative={**speculative, "adaptive": False}),
    }


def _demo_requests(llm: LLM, temperature: float) -> Callable[[int, int], Requests]:
    """The demo model's tasks in turn, answers to their end."""
    from benchmarks.demo_model.data import held_out

    def make(count: int, turn: int) -> Requests:
        samples = [
            held_out(DEMO_TASKS[index % len(DEMO_TASKS)], 1, seed=1000 * (turn + 1) + index)[0]
            for index in range(max(4 * count, DEMO_REQUESTS))
        ]
        prompts = [llm.tokenizer.apply_chat_template(list(each.messages), tools=each.tools) for each in samples]
        return prompts, [SamplingParams(temperature=temperature, seed=i, max_tokens=160) for i in range(len(prompts))]

    return make


def _repetitive(source: PromptSource) -> Callable[[int, int], Requests]:
    def make(count: int, turn: int) -> Requests:
        prompts = [period * REPEATS for period in source(count, PERIOD)]
        return prompts, [SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)] * count

    return make


def _mostly_fixed(source: PromptSource) -> Callable[[int, int], Requests]:
    spec = ConstraintSpec(kind="json_schema", text=json.dumps(SCHEMA), any_whitespace=False)

    def make(count: int, turn: int) -> Requests:
        params = [SamplingParams(max_tokens=OUTPUT, constraint=spec, seed=1000 * turn + i) for i in range(count)]
        return source(count, 64), params

    return make


def _noise(count: int, turn: int, temperature: float) -> Requests:
    generator = random.Random(turn)
    prompts = [generator.choices(NOISE_IDS, k=NOISE_PROMPT) for _ in range(count)]
    common: dict[str, Any] = {"temperature": temperature, "max_tokens": OUTPUT, "ignore_eos": True}
    common["allowed_token_ids"] = NOISE_IDS
    return prompts, [SamplingParams(seed=1000 * turn + index, **common) for index in range(count)]


class Run(NamedTuple):
    speed: float
    """Tokens a second."""
    per_step: float
    """Tokens that a sequence gained a step."""
    drafts: DraftCounts


def _compare(
    engines: dict[str, LLM],
    workload: str,
    count: int,
    make: Callable[[int, int], Requests],
    pairs: int,
    table: Table,
) -> None:
    """`count` sequences at a time."""
    requests = functools.lru_cache(1)(functools.partial(make, count))  # the same for every engine of a turn
    sides = {name: lambda turn, llm=llm: _run(llm, count, *requests(turn)) for name, llm in engines.items()}  # type: ignore[misc]
    runs: dict[str, list[Run]] = in_turns(sides, pairs, f"{workload}, {count} rows")
    for name in [each for each in engines if each != "plain"]:
        text = f"{count} row{'s' if count > 1 else ''}, {name}"
        speeds = [[[Row(workload, text, run.speed, "tok/s")] for run in runs[each]] for each in (name, "plain")]
        table.add(speeds[0], speeds[1], "plain")
        table.add([[Row(workload, f"{text}, gained a step", run.per_step, "tokens")] for run in runs[name]])
        drafts = DraftCounts()
        for run in runs[name]:
            _add(drafts.drafted, run.drafts.drafted)
            _add(drafts.accepted, run.drafts.accepted)
        for proposer, places in drafts.drafted.items():
            accepted = drafts.accepted[proposer]
            shares = [f"{yes / tried:.2f}" for yes, tried in zip(accepted, places, strict=True) if tried][:SHOWN_PLACES]
            print(f"{'':8}  {text}, {proposer}: {sum(places)} drafts, accepted by place {' '.join(shares)}", flush=True)


def _run(llm: LLM, count: int, prompts: list[list[int]], params: list[SamplingParams]) -> Run:
    scheduler = llm.engine.scheduler
    scheduler.drafts, scheduler.max_num_sequences = DraftCounts(), count
    scheduler.blocks.clear_cache()
    steps = llm.engine.stats().num_steps
    started = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(result.outputs[0].token_ids) for result in results)
    stats = llm.engine.stats()
    return Run(num_tokens / seconds, num_tokens / count / (stats.num_steps - steps), stats.drafts)


def _add(total: dict[str, list[int]], more: dict[str, list[int]]) -> None:
    for proposer, places in more.items():
        sums = total.setdefault(proposer, [])
        sums += [0] * (len(places) - len(sums))
        for place, number in enumerate(places):
            sums[place] += number


if __name__ == "__main__":
    sys.exit(main())
