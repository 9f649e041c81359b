"""Each decoder of the installed transformers is served with transformers' tokens, or refused by a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from manta.workers.models.wrappers import WRAPPERS
from tests.families.children import Child
from tests.families.judge import judge
from tests.families.tiny import MODEL_TYPES, MODELS_WITH_PICTURES, architecture_of

REFUSED_NAMES = (
    # Encoders and decoders.
    "musicgen musicgen_melody "
    # Attention that is not causal, or not over all keys: to later tokens, by hashes, by several streams.
    "cpmant prophetnet reformer xlnet "
    # The drafter of another model.
    "gemma4_unified_assistant "
    # A model of bytes in patches.
    "blt "
    # A classifier, which transformers also calls Gemma 3.
    "shieldgemma2 "
)
"""Model types that are refused before weights are read."""
LEFT_OUT = ("dots3_note", "fast_vlm", "gemma3n", "gemma4_assistant", "perception_lm")
"""Model types of which no tiny model is made: the text of one is tried by itself, one is a drafter, and three need the
package timm.
"""
THROUGH_TRANSFORMERS = (
    "aria blip-2 chameleon cohere_compass cosmos3_omni ernie4_5_vl_moe exaone4_5 hunyuan_vl hyperclovax_vision_v2 "
    "instructblip instructblipvideo kosmos-2.5 minimax_m3_vl muse_glimmer paddleocr_vl step3p7"
)
"""Model types with pictures whose text decoder has no native form and is served."""
SERVED = (*WRAPPERS, "Mistral4ForCausalLM", *map(architecture_of, THROUGH_TRANSFORMERS.split()))
"""Architectures in transformers' table of models with pictures whose text is served."""
CHEAP = (
    "gpt2",
    "doge",
    "bart",
    "hrm_text",
    "olmo_hybrid",
    "minimax",
    "exaone4_5",
    "musicgen",
    "shieldgemma2",
    "xlnet",
)
"""Model types of every run: through transformers, with replaced attention, positions or number of attentions, natively,
with pictures, and three ways to be refused.
"""


def expected(model_type: str) -> set[str]:
    """The results that are right for a model type."""
    if model_type in LEFT_OUT:
        return {"left out"}
    has_pictures_alone = model_type in MODELS_WITH_PICTURES and architecture_of(model_type) not in SERVED
    if model_type in REFUSED_NAMES.split() or has_pictures_alone:
        return {"refused", "left out"} if has_pictures_alone else {"refused"}
    return {"native", "through transformers"}


@pytest.mark.few(3)
@pytest.mark.parametrize("model_type", CHEAP)
def test_a_decoder_is_served_with_the_tokens_of_transformers_or_refused(model_type: str) -> None:
    if model_type not in MODEL_TYPES:
        pytest.skip("this transformers has no such model")
    verdict = judge(model_type)
    assert verdict.result in expected(model_type), verdict.reason


@pytest.fixture(scope="module")
def child() -> Iterator[list[Child]]:
    children = [Child()]
    yield children
    children[-1].close()


@pytest.mark.prove
@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name not in CHEAP])
def test_every_decoder_is_served_with_the_tokens_of_transformers_or_refused(
    model_type: str, child: list[Child], record_property: Callable[[str, object], None]
) -> None:
    verdict = child[-1].judge(model_type)
    if verdict is None:
        child.append(Child())
        pytest.fail(f"{architecture_of(model_type)} killed its process, or took too long")
    record_property("result", verdict.result)
    assert verdict.result in expected(model_type), verdict.reason
