"""Scores the demo model on held-out conversations, greedily, and its draft's agreement; prints the README's table.

`python -m benchmarks.demo_model.evaluate [--count 200] [--seed 10000] [--folder configs/demo]`. The target runs in
Manta's own engine; the draft is judged by transformers on the target's outputs.
"""

from __future__ import annotations

import argparse
import pathlib

import torch
from transformers import AutoModelForCausalLM

from benchmarks.demo_model.data import TASKS, Sample, held_out
from manta.cluster.llm import LLM, SamplingParams

DEMO = pathlib.Path(__file__).resolve().parents[2] / "configs" / "demo"


def answers(llm: LLM, samples: list[Sample]) -> list[tuple[list[int], list[int], str]]:
    """(prompt ids, output ids, text) of each sample's greedy answer."""
    prompts = [llm.tokenizer.apply_chat_template(list(sample.messages), tools=sample.tools) for sample in samples]
    params = SamplingParams(temperature=0, max_tokens=160, skip_special_tokens=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (prompt, output.outputs[0].token_ids, output.outputs[0].text)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


@torch.inference_mode()
def agreement(draft: AutoModelForCausalLM, found: list[tuple[list[int], list[int], str]]) -> tuple[int, int]:
    """(tokens on which the draft's best choice is the target's, tokens) along the target's own outputs."""
    agreed = total = 0
    for prompt, output, _ in found:
        logits = draft(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        agreed += int((logits.argmax(-1) == torch.tensor(output)).sum())
        total += len(output)
    return agreed, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="held-out conversations a task")
    parser.add_argument("--seed", type=int, default=10_000, help="others of the held-out conversations")
    parser.add_argument("--folder", type=pathlib.Path, default=DEMO)
    options = parser.parse_args()
    llm = LLM(str(options.folder / "target"), kv_cache_bytes=2**28)
    draft = AutoModelForCausalLM.from_pretrained(options.folder / "draft", dtype=torch.float32).eval()
    print("| task | exactly right | draft agrees |\n| --- | --- | --- |")
    agreed = total = 0
    for task in TASKS:
        samples = held_out(task, options.count, options.seed)
        found = answers(llm, samples)
        right = sum(text == sample.answer for (_, _, text), sample in zip(found, samples, strict=True))
        part = agreement(draft, found)
        agreed, total = agreed + part[0], total + part[1]
        print(f"| {task} | {100 * right / len(samples):.1f}% | {100 * part[0] / part[1]:.1f}% |", flush=True)
    print(f"| all tasks | | {100 * agreed / total:.1f}% |")


if __name__ == "__main__":
    main()
