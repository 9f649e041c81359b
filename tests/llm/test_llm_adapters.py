"""Adapters in the offline interface: token for token what PEFT computes in float32, whatever else is in the batch."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from manta.cluster.config import EngineConfig
from manta.cluster.llm import LLM, BeamSearchParams, ConstraintSpec, SamplingParams
from manta.cluster.option_reader import read_options
from manta.structured.refusals import RequestRefused
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.models.model_config import ModelError
from manta.workers.option_support import check_options
from manta.workers.torch_worker import torch_worker
from tests.adapters import Adapters, adapters_of
from tests.checkpoints import checkpoint
from tests.gguf_files import write_gguf
from tests.workers.test_layer_kinds import folder_of

NUM_TOKENS = 12
PROMPT = [30 + 7 * place % 280 for place in range(40)]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
KINDS: dict[str, dict[str, Any]] = {
    "queries": {"r": 1, "target_modules": ["q_proj"]},
    "keys and values": {"r": 3, "target_modules": ["k_proj", "v_proj"], "use_rslora": True},
    "outputs": {"r": 8, "target_modules": ["o_proj"]},
    "gates": {"r": 16, "target_modules": ["gate_proj", "up_proj"]},
    "down": {"r": 64, "lora_alpha": 40, "target_modules": ["down_proj"]},
    "everything": {"r": 256, "lora_alpha": 128},
    "patterns": {
        "rank_pattern": {"q_proj": 7, r"^model.layers.1.mlp.down_proj": 2},
        "alpha_pattern": {r"layers\.[01]\.self_attn.v_proj": 3},
    },
    "an expression": {"target_modules": r".*layers\.[12]\.self_attn\.(q|v)_proj"},
}
OTHERS = ("qwen2", "phi3", "lfm2", "olmo2", "granite", "mistral", "qwen3_windows", "seed_oss")
MIXERS: dict[str, Any] = {
    "granite_hybrid": ["in_proj", "out_proj", "q_proj", "v_proj", "o_proj"],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"],
    "deepseek_v2": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "mamba": ["in_proj", "x_proj"],
    "glm": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gemma2": "all-linear",
}


@functools.cache
def of_llama() -> tuple[LLM, Adapters]:
    """A model with an adapter of each kind."""
    adapters = adapters_of(checkpoint("llama"))
    for seed, (name, options) in enumerate(KINDS.items()):
        adapters.add(name, seed, **options)
    return make_llm(adapters), adapters


def make_llm(adapters: Adapters, **options: Any) -> LLM:
    return LLM(str(adapters.base), dtype="float32", num_threads=1, adapters=dict(adapters.folders), **options)


def tokens(llm: LLM, names: list[str], prompt: list[int] = PROMPT, params: SamplingParams = GREEDY) -> list[list[int]]:
    answers = llm.generate([prompt] * len(names), params, use_tqdm=False, adapter=names)
    return [answer.outputs[0].token_ids for answer in answers]


def test_each_kind_in_one_batch_is_what_peft_computes() -> None:
    llm, adapters = of_llama()
    names = ["", *KINDS, "queries", ""]
    expected = [adapters.greedy(PROMPT, name, NUM_TOKENS) for name in names]
    assert len({tuple(each) for each in expected}) == len(KINDS) + 1, "each adapter has tokens of its own"
    assert tokens(llm, names) == expected
    llm.engine.check_integrity()


def test_an_adapter_alone_is_what_the_merged_model_computes() -> None:
    llm, adapters = of_llama()
    for name in ("everything", "patterns"):
        assert tokens(llm, [name]) == [adapters.merged_greedy(PROMPT, name, NUM_TOKENS)]


@pytest.mark.parametrize(
    "family",
    [each if each in ("qwen2", "phi3", "lfm2") else pytest.param(each, marks=pytest.mark.prove) for each in OTHERS],
)
def test_linears_of_other_families(family: str) -> None:
    """With biases, tied heads, parts that are stored together, short convolutions, and gates that torch computes."""
    assert_as_peft(checkpoint(family), "all-linear")


@pytest.mark.prove
@pytest.mark.parametrize("case", MIXERS)
def test_linears_of_other_mixers(case: str) -> None:
    assert_as_peft(folder_of(case), MIXERS[case])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_files_of_llamacpps_converter(family: str, tmp_path: pathlib.Path) -> None:
    """Over the checkpoint and over a GGUF file of it. The first family's heads are interleaved there."""
    adapters = adapters_of(checkpoint(family))
    adapters.add("converted", 5, r=8, lora_alpha=20)
    named = {
        "converted": adapters.convert("converted", tmp_path / "adapter.gguf"),
        "saved": adapters.folders["converted"],
    }
    base = write_gguf(adapters.base, tmp_path / "base.gguf", lambda _: "F32")
    expected = [adapters.greedy(PROMPT, name, NUM_TOKENS) for name in ("converted", "converted", "")]
    assert expected[0] != expected[2]
    for model in (adapters.base, base):
        llm = LLM(str(model), dtype="float32", num_threads=1, adapters=named)
        assert tokens(llm, ["converted", "saved", ""]) == expected


