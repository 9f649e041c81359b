"""Models whose attention is not Llama's give transformers' tokens over the CUDA platform: latent attention, chunks,
heads that differ by layer, shared keys and values, and inputs of each layer.

In float32, over captured graphs: prompts longer than windows and chunks, prefixes that are cached and shared within a
step, and drafts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manta.cluster.llm import SamplingParams
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.kernels.triton import launch
from tests.checkpoints import reference_greedy
from tests.workers.kernels.test_triton_launches import poison
from tests.workers.test_cuda_platform import NUM_TOKENS, make_llm
from tests.workers.test_layer_kinds import folder_of

pytestmark = pytest.mark.usefixtures("cheap_groups")

DRAFTS = {"speculative": {"proposers": ["ngram"], "max_draft_tokens": 2, "adaptive": False}}
CASES = (
    "deepseek_v3",
    "llama4",
    "gemma4",
    "deepseek_v2",
    "glm4_moe_lite",
    "mistral4",
    "minicpm3",
    "youtu",
    "gemma4, keys as values",
)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry with each replay of a graph."""
    replayed: list[int] = []
    capture = launch.GraphCapture.capture

    def counted(*arguments: Any) -> tuple[torch.Tensor, Any]:
        result, replay = capture(*arguments)
        return result, lambda: (replayed.append(1), replay())

    monkeypatch.setattr(launch.GraphCapture, "capture", counted)
    return replayed


@pytest.mark.long_when_interpreted
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> None:
    """In steps of at most 32 tokens, the second prompt shares its keys with the first within a step, and the third
    begins alike. The second time all are cached. New memory holds NaN, so that no token depends on rows that pad.
    """
    folder = folder_of(name)
    prompts = [[5 + (7 * place + place // 32 * shift) % 300 for place in range(40)] for shift in (0, 3)]
    expected = [reference_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]
    check_poisoned = poison(monkeypatch)
    llm = make_llm(monkeypatch, str(folder), dtype="float32", mixed_tokens=2, **DRAFTS)
    replays.clear()
    for _ in range(2):
        outputs = llm.generate([prompts[0], *prompts], GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [expected[0], *expected]
    if load_model_config(folder).experts is None:  # a platform may run experts one after the other, which none captures
        assert len(replays) >= NUM_TOKENS - 1
    check_poisoned()
