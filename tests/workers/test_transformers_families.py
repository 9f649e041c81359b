"""Models that transformers runs: their windows are those of its masks, and attention and positions that are code of
their own are replaced. `tests/families/` tries every family.
"""

from __future__ import annotations

import pathlib
import re

import pytest

from manta.workers.decoders.layer_windows import LENGTHS
from manta.workers.decoders.transformers_model import TransformersModel
from tests.checkpoints import on_one_thread, reference_greedy
from tests.families.tiny import MODEL_TYPES, MODELS_WITH_PICTURES, WINDOW, make_model, tiny_config
from tests.workers.test_models import Cache, random_tokens

PROMPT, OUTPUT = 45, 12
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


def greedy(folder: pathlib.Path, prompt: list[int]) -> list[int]:
    cache = Cache(folder)
    output: list[int] = []
    logits = cache.run((0, prompt))[0]
    for _ in range(OUTPUT):
        output.append(int(logits[-1].argmax()))
        logits = cache.run((0, output[-1:]))[0]
    return output


REPLACED = (
    "diffllama roformer gpt_neox_japanese megatron-bert doge openai-gpt rembert bart mbart pegasus marian blenderbot "
    "blenderbot-small plbart mvp bigbird_pegasus whisper trocr big_bird git hrm_text dory moshi mllama_text_model"
)
"""Families whose attention or positions are replaced, or which attend more or less often than once in each layer."""


@pytest.mark.few(3)
@pytest.mark.parametrize("name", REPLACED.split())
def test_sequences_side_by_side_get_the_tokens_that_transformers_generates_for_each(
    name: str, tmp_path: pathlib.Path
) -> None:
    with on_one_thread():
        make_model(name, tiny_config(name), tmp_path)
        cache = Cache(tmp_path)
    prompts, outputs = [random_tokens(PROMPT), random_tokens(17, seed=1)], [[], []]  # type: ignore[var-annotated]
    cache.run((1, prompts[1][:9]))
    pieces = {0: prompts[0], 1: prompts[1][9:]}
    for _ in range(OUTPUT):
        for sequence, logits in enumerate(cache.run(*pieces.items())):
            outputs[sequence].append(int(logits[-1].argmax()))
        pieces = {sequence: output[-1:] for sequence, output in enumerate(outputs)}
    assert outputs == [reference_greedy(tmp_path, prompt, OUTPUT) for prompt in prompts]


def test_a_window_that_no_layer_has_is_none(tmp_path: pathlib.Path) -> None:
    """Checkpoints keep a `sliding_window` although all their layers see everything."""
    config = tiny_config("ministral")
    config.layer_types = ["full_attention"] * 4
    make_model("ministral", config, tmp_path)
    prompt = random_tokens(PROMPT)
    assert greedy(tmp_path, prompt) == reference_greedy(tmp_path, prompt, OUTPUT)


@pytest.mark.parametrize("name", ["phimoe", "mellum"])
def test_a_window_is_that_of_the_mask(name: str, tmp_path: pathlib.Path) -> None:
    """Phi-3.5-MoE names its window to the mask only; Mellum has two kinds of layers."""
    with on_one_thread():
        make_model(name, tiny_config(name), tmp_path)
        model = Cache(tmp_path).model
    assert isinstance(model, TransformersModel)
    windows = model.sliding_windows
    assert sorted(windows, key=str) == sorted([WINDOW] * 4 if name == "phimoe" else [WINDOW, None] * 2, key=str)


@pytest.mark.prove
def test_every_length_of_a_configuration_is_shrunk_for_the_probe_or_known_to_be_no_length_of_attention() -> None:
    names = [name for name in MODEL_TYPES if name not in MODELS_WITH_PICTURES and name not in ("gemma4_assistant",)]
    named = {key for name in names for key in tiny_config(name).to_dict() if LENGTH_LIKE.search(str(key))}
    assert named - NO_LENGTHS - set(LENGTHS) == set()
