"""`manta bench speculative`: the gain from drafts, against the same engine without them.

    demo      the demo model with its draft, with n-grams, and with both in a chain, over its own tasks
    h         n-grams in the large shape, on prompts that repeat 32 tokens 8 times
    json      forced tokens, in the large shape, under a schema whose text is mostly fixed, T = 1
    coupling  acceptance at T = 1 in the demo model: with shared noise, and by rejection sampling

Engines without drafts, with adaptive and with fixed lengths take turns of a few seconds in one process, with the same
requests, at each number of sequences. Ratios are to the engine without drafts. Each row also has the tokens that a
sequence gained per step, and the acceptance rate by place after the last token.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.report import header, machine, turns
from benchmarks.structured import Table
from benchmarks.workloads import PromptSource, Row
from manta.cluster.engine.stats import DraftCounts
from manta.cluster.llm import LLM, ConstraintSpec, SamplingParams

PARTS = ("demo", "h", "json", "coupling")
ROWS = (1, 4, 16, 32)
DEMO = pathlib.Path(__file__).resolve().parents[1] / "configs" / "demo"
DEMO_TASKS = ("order", "contact", "sorting", "question")
DEMO_REQUESTS = 16
"""Fewest requests of one turn of the demo model."""
COUPLING_REQUESTS = 256
"""Requests whose positions the acceptance rates of `coupling` are taken from."""
PERIOD, REPEATS, OUTPUT = 32, 8, 256
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
    print(header(True), flush=True)
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
    for part, proposer, kind in (("h", "ngram", _repetitive), ("json", "forced", _mostly_fixed)):
        if part in parts:
            model = options.model or str(benchmark_checkpoint("qwen2.5-0.5b"))
            engines = _engines(model, {"proposers": [proposer]}, 2**30)
            make = kind(PromptSource(min(150_000, engines["plain"].engine.vocab_size)))
            for count in rows:
                _compare(engines, part, count, make, options.pairs, table)
            del engines
    if "coupling" in parts:
        _coupling(table)
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
            held_out(DEMO_TASKS[index % len(DEMO_TASKS)], 1, seed=1000 * turn + index)[0]
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


def _compare(
    engines: dict[str, LLM],
    workload: str,
    count: int,
    make: Callable[[int, int], Requests],
    pairs: int,
    table: Table,
) -> None:
    """`count` sequences at a time. The first turn warms up."""
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    per_step: dict[str, list[float]] = {name: [] for name in engines}
    drafts = {name: DraftCounts() for name in engines}
    for pair in turns(pairs + 1, f"{workload}, {count} rows"):
        prompts, params = make(count, pair)
        order = list(engines) if pair % 2 else list(reversed(engines))
        outputs = {}
        for name in order:
            engine = engines[name].engine
            engine.scheduler.drafts, engine.scheduler.max_num_sequences = DraftCounts(), count
            engine.scheduler.blocks.clear_cache()
            steps = engine.stats().num_steps
            started = time.perf_counter()
            results = engines[name].generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
            outputs[name] = [result.outputs[0].token_ids for result in results]
            if pair:
                num_tokens = sum(map(len, outputs[name]))
                speeds[name].append(num_tokens / seconds)
                per_step[name].append(num_tokens / count / (engine.stats().num_steps - steps))
                for kind in ("drafted", "accepted"):
                    _add(getattr(drafts[name], kind), getattr(engine.stats().drafts, kind))
    for name in ("adaptive", "fixed"):
        text = f"{count} row{'s' if count > 1 else ''}, {name}"
        table.add(
            [[Row(workload, text, speed, "tok/s")] for speed in speeds[name]],
            [[Row(workload, text, speed, "tok/s")] for speed in speeds["plain"]],
            "plain",
        )
        table.add([[Row(workload, f"{text}, gained a step", value, "tokens")] for value in per_step[name]])
        for proposer, places in drafts[name].drafted.items():
            accepted = drafts[name].accepted[proposer]
            shares = [f"{yes / tried:.2f}" for yes, tried in zip(accepted, places, strict=True) if tried][:SHOWN_PLACES]
            print(f"{'':8}  {text}, {proposer}: {sum(places)} drafts, accepted by place {' '.join(shares)}", flush=True)


def _add(total: dict[str, list[int]], more: dict[str, list[int]]) -> None:
    for proposer, places in more.items():
        sums = total.setdefault(proposer, [])
        sums += [0] * (len(places) - len(sums))
        for place, number in enumerate(places):
            sums[place] += number


def _coupling(table: Table) -> None:
    """Along the demo model's own samples at T = 1: the share of positions at which the draft's token is the model's
    where both draw with one noise, and the chance that rejection sampling accepts, the overlap of the distributions
    (Leviathan et al. 2023; Chen et al. 2023).
    """
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from manta.workers.sampling.noise import gumbel_noise, noise_keys

    llm = LLM("demo", kv_cache_bytes=2**28)
    prompts, params = _demo_requests(llm, 1.0)(COUPLING_REQUESTS // 4, 0)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    models = [
        AutoModelForCausalLM.from_pretrained(DEMO / name, dtype=torch.float32).eval() for name in ("target", "draft")
    ]
    equal, overlap = [], []
    with torch.inference_mode():
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            tokens = prompt + output.outputs[0].token_ids
            p, q = (model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in models)
            positions = np.arange(len(prompt), len(tokens))
            keys = noise_keys(np.full(len(positions), index), positions)
            noise = gumbel_noise(torch.from_numpy(keys.view(np.int32)), torch.arange(p.shape[1]))
            equal += ((p + noise).argmax(-1) == (q + noise).argmax(-1)).tolist()
            overlap += torch.minimum(p.exp(), q.exp()).sum(-1).tolist()
    table.add(
        [
            [
                Row("coupling", "accepted with the same noise, T = 1", 100 * sum(equal) / len(equal), "%"),
                Row("coupling", "accepted by rejection sampling, T = 1", 100 * sum(overlap) / len(overlap), "%"),
            ]
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
