"""Every key of a configuration, set to what it cannot be: the refusal names that key, and what is allowed there."""

from __future__ import annotations

import copy
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from transformers.utils import quantization_config

from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.models.families import FAMILIES
from manta.workers.models.harmless_keys import HARMLESS_KEYS
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.models.raw_config import ConfigError, RawConfig
from tests.quantised_checkpoints import AWQ_CONFIG, fp8_config, gptq_config
from tests.workers.attention_cases import ATTENTION_CASES
from tests.workers.latent_keys import (
    BIASES,
    CHOICE,
    EXPERTS,
    FLAG,
    HUGE,
    LEFT_OUT,
    LIST,
    NUMBER,
    OBJECT,
    OF_LATENTS,
    PART,
    WHOLE,
    WHOLE_OR_NONE,
)
from tests.workers.recurrent_cases import RECURRENT_CASES, values_of_cases
from tests.workers.sparse_cases import SPARSE_CASES
from tests.workers.test_layer_kinds import SIZES
from tests.workers.test_quantised_formats import FORMATS

DENSE: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "hidden_act": ("silu", CHOICE),
    "vocab_size": (320, WHOLE),
    "hidden_size": (64, WHOLE),
    "intermediate_size": (96, WHOLE),
    "num_hidden_layers": (4, WHOLE),
    "num_attention_heads": (4, (*WHOLE, 128)),
    "num_key_value_heads": (2, (*WHOLE, 3)),
    "head_dim": (16, (*WHOLE, 15)),
    "rms_norm_eps": (1e-6, NUMBER),
    "max_position_embeddings": (512, WHOLE),
    "tie_word_embeddings": (False, FLAG),
    "dtype": ("bfloat16", CHOICE),
    "partial_rotary_factor": (1.0, LEFT_OUT),
    "rope_theta": (10000.0, NUMBER),
    "rope_scaling": ({"rope_type": "default"}, OBJECT),
}
"""A value that is served, and values that are not, of each key that every native family reads."""
WINDOWS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "use_sliding_window": (True, FLAG),
    "sliding_window": (8, WHOLE),
    "layer_types": (["full_attention", "sliding_attention"] * 2, (*LIST, ["full_attention"], ["novel"] * 4)),
}
KINDS: dict[str, Any] = {"layer_types": WINDOWS["layer_types"], "sliding_window": (8, WHOLE)}
PATTERN: dict[str, Any] = {"sliding_window_pattern": (2, WHOLE)}
GEMMA: dict[str, Any] = {
    "hidden_act": None,
    "hidden_activation": ("gelu_pytorch_tanh", CHOICE),
    "use_bidirectional_attention": (False, (*FLAG, True)),
    "attn_logit_softcapping": (50.0, NUMBER),
    "final_logit_softcapping": (30.0, NUMBER),
    "query_pre_attn_scalar": (256, NUMBER),
}
OF_KINDS: dict[str, Any] = {"partial_rotary_factor": None, "rope_local_base_freq": (10000.0, NUMBER)}
NULL_MEANS_NONE = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank"}
NULL_MEANS_NONE |= {"attention_chunk_size", "scale_depth", "dim_model_base"}
QWEN_EXPERTS: dict[str, tuple[Any, Any]] = (
    BIASES
    | EXPERTS
    | {
        "use_sliding_window": (True, FLAG),
        "sliding_window": (8, WHOLE),
        "decoder_sparse_step": (1, WHOLE),
        "mlp_only_layers": ([1], ([-1], "1", {"a": 1}, True)),
        "moe_intermediate_size": (32, WHOLE),
        "num_experts": (16, WHOLE),
        "norm_topk_prob": (True, FLAG),
    }
)
OWN: dict[str, dict[str, Any]] = OF_LATENTS | {
    "LlamaForCausalLM": {"attention_bias": (True, FLAG), "mlp_bias": (True, FLAG)},
    "MistralForCausalLM": {"sliding_window": (8, WHOLE)},
    "Qwen2ForCausalLM": WINDOWS,
    "Qwen3ForCausalLM": WINDOWS | {"attention_bias": (True, FLAG)},
    "SeedOssForCausalLM": {
        "attention_bias": (True, FLAG),
        "attention_out_bias": (True, FLAG),
        "mlp_bias": (True, FLAG),
    },
    "Gemma2ForCausalLM": GEMMA | BIASES | KINDS,
    "VaultGemmaForCausalLM": GEMMA | BIASES | KINDS,
    "Gemma3ForCausalLM": GEMMA | BIASES | KINDS | OF_KINDS | PATTERN,
    "Olmo2ForCausalLM": BIASES,
    "Olmo3ForCausalLM": BIASES | KINDS | OF_KINDS,
    "SmolLM3ForCausalLM": BIASES
    | KINDS
    | {
        "mlp_bias": (True, FLAG),
        "use_sliding_window": (True, FLAG),
        "no_rope_layers": ([1, 0, 1, 0], (*LIST, [1], [2] * 4)),
        "no_rope_layer_interval": (4, WHOLE),
    },
    "GraniteForCausalLM": BIASES
    | {"mlp_bias": (True, FLAG)}
    | dict.fromkeys(
        ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), (0.5, NUMBER)
    ),
    "GlmForCausalLM": BIASES | PART,
    "Glm4ForCausalLM": BIASES | PART,
    "Glm4vTextModel": BIASES | PART,
    "Phi3ForCausalLM": PART | {"sliding_window": (8, WHOLE)},
    "Qwen3MoeForCausalLM": QWEN_EXPERTS,
    "Qwen3VLMoeTextModel": QWEN_EXPERTS | {"norm_topk_prob": (True, (*FLAG, False))},
    "GptOssForCausalLM": BIASES
    | KINDS
    | EXPERTS
    | {
        "num_local_experts": (16, WHOLE),
        "swiglu_alpha": (1.702, (*NUMBER, 1.0)),
        "swiglu_limit": (7.0, (*NUMBER, 1.0)),
    },
    "Lfm2ForCausalLM": {
        "rms_norm_eps": None,
        "norm_eps": (1e-5, NUMBER),
        "layer_types": (["conv", "full_attention"] * 2, (*LIST, ["conv"], ["sliding_attention"] * 4)),
        "full_attn_idxs": ([1, 3], (*LIST, [-1])),
        "conv_L_cache": (3, (*WHOLE, 1)),
        "conv_bias": (True, FLAG),
        "block_ff_dim": (96, WHOLE),
        "block_multiple_of": (8, WHOLE),
        "block_ffn_dim_multiplier": (1.0, (*NUMBER, 1e-4)),
        "block_auto_adjust_ff_dim": (True, FLAG),
        "tie_embedding": (False, FLAG),
    },
    "Cohere2ForCausalLM": BIASES
    | KINDS
    | PATTERN
    | {"rms_norm_eps": None, "layer_norm_eps": (1e-6, NUMBER), "logit_scale": (0.5, NUMBER)},
    "MixtralForCausalLM": EXPERTS | {"sliding_window": (8, WHOLE), "num_local_experts": (16, WHOLE)},
    "Llama4ForCausalLM": BIASES
    | EXPERTS
    | {
        "layer_types": (["full_attention", "chunked_attention"] * 2, (*LIST, ["full_attention"], ["novel"] * 4)),
        "attention_chunk_size": (32, WHOLE),
        "no_rope_layers": ([1, 0, 1, 0], (*LIST, [1], [2] * 4)),
        "no_rope_layer_interval": (4, WHOLE),
        "num_local_experts": (16, WHOLE),
        "interleave_moe_layer_step": (2, WHOLE),
        "moe_layers": ([1], ([-1], "1", {"a": 1}, True)),
        "intermediate_size_mlp": (96, WHOLE),
        "attn_temperature_tuning": (True, FLAG),
        "attn_scale": (0.1, NUMBER),
        "floor_scale": (32, WHOLE),
        "use_qk_norm": (True, FLAG),
    },
    "Gemma4ForCausalLM": BIASES
    | KINDS
    | {
        "hidden_act": None,
        "hidden_activation": ("gelu_pytorch_tanh", CHOICE),
        "partial_rotary_factor": None,
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": ({"full_attention": {"rope_type": "default"}}, OBJECT),
        "enable_moe_block": (False, FLAG),
        "use_bidirectional_attention": ("vision", CHOICE),
        "attention_k_eq_v": (True, FLAG),
        "num_global_key_value_heads": (1, (*WHOLE, 3)),
        "global_head_dim": (32, (*WHOLE, 15)),
        "per_layer_config": ({}, OBJECT),
        "final_logit_softcapping": (30.0, NUMBER),
        "use_double_wide_mlp": (True, FLAG),
        "hidden_size_per_layer_input": (8, WHOLE_OR_NONE),
        "vocab_size_per_layer_input": (320, WHOLE),
        "num_kv_shared_layers": (0, (*WHOLE_OR_NONE, 3)),
        "moe_intermediate_size": (32, WHOLE),
        "num_experts": (16, WHOLE),
        "top_k_experts": (2, WHOLE),
    },
}
"""The keys of each family alone; None for a key of `DENSE` that the family does not read."""


