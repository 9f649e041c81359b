"""Adapters in the offline interface: token for token what PEFT computes in float32, whatever else is in the batch."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from manta.cluster.llm import LLM, BeamSearchParams, ConstraintSpec, SamplingParams
from manta.structured.refusals import RequestRefused
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.models.model_config import ModelError
from manta.workers.torch_worker import torch_worker
from manta.workers.torch_worker.adapter_fit import check_adapters_fit
from tests import converted_hybrids
from tests.adapters import Adapters, adapters_of, merged, write_adapter
from tests.checkpoints import checkpoint, reference_greedy
from tests.converted_gguf import convert
from tests.gguf_files import interleaved, write_gguf
from tests.quantised_checkpoints import fp8, fp8_config, of_layers, quantised_pair
from tests.workers.test_gguf_architectures import original
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
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "o_proj"],
    "deepseek_v2": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "mamba": ["in_proj", "x_proj"],
    "glm": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gemma2": "all-linear",
}
"""Modules of mixers. PEFT takes `gate_proj` and the like of models with experts for parameters of the experts."""
BESIDE_EXPERTS: dict[str, tuple[str, ...]] = {
    "qwen3_next": tuple(f"shared_expert.{each}_proj" for each in ("gate", "up", "down")),
    "deepseek_v2": tuple(f"{where}.{each}_proj" for where in ("0.mlp", "shared_experts") for each in ("gate", "down")),
    "qwen3_5_moe": ("shared_expert_gate", "shared_expert.down_proj"),
    "gemma4": ("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection", "q_proj"),
    "zamba": ("shared_transf.self_attn.q_proj", "shared_transf.feed_forward.down_proj", "linear"),
    "zamba2": ("self_attn.q_proj", "gate_up_proj", "down_proj", "linear"),
}
"""Modules of dense MLPs, of shared experts with their gates, and of what layers share, by the ends of their names."""
LATENT = {
    "deepseek_v2 without a query rank": ("kv_b_proj", "q_proj"),
    "deepseek_v3": ("kv_b_proj",),
    "minicpm3": ("kv_b_proj", "q_b_proj"),
    "kimi_linear": ("kv_b_proj", "o_proj"),
    "longcat_flash": ("kv_b_proj",),
    "deepseek_v32": ("kv_b_proj", "q_b_proj"),
    "glm_moe_dsa": ("kv_b_proj",),
}
"""Modules of latent attention, whose weight between latent vectors and heads is absorbed."""


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


@pytest.mark.prove
def test_sixteen_adapters_and_plain_rows_in_one_batch() -> None:
    """Each row has the tokens that it has alone."""
    adapters = Adapters(checkpoint("qwen2"))
    for number in range(16):
        adapters.add(f"one-{number}", 80 + number, r=1 + 17 * number)
    llm, names = make_llm(adapters), [*adapters.folders, "", "one-3", "", "one-3"]
    expected = [adapters.greedy(PROMPT, name, NUM_TOKENS) for name in names]
    assert len({tuple(each) for each in expected}) > 12, "most have tokens of their own"
    assert tokens(llm, names) == expected
    assert [tokens(llm, [name])[0] for name in names[:17]] == expected[:17]


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


@pytest.mark.prove
@pytest.mark.parametrize("case", BESIDE_EXPERTS)
def test_mlps_beside_experts_are_what_merged_weights_compute(case: str, tmp_path: pathlib.Path) -> None:
    assert_as_merged(folder_of(case), BESIDE_EXPERTS[case], tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize("case", LATENT)
def test_latent_attention_is_what_merged_weights_compute(case: str, tmp_path: pathlib.Path) -> None:
    assert_as_merged(folder_of(case), LATENT[case], tmp_path)


def assert_as_merged(base: pathlib.Path, modules: tuple[str, ...], folder: pathlib.Path) -> None:
    adapter = write_adapter(base, folder / "adapter", modules, 8)
    changed = {name.split(".lora_")[0] for name in load_file(adapter / "adapter_model.safetensors")}
    assert all(any(module.endswith(end) for module in changed) for end in modules)
    llm = LLM(str(base), dtype="float32", num_threads=1, adapters={"a": str(adapter)})
    models = merged(base, adapter, folder / "merged"), base
    expected = [reference_greedy(model, PROMPT, NUM_TOKENS) for model in models]
    assert expected[0] != expected[1]
    assert tokens(llm, ["a", "", "a"]) == [*expected, expected[0]]


EXPERTS = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}
"""Mixtures whose checkpoints store experts one by one, and the names of an expert's linears."""
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def mixture(family: str) -> pathlib.Path:
    return checkpoint(family) if family == "mixtral" else folder_of(family)


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("mixtral", PARAMETERS),
        pytest.param("qwen3_moe", PARAMETERS[1:], marks=pytest.mark.prove),
        pytest.param("qwen3_moe", PARAMETERS[::-1], marks=pytest.mark.prove),
        pytest.param("gpt_oss", PARAMETERS, marks=pytest.mark.prove),
        pytest.param("gpt_oss", PARAMETERS[:1], marks=pytest.mark.prove),
    ],
)
def test_adapters_of_all_experts_of_a_layer(family: str, parameters: list[str]) -> None:
    """The batch also has rows without an adapter, and rows whose adapter changes no experts."""
    adapters = Adapters(mixture(family))
    adapters.add("experts", 1, r=4, target_modules=["q_proj"], target_parameters=parameters)
    others = Adapters(mixture(family))
    others.add("attention", 2, r=8, target_modules=["o_proj"])
    expected = [adapters.greedy(PROMPT, name, NUM_TOKENS) for name in ("experts", "")]
    expected.append(others.greedy(PROMPT, "attention", NUM_TOKENS))
    assert len({tuple(each) for each in expected}) == 3
    llm = LLM(str(adapters.base), dtype="float32", num_threads=1, adapters=adapters.folders | others.folders)
    assert tokens(llm, ["experts", "", "attention"]) == expected
    assert tokens(llm, ["attention", ""]) == expected[:0:-1]


