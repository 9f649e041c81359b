"""Families whose layers do more than Llama's: logits and tokens against transformers, with and without each feature.

Each is a tiny random model whose windows and original contexts are shorter than the sequence, and whose caps, scales
and factors are far from neutral. Without a feature the same weights give other tokens, so that no test passes by it.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

import tests.glm5_next  # noqa: F401, a class that transformers lacks
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.kv_cache_dtype import check_kv_cache
from manta.workers.model_options import ModelOptions
from manta.workers.models.draft_heads import draft_head_config
from manta.workers.models.model_config import ModelError
from manta.workers.models.variants import NOT_COMPUTED, Variant, check_block_size, check_variants
from manta.workers.platforms import choose_platform
from manta.workers.torch_worker.loader import load_model
from manta.workers.torch_worker.tensor_check import check_tensors
from tests.checkpoints import (
    make_tokenizer,
    on_one_thread,
    randomise,
    reference_greedy,
    reference_logits,
    set_buffers,
)
from tests.workers.attention_cases import ATTENTION_CASES, NO_WINDOW, YARN
from tests.workers.cpu_forms import COMPILED, TORCH, in_form
from tests.workers.recurrent_cases import INKLING_TENSORS, RECURRENT_CASES, ROPE, Case
from tests.workers.sparse_cases import SPARSE_CASES
from tests.workers.test_models import Cache, random_tokens

transformers.AutoModelForCausalLM.register(transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True)

NUM_TOKENS = 120
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
LINEAR = ROPE | {"rope_type": "linear", "factor": 4.0}
LONG_ROPE = ROPE | {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [1.5 + 0.5 * index for index in range(8)],
    "original_max_position_embeddings": 64,
}


CASES: dict[str, Case] = (
    RECURRENT_CASES
    | ATTENTION_CASES
    | SPARSE_CASES
    | {
        "gemma2": Case(
            "Gemma2Config",
            {
                "head_dim": 16,
                "sliding_window": 24,
                "attn_logit_softcapping": 3.0,
                "final_logit_softcapping": 5.0,
                "query_pre_attn_scalar": 2,
            },
            {
                "attention's cap": {"attn_logit_softcapping": None},
                "query scale": {"query_pre_attn_scalar": 16},
                "layers with windows": {"layer_types": ALTERNATING[1:] + ALTERNATING[:1]},
            }
            | NO_WINDOW,
        ),
        "vaultgemma": Case(
            "VaultGemmaConfig",
            {
                "head_dim": 16,
                "sliding_window": 24,
                "attn_logit_softcapping": 3.0,
                "final_logit_softcapping": 5.0,
                "query_pre_attn_scalar": 2,
            },
            {"attention's cap": {"attn_logit_softcapping": None}, "query scale": {"query_pre_attn_scalar": 16}}
            | NO_WINDOW,
        ),
        "gemma3": Case(
            "Gemma3TextConfig",
            {
                "head_dim": 32,
                "sliding_window": 24,
                "query_pre_attn_scalar": 9,
                "layer_types": ALTERNATING,
                "rope_parameters": {"full_attention": LINEAR, "sliding_attention": ROPE | {"rope_theta": 100.0}},
            },
            {
                "local rope": {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LINEAR}},
                "scaled global rope": {"rope_parameters": {"sliding_attention": ROPE | {"rope_theta": 100.0}}},
                "query scale": {"query_pre_attn_scalar": 256},
            }
            | NO_WINDOW,
        ),
        "olmo2": Case("Olmo2Config"),
        "olmo3": Case(
            "Olmo3Config",
            {"sliding_window": 24, "rope_parameters": {"full_attention": YARN, "sliding_attention": ROPE}},
            {"scaled rope in full layers": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}}
            | NO_WINDOW,
        ),
        "smollm3": Case(
            "SmolLM3Config",
            {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 24, "rope_parameters": ROPE},
            {"layers without positions": {"no_rope_layers": [1, 1, 1, 1]}} | NO_WINDOW,
        ),
        "granite": Case(
            "GraniteConfig",
            {
                "logits_scaling": 3.0,
                "residual_multiplier": 0.5,
                "embedding_multiplier": 8.0,
                "attention_multiplier": 0.6,
                "attention_bias": True,
                "mlp_bias": True,
            },
            {
                "residual multiplier": {"residual_multiplier": 1.0},
                "embedding multiplier": {"embedding_multiplier": 1.0},
                "attention multiplier": {"attention_multiplier": 0.25},
            },
        ),
        "glm": Case("GlmConfig", {"head_dim": 16}),
        "glm4": Case(
            "Glm4Config",
            {"head_dim": 16},
            {"partial rotation": {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}},
        ),
        "phi3": Case("Phi3Config", {"sliding_window": 24}, NO_WINDOW),
        "phi3, longrope": Case(
            "Phi3Config",
            {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64},
            {"long factors": {"rope_parameters": LONG_ROPE | {"long_factor": LONG_ROPE["short_factor"]}}},
        ),
        "phi4, partial rotation": Case(
            "Phi3Config",
            {"rope_parameters": ROPE | {"partial_rotary_factor": 0.75}},
            {"partial rotation": {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}},
        ),
        "qwen3_moe": Case(
            "Qwen3MoeConfig",
            {
                "head_dim": 16,
                "moe_intermediate_size": 32,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
                "rope_parameters": ROPE,
            },
            {"choice of two experts": {"num_experts_per_tok": 1}, "shares that sum to one": {"norm_topk_prob": False}},
        ),
        "gpt_oss": Case(
            "GptOssConfig",
            {
                "head_dim": 16,
                "sliding_window": 24,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "rope_parameters": YARN | {"truncate": False},
            },
            {"choice of two experts": {"num_experts_per_tok": 1}, "scaled rope": {"rope_parameters": ROPE}} | NO_WINDOW,
        ),
        "lfm2": Case(
            "Lfm2Config",
            {
                "layer_types": ["conv", "full_attention", "conv", "full_attention"],
                "conv_L_cache": 4,
                "block_multiple_of": 8,
                "rope_parameters": ROPE,
            },
        ),
        "lfm2, convolutions only": Case(
            "Lfm2Config", {"layer_types": ["conv"] * 4, "block_auto_adjust_ff_dim": False, "rope_parameters": ROPE}
        ),
        "cohere2": Case(
            "Cohere2Config",
            {"sliding_window": 24, "layer_types": ALTERNATING, "logit_scale": 0.5},
            {"layers without positions": {"layer_types": ["sliding_attention"] * 4, "sliding_window": 4096}}
            | NO_WINDOW,
        ),
    }
)
SCALES_OF_LOGITS = {
    "gemma2": {"final_logit_softcapping": None},
    "granite": {"logits_scaling": 1.0},
    "inkling": {"logits_mup_width_multiplier": 1.0},
    "inkling2": {"final_logit_softcapping": 1000.0},
    "cohere2": {"logit_scale": 1.0},
    "recurrent_gemma": {"logits_soft_cap": 1000.0},
}
"""Features that change logits and no greedy token."""
NOT_GENERATED = ("lfm2, convolutions only",)
"""Models for which transformers has logits and generates nothing, because its cache needs a layer of attention."""
FEATURES = [(name, feature) for name, case in CASES.items() for feature in case.without]
_root = tempfile.TemporaryDirectory(prefix="manta-layer-kinds-")
_made: dict[str, pathlib.Path] = {}


def folder_of(name: str, **changes: Any) -> pathlib.Path:
    """A checkpoint of a case, perhaps with `changes` of its configuration, made once a process."""
    kept_as = f"{name}, {changes}" if changes else name
    if kept_as not in _made:
        case = CASES[name]
        config = getattr(transformers, case.config)(**SIZES | case.options | changes, dtype="float32")
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomise(model, 0)
        set_buffers(model)
        folder = pathlib.Path(_root.name) / f"model-{len(_made)}"
        model.save_pretrained(folder)
        make_tokenizer(folder)
        _made[kept_as] = folder
    return _made[kept_as]


def changed(folder: pathlib.Path, to: pathlib.Path, keys: dict[str, Any]) -> pathlib.Path:
    """A copy of a checkpoint with other values in its configuration."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | keys))
    return to


