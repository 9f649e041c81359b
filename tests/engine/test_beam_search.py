"""Beam search finds what transformers finds: the same sequences in the same order, with the same scores."""

from __future__ import annotations

import functools
import random

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from manta.cluster.llm import BeamSearchParams, SamplingParams
from tests.checkpoints import VOCAB_SIZE, checkpoint
from tests.engine.llms import make_llm

MAX_TOKENS = 12


@functools.cache
def reference_model():
    return AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32).eval()


def prompts(lengths: tuple[int, ...] = (3, 16, 29)) -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def reference_beams(
    prompt: list[int], params: BeamSearchParams, eos_token_id: int | None
) -> list[tuple[list[int], float]]:
    found = reference_model().generate(
        torch.tensor([prompt]),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=eos_token_id,
        pad_token_id=VOCAB_SIZE - 1,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    sequences = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        output = row[len(prompt) :]
        if eos_token_id in output:
            output = output[: output.index(eos_token_id) + 1]
        sequences.append((output, score))
    return sequences


@pytest.mark.axes_in_turns
@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS),
        BeamSearchParams(beam_width=2, max_tokens=MAX_TOKENS),
        BeamSearchParams(beam_width=6, max_tokens=MAX_TOKENS, length_penalty=2.0, early_stopping="never"),
        BeamSearchParams(beam_width=3, max_tokens=MAX_TOKENS, length_penalty=0.0, early_stopping=True),
        BeamSearchParams(beam_width=5, max_tokens=MAX_TOKENS, length_penalty=-1.0),
    ],
    ids=["default", "two", "never", "early", "short"],
)
@pytest.mark.parametrize("options", [{}, {"num_blocks": 8}, {"max_num_batched_tokens": 7}], ids=["", "tiny", "chunked"])
def test_the_beams_are_those_of_transformers(params: BeamSearchParams, options: dict) -> None:
    llm = make_llm(**options)
    # A token that the beams meet early ends them, so that the rules for finished sequences matter.
    (first,) = llm.generate(
        [prompts()[0]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False
    )
    eos = first.outputs[0].token_ids[-1]
    llm.engine.model = msgspec.structs.replace(llm.engine.model, eos_token_ids=(eos,))
    found = llm.beam_search(prompts(), params)
    for prompt, sequences in zip(prompts(), found, strict=True):
        expected = reference_beams(prompt, params, eos)
        assert [sequence.token_ids for sequence in sequences] == [output for output, _ in expected]
        assert [sequence.score for sequence in sequences] == pytest.approx(
            [score for _, score in expected], rel=1e-5, abs=1e-5
        )
    llm.engine.step()
    llm.engine.check_integrity()
    stats = llm.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert bool(stats.num_preemptions) == ("num_blocks" in options and params.beam_width > 2)


def test_beams_run_beside_other_requests() -> None:
    llm = make_llm()
    params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
    (alone,) = llm.generate([prompts()[1]], params, use_tqdm=False)
    llm.add_request("beside", prompts()[1], params)
    beams = llm.beam_search(prompts()[0], BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
    assert len(beams) == 1
    assert all(sequence.text == llm.tokenizer.decode(sequence.token_ids) for sequence in beams[0])
    outputs = []
    while llm.engine.has_unfinished:
        outputs += llm.step()
    assert outputs[-1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_what_cannot_be_searched_is_refused() -> None:
    llm = make_llm(max_num_sequences=4)
    with pytest.raises(ValueError, match=r"5 exceeds the 4 sequences"):
        llm.beam_search([5, 6], BeamSearchParams(beam_width=5))
    with pytest.raises(ValueError, match=r"beam_width 60 exceeds 32 for this model"):
        llm.beam_search([5, 6], BeamSearchParams(beam_width=60))
    assert not llm.engine.has_unfinished