@pytest.mark.prove
@pytest.mark.parametrize("intermediate_size", [96, 32])
def test_adapters_of_experts_that_peft_saved_before_0_19(intermediate_size: int, tmp_path: pathlib.Path) -> None:
    """Inputs and outputs have changed places in their halves, which their sizes do not show if they are equal."""
    adapters = Adapters(checkpoint("mixtral", intermediate_size=intermediate_size))
    new = pathlib.Path(adapters.add("experts", 1, r=4, target_modules=["q_proj"], target_parameters=PARAMETERS))
    old = pathlib.Path(shutil.copytree(new, tmp_path / "old"))
    halves, num_experts = load_file(new / "adapter_model.safetensors"), 4
    for name in [name for name in halves if "experts" in name and "lora_A" in name]:
        a, b = halves[name], halves[name.replace("lora_A", "lora_B")]
        a, b = a.view(num_experts, 4, -1), b.view(len(b), 4, num_experts)
        halves[name] = b.permute(2, 1, 0).flatten(0, 1).contiguous()
        halves[name.replace("lora_A", "lora_B")] = a.permute(2, 1, 0).flatten(1).contiguous()
    save_file(halves, old / "adapter_model.safetensors")
    config = json.loads((old / "adapter_config.json").read_text())
    (old / "adapter_config.json").write_text(json.dumps(config | {"peft_version": "0.18.1"}))
    llm = LLM(str(adapters.base), dtype="float32", num_threads=1, adapters={"new": str(new), "old": str(old)})
    assert tokens(llm, ["old", "new"]) == [adapters.greedy(PROMPT, "experts", NUM_TOKENS)] * 2


@pytest.mark.prove
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_adapters_of_experts_one_by_one(family: str, exact: bool, tmp_path: pathlib.Path) -> None:
    """Not of all of them, and one changes the second linear alone."""
    base, linears = mixture(family), EXPERTS[family]
    modules = tuple(f"experts.{expert}.{name}" for expert in (0, 2) for name in linears)
    adapter = write_adapter(base, tmp_path / "adapter", (*modules, f"experts.1.{linears[-1]}"), 5)
    names = {name.split(".lora_")[0] for name in load_file(adapter / "adapter_model.safetensors")}
    assert sum(".experts." in name for name in names) >= 2 * (len(modules) + 1), "of every layer"
    options = {"dtype": "float32", "num_threads": 1, "adapters": {"a": str(adapter)}}
    if not exact:
        models = merged(base, adapter, tmp_path / "merged"), base
        expected = [reference_greedy(model, PROMPT, NUM_TOKENS) for model in models]
        assert expected[0] != expected[1]
        assert tokens(LLM(str(base), **options), ["a", ""]) == expected
        return
    alone = LLM(str(base), exact=True, weights="int8", max_num_sequences=1, **options)
    together = LLM(str(base), exact=True, weights="int8", max_num_batched_tokens=17, **options)
    names = ["a", "", "a"]
    assert tokens(together, names) == [tokens(alone, [name])[0] for name in names]


OF_EXPERTS = dict(zip(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), ("w1", "w3", "w2"), strict=True))
"""llama.cpp's names of a layer's experts, and Mixtral's."""