def logits_of(folder: pathlib.Path, tokens: list[int]) -> torch.Tensor:
    """Logits of chunks of a prompt and of decodes, which begin a block of the cache."""
    cache = Cache(folder)
    pieces = [tokens[:33], tokens[33:40], tokens[40:108], *([token] for token in tokens[108:])]
    with torch.inference_mode(), on_one_thread():
        return torch.cat([cache.run((0, piece))[0] for piece in pieces])


@pytest.fixture(
    scope="module", params=[COMPILED[0], TORCH, *(pytest.param(each, marks=pytest.mark.prove) for each in COMPILED[1:])]
)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    with in_form(request.param):
        yield request.param


@pytest.mark.few(34)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(form: str, name: str) -> None:
    folder, tokens = folder_of(name), random_tokens(NUM_TOKENS)
    assert load_model_config(folder).native
    expected = reference_logits(folder, tokens)
    logits = logits_of(folder, tokens)
    assert (logits - expected).abs().max() <= 1e-4 * (expected.max() - expected.min())
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.few(25)
@pytest.mark.parametrize(("name", "feature"), FEATURES)
def test_without_a_feature_the_tokens_differ(name: str, feature: str, tmp_path: pathlib.Path) -> None:
    folder, tokens = folder_of(name), random_tokens(NUM_TOKENS)
    without = changed(folder, tmp_path / "without", CASES[name].without[feature])
    assert not torch.equal(logits_of(without, tokens).argmax(-1), reference_logits(folder, tokens).argmax(-1))


