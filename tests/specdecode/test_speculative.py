"""Speculation changes how many tokens a step yields and never which: against plain decoding and transformers."""

from __future__ import annotations

import random
import shutil

import pytest

from manta.cluster.engine.engine import Engine
from manta.cluster.engine.request import EngineRequest, FinishStatus, SequenceOutput
from manta.specdecode.ngram import NgramIndex
from manta.specdecode.speculative_config import SpeculativeConfig
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.models.model_config import ModelError
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import StepInput, StepOutput
from tests.checkpoints import VOCAB_SIZE, checkpoint, reference_greedy
from tests.engine.test_engine import HISTORIES, POOL_BLOCKS, drain, make_engine, run
from tests.engine_parts import speculative_worker_of
from tests.pairs import in_turns

NUM_TOKENS = 40
NGRAM = SpeculativeConfig(proposers=("ngram",), ngram_min=1, adaptive=False)
"""One token of context finds something at nearly every step, mostly wrong."""


def drafting(family: str, **fields) -> SpeculativeConfig:
    """With the model itself as its draft, every draft is accepted; another family's random weights agree by chance."""
    options = {"proposers": ("draft",), "draft_model": str(checkpoint(family)), "max_draft_tokens": 5}
    return SpeculativeConfig(**{**options, "adaptive": False, **fields})