def expected_of_written(
    writer: gguf.GGUFWriter, base: pathlib.Path, adapter: pathlib.Path, at: pathlib.Path
) -> list[list[int]]:
    """Writes a GGUF adapter. Returns the tokens of the model that the same adapter of PEFT is merged into, at a new
    path, and those of the base model, which differ.
    """
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = [reference_greedy(model, PROMPT, NUM_TOKENS) for model in (merged(base, adapter, at), base)]
    assert expected[0] != expected[1]
    return expected


def test_a_file_of_llamacpps_converter_changes_experts(tmp_path: pathlib.Path) -> None:
    """Over the checkpoint and over a GGUF file of it. The tensor of each half has all experts of a layer."""
    base = checkpoint("mixtral")
    adapter = write_adapter(base, tmp_path / "adapter", tuple(OF_EXPERTS.values()), 4)
    halves, file = load_file(adapter / "adapter_model.safetensors"), tmp_path / "adapter.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in {"general.type": "adapter", "adapter.type": "lora"}.items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", 8.0)
    for name in [name for name in halves if ".experts.0." in name]:
        layer, module, half = name.split(".")[4], name.split(".")[-3], name.split(".")[-2].lower()
        of_all = torch.stack([halves[name.replace("experts.0", f"experts.{expert}")] for expert in range(4)])
        stored = next(each for each, own in OF_EXPERTS.items() if own == module)
        writer.add_tensor(f"blk.{layer}.{stored}.weight.{half}", of_all.numpy())
    expected = expected_of_written(writer, base, adapter, tmp_path / "merged")
    for model in (base, convert(base, tmp_path / "base.gguf")):
        llm = LLM(str(model), dtype="float32", num_threads=1, adapters={"file": str(file), "saved": str(adapter)})
        assert tokens(llm, ["file", "saved", ""]) == [expected[0], *expected]


def test_a_rounded_mixture_takes_adapters_of_its_experts(tmp_path: pathlib.Path) -> None:
    base = checkpoint("mixtral")
    adapter = write_adapter(base, tmp_path / "adapter", tuple(f"experts.{each}.w1" for each in range(4)), 3)
    llm = LLM(str(base), weights="int8", num_threads=1, adapters={"a": str(adapter)})
    firsts = [each[0] for each in tokens(llm, ["a", "", "a"])]
    assert firsts == [tokens(llm, [name])[0][0] for name in ("a", "", "a")]


def test_experts_take_no_adapters_where_nothing_adapts_them(tmp_path: pathlib.Path) -> None:
    """On TPUs, and if ranks have whole experts."""
    base = checkpoint("mixtral")
    adapter = write_adapter(base, tmp_path / "adapter", ("experts.1.w2",), 3)
    with pytest.raises(ModelError, match=r"experts\.1\.w2, which takes no adapters"):
        check_adapters_fit(base, load_model_config(base), {"a": str(adapter)}, 2**30)


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


HYBRIDS = {
    "granitehybrid": ("in_proj", "out_proj", "q_proj", "v_proj", "o_proj"),
    "qwen3next": ("in_proj_ba", "out_proj", "q_proj", "k_proj", "o_proj"),
    "deepseek2": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "mamba": ("in_proj", "x_proj", "out_proj"),
    "nemotron_h": ("in_proj", "out_proj", "q_proj", "o_proj"),
    "jamba": ("in_proj", "x_proj", "out_proj", "q_proj", "o_proj"),
}
"""Modules of models with recurrent states or latent attention that llama.cpp's converter keeps in one piece."""


@pytest.mark.prove
@pytest.mark.parametrize("case", HYBRIDS)
def test_files_of_llamacpps_converter_for_other_mixers(case: str, tmp_path: pathlib.Path) -> None:
    """Over the checkpoint and over a GGUF file of it."""
    base = original(case)
    adapter = write_adapter(base, tmp_path / "adapter", HYBRIDS[case], 4)
    config = json.loads((base / "config.json").read_text())
    name = converted_hybrids.name_of(config)
    (architecture,) = (each for each, spelled in gguf.MODEL_ARCH_NAMES.items() if spelled == name)
    names = gguf.get_tensor_name_map(architecture, converted_hybrids.num_layers_of(config))
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    writer = gguf.GGUFWriter(tmp_path / "adapter.gguf", name)
    for key, value in {"general.type": "adapter", "adapter.type": "lora"}.items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", 8.0)
    for stored, tensor in load_file(adapter / "adapter_model.safetensors").items():
        module, _, half = stored.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        rows, leaf = tensor.numpy(), module.rpartition(".")[2]
        if half == "lora_B" and leaf in heads and name in ("granitehybrid", "nemotron_h", "nemotron_h_moe"):
            rows = interleaved(rows, config[heads[leaf]])
        converted = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        assert converted is not None, module
        writer.add_tensor(f"{converted}.{half.lower()}", rows)
    expected = expected_of_written(writer, base, adapter, tmp_path / "merged")
    named = {"file": str(tmp_path / "adapter.gguf"), "saved": str(adapter)}
    for model in (base, convert(base, tmp_path / "base.gguf")):
        llm = LLM(str(model), dtype="float32", num_threads=1, adapters=named)
        assert tokens(llm, ["file", "saved", ""]) == [expected[0], *expected]


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