def rewritten(
    folder: pathlib.Path, to: pathlib.Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
) -> pathlib.Path:
    """A copy of a checkpoint, for each tensor of which stand those that `change` makes of it."""
    shutil.copytree(folder, to)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in safetensors.torch.load_file(to / "model.safetensors").items():
        tensors |= change(name, tensor)
    safetensors.torch.save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("deepseek_v3", "e_score_correction_bias"),
        ("deepseek_v32", "indexer.wq_b"),
        ("glm_moe_dsa", "indexer.k_norm.bias"),
        ("glm_moe_dsa", "indexer.weights_proj"),
        ("dots3_note", "layers.0.self_attn.g_proj"),
        ("dots3_note", "k_rope_only_layernorm"),
        ("axk1", "post_mlp_layernorm"),
        ("axk2", "input_layernorm.W_up"),
        ("axk2", "post_attention_layernorm.W_down"),
        ("longcat_flash", "mlp.experts.2.down_proj"),
        *INKLING_TENSORS,
        ("gemma4", "layer_scalar"),
        ("gemma4", "per_layer"),
        ("mimo_v2", "attention_sink_bias"),
        ("gemma4, experts", "router.scale"),
        ("gemma4, experts", "per_expert_scale"),
        ("gemma3n", "correct_output_scale"),
        ("gemma3n", "linear_left"),
        ("qwen4_exp", "mlp_hyper_connection.input_mix_weight_up"),
        ("qwen4_exp", "attn_hyper_connection.block_inject_weight"),
        ("qwen4_exp", "ple.norm_query"),
        ("qwen4_exp", "ple.conv1d"),
        ("qwen4_exp", "ngram_embedding.shard_2"),
        ("qwen4_exp", "indexer.q_layernorm"),
        ("rwkv", "time_decay"),
        ("rwkv", "time_first"),
        ("rwkv", "attention.time_mix_value"),
        ("rwkv", "feed_forward.time_mix_key"),
        ("rwkv", "pre_ln.bias"),
        ("zamba2", "linear_q_adapter_list"),
        ("zamba2", "gate_up_proj_adapter_list"),
    ],
)
def test_with_another_tensor_the_tokens_differ(name: str, tensor: str, tmp_path: pathlib.Path) -> None:
    def without(key: str, stored: torch.Tensor) -> dict[str, torch.Tensor]:
        return {key: stored * 0.5 + 0.1 if tensor in key else stored}

    tokens = random_tokens(NUM_TOKENS)
    logits = logits_of(rewritten(folder_of(name), tmp_path / "without", without), tokens)
    assert not torch.equal(logits.argmax(-1), reference_logits(folder_of(name), tokens).argmax(-1))


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("deepseek_v3", "model.layers.4.eh_proj.weight"),  # of the layer that drafts tokens
        ("axk1", "model.layers.0.post_mlp_layernorm.weight"),  # of a layer with one MLP, which has no such norm
        ("gemma4", "model.layers.5.self_attn.k_proj.weight"),  # of a layer that reads those of another
    ],
)
def test_published_tensors_that_no_token_needs_are_not_missed(name: str, extra: str, tmp_path: pathlib.Path) -> None:
    first = "model.norm.weight"
    folder = rewritten(
        folder_of(name),
        tmp_path / "more",
        lambda key, each: {key: each} | ({extra: each.clone()} if key == first else {}),
    )
    check_tensors(folder, load_model_config(folder))


