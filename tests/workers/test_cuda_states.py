"""Models with recurrent states on the CUDA platform give the tokens of transformers and of the CPU.

In Triton's interpreter, where only one of them runs in every test, or on a GPU (`make gpu-check`).
"""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec
import pytest
import torch
import transformers

from manta.cluster.llm import LLM, SamplingParams
from manta.workers.kernels.triton import graphs
from tests.checkpoints import reference_logits
from tests.engine.histories import NGRAM
from tests.workers.test_cuda_platform import make_llm
from tests.workers.test_layer_kinds import CASES, folder_of

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
FAMILIES = (
    "qwen3_5",
    "falcon_h1",
    "mamba",
    "lfm2",
    "mamba2",
    "jamba",
    "qwen3_next",
    "qwen3_5_moe",
    "granite_hybrid",
    "nemotron_h",
    "bamba",
    "falcon_mamba",
    "lfm2_moe",
    "kimi_linear",
    "olmo_hybrid",
    "minimax",
)
"""Gated delta nets, Mamba 2 beside attention, Mamba 1, short convolutions, and their other families."""
PROMPTS = [[5 + (7 * place + place // 32 * shift) % 300 for place in range(40)] for shift in (0, 3)]
"""They begin alike, and are longer than a captured step."""


def model_of(name: str) -> pathlib.Path:
    if not hasattr(transformers, CASES[name].config):
        pytest.skip(f"transformers {transformers.__version__} has no {CASES[name].config}")
    return folder_of(name)


def expected(name: str, prompt: list[int], allowed: list[int]) -> list[int]:
    """Returns the most probable tokens by transformers, of those that are allowed."""
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        logits = reference_logits(model_of(name), tokens)[-1]
        tokens.append(allowed[int(logits[allowed].argmax())])
    return tokens[len(prompt) :]


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Returns the tokens of every choice."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.step()
    llm.engine.check_integrity()
    return [choice.token_ids for output in outputs for choice in output.outputs]


@pytest.mark.long_when_interpreted
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold, and from snapshots. Other tests compare the CPU's tokens with those of the transformers that we pin; older
    ones repeat the groups of Mamba 2 in another order.
    """
    folder = str(model_of(name))
    llm = make_llm(monkeypatch, folder, dtype="float32")
    on_cpu = answers(LLM(folder, device="cpu", dtype="float32", kv_cache_bytes=1 << 22), PROMPTS)
    for _ in range(2):
        assert answers(llm, PROMPTS) == on_cpu
    assert llm.engine.stats().prefix_cache_hits == 64


@pytest.mark.long_when_interpreted
@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "mamba", "lfm2"])
def test_graphs_verify_drafts_and_fork_states(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of every kind are padded: decodes, verifications and prompts."""
    layouts: set[tuple[int, int | None]] = set()
    call = graphs.GraphedLayers.__call__

    def watched(self: graphs.GraphedLayers, *arguments: Any) -> torch.Tensor:
        metadata = arguments[2]
        if self.capture is None and metadata.layout is not None:
            layouts.add((metadata.layout.tokens_each, metadata.layout.most_tokens))
        return call(self, *arguments)

    drafts = NGRAM | {"max_draft_tokens": 2}
    llm = make_llm(monkeypatch, str(model_of(name)), dtype="float32", speculative=drafts)
    monkeypatch.setattr(graphs.GraphedLayers, "__call__", watched)
    allowed = [5, 9, 11]  # so that each token is in the prompt, and drafts follow it
    params = msgspec.structs.replace(GREEDY, allowed_token_ids=tuple(allowed))
    prompts = [[*(allowed * 6), allowed[0]], allowed * 3]
    found = [expected(name, prompt, allowed) for prompt in prompts]
    assert answers(llm, prompts[:1], msgspec.structs.replace(params, n=2)) == [found[0]] * 2
    # The last three tokens of the cached prompt are a step of as many as verify two drafts
    assert answers(llm, prompts, params) == found
    assert llm.engine.stats().prefix_cache_hits == 16
    assert (3, None) in layouts
    assert any(most_tokens is not None for _, most_tokens in layouts)
