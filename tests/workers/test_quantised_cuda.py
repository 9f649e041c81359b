"""Quantised checkpoints on the CUDA platform, which keeps the dense weights: the tokens are transformers'."""

from __future__ import annotations

import pathlib

import pytest

from cluster.llm import SamplingParams
from tests.checkpoints import checkpoint, reference_greedy
from tests.gguf_files import dequantized, write_gguf
from tests.quantised_checkpoints import gptq, gptq_config, of_layers, quantised_pair
from tests.workers.test_cuda_platform import NUM_TOKENS, make_llm

PROMPT = [5, 77, 130, 9]


def made(kind: str, at: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """A model and the checkpoint that it stands for; the GGUF file has a quantised embedding, which is its head too."""
    if kind == "gguf":
        path = write_gguf(checkpoint("qwen2"), at / "model.gguf", lambda name: "Q4_1")
        return path, dequantized(path, checkpoint("qwen2"), at / "dense")
    return quantised_pair(checkpoint("llama"), at, of_layers(gptq(4, True, act_order=3)), gptq_config(4, True, True))


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["gptq", "gguf"])
def test_the_tokens_are_those_of_the_dequantised_weights(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, dense = made(kind, tmp_path)
    llm = make_llm(monkeypatch, str(model), dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == reference_greedy(dense, PROMPT, NUM_TOKENS)
