"""A step for which the device has too little memory costs time and no request, and all tokens stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manta.cluster.engine import step_plan
from manta.cluster.engine.engine import EngineDead
from manta.cluster.engine.step_plan import StepBudget
from manta.cluster.llm import LLM, SamplingParams
from manta.workers.platforms.cpu import CpuPlatform
from manta.workers.step import ScheduledSequence, StepInput
from manta.workers.torch_worker.model_runner import ModelRunner
from tests.checkpoints import checkpoint

PROMPTS = [list(range(3, 3 + length)) for length in (40, 9, 9, 23, 70, 5)]
PARAMS = [
    SamplingParams(seed=index, max_tokens=12, ignore_eos=True, n=2 if index == 3 else 1)
    for index in range(len(PROMPTS))
]


def make_llm(family: str = "llama", **options) -> LLM:
    return LLM(str(checkpoint(family)), kv_cache_bytes=1 << 22, max_num_batched_tokens=64, **options)


def answers(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert all(choice.error is None for output in outputs for choice in output.outputs)
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def fail_at(monkeypatch: pytest.MonkeyPatch, method: str, steps: set[int]) -> list[int]:
    """`method` of the runner raises what torch raises, when it is called for these times; returns the times so far."""
    calls: list[int] = []
    original = getattr(ModelRunner, method)

    def limited(self: ModelRunner, *arguments):
        calls.append(len(calls))
        result = original(self, *arguments) if method == "_forward" else None
        if len(calls) - 1 in steps:  # as late as can be: keys and block tables are written
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(self, *arguments) if result is None else result

    monkeypatch.setattr(ModelRunner, method, limited)
    return calls


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("method", ["_forward", "_logits"])
@pytest.mark.parametrize("steps", [{0}, {1, 2, 3}, {4}, {9}], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"speculative": {"proposers": ["ngram"], "adaptive": False}}, {"overlap": "on"}],
    ids=["plain", "drafts", "overlap"],
)
def test_every_token_stays_the_same(
    method: str, steps: set[int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_tokens("llama", method, steps, options, monkeypatch)


@pytest.mark.parametrize("options", [{}, {"speculative": {"proposers": ["ngram"], "adaptive": False}}], ids=str)
def test_recurrent_states_are_computed_again(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check_tokens("lfm2", "_forward", {1, 4}, options, monkeypatch)


def check_tokens(
    family: str, method: str, steps: set[int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(make_llm(family))
    llm = make_llm(family, **options)
    calls = fail_at(monkeypatch, method, steps)
    assert answers(llm) == expected
    assert len(calls) > max(steps)
    assert llm.engine.alive
    llm.engine.check_integrity()


@pytest.mark.parametrize(
    ("method", "steps", "family"),
    [("_forward", {4}, "llama"), ("_logits", {1, 2, 3}, "llama"), ("_logits", {4}, "llama"), ("_forward", {4}, "lfm2")],
    ids=str,
)
def test_an_asynchronous_device_may_run_out_of_memory(
    method: str, steps: set[int], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the loop draws in two parts: what the first one raises comes with the second."""
    expected = answers(make_llm(family))
    monkeypatch.setattr(CpuPlatform, "runs_ahead", True)
    llm = make_llm(family, overlap="on")
    assert llm.engine.executor.depth == 1
    fail_at(monkeypatch, method, steps)
    assert answers(llm) == expected
    assert llm.engine.scheduler.max_num_batched_tokens < 64


def test_steps_become_smaller_and_grow_again(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(max_num_sequences=4, enable_prefix_caching=False)
    fail_at(monkeypatch, "_forward", {6})
    answers(llm)
    assert llm.engine.stats().num_preemptions > 0
    assert llm.engine.scheduler.max_num_batched_tokens < 64
    monkeypatch.setattr(llm.engine._step_budget, "_patience", 1)
    answers(llm)
    assert llm.engine.scheduler.max_num_batched_tokens == 64


def step_of(num_tokens: int) -> StepInput:
    return StepInput(0, scheduled=[ScheduledSequence(0, 0, num_tokens, [])])


def num_steps_until(budget: StepBudget, num_tokens: int) -> int:
    """Full steps after which the budget is as large."""
    for count in range(2 * step_plan.MOST_PATIENCE):
        if budget.num_tokens >= num_tokens:
            return count
        budget.count(step_of(budget.num_tokens))
    raise AssertionError(f"the budget stays at {budget.num_tokens}")


def test_a_step_grows_again_with_increasing_delay() -> None:
    budget = StepBudget(100)
    for failure in range(12):
        budget.shrink(50)
        assert budget.num_tokens == 25
        patience = min(step_plan.FIRST_PATIENCE << failure, step_plan.MOST_PATIENCE)
        for _ in range(2 * patience):
            budget.count(step_of(24))  # says nothing of larger ones
        assert budget.num_tokens == 25
        assert num_steps_until(budget, 50) == patience
        assert num_steps_until(budget, 100) == patience
    budget.shrink(3)
    assert budget.num_tokens == 1
    budget.count(step_of(1))
    assert budget.num_tokens == 1


def test_a_one_token_step_without_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    fail_at(monkeypatch, "_forward", set(range(100)))
    with pytest.raises(EngineDead, match="StepOutOfMemory"):
        llm.generate([5, 6, 7], SamplingParams(max_tokens=2), use_tqdm=False)
