"""Every architecture of GGUF files that is served gives the tokens of the checkpoint that was converted, by
transformers, and llama.cpp reads the same file and gives the same tokens.
"""

from __future__ import annotations

import functools
import json
import pathlib
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from gguf.constants import MODEL_ARCH_NAMES

from manta.workers.checkpoints.gguf_architectures import ARCHITECTURES
from manta.workers.checkpoints.gguf_file import gguf_folder
from manta.workers.checkpoints.model_folder import load_model_config, resolve_model_folder
from manta.workers.models.model_config import ModelError
from manta.workers.models.raw_config import ConfigError
from manta.workers.torch_worker.tensor_check import check_tensors
from tests import converted_gguf, gguf_files
from tests.checkpoints import make_tokenizer, randomise, set_buffers
from tests.converted_gguf import convert
from tests.llamacpp import greedy_of_llamacpp
from tests.workers.recurrent_cases import FALCON_H1
from tests.workers.test_quantised_formats import PROMPTS, expected_of, greedy

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


STATE_SPACE = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "head_dim": 32,
}
DELTA = HYBRID | {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
MAMBA = {"state_size": 16, "intermediate_size": 128, "tie_word_embeddings": False}
GEMMA_4 = {"head_dim": 32, "global_head_dim": 64, "sliding_window": 24}
QWEN_EXPERTS = EXPERTS | {"num_experts": 6, "shared_expert_intermediate_size": 64}
LATENT_HEADS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
    "head_dim": 8,
}
LATENT = {
    **LATENT_HEADS,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


class Case(NamedTuple):
    config: str
    options: dict[str, Any] = {}
    as_name: str | None = None
    """llama.cpp's name, if it is that of a text decoder beside what sees."""


CASES = {
    "cohere2": Case("Cohere2Config", {"sliding_window": 24, "logit_scale": 0.5}),
    "gemma2": Case("Gemma2Config", {"sliding_window": 24, "query_pre_attn_scalar": 16}),
    "gemma3": Case("Gemma3TextConfig", {"sliding_window": 24, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}),
    "gemma3n": Case(
        "Gemma3nTextConfig",
        {
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 320,
            "activation_sparsity_pattern": [0.6, 0.0, 0.4, 0.0],
            "altup_num_inputs": 3,
            "laurel_rank": 32,
        },
    ),
    "gemma4": Case(
        "Gemma4TextConfig",
        GEMMA_4
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 320,
        },
    ),
    "gemma4 with experts": Case(
        "Gemma4TextConfig",
        GEMMA_4
        | {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "glm4": Case("Glm4Config", {"attention_bias": True}),
    "glm4moe": Case(
        "Glm4MoeConfig",
        {
            **EXPERTS,
            "n_routed_experts": 6,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "gpt-oss": Case(
        "GptOssConfig",
        {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN},
    ),
    "granite": Case(
        "GraniteConfig",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.5,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
    "lfm2": Case(
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "chatglm": Case("GlmConfig", {"attention_bias": True}),
    "minicpm3": Case(
        "MiniCPM3Config",
        {
            **LATENT_HEADS,
            "scale_emb": 12.0,
            "scale_depth": 1.4,
            "dim_model_base": 256,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2moe": Case(
        "Lfm2MoeConfig",
        {
            **EXPERTS,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "conv_L_cache": 4,
            "num_dense_layers": 1,
            "num_experts": 6,
        },
    ),
    "mixtral": Case("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": Case("Olmo2Config"),
    "phi3": Case("Phi3Config", {"sliding_window": None}),
    "qwen3moe": Case("Qwen3MoeConfig", {**EXPERTS, "num_experts": 6, "norm_topk_prob": True}),
    "qwen2vl": Case("Qwen2Config", as_name="qwen2vl"),
    "qwen3vl": Case("Qwen3Config", as_name="qwen3vl"),
    "qwen3vlmoe": Case("Qwen3MoeConfig", {**EXPERTS, "num_experts": 6, "norm_topk_prob": True}, "qwen3vlmoe"),
    "seed_oss": Case("SeedOssConfig"),
    "smollm3": Case("SmolLM3Config"),
    "granitehybrid": Case(
        "GraniteMoeHybridConfig",
        HYBRID
        | STATE_SPACE
        | {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.5,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
    "granitehybrid without experts": Case(
        "GraniteMoeHybridConfig",
        HYBRID | STATE_SPACE | {"num_local_experts": 0, "shared_intermediate_size": 96, "mamba_n_groups": 1},
    ),
    "falcon-h1": Case("FalconH1Config", FALCON_H1 | STATE_SPACE),
    "jamba": Case(
        "JambaConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "mamba_d_state": 16,
            "mamba_dt_rank": 6,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_hidden_layers": 5,
        },
    ),
    "nemotron_h": Case(
        "NemotronHConfig", NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}
    ),
    "nemotron_h_moe": Case(
        "NemotronHConfig",
        NEMOTRON
        | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "routed_scaling_factor": 2.5,
        },
    ),
    "mamba": Case("MambaConfig", MAMBA),
    "falcon_mamba": Case("FalconMambaConfig", MAMBA | {"layer_norm_epsilon": 1e-6}),
    "mamba2": Case("Mamba2Config", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1}),
    "qwen35": Case("Qwen3_5TextConfig", DELTA),
    "qwen35moe": Case("Qwen3_5MoeTextConfig", DELTA | QWEN_EXPERTS),
    "qwen3next": Case("Qwen3NextConfig", DELTA | QWEN_EXPERTS),
    "deepseek2": Case(
        "DeepseekV3Config",
        LATENT
        | {
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": YARN | {"truncate": True, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek2 of version 2": Case("DeepseekV2Config", LATENT | {"q_lora_rank": None, "topk_method": "greedy"}),
}
ENDS = (0, 2)
"""Tokens at which llama.cpp ends."""
NOT_LLAMACPPS = {
    "gpt-oss": "llama.cpp rounds the borders of YaRN",
    "gemma3n": "llama.cpp has the numbers of the published models in its code",
    "gemma4": "llama.cpp rounds what its gates compute to float16",
    "deepseek2 of version 2": "llama.cpp reads queries without a latent vector in models of 27 layers alone",
}
"""Cases whose tokens llama.cpp does not share, and why."""
ALIKE = (
    "granitehybrid without experts",
    "nemotron_h",
    "falcon_mamba",
    "qwen35",
    "qwen2vl",
    "qwen3vl",
    "deepseek2 of version 2",
)
"""Cases that differ little from others, for long runs."""
_root = tempfile.TemporaryDirectory(prefix="manta-gguf-")


def params(names: Iterable[str], long: Sequence[str] = ALIKE) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.prove) if name in long else name for name in names]


@functools.cache
def original(name: str) -> pathlib.Path:
    """Returns a checkpoint of a case, made once a process."""
    case = CASES[name]
    config = getattr(transformers, case.config)(**SIZES | case.options, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, 0)
    set_buffers(model)
    folder = pathlib.Path(_root.name) / name
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


@functools.cache
def converted(name: str) -> pathlib.Path:
    return convert(original(name), pathlib.Path(_root.name) / f"{name}.gguf", as_name=CASES[name].as_name)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", params(CASES))
def test_greedy_tokens_are_those_of_the_converted_checkpoint(name: str) -> None:
    assert greedy(converted(name)) == expected_of(original(name))


@pytest.mark.parametrize(("name", "kind"), [("qwen3moe", "Q8_0"), ("gpt-oss", "MXFP4"), ("mixtral", "Q4_0")])
def test_rounded_experts_are_the_numbers_that_their_blocks_stand_for(
    name: str, kind: str, tmp_path: pathlib.Path
) -> None:
    def kind_of(tensor: str) -> str:
        return kind if tensor.endswith("_exps.weight") else "F32"

    rounded = convert(original(name), tmp_path / "rounded.gguf", kind_of)
    dense = convert(original(name), tmp_path / "dense.gguf", kind_of, is_dense=True)
    tokens = greedy(rounded)
    assert tokens == greedy(dense)
    assert tokens != greedy(converted(name))


@pytest.mark.few(8)
@pytest.mark.parametrize("name", params(sorted(CASES.keys() - NOT_LLAMACPPS)))
def test_llamacpp_gives_the_same_tokens(name: str) -> None:
    pytest.importorskip("xllamacpp", reason="no wheel for this platform")
    for prompt, expected in zip(PROMPTS, expected_of(original(name)), strict=True):
        found = greedy_of_llamacpp(converted(name), list(prompt), len(expected))
        assert found == expected[: len(found)]
        assert len(found) == len(expected) or found[-1] in ENDS


def test_every_architecture_has_a_case() -> None:
    configs = {name: json.loads((original(name) / "config.json").read_text()) for name in CASES}
    tried = {CASES[name].as_name or converted_gguf.name_of(config) for name, config in configs.items()}
    assert tried | set(gguf_files.ARCHITECTURES.values()) | {"mistral"} == set(ARCHITECTURES)


def test_every_other_name_of_llamacpp_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    for name in set(MODEL_ARCH_NAMES.values()) - set(ARCHITECTURES):
        writer = gguf.GGUFWriter(tmp_path / "other.gguf", name)
        writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ConfigError) as raised:
            gguf_folder(tmp_path / "other.gguf")
        assert (raised.value.key, raised.value.value) == ("general.architecture", name)


def test_scales_beside_blocks_multiply_them(tmp_path: pathlib.Path) -> None:
    """As in files of NVFP4: a number for each linear or expert, and others for activations, which stay unrounded."""
    layers, ends = range(SIZES["num_hidden_layers"]), ("attn_q", "ffn_gate_exps", "ffn_down_exps")

    def kind_of(tensor: str) -> str:
        return "Q8_0" if tensor.endswith(tuple(f"{end}.weight" for end in ends)) else "F32"

    rounded = convert(original("mixtral"), tmp_path / "rounded.gguf", kind_of)
    dense = convert(original("mixtral"), tmp_path / "dense.gguf", kind_of, is_dense=True)
    names = [f"blk.{layer}.{end}" for layer in layers for end in ends]
    factors = {
        name: np.linspace(0.8, 1.3, 4 if name.endswith("exps") else 1, dtype=np.float32) + number / 40
        for number, name in enumerate(names)
    }
    beside = {f"{name}.scale": factor for name, factor in factors.items()}
    beside |= {f"{name}.input_scale": factor for name, factor in factors.items()}
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(dense).tensors}
    shapes = {name: (-1,) + (1,) * (stored[f"{name}.weight"].ndim - 1) for name in names}
    multiplied = {f"{name}.weight": stored[f"{name}.weight"] * factors[name].reshape(shapes[name]) for name in names}
    with_scales = rewritten(rounded, tmp_path / "scales.gguf", {}, beside)
    expected = rewritten(dense, tmp_path / "expected.gguf", {}, multiplied, tuple(f"{end}.weight" for end in ends))
    tokens = greedy(with_scales)
    assert tokens == greedy(expected)
    assert tokens != greedy(rounded)
    unknown = rewritten(rounded, tmp_path / "unknown.gguf", {}, {"blk.0.attn_norm.scale": np.ones(1, np.float32)})
    with pytest.raises(ModelError, match=r"holds 1 tensors that its architecture does not have: .*layernorm\.scale"):
        greedy(unknown)


def rounded_linears(tensor: str) -> str:
    """Q8_0 for all linears of layers but small ones, which published files keep in F32."""
    small = ("norm", "conv1d", "ffn_gate_inp", "_coef")
    is_small = any(part in tensor for part in small) or tensor.startswith(("token_embd", "output"))
    return "Q8_0" if tensor.endswith(".weight") and not is_small else "F32"


ROUNDED = ("qwen35moe", "deepseek2", "gemma4 with experts", "granitehybrid", "qwen3next", "gemma3n")


@pytest.mark.parametrize("name", params(ROUNDED, long=ROUNDED[3:]))
def test_rounded_heads_are_read_in_their_order(name: str, tmp_path: pathlib.Path) -> None:
    rounded = convert(original(name), tmp_path / "rounded.gguf", rounded_linears)
    dense = convert(original(name), tmp_path / "dense.gguf", rounded_linears, is_dense=True)
    tokens = greedy(rounded)
    assert tokens == greedy(dense)
    config = load_model_config(resolve_model_folder(str(rounded)))
    stored = check_tensors(resolve_model_folder(str(rounded)), config).stored
    assert stored is not None
    assert next(iter(stored.quantized)) == "Q8_0"


def rewritten(
    path: pathlib.Path,
    to: pathlib.Path,
    keys: dict[str, Any],
    tensors: dict[str, np.ndarray],
    without: tuple[str, ...] = (),
) -> pathlib.Path:
    """A copy of a file with other values of keys below the architecture's name, and with more tensors. `without` are
    ends of names of keys and tensors that it leaves out.
    """
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(to, architecture)
    for field in reader.fields.values():
        name = field.name.removeprefix(f"{architecture}.")
        if name.startswith("GGUF.") or name == "general.architecture" or name.endswith(without or "?"):
            continue
        items = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, keys.get(name, field.contents()), field.types[0], sub_type=items)
    for name in keys.keys() - {each.removeprefix(f"{architecture}.") for each in reader.fields}:
        kind = gguf.GGUFValueType.get_type(keys[name])
        writer.add_key_value(f"{architecture}.{name}", keys[name], kind)
    for tensor in reader.tensors:
        if not tensor.name.endswith(without or "?"):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, added in tensors.items():
        writer.add_tensor(name, added)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


@pytest.mark.parametrize(("name", "num_layers"), [("glm4moe", 4), ("qwen35moe", 4)])
def test_layers_that_draft_tokens_and_towers_are_left_out(name: str, num_layers: int, tmp_path: pathlib.Path) -> None:
    """As files of Qwen3.6 with its drafting layer are published, and Ollama's with what sees."""
    others = {
        f"blk.{num_layers}.nextn.eh_proj.weight": np.zeros((64, 128), dtype=np.float32),
        f"blk.{num_layers}.attn_norm.weight": np.zeros(64, dtype=np.float32),
        "v.blk.0.attn_q.weight": np.zeros((32, 32), dtype=np.float32),
    }
    keys = {"block_count": num_layers + 1, "nextn_predict_layers": 1}
    more = rewritten(converted(name), tmp_path / "more.gguf", keys, others)
    assert greedy(more) == expected_of(original(name))
    missing = rewritten(converted(name), tmp_path / "missing.gguf", keys, {})
    assert greedy(missing) == expected_of(original(name))


def test_older_files_of_deepseek_have_one_linear_to_keys_and_values(tmp_path: pathlib.Path) -> None:
    name, config = "deepseek2", CASES["deepseek2"].options
    stored = safetensors.torch.load_file(original(name) / "model.safetensors")
    whole = {
        f"blk.{layer}.attn_kv_b.weight": stored[f"model.layers.{layer}.self_attn.kv_b_proj.weight"].numpy()
        for layer in range(SIZES["num_hidden_layers"])
    }
    keys = {
        "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "attention.value_length": config["v_head_dim"],
        "attention.head_count_kv": SIZES["num_attention_heads"],
    }
    left_out = ("attn_k_b.weight", "attn_v_b.weight", "_length_mla")
    older = rewritten(converted(name), tmp_path / "older.gguf", keys, whole, left_out)
    assert greedy(older) == expected_of(original(name))


@pytest.mark.prove
def test_files_of_the_first_glm_4_have_queries_keys_and_values_as_one(tmp_path: pathlib.Path) -> None:
    """As the converter makes them of checkpoints with code of their own."""
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(converted("chatglm")).tensors}
    joined = {
        f"blk.{layer}.attn_qkv.{end}": np.concatenate([stored[f"blk.{layer}.attn_{each}.{end}"] for each in "qkv"])
        for layer in range(SIZES["num_hidden_layers"])
        for end in ("weight", "bias")
    }
    parts = tuple(f"attn_{each}.{end}" for each in "qkv" for end in ("weight", "bias"))
    path = rewritten(converted("chatglm"), tmp_path / "joined.gguf", {}, joined, parts)
    assert greedy(path) == expected_of(original("chatglm"))


def test_dense_models_of_granite_4_have_keys_of_hybrids(tmp_path: pathlib.Path) -> None:
    """Their converter writes the sizes of states that they do not have, and whether heads rotate."""
    states = ("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.inner_size", "ssm.time_step_rank")
    keys: dict[str, Any] = dict.fromkeys(states, 4) | {
        "rope.scaling.finetuned": True,
        "expert_shared_feed_forward_length": SIZES["intermediate_size"],
    }
    assert greedy(rewritten(converted("granite"), tmp_path / "4.gguf", keys, {})) == expected_of(original("granite"))
    still = rewritten(converted("granite"), tmp_path / "still.gguf", keys | {"rope.scaling.finetuned": False}, {})
    with pytest.raises(ConfigError) as raised:
        gguf_folder(still)
    assert (raised.value.key, raised.value.value) == ("granite.rope.scaling.finetuned", False)


@pytest.mark.parametrize(
    ("name", "key"), [("granitehybrid", "rope.scaling.finetuned"), ("falcon-h1", "ssm.has_mup")], ids=["Bamba", "fork"]
)
def test_files_of_another_converter_are_refused(name: str, key: str, tmp_path: pathlib.Path) -> None:
    """Bamba's rotate in part, and those of Falcon-H1's fork have factors that are not in the weights."""
    other = rewritten(converted(name), tmp_path / "other.gguf", {key: True}, {})
    with pytest.raises(ConfigError) as raised:
        gguf_folder(other)
    assert (raised.value.key, raised.value.value) == (f"{name}.{key}", True)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    damaged = tmp_path / "model.gguf"
    damaged.write_bytes(converted("olmo2").read_bytes().replace(b"olmo2", b"olmo9"))
    with pytest.raises(ConfigError) as raised:
        gguf_folder(damaged)
    assert (raised.value.key, raised.value.value) == ("general.architecture", "olmo9")