def table_of(family: str) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    return {key: values for key, values in (DENSE | OWN[family]).items() if values is not None}


TABLE = [(family, key) for family in OWN for key in table_of(family)]

SCALED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
    "attention_factor": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "truncate": True,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "frequency_divisors": [1.0] * 8},
    **{name: SCALED | {"rope_type": name} for name in ("linear", "llama3", "yarn")},
}
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "awq": AWQ_CONFIG | {"modules_to_not_convert": ["lm_head"]},
    "gptq": gptq_config(4, True) | {"dynamic": {"+:.*down_proj": {"bits": 8, "group_size": 32, "sym": True}}},
    "fp8": fp8_config([16, 16]),
    **{name: FORMATS[name].config for name in ("W8A8", "W4A16", "mxfp4", "float8, by output")},
}


def values_of(family: str) -> dict[str, Any]:
    if family not in OWN:
        others = [ATTENTION_CASES[name] for name in ("axk1", "mimo_v2", "gemma3n")]
        sparse = "axk2", "longcat_flash", "dots3_note", "hy_v4", "deepseek_v4", "glm5_next"
        others += [SPARSE_CASES[name] for name in sparse]
        return values_of_cases([*RECURRENT_CASES.values(), *others], SIZES)[family]
    table = table_of(family)
    return {"architectures": [family]} | {key: served for key, (served, _) in table.items()}


