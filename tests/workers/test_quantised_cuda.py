"""Quantised weights on the CUDA platform: the tokens are those of the CPU, and dense weights give transformers'."""

from __future__ import annotations

import pathlib

import pytest

from manta.cluster.llm import LLM, SamplingParams
from tests.checkpoints import checkpoint, reference_greedy
from tests.gguf_files import dequantized, write_gguf
from tests.quantised_checkpoints import gptq, gptq_config, of_layers, quantised_pair
from tests.workers.test_cuda_platform import NUM_TOKENS, make_llm

PROMPT = [5, 77, 130, 9]


def greedy(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def made(kind: str, at: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """A model and the checkpoint that it stands for; the GGUF file has a quantised embedding, which is its head too."""
    if kind == "gguf":
        path = write_gguf(checkpoint("qwen2"), at / "model.gguf", lambda name: "Q4_1")
        return path, dequantized(path, checkpoint("qwen2"), at / "dense")
    return quantised_pair(checkpoint("llama"), at, of_layers(gptq(4, True, act_order=3)), gptq_config(4, True, True))


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["gptq", "gguf"])
def test_integers_and_dense_weights_give_reference_tokens(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, dense = made(kind, tmp_path)
    on_cpu = greedy(LLM(str(model), dtype="float32", kv_cache_bytes=1 << 20))
    assert greedy(make_llm(monkeypatch, str(model), dtype="float32")) == on_cpu
    llm = make_llm(monkeypatch, str(model), dtype="float32", weights="dense")
    assert greedy(llm) == reference_greedy(dense, PROMPT, NUM_TOKENS)


@pytest.mark.prove
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_rounded_at_load_give_the_cpus_tokens(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is tied to the embedding and rounded all the same."""
    model = str(checkpoint("qwen2", tie_word_embeddings=True))
    on_cpu = greedy(LLM(model, dtype="float32", kv_cache_bytes=1 << 20, weights=weights))
    assert greedy(make_llm(monkeypatch, model, dtype="float32", weights=weights)) == on_cpu
