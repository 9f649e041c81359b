"""The demo model with its draft, in float32: text that makes sense, so that most drafts are accepted.

`MANTA_PROVE=1` takes 200 prompts instead of a few, against transformers too.
"""

from __future__ import annotations

import functools
import os

import pytest

from benchmarks.demo_model.data import held_out
from manta.cluster.llm import LLM, SamplingParams
from manta.specdecode.speculative_config import SpeculativeConfig
from manta.workers.checkpoints.model_folder import resolve_model_folder
from tests.checkpoints import reference_greedy

PROVE = os.environ.get("MANTA_PROVE") == "1"
TASKS = ("order", "contact", "sorting", "question", "tool_call")
NUM_PROMPTS = 200 if PROVE else 10
NUM_REFERENCES = 200 if PROVE else 2
DRAFT = str(resolve_model_folder("demo").parent / "draft")

SPECULATIVE = {
    "ngram": SpeculativeConfig(proposers=("ngram",)),
    "draft": SpeculativeConfig(proposers=("draft",), draft_model=DRAFT, max_draft_tokens=4, adaptive=False),
    "chain": SpeculativeConfig(proposers=("forced", "ngram", "draft"), draft_model=DRAFT),
}


def make_llm(speculative: SpeculativeConfig | None = None) -> LLM:
    return LLM("demo", dtype="float32", kv_cache_bytes=2**27, max_num_sequences=6, speculative=speculative)


@functools.cache
def requests() -> tuple[list[list[int]], dict[str, list[SamplingParams]]]:
    """Prompts, and greedy and sampled parameters for each: among them stop strings, ends inside drafts, logprobs."""
    llm = make_llm()
    samples = [held_out(TASKS[index % len(TASKS)], 1, seed=index)[0] for index in range(NUM_PROMPTS)]
    prompts = [llm.tokenizer.apply_chat_template(list(each.messages), tools=each.tools) for each in samples]
    greedy, sampled = [], []
    for index in range(NUM_PROMPTS):
        stop = ("city", ",")[index % 2 : index % 2 + index % 3]
        length = (64, 23, 96)[index % 3]
        greedy.append(SamplingParams(temperature=0, max_tokens=length, stop=stop))
        sampled.append(
            SamplingParams(
                seed=index, max_tokens=length, top_p=(1.0, 0.9)[index % 2], presence_penalty=index % 3 / 4, logprobs=1
            )
        )
    return prompts, {"greedy": greedy, "sampled": sampled}


def answers(llm: LLM, kind: str) -> list[tuple]:
    prompts, params = requests()
    outputs = [output.outputs[0] for output in llm.generate(prompts, params[kind], use_tqdm=False)]
    return [(each.token_ids, each.text, each.finish_reason, each.stop_reason) for each in outputs]


@functools.cache
def expected(kind: str) -> list[tuple]:
    return answers(make_llm(), kind)


def test_plain_answers_are_those_of_transformers() -> None:
    folder = resolve_model_folder("demo")
    prompts, params = requests()
    for prompt, one, answer in list(zip(prompts, params["greedy"], expected("greedy"), strict=True))[:NUM_REFERENCES]:
        tokens = answer[0]
        assert reference_greedy(folder, prompt, one.max_tokens)[: len(tokens)] == tokens


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("proposer", SPECULATIVE)
def test_answers_are_equal_and_drafts_are_accepted(proposer: str, kind: str) -> None:
    llm = make_llm(SPECULATIVE[proposer])
    assert answers(llm, kind) == expected(kind)
    drafts = llm.engine.stats().drafts
    drafted, accepted = (sum(map(sum, counts.values())) for counts in (drafts.drafted, drafts.accepted))
    if proposer == "draft":
        assert drafted > 50
        assert accepted > (0.7 if kind == "greedy" else 0.4) * drafted
