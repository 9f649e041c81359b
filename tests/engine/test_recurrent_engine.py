"""Models with recurrent states through the engine's histories. A state may not be updated twice with one token, and
these are the cases in which an engine computes tokens again: late masks, rejected drafts, forks, preemption, steps out
of memory, steps under way.

The hybrid model is a tiny LFM2 with convolutions and attention, the recurrent one has convolutions only.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import transformers

from manta.cluster.cli.check import run_check
from manta.cluster.errors import RequestRefused
from manta.cluster.llm import LLM, BeamSearchParams, SamplingParams
from manta.structured.constraint import ConstraintSpec
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.kv_groups import most_states
from manta.workers.models.model_config import ModelError
from manta.workers.step import NUM_FIXED_STATES
from tests.checkpoints import on_one_thread
from tests.engine.histories import BLOCK, GREEDY, NGRAM, expected, prompts
from tests.fuzz.campaign import check_engine
from tests.fuzz.cases import Case, Fault, Request, Settings
from tests.workers.test_layer_kinds import folder_of
from tests.workers.test_models import random_tokens

HYBRID, PURE = KINDS = ("lfm2", "lfm2, convolutions only")
COMPRESSED = "deepseek_v4"
"""A model whose states hold what the next compressed keys will be made of, which are in blocks of the cache."""


def make_llm(kind: str, num_sequences: int = 8, num_blocks: int = 64, **options: Any) -> LLM:
    """An engine whose cache holds the states of `num_sequences` sequences, and `num_blocks` blocks."""
    config = load_model_config(folder_of(kind))
    num_steps_ahead = int(options.get("overlap") == "on" and "speculative" not in options)
    num_slots = NUM_FIXED_STATES + num_sequences * most_states(num_steps_ahead, "speculative" in options)
    num_bytes = num_slots * config.state_bytes + num_blocks * BLOCK * config.kv_bytes_per_token("float32")
    defaults = {
        "dtype": "float32",
        "num_threads": 1,
        "kv_cache_bytes": num_bytes,
        "max_num_sequences": num_sequences,
        "typical_sequence_tokens": 1,  # states come first
    }
    llm = LLM(str(folder_of(kind)), **(defaults | options))
    assert llm.engine.scheduler.max_num_sequences == num_sequences
    return llm


def run(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    llm.engine.step()
    llm.engine.check_integrity()
    return [choice.token_ids for output in outputs for choice in output.outputs]


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("kind", [*KINDS, pytest.param(COMPRESSED, marks=pytest.mark.prove)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 11},
        {"max_num_batched_tokens": 40},
        {"speculative": NGRAM},
        {"speculative": NGRAM, "num_sequences": 2},
        {"num_sequences": 1},
        {"num_blocks": 8, "max_num_batched_tokens": 24},
        {"enable_prefix_caching": False},
    ],
    ids=["cold", "chunks", "aligned chunks", "drafts", "drafts in few slots", "one at a time", "preempted", "no cache"],
)
def test_every_history_gives_the_tokens_of_transformers(kind: str, options: dict[str, Any]) -> None:
    llm = make_llm(kind, **options)
    assert run(llm) == expected(kind)
    hits = llm.engine.stats().prefix_cache_hits
    assert run(llm) == expected(kind), "from snapshots"
    has_more_hits = llm.engine.stats().prefix_cache_hits > hits
    assert has_more_hits == ("enable_prefix_caching" not in options)
    assert bool(llm.engine.stats().num_preemptions) == ("num_blocks" in options and kind != PURE)


def test_prompts_that_end_around_compressed_keys_give_the_tokens_of_transformers() -> None:
    """In chunks, with drafts, and once more with whatever the first requests have left in the cache."""
    asked = [random_tokens(num_tokens, seed=7) for num_tokens in (3, 4, 5, 8, 33)]
    llm = make_llm(COMPRESSED, speculative=NGRAM, max_num_batched_tokens=11)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of(COMPRESSED)).eval()
    for _ in range(2):
        for output in llm.generate(asked, GREEDY, use_tqdm=False):
            prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
            with torch.inference_mode(), on_one_thread():
                logits = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
            assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_short_prompts_with_compressed_keys_are_found_to_their_last_block() -> None:
    """A key that stands for many tokens needs no longer prefix than the block that it ends in."""
    llm, prompt = make_llm(COMPRESSED), random_tokens(40)
    assert [num_hits(llm, prompt) for _ in range(2)] == [0, 32]


PROMPTS = ((5, 9, 11) * 11, (7,) * 3, tuple(range(20, 52)), (5, 9, 11) * 11 + (80, 81))
"""Two begin alike; one fills no block, one ends with a block."""


def requests(**params: Any) -> tuple[Request, ...]:
    """One of each prompt, in different steps."""
    sampling = SamplingParams(**({"max_tokens": 40, "temperature": 0.8} | params))
    return tuple(
        Request(name=f"r{index}", prompt=prompt, params=sampling, step=2 * index)
        for index, prompt in enumerate(PROMPTS)
    )


REGEX = ConstraintSpec(kind="regex", text="[a-z]{4,18}")
CASES: dict[str, Case] = {
    "late masks": Case(
        seed=0,
        requests=requests(constraint=REGEX, seed=5),
        faults=tuple(Fault(kind="late_masks", step=step, duration=2) for step in (1, 2, 4, 7)),
    ),
    "masks late at the last prompt token of forks": Case(
        seed=0,
        requests=requests(constraint=REGEX, seed=5, n=3),
        faults=tuple(Fault(kind="late_masks", step=step, duration=1, target=step) for step in range(1, 8)),
    ),
    "forks": Case(seed=0, requests=requests(seed=5, n=4, max_tokens=20)),
    "forks in chunks": Case(
        seed=0, settings=Settings(max_num_batched_tokens=7), requests=requests(seed=5, n=3, max_tokens=20)
    ),
    "rejected drafts": Case(
        seed=0, settings=Settings(proposers=("ngram",), ngram_min=1), requests=requests(seed=5, max_tokens=30)
    ),
    "late masks after drafts": Case(
        seed=0,
        settings=Settings(proposers=("forced", "ngram"), ngram_min=1),
        requests=requests(constraint=REGEX, seed=5, n=2),
        faults=tuple(Fault(kind="late_masks", step=step, duration=2) for step in (1, 2, 4, 7)),
    ),
    "a draft model": Case(
        seed=0,
        settings=Settings(proposers=("draft",), draft_family="llama", max_draft_tokens=3),
        requests=requests(seed=5, max_tokens=20),
    ),
    "steps under way": Case(seed=0, settings=Settings(overlap="device"), requests=requests(seed=5, n=2, max_tokens=20)),
    "late masks of steps under way": Case(
        seed=0,
        settings=Settings(overlap="device"),
        requests=requests(constraint=REGEX, seed=5, n=2),
        faults=tuple(Fault(kind="late_masks", step=step, duration=2) for step in (1, 2, 4, 7)),
    ),
    "failed steps": Case(
        seed=0,
        requests=requests(seed=5, n=2, max_tokens=20),
        faults=(Fault(kind="raise_in_forward", step=2), Fault(kind="raise_after_sample", step=9)),
    ),
    "beams": Case(
        seed=0,
        requests=tuple(
            Request(name=f"r{index}", prompt=prompt, beams=BeamSearchParams(beam_width=3, max_tokens=12))
            for index, prompt in enumerate(PROMPTS)
        ),
    ),
}
"""Each case in which an engine computes tokens again or shares a state."""


@pytest.mark.few(4)
@pytest.mark.axes_in_turns
@pytest.mark.parametrize("family", ["lfm2", "lfm2_convolutions"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("plugin")
def test_no_state_is_updated_twice(name: str, family: str) -> None:
    """The tokens are those of each request alone. `check_engine` checks the slots after each step too."""
    case = CASES[name]
    settings = msgspec.structs.replace(case.settings, family=family, max_num_sequences=8, max_model_len=128)
    problems, counts = check_engine(msgspec.structs.replace(case, settings=settings))
    assert not problems
    if case.faults:
        assert any(counts[f"fault {fault.kind}"] for fault in case.faults)
    if "mask" in name:
        assert counts["late rows"]
    if "draft" in name:
        assert any(counts[f"rejected {each} drafts"] for each in case.settings.proposers)


def num_hits(llm: LLM, prompt: list[int], num_tokens: int = 4) -> int:
    """The tokens of a prompt that are found in the prefix cache."""
    before = llm.engine.stats().prefix_cache_hits
    llm.generate([prompt], msgspec.structs.replace(GREEDY, max_tokens=num_tokens), use_tqdm=False)
    return llm.engine.stats().prefix_cache_hits - before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"speculative": NGRAM}], ids=["plain", "drafts"])
def test_a_repeated_prompt_is_found_to_its_last_block(kind: str, options: dict[str, Any]) -> None:
    llm = make_llm(kind, **options)
    prompt = random_tokens(100)
    assert [num_hits(llm, prompt) for _ in range(3)] == [0, 96, 96]


@pytest.mark.parametrize("kind", KINDS)
def test_a_system_prompt_is_found_from_the_third_request_on(kind: str) -> None:
    """The second one computes it again, and leaves a snapshot where it parts from the first."""
    llm = make_llm(kind)
    system = random_tokens(90)
    requests = [system + random_tokens(60, seed) for seed in range(1, 5)]
    assert [num_hits(llm, prompt) for prompt in requests] == [0, 0, 80, 80]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keeps_thoughts", [True, False])
def test_the_second_turn_of_a_long_conversation_computes_little(kind: str, keeps_thoughts: bool) -> None:
    """The first turn has a prompt of 300 tokens, whose last six open the answer, and an answer of 100. A chat template
    that drops thoughts leaves these six out of the second turn, and all of the answer but its end.
    """
    llm = make_llm(kind, num_blocks=128)
    opening = [9, 8, 7, 6, 5, 4]
    first = random_tokens(294) + opening
    (output,) = llm.generate([first], msgspec.structs.replace(GREEDY, max_tokens=100), use_tqdm=False)
    answer = output.outputs[0].token_ids
    turn = first + answer if keeps_thoughts else first[:-6] + answer[-40:]
    second = turn + random_tokens(30, seed=2) + opening
    num_reusable = len(turn) - 1 if keeps_thoughts else 294
    assert num_reusable - num_hits(llm, second) <= BLOCK


def test_snapshots_of_a_long_output_leave_room_for_others() -> None:
    """Each block of the output replaces the snapshot of the one before it."""
    llm = make_llm(HYBRID, num_sequences=2, num_blocks=128)
    prompt = random_tokens(60)
    num_hits(llm, prompt)
    num_hits(llm, random_tokens(30, seed=2), num_tokens=300)
    assert num_hits(llm, prompt) == 48


@pytest.mark.parametrize("cached", ["int8", "int4"])
def test_rounded_keys_leave_states_as_they_are(cached: str) -> None:
    """A model without attention has nothing to round."""
    assert run(make_llm(PURE, kv_cache_dtype=cached)) == expected(PURE)


def test_a_draft_model_with_states_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="draft model is a Lfm2ForCausalLM, which has recurrent states"):
        make_llm(HYBRID, speculative={"proposers": ["draft"], "draft_model": str(folder_of(HYBRID))})


def test_more_choices_than_states_are_refused_with_the_remedy() -> None:
    llm = LLM(str(folder_of(HYBRID)), dtype="float32", kv_cache_bytes=1 << 16, max_model_len=64)
    assert llm.engine.scheduler.max_num_sequences < 32
    with pytest.raises(RequestRefused, match="raise kv_cache_bytes"):
        llm.generate([[5, 6]], SamplingParams(n=32, max_tokens=4), use_tqdm=False)


def test_a_cache_without_room_for_states_is_refused_at_start() -> None:
    with pytest.raises(ModelError, match=r"the states of one sequence take .* raise kv_cache_bytes"):
        LLM(str(folder_of(HYBRID)), dtype="float32", kv_cache_bytes=1 << 12)


@pytest.mark.usefixtures("trials_here")
@pytest.mark.parametrize("kind", [HYBRID, pytest.param(PURE, marks=pytest.mark.prove)])
def test_a_check_says_what_states_take(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = {"model": str(folder_of(kind)), "device": "cpu", "dtype": "float32", "speculative": NGRAM}
    assert run_check(None, {"engine": engine}) == 0
    printed = capsys.readouterr().out
    assert "KiB each, of which a decode takes two" in printed
    assert "for 256 sequences at a time" in printed
    assert ("recurrent states only" in printed) == (kind == PURE)