def test_without_sinks_the_tokens_differ(tmp_path: pathlib.Path) -> None:
    def without(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: tensor - 1e4 if name.endswith("sinks") else tensor}

    tokens = random_tokens(NUM_TOKENS)
    logits = logits_of(rewritten(folder_of("gpt_oss"), tmp_path / "without", without), tokens)
    assert not torch.equal(logits.argmax(-1), reference_logits(folder_of("gpt_oss"), tokens).argmax(-1))


def test_without_the_older_taps_of_a_convolution_the_tokens_differ(tmp_path: pathlib.Path) -> None:
    def without(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        newest = torch.tensor([0, 0, 0, 1])
        return {name: tensor * newest if name.endswith("conv.conv.weight") else tensor}

    tokens = random_tokens(NUM_TOKENS)
    logits = logits_of(rewritten(folder_of("lfm2"), tmp_path / "without", without), tokens)
    assert not torch.equal(logits.argmax(-1), reference_logits(folder_of("lfm2"), tokens).argmax(-1))


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_experts_in_mxfp4_are_read_as_the_numbers_that_they_stand_for(tmp_path: pathlib.Path) -> None:
    """As gpt-oss is published: two numbers a byte, a scale for 32 inputs, outputs before inputs."""
    generator = torch.Generator().manual_seed(0)
    dense: dict[str, torch.Tensor] = {}

    def rounded(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if tensor.dim() != 3:
            return {name: tensor}
        num_experts, inputs, outputs = tensor.shape
        codes = torch.randint(0, 16, (num_experts, outputs, inputs), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(
            123, 126, (num_experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8
        )
        numbers = E2M1[(codes & 7).int()] * torch.where(codes > 7, -1.0, 1.0)
        scales = torch.exp2(exponents.float() - 127).repeat_interleave(32, dim=-1)
        dense[name] = (numbers * scales).transpose(1, 2).contiguous()
        pairs = codes.view(num_experts, outputs, inputs // 32, 16, 2)
        return {f"{name}_blocks": pairs[..., 0] | pairs[..., 1] << 4, f"{name}_scales": exponents}

    stored = rewritten(folder_of("gpt_oss"), tmp_path / "stored", rounded)
    config = json.loads((stored / "config.json").read_text())
    quantization = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (stored / "config.json").write_text(json.dumps(config | quantization))
    plain = rewritten(folder_of("gpt_oss"), tmp_path / "plain", lambda name, each: {name: dense.get(name, each)})
    tokens = random_tokens(NUM_TOKENS)
    model = load_model(stored, load_model_config(stored), "float32", choose_platform("cpu", 1), weights="dense")
    logits = Cache(stored, model=model).run((0, tokens))[0]
    assert (logits - reference_logits(plain, tokens)).abs().max() <= 1e-4 * logits.abs().max()


WRAPPED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("Gemma3Config", "gemma3", {"mm_tokens_per_image": 4}),
    "mistral": ("Mistral3Config", "MistralConfig", {"spatial_merge_size": 2}),
    "gemma4": ("Gemma4Config", "gemma4", {}),
    "qwen3_5": ("Qwen3_5Config", "qwen3_5", {}),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "qwen3_5_moe", {}),
}
VISION_TYPES = {
    "gemma3": "siglip_vision_model",
    "gemma4": "gemma4_vision",
    "mistral": "pixtral",
    "qwen3_5": "qwen3_5_vision",
    "qwen3_5_moe": "qwen3_5_moe_vision",
}


@pytest.mark.parametrize("prefixes", ["published", "transformers 5"])
@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_decoder_of_a_multimodal_model_is_served(name: str, prefixes: str, tmp_path: pathlib.Path) -> None:
    config_class, text, options = WRAPPED[name]
    text_class, text_options = (CASES[text].config, CASES[text].options) if text in CASES else (text, {})
    text_config = getattr(transformers, text_class)(**SIZES | text_options)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {
        "patch_size": 14,
        "model_type": VISION_TYPES[name],
    }
    vision |= {"image_size": 28} if name in ("gemma3", "mistral") else {}
    vision |= {"num_key_value_heads": 2, "head_dim": 16} if name == "gemma4" else {}
    config = getattr(transformers, config_class)(text_config=text_config, vision_config=vision, **options)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomise(model, 0)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    make_tokenizer(folder)
    if prefixes == "published":
        renamed = {
            "model.language_model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
            "model.": "",
        }

        def rename(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
            begins = next((each for each in renamed if name.startswith(each)), "")
            return {renamed.get(begins, "") + name.removeprefix(begins): tensor}

        folder = rewritten(folder, tmp_path / "published", rename)
    tokens = random_tokens(60)
    with torch.inference_mode(), on_one_thread():
        expected = model.eval()(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    served = load_model_config(folder)
    assert served.native
    assert served.wrapper == type(model).__name__
    assert served.unused_keys == ()
    check_tensors(folder, served)
    logits = Cache(folder).run((0, tokens))[0]
    assert (logits - expected).abs().max() <= 1e-4 * (expected.max() - expected.min())


def test_half_of_each_head_rotates_in_a_glm_that_does_not_say(tmp_path: pathlib.Path) -> None:
    folder, tokens = folder_of("glm4"), random_tokens(NUM_TOKENS)
    silent = changed(folder, tmp_path / "silent", {"rope_parameters": None})
    assert torch.equal(logits_of(silent, tokens), logits_of(folder, tokens))


SPARSE = "attention to tokens that an indexer chooses"
BIASES = "biases by the distance of tokens, convolutions of keys, values and results"
BOUNDED_GATES = "experts whose gates are bounded"
NOT_ON_DEVICES = {
    "cuda": {
        **dict.fromkeys(SPARSE_CASES, SPARSE),
        "inkling": BIASES,
        **dict.fromkeys(("inkling2", "inkling2_loop"), f"{BIASES}, {BOUNDED_GATES}, layers that read blocks of layers"),
        "longcat_flash": "experts that return what they get",
        "qwen4_exp": f"{SPARSE}, rows of tables of n-grams",
        "rwkv": "channel mixing, time mixing",
        "xlstm": "matrix memories",
        "zaya": "attention behind convolutions, factors on the residual stream, routers behind an MLP",
    },
    "tpu": {
        **dict.fromkeys(SPARSE_CASES, SPARSE),
        "axk2": f"{SPARSE}, gates on the results of norms",
        "dots3_note": f"{SPARSE}, heads that differ by layer",
        "llama4": "layers that see a chunk, shares that multiply what experts get",
        "gemma3n": "heads that differ by layer, .*several residual streams",
        "gemma4": "heads that differ by layer, .*inputs of each layer",
        "gemma4, keys as values": "heads that differ by layer",
        "gemma4, experts": "experts beside an MLP",
        "longcat_flash": "experts that return what they get, experts whose result is added a layer later",
        "mimo_v2": "heads that differ by layer",
        "inkling": f"{BIASES}, heads that differ",
        **dict.fromkeys(("inkling2", "inkling2_loop"), f"{BIASES}, {BOUNDED_GATES}, .*layers that read blocks"),
        "qwen4_exp": f"{SPARSE}, gates on the results of norms, rows of tables of n-grams, several residual streams",
        "minimax": "lightning attention, norms that replace the residual stream",
        "recurrent_gemma": "real-gated linear recurrent units",
        "rwkv": "channel mixing, time mixing",
        "xlstm": "matrix memories",
        "zamba": "blocks that layers share",
        "zamba2": "blocks that layers share",
        "zaya": "attention behind convolutions, factors on the residual stream, routers behind an MLP",
    },
}
"""Cases with layers that a device does not compute, and what the refusal names."""
ON_TPUS = [name for name in CASES if name not in NOT_ON_DEVICES["tpu"] and name not in NOT_GENERATED]


@pytest.mark.parametrize("device", NOT_ON_DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_devices_compute_every_layer_or_say_what_they_do_not(name: str, device: str) -> None:
    config, words = load_model_config(folder_of(name)), NOT_ON_DEVICES[device].get(name)
    if words is None:
        check_variants(config, device)
        return
    with pytest.raises(ModelError, match=f"device {device} does not compute .*{words}.*; set device to cpu"):
        check_variants(config, device)


def test_tpus_refuse_draft_heads() -> None:
    """Even of families whose layers they compute."""
    head = draft_head_config(load_model_config(folder_of("glm4_moe")))
    check_variants(head, "cpu")
    with pytest.raises(ModelError, match="device tpu does not compute draft heads, which Glm4Moe"):
        check_variants(head, "tpu")


def test_blocks_that_do_not_fill_chunks_are_refused() -> None:
    config = load_model_config(folder_of("llama4"))
    check_block_size(config, 16)
    with pytest.raises(ModelError, match=r"in chunks of 32 .* and block_size 24 does not"):
        check_block_size(config, 24)


def test_a_device_refuses_what_it_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names those of its missing variants that the model has."""
    lacking = {Variant.OTHER_NORM_PLACES, Variant.WIDE_NORMS, Variant.SINKS}
    monkeypatch.setitem(NOT_COMPUTED, "tpu", frozenset(lacking))
    config = load_model_config(folder_of("olmo2"))
    check_variants(config, "cpu")
    words = "device tpu does not compute norms after attention and MLP, norms over all heads together, which Olmo2For"
    with pytest.raises(ModelError, match=words):
        check_variants(config, "tpu")


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_rounded_cache_is_refused_where_latents_and_an_indexers_key_would_share_a_scale(dtype: str) -> None:
    folder = folder_of("deepseek_v32")
    options = ModelOptions(model=str(folder), kv_cache_dtype=dtype)
    with pytest.raises(ModelError, match=f"kv_cache_dtype {dtype} is not for DeepseekV32ForCausalLM"):
        check_kv_cache(options, "cpu", load_model_config(folder))


def test_a_router_without_a_stored_bias_is_that_of_zeros(tmp_path: pathlib.Path) -> None:
    """As published files of A.X K1 are."""
    bias = "e_score_correction_bias"
    zeros = rewritten(
        folder_of("axk1"), tmp_path / "zeros", lambda name, each: {name: each * 0 if name.endswith(bias) else each}
    )
    without = rewritten(
        folder_of("axk1"), tmp_path / "without", lambda name, each: {} if name.endswith(bias) else {name: each}
    )
    tokens = random_tokens(NUM_TOKENS)
    assert torch.equal(logits_of(without, tokens), logits_of(zeros, tokens))


@pytest.mark.parametrize("name", SCALES_OF_LOGITS)
def test_without_their_scale_the_logits_differ(name: str, tmp_path: pathlib.Path) -> None:
    folder, tokens = folder_of(name), random_tokens(40)
    without = changed(folder, tmp_path / "without", SCALES_OF_LOGITS[name])
    difference = (Cache(without).run((0, tokens))[0] - reference_logits(folder, tokens)).abs().max()
    assert difference > 0.1 * reference_logits(folder, tokens).abs().max()


@pytest.mark.few(5)
@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_GENERATED])
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    folder, prompt = folder_of(name), random_tokens(70, seed=1)
    cache, output = Cache(folder), []
    with torch.inference_mode(), on_one_thread():
        logits = cache.run((0, prompt))[0]
        for _ in range(20):
            output.append(int(logits[-1].argmax()))
            logits = cache.run((0, output[-1:]))[0]
    assert output == reference_greedy(folder, prompt, 20)