def assert_as_peft(base: pathlib.Path, targets: Any) -> None:
    adapters = adapters_of(base)
    adapters.add("a", 1, r=8, target_modules=targets)
    expected = [adapters.greedy(PROMPT, name, NUM_TOKENS) for name in ("a", "")]
    assert expected[0] != expected[1]
    assert tokens(make_llm(adapters), ["a", ""]) == expected


@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_weights_of_other_precisions_take_the_same_adapters(weights: str) -> None:
    """The base model's rounding changes tokens, so they are compared with the same adapter alone."""
    adapters = of_llama()[1]
    llm = LLM(str(adapters.base), dtype="bfloat16", weights=weights, num_threads=1, adapters=dict(adapters.folders))
    names = ["everything", "", "gates", "queries"]
    together = llm.generate([PROMPT] * 4, GREEDY, use_tqdm=False, adapter=names)
    firsts = [answer.outputs[0].token_ids[0] for answer in together]
    assert firsts == [tokens(llm, [name])[0][0] for name in names]
    assert len(set(firsts)) > 1


def test_an_adapter_shares_no_cached_prefix_with_others() -> None:
    llm, adapters = of_llama()
    prompt = [9, *PROMPT]
    for name in ("", "gates", "", "down", "gates"):
        (answer,) = llm.generate([prompt], GREEDY, use_tqdm=False, adapter=name)
        assert answer.outputs[0].token_ids == adapters.greedy(prompt, name, NUM_TOKENS)
        assert answer.usage is not None
    cached = [llm.generate([prompt], GREEDY, use_tqdm=False, adapter=name)[0].usage for name in ("down", "outputs")]
    assert [each.num_cached_tokens > 0 for each in cached if each is not None] == [True, False]


def test_choices_constraints_drafts_and_beams_go_with_an_adapter() -> None:
    plain, adapters = of_llama()
    name, prompt = "everything", [40, 41, 42, 43] * 8
    drafting = make_llm(adapters, speculative={"proposers": ["ngram"]})
    assert tokens(drafting, [name, ""], prompt) == [adapters.greedy(prompt, each, NUM_TOKENS) for each in (name, "")]
    sampled = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True)
    choices = [
        [choice.token_ids for choice in llm.generate([prompt], sampled, use_tqdm=False, adapter=name)[0].outputs]
        for llm in (plain, drafting)
    ]
    assert choices[0] == choices[1]
    constraint = SamplingParams(
        temperature=0, max_tokens=8, constraint=ConstraintSpec(kind="choice", text='["alpha", "beta"]')
    )
    assert plain.generate([prompt], constraint, use_tqdm=False, adapter=name)[0].outputs[0].text in ("alpha", "beta")
    beams = [plain.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=4), each) for each in (name, "")]
    assert beams[0][0][0].score != beams[1][0][0].score


def test_an_unknown_name_is_refused_before_anything_runs() -> None:
    llm, _ = of_llama()
    with pytest.raises(RequestRefused) as refused:
        llm.generate([PROMPT], GREEDY, use_tqdm=False, adapter="else")
    refusal = refused.value.refusal
    assert (refusal.kind, refusal.field, refusal.value) == ("unknown_value", "adapter", "else")
    assert {*KINDS} <= {*refusal.bound}


MERGED = {
    "separate experts": "model.layers.0.block_sparse_moe.experts.0.w1",
    "experts of another name": "model.layers.0.mlp.experts.0.gate_proj",
    "experts in one tensor": "model.layers.0.mlp.experts",
    "a router": "model.layers.0.block_sparse_moe.gate",
    "the head": "lm_head",
}
"""Modules that adapters may change elsewhere, and have to be merged into the model here."""


@pytest.mark.parametrize("what", [*MERGED, "another model's modules", "a missing half"])
def test_what_adapters_cannot_change_is_refused_before_weights_are_read(
    what: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_models(*_: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(torch_worker, "load_models", load_models)
    module = MERGED.get(what, "transformer.h.0.attn")
    halves = {f"base_model.model.{module}.lora_{half}.weight": torch.zeros(4, 4) for half in "AB"}
    if what == "a missing half":
        halves.popitem()
    save_file(halves, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": [module.rpartition(".")[2]]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"{module}{', which takes no adapters' if what in MERGED else ''}"):
        LLM(str(checkpoint("mixtral")), num_threads=1, adapters={"a": str(tmp_path)})


def test_devices_without_adapters_refuse_them_before_anything_is_read() -> None:
    model = load_model_config(checkpoint("llama"))
    for options in ({"adapters": {"a": "nowhere"}}, {"adapter_roots": ["nowhere"]}):
        config = read_options({"model": "nowhere", **options}, EngineConfig)
        with pytest.raises(ModelError, match="the device is tpu"):
            check_options(config, "tpu", model)
        check_options(config, "cuda", model)


def test_adapters_of_a_model_or_a_memory_that_has_none_are_refused(tmp_path: pathlib.Path) -> None:
    named = {"adapters": {"a": str(tmp_path)}, "num_threads": 1}
    with pytest.raises(ModelError):
        LLM(str(checkpoint("opt")), **named)
    with pytest.raises(ModelError):
        LLM(str(checkpoint("llama")), max_adapter_bytes=1000, num_threads=1, adapters=of_llama()[1].folders)