def make_speculative(family: str, speculative: SpeculativeConfig, num_blocks: int = 256, **options) -> Engine:
    """As `make_engine`, with memory for as many blocks if a draft model's keys and values need room too."""
    if speculative.draft_model is not None:
        ours, theirs = (
            load_model_config(folder).kv_bytes_per_token("float32")
            for folder in (checkpoint(family), speculative.draft_model)
        )
        num_blocks = -(-num_blocks * (ours + theirs) // ours)
    return make_engine(family, speculative=speculative, num_blocks=num_blocks, **options)


def make_prompts(seed: int = 1) -> list[list[int]]:
    """Repetitive ones of mixed lengths; the last two share blocks."""
    generator = random.Random(seed)
    prompts = []
    for length in (4, 18, 40, 64, 9):
        period = [generator.randrange(5, VOCAB_SIZE) for _ in range(max(3, length // 3))]
        prompts.append((period * length)[:length])
    return [*prompts, [*prompts[3][:48], 7, 8]]


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields})


def watch(engine: Engine) -> dict[str, int]:
    """Counts what the ranks are asked to verify and what came of it."""
    counts = {"drafted": 0, "accepted": 0, "most": 0}
    update = engine.scheduler.update

    def watched_update(step: StepInput, output: StepOutput) -> list[SequenceOutput]:
        for item in step.scheduled:
            if item.draft_token_ids and item.sequence_id in output.token_ids:
                accepted = len(output.token_ids[item.sequence_id]) - 1
                counts["drafted"] += len(item.draft_token_ids)
                counts["accepted"] += accepted
                counts["most"] = max(counts["most"], accepted)
        return update(step, output)

    engine.scheduler.update = watched_update
    return counts


def test_the_index_proposes_what_followed_the_longest_match() -> None:
    index = NgramIndex(2, 4)
    assert index.propose(3) == []
    index.extend([1, 2, 3, 9, 8, 2, 3, 7, 7, 1, 2, 3])
    assert index.propose(3) == [9, 8, 2], "(1, 2, 3) stood at the start, (2, 3) later"
    index.extend([9])
    assert index.propose(2) == [8, 2]
    index.extend([5, 6])
    assert index.propose(4) == []
    index = NgramIndex(2, 4)
    index.extend([4, 5, 6, 4, 5, 6, 4, 5])
    assert index.propose(7) == [6, 4, 5, 6, 4, 5, 6], "a repetition goes on past its end"


def test_the_incremental_index_equals_a_search() -> None:
    generator = random.Random(0)
    tokens = [generator.randrange(3) for _ in range(300)]
    index = NgramIndex(3, 6)
    for end, token in enumerate(tokens, start=1):
        index.extend([token])
        places = [p for p in range(3, end) if tokens[p - 3 : p] == tokens[end - 3 : end]][-8:]

        def length(place: int, end: int = end) -> int:
            return next(
                (n for n in range(6) if n >= place or tokens[place - 1 - n] != tokens[end - 1 - n]),
                6,
            )

        if not places:
            assert index.propose(2) == []
            continue
        best = max(reversed(places), key=length)
        expected = [*tokens[best:end], *tokens[best:end]][:2] if best < end - 1 else [tokens[best]] * 2
        assert index.propose(2) == expected


DRAFTED: dict[str, tuple[str, str | None]] = {
    "llama": ("llama", None),
    "mistral": ("mistral", None),
    "qwen3 by qwen3": ("qwen3", "qwen3"),
    "llama by llama": ("llama", "llama"),
    "llama by qwen2": ("llama", "qwen2"),
}
"""A family, and that of its draft model; None for n-grams."""


@pytest.mark.few(2)
@pytest.mark.parametrize(("drafted", "history"), in_turns(DRAFTED, list(HISTORIES)))
def test_greedy_tokens_equal_transformers(drafted: str, history: str) -> None:
    (family, draft), options = DRAFTED[drafted], HISTORIES[history]
    prompts = make_prompts()
    expected = [reference_greedy(checkpoint(family), prompt, NUM_TOKENS) for prompt in prompts]
    engine = make_speculative(family, drafting(draft) if draft else NGRAM, **options)
    counts = watch(engine)
    assert run(engine, prompts, greedy()) == expected
    assert counts["drafted"] > 100
    assert counts["accepted"] > (0.95 * counts["drafted"] if draft == family else 0)
    if list(options) == ["num_blocks"]:
        assert engine.stats().num_preemptions > 0
    assert run(engine, prompts, greedy()) == expected, "a warm prefix cache changed the tokens"


class Oracle:
    """Proposes what the plain engine said, with a wrong token now and then."""

    def __init__(self, texts: list[list[int]], every: int) -> None:
        self._texts = texts
        self._every = every

    def propose(self, wanted) -> dict[int, list[int]]:
        proposals = {}
        for each in wanted:
            tokens = each.state.tokens[: each.state.num_tokens].tolist()
            text = next((text for text in self._texts if text[: len(tokens)] == tokens), None)
            if text is not None and len(text) > len(tokens):
                drafts = text[len(tokens) : len(tokens) + each.count]
                wrong = [(len(tokens) + place) % self._every == 0 for place in range(len(drafts))]
                proposals[each.sequence_id] = [5 + bad * 3 if bad else t for bad, t in zip(wrong, drafts, strict=True)]
        return proposals


def ask_oracle(engine: Engine, texts: list[list[int]], every: int = 7) -> None:
    (proposer,) = speculative_worker_of(engine).chain.proposers
    proposer.propose = Oracle(texts, every).propose


def test_stop_conditions_inside_a_draft_end_sequences() -> None:
    prompt = make_prompts()[1]
    free = reference_greedy(checkpoint("llama"), prompt, 60)
    plain, engine = make_engine("llama"), make_engine("llama", speculative=NGRAM)
    ask_oracle(engine, [prompt + free])
    counts = watch(engine)
    for index in range(0, 40, 3):
        for params in (
            greedy(max_tokens=index + 1),
            greedy(stop_token_ids=(free[index],)),
            greedy(stop_token_ids=(free[index],), min_tokens=index),
            greedy(ignore_eos=False, logit_bias={2: 4.0 + index / 8}),
        ):
            ends = []
            for each in (plain, engine):
                each.add_request(EngineRequest(request_id="a", prompt_token_ids=prompt, params=params))
                deltas = drain(each)
                last = deltas[-1]
                tokens = [token for delta in deltas for token in delta.token_ids]
                ends.append((tokens, last.finish, last.stop_token_id, last.usage.num_output_tokens))
            assert ends[1] == ends[0]
    assert counts["most"] > 5
    assert counts["accepted"] > 0.6 * counts["drafted"]


SAMPLED = [
    SamplingParams(seed=11, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(
        seed=12, temperature=0.8, top_p=0.9, repetition_penalty=1.2, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2
    ),
    SamplingParams(seed=13, top_k=20, min_p=0.05, presence_penalty=0.7, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(seed=14, frequency_penalty=0.4, logit_bias={7: 3.0, 9: -4.0}, max_tokens=NUM_TOKENS, min_tokens=20),
    SamplingParams(seed=15, bad_words_token_ids=((7, 8), (9,)), max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0),
    SamplingParams(seed=16, temperature=0.3, max_tokens=NUM_TOKENS, allowed_token_ids=(5, 6, 7, 8, 9), logprobs=5),
]


def sampled(engine: Engine, prompts: list[list[int]]) -> list[tuple]:
    """What each request gets: tokens, logprobs and end."""
    for index, (prompt, params) in enumerate(zip(prompts, SAMPLED, strict=True)):
        engine.add_request(EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params))
    deltas = drain(engine)
    results = []
    for index in range(len(prompts)):
        own = [delta for delta in deltas if delta.request_id == str(index)]
        assert own[-1].error is None
        entries = [entry for delta in own for entry in delta.logprobs or []]
        results.append(
            (
                [token for delta in own for token in delta.token_ids],
                [(entry.token_id, entry.rank, entry.top_token_ids) for entry in entries],
                [entry.logprob for entry in entries],
                own[-1].finish,
            )
        )
    assert [len(entries) for _, entries, *_ in results] == [
        0 if params.logprobs is None else len(tokens) for params, (tokens, *_) in zip(SAMPLED, results, strict=True)
    ]
    return results


@pytest.mark.parametrize(
    ("proposer", "options"),
    in_turns(
        ["ngram", "oracle", "draft", "far draft"], [{}, {"num_blocks": POOL_BLOCKS, "max_num_batched_tokens": 11}]
    ),
)
def test_speculation_keeps_seeded_outputs(proposer: str, options: dict) -> None:
    prompts = make_prompts()
    expected = sampled(make_engine("llama"), prompts)
    speculative = {"draft": drafting("llama"), "far draft": drafting("qwen3")}.get(proposer, NGRAM)
    engine = make_speculative("llama", speculative, **options)
    if proposer == "oracle":
        ask_oracle(engine, [prompt + tokens for prompt, (tokens, *_) in zip(prompts, expected, strict=True)])
    counts = watch(engine)
    for got, wanted in zip(sampled(engine, prompts), expected, strict=True):
        assert got[0] == wanted[0]
        assert got[1] == wanted[1]
        assert got[2] == pytest.approx(wanted[2], abs=1e-4)
        assert got[3] == wanted[3]
    assert counts["drafted"] > 50
    assert counts["accepted"] > (0.95 * counts["drafted"] if proposer == "draft" else 0)


def test_choices_of_one_request_speculate_each_for_itself() -> None:
    prompt = make_prompts()[2]
    params = SamplingParams(n=5, seed=3, temperature=0.7, max_tokens=30, ignore_eos=True)
    outputs = []
    for speculative, num_blocks in ((NGRAM, 256), (NGRAM, POOL_BLOCKS), (drafting("llama"), 256), (None, 256)):
        engine = make_speculative("llama", speculative or SpeculativeConfig(proposers=("forced",)), num_blocks)
        engine.add_request(EngineRequest(request_id="a", prompt_token_ids=prompt, params=params))
        deltas = drain(engine)
        outputs.append([[t for d in deltas if d.index == i for t in d.token_ids] for i in range(5)])
        assert sum(delta.finish is FinishStatus.FINISHED_LENGTH for delta in deltas) == 5
    assert all(output == outputs[-1] for output in outputs)
    assert len({tuple(choice) for choice in outputs[0]}) == 5


def test_mixed_batches_keep_their_tokens() -> None:
    prompts = [prompt for seed in range(4) for prompt in make_prompts(seed)]
    params = [greedy(max_tokens=10 + index % 23) for index in range(len(prompts))]
    expected = run(make_engine("llama"), prompts, params)
    engine = make_engine("llama", speculative=NGRAM, max_num_batched_tokens=40, max_num_sequences=9)
    assert run(engine, prompts, params) == expected


def test_a_raising_proposer_is_left_out() -> None:
    prompts = make_prompts()
    expected = run(make_engine("llama"), prompts, greedy())
    engine = make_engine("llama", speculative=NGRAM)
    (proposer,) = speculative_worker_of(engine).chain.proposers
    propose, calls = proposer.propose, []

    def fail(wanted):
        calls.append([each.sequence_id for each in wanted])
        if len(calls) == 4:
            raise RuntimeError("no more ideas")
        return propose(wanted)

    proposer.propose = fail
    assert run(engine, prompts, greedy()) == expected
    assert len(calls) == 4, "a failed proposer is not asked about the same requests again"
    assert run(engine, prompts, greedy()) == expected
    assert len(calls) > 4, "new requests speculate again"


def test_a_draft_raising_between_tokens_leaves_no_trace() -> None:
    prompts = make_prompts()
    expected = sampled(make_engine("llama"), prompts)
    engine = make_engine("llama", speculative=drafting("llama"))
    model = speculative_worker_of(engine).chain.proposers[0].runner.model
    forward, calls = model.forward, []

    def fail(*arguments):
        calls.append(len(arguments[0]))
        if len(calls) == 9:
            raise RuntimeError("the draft is gone")
        return forward(*arguments)

    model.forward = fail
    got = sampled(engine, prompts)
    assert [one[0] for one in got] == [one[0] for one in expected]
    assert len(calls) == 9
    counts = watch(engine)
    assert [one[0] for one in sampled(engine, prompts)] == [one[0] for one in expected]
    assert counts["accepted"] > 0.95 * counts["drafted"] > 50, "new requests speculate again, and nothing is stale"


def test_the_draft_reads_only_blocks_it_wrote() -> None:
    """Blocks that were filled while the draft did not run are computed again; acceptance shows that they are right."""
    prompt = make_prompts()[3]
    engine = make_engine("llama", speculative=drafting("llama"))
    expected = run(make_engine("llama"), [prompt], greedy())[0]
    draft = speculative_worker_of(engine).chain.proposers[0]
    counts = watch(engine)
    propose, draft.propose = draft.propose, lambda wanted: {}
    assert run(engine, [prompt], greedy()) == [expected]
    assert counts["drafted"] == 0
    assert not draft._written
    draft.propose = propose
    assert run(engine, [prompt], greedy()) == [expected]
    assert engine.stats().prefix_cache_hits >= 48, "the blocks were not found, so nothing was tested"
    assert counts["accepted"] == counts["drafted"] > 20
    assert len(draft._written) >= 4
    computed = []
    forward = draft.runner.model.forward
    draft.runner.model.forward = lambda tokens, *rest: computed.append(len(tokens)) or forward(tokens, *rest)
    assert run(engine, [prompt], greedy()) == [expected]
    assert computed[0] <= 17, "blocks that the draft wrote were computed again"
    assert counts["accepted"] == counts["drafted"]


def test_a_draft_shares_memory_and_is_checked(tmp_path) -> None:
    plain, engine = make_engine("llama"), make_engine("llama", speculative=drafting("llama"))
    assert engine.model.num_blocks == plain.model.num_blocks // 2
    assert engine.model.kv_cache_bytes == plain.model.kv_cache_bytes
    other = tmp_path / "other"
    shutil.copytree(checkpoint("qwen2"), other)
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"a":', '"$$":'))
    with pytest.raises(ModelError, match="another tokenizer"):
        make_engine("llama", speculative=drafting("llama", draft_model=str(other)))


def test_configurations_that_contradict_themselves_are_refused() -> None:
    for fields in ({"proposers": ()}, {"proposers": ("draft",)}, {"draft_model": "x"}, {"ngram_min": 9}):
        with pytest.raises(ValueError, match=r"proposers|exceeds"):
            SpeculativeConfig(**fields)