FLOAT8 = {
    "one scale": (of_layers(fp8(None)), fp8_config(None)),
    "blocks": (of_layers(fp8((48, 48))), fp8_config((48, 48))),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", FLOAT8)
def test_adapters_over_float8_weights_are_those_over_the_dequantised_ones(kind: str, tmp_path: pathlib.Path) -> None:
    """Adapters have the names of the modules, and the checkpoint stores scales beside these."""
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3}
    quantised, dense = quantised_pair(checkpoint("llama", **shape), tmp_path, *FLOAT8[kind])
    adapters = Adapters(dense)
    for seed, targets in enumerate((["q_proj", "down_proj"], "all-linear")):
        adapters.add(f"number {seed}", seed, r=8, target_modules=targets)
    names = ["number 0", "", "number 1"]
    expected = [adapters.greedy(PROMPT, name, NUM_TOKENS) for name in names]
    assert len({tuple(each) for each in expected}) == len(names)
    llm = LLM(str(quantised), dtype="float32", num_threads=1, adapters=adapters.folders)
    assert tokens(llm, names) == expected


@pytest.mark.prove
@pytest.mark.parametrize("kind", FLOAT8)
def test_adapters_over_a_mixture_of_float8_weights(kind: str, tmp_path: pathlib.Path) -> None:
    """Of attention and of experts."""
    quantised, dense = quantised_pair(mixture("qwen3_moe"), tmp_path, *FLOAT8[kind])
    of_experts = (f"experts.{expert}.{name}" for expert in (0, 2) for name in EXPERTS["qwen3_moe"])
    modules = ("q_proj", "o_proj", *of_experts)
    adapter = write_adapter(dense, tmp_path / "adapter", modules, 4)
    models = merged(dense, adapter, tmp_path / "merged"), dense
    expected = [reference_greedy(model, PROMPT, NUM_TOKENS) for model in models]
    assert expected[0] != expected[1]
    llm = LLM(str(quantised), dtype="float32", num_threads=1, adapters={"a": str(adapter)})
    assert tokens(llm, ["a", "", "a"]) == [*expected, expected[0]]


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


@pytest.mark.prove
def test_a_draft_model_has_no_adapter_and_its_target_has() -> None:
    """Where the adapter changes little, drafts of the model without it are accepted."""
    adapters = adapters_of(checkpoint("llama"))
    adapters.add("slight", 11, r=2, lora_alpha=1)
    adapters.add("strong", 12)
    names = ["slight", "", "strong", "slight"]
    llm = make_llm(adapters, speculative={"proposers": ["draft"], "draft_model": str(adapters.base), "adaptive": False})
    assert tokens(llm, names) == [adapters.greedy(PROMPT, name, NUM_TOKENS) for name in names]
    drafts = llm.engine.stats().drafts
    assert 0 < sum(drafts.accepted["draft"]) < sum(drafts.drafted["draft"])


def test_an_unknown_name_is_refused_before_anything_runs() -> None:
    llm, _ = of_llama()
    with pytest.raises(RequestRefused) as refused:
        llm.generate([PROMPT], GREEDY, use_tqdm=False, adapter="else")
    refusal = refused.value.refusal
    assert (refusal.kind, refusal.field, refusal.value) == ("unknown_value", "adapter", "else")
    assert {*KINDS} <= {*refusal.bound}


MERGED = {
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


def test_adapters_of_a_model_or_a_memory_that_has_none_are_refused(tmp_path: pathlib.Path) -> None:
    named = {"adapters": {"a": str(tmp_path)}, "num_threads": 1}
    with pytest.raises(ModelError):
        LLM(str(checkpoint("opt")), **named)
    with pytest.raises(ModelError):
        LLM(str(checkpoint("llama")), max_adapter_bytes=1000, num_threads=1, adapters=of_llama()[1].folders)
