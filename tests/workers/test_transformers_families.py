"""Every causal family of transformers that Manta serves through transformers: greedy tokens beyond its windows.

Each is a tiny random model whose windows, chunks and rope scaling are shorter than the sequence. Its tokens equal those
of transformers' own `generate`, or the model is refused with a reason.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from manta.workers.checkpoints.transformers_support import why_unsupported
from manta.workers.decoders.layer_windows import LENGTHS
from manta.workers.decoders.transformers_model import TransformersModel
from manta.workers.models.families import FAMILIES
from manta.workers.models.model_config import ModelError
from tests.checkpoints import on_one_thread, randomise, reference_greedy
from tests.workers.test_models import Cache, random_tokens

WINDOW = 20
PROMPT, OUTPUT = 45, 12
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "keep_window_size": WINDOW,
    "local_attention": 2 * WINDOW,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LENGTH_LIKE = re.compile("window|chunk|block|stride|index_top|floor|local_att|original_max")
NO_LENGTHS = {
    "block_auto_adjust_ff_dim",
    "block_ffn_dim_multiplier",
    "block_multiple_of",
    "chunk_size_feed_forward",
    "local_attention",  # of ModernBERT, which computes its sliding_window of it
    "max_window_layers",
    "prefix_dense_sliding_window_pattern",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "use_sliding_window",
    "window_size",  # of GPT-Neo, whose probe is as long
}
"""Keys with such names that are layers, switches, or sizes of something else."""
OWN: dict[str, dict[str, Any]] = {
    "Beam": {"n_group": 1, "topk_group": 1},
    "CodeGen": {"rotary_dim": 8},
    "Dots1": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "GPTJ": {"rotary_dim": 8},
    "GPTNeo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "Qwen2Moe": {"use_sliding_window": True},
}
"""What differs for a family that cannot be made of `SIZES`."""


SERVED_NAMES = (
    "Afmoe Apertus Apertus1p5Text Arcee AriaText Beam BioGpt BitNet Bloom CodeGen Cohere Cohere2Moe CTRL Cwm "
    "Dots1 Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe Falcon FlexOlmo Gemma GPT2 GPTBigCode "
    "GPTJ GPTNeo GPTNeoX GraniteMoe GraniteMoeShared Helium HunYuanDenseV1 HunYuanMoEV1 HYV3 HyperCLOVAX Jais2 "
    "Kolibri1 Laguna Mellum MiniMaxM2 MiniMaxM3VLText Ministral Ministral3 ModernBertDecoder Mpt "
    "NanoChat Nemotron Olmo Olmoe OPT Persimmon Phi Phimoe Qwen2Moe SarvamMoE "
    "SolarOpen StableLm Starcoder2 XGLM"
)
"""Families that are served, by the names of their configurations."""
REFUSED_NAMES = (
    # Not causal unless they are told to be: their masks show a token what comes after it.
    "Bert BertGeneration Camembert Data2VecText Electra Ernie RoCBert Roberta RobertaPreLayerNorm XLMRoberta "
    # Attention that a layer calls twice, masks of their own, sinks, keys of another shape, recurrence.
    "DiffLlama Doge Dory Flint Git GraniteMoeSWA GraniteSWA HrmText JetMoe MiMoV2Flash "
    # A cache that forgets positions which the mask shows.
    "Moshi "
    # Languages, of which one is to be chosen in code.
    "Xmod"
)
"""Families that are refused when they are loaded."""
SERVED, REFUSED = SERVED_NAMES.split(), REFUSED_NAMES.split()
LEFT_OUT = ("Blt", "CohereCompassText", "Dbrx", "Gemma3nText", "Phi4Multimodal", "XLMRobertaXL")
"""Families of which transformers makes no tiny model, or not within minutes."""
CHEAP = ("Ministral3", "Mellum", "Phimoe", "SarvamMoE", "Moshi", "Doge", "Git")
"""Families of every run: a window in the mask only, other kinds of layers, scaled queries, the architecture of a native
family with other tensors, three kinds of refusals.
"""


def families() -> Iterator[tuple[str, Any]]:
    """Yields name and class of each configuration that `why_unsupported` lets through."""
    for config_class in dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING.keys()):
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        architecture = model_class.__name__
        if architecture in FAMILIES:
            continue
        try:
            config = config_class()
        except Exception:  # a configuration without defaults
            continue
        if why_unsupported(config, architecture) is None:
            yield config_class.__name__.removesuffix("Config"), config_class


def tiny_config(name: str) -> Any:
    config_class = getattr(transformers, f"{name}Config")
    usual = config_class()
    known = usual.to_dict()
    options = {key: value for key, value in SIZES.items() if key in known or key in usual.attribute_map}
    if "sliding_window" not in options:
        options.pop("layer_types", None)
    return config_class(**options | OWN.get(name, {}))


def make(folder: pathlib.Path, config: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, 0)
    model.save_pretrained(folder)


def greedy(folder: pathlib.Path, prompt: list[int]) -> list[int]:
    cache = Cache(folder)
    output: list[int] = []
    logits = cache.run((0, prompt))[0]
    for _ in range(OUTPUT):
        output.append(int(logits[-1].argmax()))
        logits = cache.run((0, output[-1:]))[0]
    return output


def test_a_window_that_no_layer_has_is_none(tmp_path: pathlib.Path) -> None:
    """Checkpoints keep a `sliding_window` although all their layers see everything."""
    config = tiny_config("Ministral")
    config.layer_types = ["full_attention"] * 4
    make(tmp_path, config)
    prompt = random_tokens(PROMPT)
    assert greedy(tmp_path, prompt) == reference_greedy(tmp_path, prompt, OUTPUT)


@pytest.mark.prove  # it imports the code of all families
def test_every_family_of_transformers_is_in_a_table() -> None:
    listed = {*SERVED, *REFUSED, *LEFT_OUT}
    unlisted = {name for name, _ in families()} - listed
    assert not unlisted, "a newer transformers has more: try them and add them to a table"


@pytest.mark.parametrize(
    "name", [name if name in CHEAP else pytest.param(name, marks=pytest.mark.prove) for name in (*SERVED, *REFUSED)]
)
def test_tokens_beyond_every_window_are_those_of_transformers(name: str, tmp_path: pathlib.Path) -> None:
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip("this transformers has no such family")
    with on_one_thread():
        make(tmp_path, tiny_config(name))
        prompt = random_tokens(PROMPT)
        if name in REFUSED:
            with pytest.raises(ModelError):
                Cache(tmp_path)
        else:
            assert greedy(tmp_path, prompt) == reference_greedy(tmp_path, prompt, OUTPUT)


@pytest.mark.parametrize("name", ["Phimoe", "Mellum"])
def test_a_window_is_that_of_the_mask(name: str, tmp_path: pathlib.Path) -> None:
    """Phi-3.5-MoE names its window to the mask only; Mellum has two kinds of layers."""
    make(tmp_path, tiny_config(name))
    model = Cache(tmp_path).model
    assert isinstance(model, TransformersModel)
    windows = [model.window_of(layer, None) for layer in range(4)]
    assert windows == ([WINDOW] * 4 if name == "Phimoe" else [WINDOW, None] * 2)


@pytest.mark.prove
def test_every_length_of_a_configuration_is_shrunk_for_the_probe_or_known_to_be_no_length_of_attention() -> None:
    named = {key for _, config_class in families() for key in config_class().to_dict() if LENGTH_LIKE.search(key)}
    assert named - NO_LENGTHS - set(LENGTHS) == set()