def read(folder: pathlib.Path, values: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return load_model_config(folder)


def refused_key(folder: pathlib.Path, values: dict[str, Any]) -> str | None:
    """The key of the refusal; None if the values are served."""
    try:
        read(folder, values)
    except ConfigError as error:
        return error.key
    return None


class Recorder(dict[str, Any]):
    """Notes the keys that are read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.keys_read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("family", OWN)
def test_the_table_has_every_key_that_a_family_reads(family: str) -> None:
    recorder = Recorder(values_of(family))
    FAMILIES[family].read_config(RawConfig(recorder, "config.json"))
    others = {
        "architectures",
        "rope_parameters",
        "torch_dtype",
        "max_window_layers",
        "original_max_position_embeddings",
        "_sliding_window_pattern",
        "num_local_experts",
        "num_experts",
        "model_type",
    }
    assert recorder.keys_read - others == recorder.keys() - others


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_transformers_is_read_or_known_to_be_harmless(family: str, tmp_path: pathlib.Path) -> None:
    own = getattr(transformers, family).config_class().to_dict()
    assert read(tmp_path, own | values_of(family) | {"eos_token_id": 2}).unused_keys == ()
    if family in OWN:  # others read some keys by other names
        recorder = Recorder(values_of(family))
        FAMILIES[family].read_config(RawConfig(recorder, "config.json"))
        assert own.keys() - recorder.keys_read - HARMLESS_KEYS <= {"eos_token_id", "quantization_config"}


@pytest.mark.parametrize("family", [*FAMILIES, "GPTNeoXForCausalLM"])
def test_keys_that_nobody_knows_are_named(family: str, tmp_path: pathlib.Path) -> None:
    values = values_of(family) if family in FAMILIES else transformers.GPTNeoXConfig(architectures=[family]).to_dict()
    novel = {"novel_multiplier": 0.5, "attn_multiplier": 2.0, "novel_list": [1]}
    neutral = {"novel_switch": False, "novel_null": None, "novel_empty": {}}
    assert read(tmp_path, values).unused_keys == ()
    assert read(tmp_path, values | novel | neutral).unused_keys == tuple(sorted(novel))


def test_keys_of_a_rope_that_nobody_knows_are_named(tmp_path: pathlib.Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attn_factor": 2.0}
    config = read(tmp_path, values_of("LlamaForCausalLM") | {"rope_parameters": rope})
    assert config.unused_keys == ("rope_parameters.attn_factor",)


@pytest.mark.parametrize("rope_type", [{}, {"rope_type": "default"}, {"type": "default"}, {"rope_type": None}])
def test_a_factor_without_a_scaling_is_refused(rope_type: dict[str, Any], tmp_path: pathlib.Path) -> None:
    values = values_of("LlamaForCausalLM")
    assert refused_key(tmp_path, values | {"rope_parameters": rope_type | {"factor": 1.0}}) is None
    assert refused_key(tmp_path, values | {"rope_parameters": rope_type | {"factor": 4.0}}) == "rope_parameters.factor"


def test_the_models_unscaled_positions_win_over_those_of_its_rope(tmp_path: pathlib.Path) -> None:
    """As in transformers."""
    values = values_of("LlamaForCausalLM") | {"rope_parameters": ROPES["yarn"], "original_max_position_embeddings": 32}
    assert read(tmp_path, values).rope.original_max_position_embeddings == 32


def test_published_keys_of_sarvam_are_those_of_transformers(tmp_path: pathlib.Path) -> None:
    """Its first code had names of its own."""
    published = SIZES | {
        "model_type": "sarvam_mla",
        "num_experts": 16,
        "num_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 20,
        "q_head_dim": 20,
        "head_dim": 32,
        "use_qk_norm": True,
        "rope_theta": 5000.0,
        "rope_scaling": {
            "type": "deepseek_yarn",
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 64,
        },
        "torch_dtype": "float32",
    }
    stored = json.loads(transformers.SarvamMLAConfig(**published).to_json_string())
    expected = read(tmp_path, stored | {"architectures": ["DeepseekV3ForCausalLM"]})
    assert expected.unused_keys == ()
    assert read(tmp_path, published | {"architectures": ["SarvamMLAForCausalLM"]}) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [("layer_norm_eps", "1e-5"), ("use_parallel_residual", "yes"), ("hidden_size", "64"), ("rope_parameters", ["a"])],
)
def test_texts_for_numbers_are_refused_where_transformers_reads_them(
    key: str, value: Any, tmp_path: pathlib.Path
) -> None:
    values = transformers.GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"]).to_dict()
    with pytest.raises(ModelError, match=key):
        read(tmp_path, values | {key: value})


@pytest.mark.few(120)
@pytest.mark.parametrize(("family", "key"), TABLE)
def test_a_value_of_another_kind_is_refused_by_its_key(family: str, key: str, tmp_path: pathlib.Path) -> None:
    served, (_, refused) = values_of(family), table_of(family)[key]
    read(tmp_path, served)
    for value in refused:
        with pytest.raises(ConfigError) as caught:
            read(tmp_path, served | {key: value})
        error = caught.value
        assert error.key.partition("[")[0] == key, value
        assert error.file == str(tmp_path / "config.json")
        assert str(error).startswith(f"{error.file}: {error.key} must be {error.allowed}, not ")


@pytest.mark.parametrize(
    ("key", "refused"),
    [
        ("torch_dtype", CHOICE),
        ("max_window_layers", WHOLE),
        ("architectures", (*LIST, [])),
        ("rope_parameters", OBJECT),
    ],
)
def test_another_spelling_is_refused_by_its_own_key(key: str, refused: tuple[Any, ...], tmp_path: pathlib.Path) -> None:
    values = values_of("Qwen2ForCausalLM")
    del values["dtype"], values["layer_types"]
    for value in refused:
        with pytest.raises(ConfigError) as caught:
            read(tmp_path, values | {key: value})
        assert caught.value.key.partition("[")[0] == key, value


@pytest.mark.parametrize("family", OWN)
def test_null_is_as_good_as_nothing(family: str, tmp_path: pathlib.Path) -> None:
    """Except where null means none. What a family must have is named where it is missing."""
    values = values_of(family)
    required = {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "architectures",
    }
    for key in values:
        without = {name: value for name, value in values.items() if name != key}
        if key in required:
            for missing in (without, values | {key: None}):
                with pytest.raises(ConfigError) as caught:
                    read(tmp_path, missing)
                assert (caught.value.key, caught.value.value) == (key, None)
        elif (family, key) in (("GptOssForCausalLM", "rope_scaling"), ("Mistral4ForCausalLM", "rope_parameters")):
            assert refused_key(tmp_path, without) == "rope_parameters"  # transformers' own would be another rope
        elif key not in NULL_MEANS_NONE:
            assert read(tmp_path, values | {key: None}) == read(tmp_path, without), key


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["2", {"a": [1]}, -1, math.nan, HUGE, True, [2, "3"], [2, None]])
def test_end_of_sequence_tokens_are_refused_by_file(file: str, value: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values_of("LlamaForCausalLM")))
    contents = json.loads((tmp_path / "config.json").read_text()) if file == "config.json" else {}
    (tmp_path / file).write_text(json.dumps(contents | {"eos_token_id": value}))
    with pytest.raises(ConfigError) as caught:
        load_model_config(tmp_path)
    assert caught.value.key.partition("[")[0] == "eos_token_id"
    assert caught.value.file == str(tmp_path / file)


# ---- objects within: every place in them, set to everything ----------------------------------------------------------

ANYTHING = (None, "novel", "re:(", [7], [], {"a": 7}, {}, -2, 0, 1.5, 7, HUGE, math.nan, math.inf, 1e300, True)


def places(value: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields the path of everything in an object, with the container and the key there."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            inner = f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}"
            yield inner, value, key
            yield from places(value[key], inner)


NESTED = [("rope_parameters", name) for name in ROPES] + [("quantization_config", name) for name in QUANTIZATIONS]


@pytest.mark.parametrize(("key", "name"), NESTED)
def test_a_refusal_within_an_object_names_its_place(key: str, name: str, tmp_path: pathlib.Path) -> None:
    """What another value means may make a value near it wrong: then that one is named, of the same object."""
    values = values_of("LlamaForCausalLM") | {key: (ROPES | QUANTIZATIONS)[name]}
    read(tmp_path, values)
    num_refused = num_exact = 0
    for number, (path, _, _) in enumerate(list(places(values[key], key))):
        for other in ANYTHING:
            changed = copy.deepcopy(values)
            _, container, at = list(places(changed[key], key))[number]
            container[at] = other
            refused = refused_key(tmp_path, changed)
            num_refused += refused is not None
            num_exact += refused is not None and (path.startswith(refused) or refused.startswith(path))
            assert refused is None or refused.startswith(path.rpartition(".")[0]), (path, other, refused)
    assert num_refused > 20
    assert num_exact > 0.9 * num_refused


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize(("key", "refused"), [("factor", NUMBER), ("rope_type", CHOICE), ("truncate", FLAG)])
def test_rope_parameters_are_named_with_their_object(
    name: str, key: str, refused: tuple[Any, ...], tmp_path: pathlib.Path
) -> None:
    for value in refused:
        with pytest.raises(ConfigError) as caught:
            read(tmp_path, values_of("LlamaForCausalLM") | {"rope_parameters": ROPES[name] | {key: value}})
        assert caught.value.key == f"rope_parameters.{key}"


def test_rope_parameters_that_differ_by_layer_are_refused(tmp_path: pathlib.Path) -> None:
    """Without their kind of layer they would be read as rope's usual ones."""
    by_kind = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, values_of("Qwen3ForCausalLM") | {"rope_parameters": by_kind})
    assert caught.value.key == "rope_parameters.full_attention"


