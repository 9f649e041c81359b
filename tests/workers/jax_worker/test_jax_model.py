"""Every native family on meshes of simulated devices gives the tokens of the CPU platform, greedy and seeded."""

from __future__ import annotations

import tests.workers.jax_worker.devices  # isort: skip  # noqa: F401
import functools
import pathlib
import random
from typing import Any

import numpy as np
import pytest

from manta.cluster.llm import LLM, RequestOutput, SamplingParams
from manta.workers.models.model_config import ModelError
from tests.checkpoints import NATIVE_FAMILIES, VOCAB_SIZE, checkpoint, reference_greedy
from tests.conftest import PROVE

FAMILIES = (*NATIVE_FAMILIES, "seed_oss")
SIZES = (1, 2, 4, 8)
COMBINATIONS = [(family, size) for family in FAMILIES for size in SIZES if PROVE or size == 8 or family == "llama"]
SMALL: dict[str, Any] = {"dtype": "float32", "max_num_sequences": 8, "max_num_batched_tokens": 32}
NUM_TOKENS = 24


def folder_of(family: str) -> pathlib.Path:
    """Eight heads, so that eight devices can divide them; two KV heads, which several devices then share."""
    return checkpoint(family, num_attention_heads=8, num_key_value_heads=2)


def prompts() -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in (3, 21, 40)]


def params() -> list[SamplingParams]:
    common: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    return [
        SamplingParams(temperature=0, **common),
        SamplingParams(seed=4, temperature=0.9, top_p=0.9, top_k=50, **common),
        SamplingParams(seed=5, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={7: 2.0}, n=2, **common),
    ]


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]


@functools.cache
def expected(family: str) -> list[list[list[int]]]:
    """What the CPU platform gives, whose greedy tokens are transformers'."""
    outputs = tokens_of(LLM(str(folder_of(family)), device="cpu", **SMALL).generate(prompts(), params()))
    assert outputs[0][0] == reference_greedy(folder_of(family), prompts()[0], NUM_TOKENS)
    return outputs


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "num_devices"), COMBINATIONS)
def test_tokens_equal_the_cpu_platforms_on_every_mesh(family: str, num_devices: int) -> None:
    llm = LLM(str(folder_of(family)), device="tpu", tensor_parallel_size=num_devices, **SMALL)
    assert llm.engine.executor.model.kernels == f"xla, {num_devices} devices"
    assert tokens_of(llm.generate(prompts(), params())) == expected(family)


def test_devices_hold_shares_of_weights_and_cache() -> None:
    llm = LLM(str(folder_of("llama")), device="tpu", tensor_parallel_size=8, **SMALL)
    worker: Any = llm.engine.executor
    model = worker.worker.runner.model
    layer = model.parameters.layers[0]
    held = layer.mixer.query.weight, layer.mixer.key.weight, layer.mlp.down.weight, model.pages[0]
    for array in held:
        assert {np.prod(shard.data.shape) for shard in array.addressable_shards} == {array.size // 8}
    assert model.parameters.embedding.addressable_shards[0].data.shape[0] == VOCAB_SIZE // 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 16}, "16 ranks cannot split the 8 attention heads"),
        ({"model": "gpt2"}, "device tpu runs no GPT2LMHeadModel; use one of the native families, or device cpu"),
        ({"max_model_len": 10**6}, "max_model_len 1000000 exceeds the 512 positions"),
    ],
)
def test_what_cannot_run_is_refused_in_words(options: dict[str, Any], words: str) -> None:
    family = options.pop("model", None)
    folder = folder_of("llama") if family is None else checkpoint(family)
    with pytest.raises(ModelError, match=words):
        LLM(str(folder), device="tpu", tpu_chips_per_host=32, **{**SMALL, **options})


def test_a_missing_tpu_error_explains_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(
        ModelError, match="JAX finds no TPU here, only cpu; to simulate a mesh on CPUs set JAX_PLATFORMS"
    ):
        LLM(str(folder_of("llama")), device="tpu", **SMALL)


def test_more_devices_than_there_are_name_both_numbers() -> None:
    folder = checkpoint("llama", num_attention_heads=16, num_key_value_heads=2)
    with pytest.raises(ModelError, match="tensor_parallel_size 16 needs as many devices, and JAX finds 8 of cpu"):
        LLM(str(folder), device="tpu", tensor_parallel_size=16, tpu_chips_per_host=16, **SMALL)
