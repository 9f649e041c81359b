"""Scores the demo model with weights, and a KV cache, in each format, on held-out conversations; prints a table.

`python -m benchmarks.demo_model.formats [--count 100] [--seed 10000]`. Perplexity is that of the right answers' tokens,
given the conversation before them.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from benchmarks.demo_model.data import TASKS, Sample, held_out
from benchmarks.demo_model.evaluate import answers
from manta.cluster.llm import LLM, SamplingParams

FORMATS: dict[str, dict[str, Any]] = {
    "auto": {},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    "auto, KV cache int8": {"kv_cache_dtype": "int8"},
    "int8, KV cache int8": {"weights": "int8", "kv_cache_dtype": "int8"},
    "auto, KV cache int4": {"kv_cache_dtype": "int4"},
    "int8, KV cache int4": {"weights": "int8", "kv_cache_dtype": "int4"},
}
"""Names of formats, and the options of the engine that make them; `auto` is the checkpoint's dtype."""


def perplexity(llm: LLM, samples: list[Sample]) -> float:
    """Returns exp of the mean negative log-probability of the tokens of all right answers."""
    prompts, starts = [], []
    for sample in samples:
        prompt = llm.tokenizer.apply_chat_template(list(sample.messages), tools=sample.tools)
        prompts.append(prompt + llm.tokenizer.encode(sample.answer, add_special_tokens=False))
        starts.append(len(prompt))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    logprobs = []
    for output, start in zip(llm.generate(prompts, params, use_tqdm=False), starts, strict=True):
        assert output.prompt_logprobs is not None
        logprobs += [entry.logprob for entry in output.prompt_logprobs[start:] if entry is not None]
    return math.exp(-sum(logprobs) / len(logprobs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="held-out conversations a task")
    parser.add_argument("--seed", type=int, default=10_000, help="others of the held-out conversations")
    options = parser.parse_args()
    samples = {task: held_out(task, options.count, options.seed) for task in TASKS}
    print(f"| weights | perplexity | as auto | {' | '.join(TASKS)} |\n{'| --- ' * (3 + len(TASKS))}|")
    reference: list[str] = []
    for name, formats in FORMATS.items():
        llm = LLM("demo", kv_cache_bytes=2**28, **formats)
        everything = [sample for each in samples.values() for sample in each]
        found = [text for _, _, text in answers(llm, everything)]
        reference = reference or found
        same = sum(a == b for a, b in zip(found, reference, strict=True)) / len(found)
        cells = [name, f"{perplexity(llm, everything):.4f}", f"{same:.1%}"]
        for number in range(len(TASKS)):
            part = slice(number * options.count, (number + 1) * options.count)
            right = sum(text == sample.answer for text, sample in zip(found[part], everything[part], strict=True))
            cells.append(f"{right / options.count:.1%}")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