# ---- keys below quantization_config ----------------------------------------------------------------------------------

_GROUP = {"targets": ["Linear"], "weights": QuantizationArgs(num_bits=4, type="int", group_size=32, strategy="group")}
SAVED: dict[str, dict[str, Any]] = {
    "awq": quantization_config.AwqConfig().to_dict(),
    "gptq": quantization_config.GPTQConfig(4, static_groups=False).to_dict(),
    "fp8": quantization_config.FineGrainedFP8Config(scale_fmt="ue8m0").to_dict() | {"modules_to_convert": ["a"]},
    "compressed-tensors": QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(**_GROUP, input_activations=QuantizationArgs(dynamic=True))},
        format="pack-quantized",
        kv_cache_scheme=QuantizationArgs(num_bits=8, type="float"),
    ).model_dump(mode="json"),
}
"""What other libraries write, by method."""


@pytest.mark.parametrize("method", SAVED)
def test_every_key_of_other_libraries_below_quantization_config_is_read_or_harmless(
    method: str, tmp_path: pathlib.Path
) -> None:
    saved = SAVED[method]
    assert read(tmp_path, values_of("LlamaForCausalLM") | {"quantization_config": saved}).unused_keys == ()


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_keys_below_quantization_config_that_nobody_knows_are_named(name: str, tmp_path: pathlib.Path) -> None:
    values = values_of("LlamaForCausalLM") | {"quantization_config": copy.deepcopy(QUANTIZATIONS[name])}
    objects = [("quantization_config", values["quantization_config"])]
    objects += [
        (path, container[key])
        for path, container, key in places(values["quantization_config"], "quantization_config")
        if isinstance(container[key], dict) and path.rpartition(".")[2] in ("weights", "input_activations", "group_0")
    ]
    for _, each in objects:
        each["novel_rounding"] = 2
    assert read(tmp_path, values).unused_keys == tuple(sorted(f"{path}.novel_rounding" for path, _ in objects))


