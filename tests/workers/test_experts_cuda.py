"""Mixtures of experts on the CUDA platform: their steps are captured, and their tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from manta.cluster.llm import LLM, SamplingParams
from manta.workers.kernels.looped_experts import LoopedExperts
from manta.workers.kernels.triton import launch
from tests.checkpoints import checkpoint, reference_greedy
from tests.workers.test_cuda_platform import NUM_TOKENS, make_llm
from tests.workers.test_layer_kinds import folder_of

FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "llama4", "deepseek_v3"]
"""Softmax over all experts; normalised shares; biases and clamped gates; sigmoids in groups, with a bias for the choice
and an expert for every token; shares that scale inputs; groups ranked by two scores.
"""
PROMPTS = [[5 + (7 * place + place // 32 * shift) % 300 for place in range(40)] for shift in (0, 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets a number for each replay of a graph."""
    replayed: list[int] = []
    capture = launch.GraphCapture.capture

    def counted(*arguments: Any) -> tuple[torch.Tensor, Callable[[], object]]:
        result, replay = capture(*arguments)
        return result, lambda: (replayed.append(1), replay())

    monkeypatch.setattr(launch.GraphCapture, "capture", counted)
    return replayed


@pytest.fixture
def no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """No expert runs by itself, which would wait for the device."""

    def refuse(*arguments: Any) -> torch.Tensor:
        raise AssertionError("experts ran one by one")

    monkeypatch.setattr(LoopedExperts, "forward", refuse)


@pytest.mark.usefixtures("no_loop")
def test_a_step_of_a_mixture_is_captured(monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> None:
    """One layer, and one sequence after the other, which fills no step up."""
    folder = checkpoint("mixtral", num_hidden_layers=1)
    llm = make_llm(monkeypatch, str(folder), dtype="float32", max_num_sequences=1)
    replays.clear()
    outputs = llm.generate([PROMPTS[0][:9]], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == reference_greedy(folder, PROMPTS[0][:9], NUM_TOKENS)
    assert len(replays) >= NUM_TOKENS - 1


@pytest.mark.usefixtures("no_loop")
@pytest.mark.long_when_interpreted
@pytest.mark.parametrize("name", FAMILIES)
def test_captured_steps_give_transformers_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch, replays: list[int]
) -> None:
    folder = folder_of(name)
    llm = make_llm(monkeypatch, str(folder), dtype="float32")
    replays.clear()
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    expected = [reference_greedy(folder, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert len(replays) >= NUM_TOKENS - 1


@pytest.mark.usefixtures("no_loop")
@pytest.mark.long_when_interpreted
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_experts_rounded_at_load_give_the_cpus_tokens(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(folder_of("qwen3_moe"))
    llm = make_llm(monkeypatch, folder, dtype="float32", weights=weights)
    outputs = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    on_cpu = LLM(folder, device="cpu", dtype="float32", kv_cache_bytes=1 << 20, weights=weights)
    expected = on_cpu.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
