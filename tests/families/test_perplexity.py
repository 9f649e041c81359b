"""Perplexity of models that were trained here for a minute on the documents: transformers' own, for each kind of mixer.

A trained model keeps long memories in its states, which random weights do not.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from manta.cluster.llm import LLM, SamplingParams
from manta.cluster.text.tokenizer import Tokenizer
from tests.checkpoints import VOCAB_SIZE, make_tokenizer, on_one_thread, set_buffers
from tests.workers.test_layer_kinds import CASES, SIZES

DOCUMENTS = pathlib.Path(__file__).resolve().parents[2] / "docs"
PIECE = 250
"""Tokens of a text whose perplexity is measured."""
NUM_PIECES = 16
NUM_STEPS, BATCH, TRAINED = 150, 8, 96
"""Steps of training, texts of a step, and tokens of a text."""
KINDS = {
    "qwen3_5": "gated delta nets",
    "mamba2": "Mamba 2",
    "jamba": "Mamba 1 with experts",
    "kimi_linear": "Kimi's delta attention and latent attention",
    "minimax": "lightning attention",
    "lfm2": "short convolutions",
    "deepseek_v3": "latent attention",
    "olmo_hybrid": "gated delta nets with negative eigenvalues",
}
"""A case of each kind of mixer."""
MOST_DIFFERENCE = {"float32": 1e-5, "bfloat16": 2e-3}
"""Largest relative difference of the perplexities, by dtype. In bfloat16 both round differently."""
MOST_ROUNDED = {"int8": ("auto", 1e-3), "int4": ("int8", 5e-3)}
"""Largest relative growth of the perplexity over a rounded KV cache, and the dtype of the cache it is compared with."""


def pieces(tokenizer: Tokenizer) -> tuple[torch.Tensor, list[list[int]]]:
    """Tokens to train on, and other texts to measure."""
    text = "\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.md")))
    tokens = tokenizer.encode(text)
    held_out = tokens[-PIECE * NUM_PIECES :]
    return torch.tensor(tokens[: -len(held_out)]), [
        held_out[start : start + PIECE] for start in range(0, len(held_out), PIECE)
    ]


def train(model: Any, tokens: torch.Tensor) -> None:
    """Trains with the loss that transformers computes."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(NUM_STEPS):
        starts = torch.randint(0, len(tokens) - TRAINED, (BATCH,), generator=generator)
        batch = torch.stack([tokens[start : start + TRAINED] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def trained(config: Any, folder: pathlib.Path) -> tuple[Any, list[list[int]]]:
    """Trains a model of transformers and saves it. Returns it and texts that it has not seen."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        set_buffers(model)
    make_tokenizer(folder)
    tokens, texts = pieces(Tokenizer(folder))
    with on_one_thread():
        train(model, tokens)
    model.save_pretrained(folder)
    return model, texts


@torch.inference_mode()
def perplexity_of_transformers(model: Any, texts: list[list[int]]) -> float:
    logits = model(input_ids=torch.tensor(texts), use_cache=False).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(texts)[:, 1:, None])
    return math.exp(-logprobs.mean().item())


def perplexity(llm: LLM, texts: list[list[int]]) -> float:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(texts, params, use_tqdm=False)
    logprobs = [entry.logprob for output in outputs for entry in output.prompt_logprobs or [] if entry is not None]
    assert len(logprobs) == len(texts) * (PIECE - 1)
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.mark.prove
@pytest.mark.parametrize("kind", KINDS)
def test_the_perplexity_is_that_of_transformers(
    kind: str, tmp_path: pathlib.Path, record_property: Callable[[str, object], None]
) -> None:
    case = CASES[kind]
    model, texts = trained(getattr(transformers, case.config)(**SIZES | case.options, dtype="float32"), tmp_path)
    with on_one_thread():
        for dtype, most in MOST_DIFFERENCE.items():
            expected = perplexity_of_transformers(model.to(getattr(torch, dtype)), texts)
            assert expected < VOCAB_SIZE / 10, "it has learnt nothing"
            found = perplexity(LLM(str(tmp_path), dtype=dtype, num_threads=1, max_num_batched_tokens=96), texts)
            record_property(dtype, f"{found:.4f} ({found / expected - 1:+.1e})")
            assert abs(found / expected - 1) <= most, dtype


@pytest.mark.prove
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_rounded_cache_costs_little_perplexity(
    head_dim: int, tmp_path: pathlib.Path, record_property: Callable[[str, object], None]
) -> None:
    """In bfloat16 some forms of the kernels round queries and probabilities too."""
    _, texts = trained(transformers.LlamaConfig(**SIZES, head_dim=head_dim, dtype="float32"), tmp_path)
    for dtype in MOST_DIFFERENCE:
        with on_one_thread():
            found = {
                cached: perplexity(LLM(str(tmp_path), dtype=dtype, num_threads=1, kv_cache_dtype=cached), texts)
                for cached in ("auto", *MOST_ROUNDED)
            }
        for cached, (other, most) in MOST_ROUNDED.items():
            growth = found[cached] / found[other] - 1
            record_property(f"{dtype}, {cached}", f"{found[cached]:.4f} ({growth:+.1e})")
            assert growth <= most, (dtype, cached)
