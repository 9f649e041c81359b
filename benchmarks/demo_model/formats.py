"""Scores the demo model with weights in each format, on held-out conversations; prints a table.

`python -m benchmarks.demo_model.formats [--count 100] [--seed 10000]`. Perplexity is that of the right answers' tokens,
given the conversation before them.
"""

from __future__ import annotations

import argparse
import math

from benchmarks.demo_model.data import TASKS, Sample, held_out
from benchmarks.demo_model.evaluate import answers
from cluster.llm import LLM, SamplingParams

FORMATS = ("auto", "int8", "int4")
"""Values of the option `weights`; `auto` is the checkpoint's dtype."""


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
    for weights in FORMATS:
        llm = LLM("demo", weights=weights, kv_cache_bytes=2**28)
        everything = [sample for each in samples.values() for sample in each]
        found = [text for _, _, text in answers(llm, everything)]
        reference = reference or found
        same = sum(a == b for a, b in zip(found, reference, strict=True)) / len(found)
        cells = [weights, f"{perplexity(llm, everything):.4f}", f"{same:.1%}"]
        for number in range(len(TASKS)):
            part = slice(number * options.count, (number + 1) * options.count)
            right = sum(text == sample.answer for text, sample in zip(found[part], everything[part], strict=True))
            cells.append(f"{right / options.count:.1%}")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