def test_gptqs_layout_is_read_in_both_spellings(tmp_path: pathlib.Path) -> None:
    """transformers writes `format`, and GPTQModel `checkpoint_format`."""
    shifts = set()
    for key in ("format", "checkpoint_format"):
        stored = {k: v for k, v in gptq_config(4, True).items() if k not in ("format", "checkpoint_format")}
        config = read(tmp_path, values_of("LlamaForCausalLM") | {"quantization_config": stored | {key: "gptq_v2"}})
        assert config.quantization is not None
        shifts |= {rule.format.zero_point_shift for rule in config.quantization.rules if rule.format is not None}
    assert shifts == {0}


@pytest.mark.parametrize("key", ["version", "format"])
def test_awqs_other_layouts_are_refused_in_both_spellings(key: str, tmp_path: pathlib.Path) -> None:
    stored = {k: v for k, v in AWQ_CONFIG.items() if k != "version"} | {key: "gemv"}
    refused = refused_key(tmp_path, values_of("LlamaForCausalLM") | {"quantization_config": stored})
    assert refused == f"quantization_config.{key}"


def test_rounded_outputs_are_refused(tmp_path: pathlib.Path) -> None:
    stored = copy.deepcopy(FORMATS["W8A8"].config)
    stored["config_groups"]["group_0"]["output_activations"] = {"num_bits": 8}
    refused = refused_key(tmp_path, values_of("LlamaForCausalLM") | {"quantization_config": stored})
    assert refused == "quantization_config.config_groups.group_0.output_activations"


def test_a_multimodal_model_is_refused_for_what_it_is(tmp_path: pathlib.Path) -> None:
    architecture = "ColPaliForRetrieval"
    transformers.ColPaliConfig(architectures=[architecture]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="multimodal models are not served") as caught:
        load_model_config(tmp_path)
    assert architecture in str(caught.value)
    assert "quantization_config" not in str(caught.value)


def test_no_value_of_another_family_is_blamed_on_a_key_that_was_read_before(tmp_path: pathlib.Path) -> None:
    transformers.GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"]).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    for key in keys:
        for value in ("7", [7], {"a": 7}, -1, 0, math.nan, HUGE):
            with pytest.raises(ModelError) as caught:
                read(tmp_path, values | {key: value})
            assert "quantization_config" not in str(caught.value)
            if not isinstance(value, int):
                assert key in str(caught.value)
