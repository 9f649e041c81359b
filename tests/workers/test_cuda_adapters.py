"""Engines over the CUDA platform serve adapters: PEFT's tokens, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import functools
import pathlib

import pytest

from manta.cluster.llm import SamplingParams
from tests.adapters import Adapters, adapters_of, merged, write_adapter
from tests.checkpoints import checkpoint, reference_greedy
from tests.workers.test_cuda_platform import NUM_TOKENS, make_llm

PROMPT = [30 + 7 * place % 280 for place in range(20)]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@functools.cache
def of_llama() -> Adapters:
    adapters = adapters_of(checkpoint("llama", dtype="float32"))
    adapters.add("wide", 1, r=24)
    adapters.add("narrow", 2, r=3, target_modules=["q_proj"])
    return adapters


@pytest.mark.long_when_interpreted
def test_each_request_has_the_tokens_of_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and decodes, beside requests without an adapter, and those of others."""
    adapters = of_llama()
    folders = dict(adapters.folders)
    llm = make_llm(monkeypatch, str(adapters.base), dtype="float32", adapters=folders, max_num_sequences=4)
    names = ["wide", "", "narrow", "wide"]
    answers = llm.generate([PROMPT] * 4, GREEDY, use_tqdm=False, adapter=names)
    expected = {name: adapters.greedy(PROMPT, name, NUM_TOKENS) for name in names}
    assert len({tuple(each) for each in expected.values()}) == 3
    assert [answer.outputs[0].token_ids for answer in answers] == [expected[name] for name in names]


@pytest.mark.long_when_interpreted
def test_quantised_weights_take_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base model's rounding changes tokens, so they are compared with the same adapter alone."""
    adapters = of_llama()
    options = {"dtype": "float32", "weights": "int8", "adapters": {"wide": adapters.folders["wide"]}}
    llm = make_llm(monkeypatch, str(adapters.base), **options)
    names = ["wide", ""]
    few = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    together = llm.generate([PROMPT[:6]] * 2, few, use_tqdm=False, adapter=names)
    alone = [llm.generate([PROMPT[:6]], few, use_tqdm=False, adapter=name)[0] for name in names]
    tokens = [[answer.outputs[0].token_ids for answer in answers] for answers in (together, alone)]
    assert tokens[0] == tokens[1]
    assert tokens[0][0] != tokens[0][1]


@pytest.mark.prove
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_experts_take_adapters(weights: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Some of them, and linears beside them. Rounded ones are compared with the same adapter alone."""
    base = checkpoint("mixtral", dtype="float32")
    modules = ("experts.0.w1", "experts.0.w3", "experts.0.w2", "experts.3.w2", "q_proj")
    adapter = write_adapter(base, tmp_path / "adapter", modules, 5)
    llm = make_llm(monkeypatch, str(base), dtype="float32", weights=weights, adapters={"a": str(adapter)})

    def tokens(*names: str) -> list[list[int]]:
        answers = llm.generate([PROMPT] * len(names), GREEDY, use_tqdm=False, adapter=[*names])
        return [answer.outputs[0].token_ids for answer in answers]

    found = tokens("a", "", "a")
    assert found[0] == found[2] != found[1]
    if weights == "auto":
        models = merged(base, adapter, tmp_path / "merged"), base
        assert found[:2] == [reference_greedy(model, PROMPT, NUM_TOKENS) for model in models]
    else:
        assert found[:2] == [*tokens("a"), *tokens("")]
