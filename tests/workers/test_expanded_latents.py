"""Long prompts of latent attention: expanded latent vectors give what absorbed weights give, and are used where the
multiplications are fewer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from manta.cluster.llm import LLM, SamplingParams
from manta.workers.decoders import latent_attention
from manta.workers.decoders.expanded_latents import expanded_sequences
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.models.model_config import HeadShape, LatentShape
from tests.checkpoints import reference_greedy
from tests.workers.test_layer_kinds import folder_of

DEEPSEEK = LatentShape(query_rank=1536, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128)
HEADS = HeadShape(16, 1, 576, 192**-0.5, latent_dim=512)
NUM_TOKENS = 6


def step(*lens: tuple[int, int]) -> AttentionMetadata:
    """Sequences of (tokens before the step, tokens in it)."""
    starts, counts = (np.array(each, dtype=np.int64) for each in zip(*lens, strict=True))
    tables = np.zeros((len(lens), int((starts + counts).max()) // 16 + 1), dtype=np.int32)
    return AttentionMetadata.build(QueryTokens(starts, counts, tables, 16))


@pytest.mark.parametrize(
    ("lens", "expected"),
    [
        (((0, 1), (500, 1)), []),
        (((0, 512),), [0]),
        (((0, 31),), []),
        (((700, 1), (0, 512), (4000, 40), (512, 512)), [1, 3]),
        (((8000, 128),), []),
        (((8000, 1024),), [0]),
    ],
)
def test_latent_vectors_are_expanded_for_long_prompts(lens: tuple[tuple[int, int], ...], expected: list[int]) -> None:
    assert expanded_sequences(step(*lens), HEADS, DEEPSEEK) == expected


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}, {"max_num_batched_tokens": 100}], ids=str)
@pytest.mark.parametrize("name", ["deepseek_v3", "mistral4", "minicpm3"])
def test_tokens_are_those_of_absorbed_weights(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside prompts that are short or cached, and sequences that decode; transformers has the last word."""
    folder = folder_of(name, max_position_embeddings=512)
    prompts = [
        [5 + (7 * place + shift) % 300 for place in range(length)] for length, shift in ((150, 0), (9, 1), (90, 3))
    ]
    prompts.append([*prompts[0][:48], *prompts[2]])
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    calls: list[int] = []
    attend = latent_attention.attend_expanded

    def counted(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return attend(*arguments)

    def tokens() -> list[list[int]]:
        limits = {"max_model_len": 512, "kv_cache_bytes": 1 << 22, "dtype": "float32"}
        llm = LLM(str(folder), **{**limits, **options})
        return [
            output.outputs[0].token_ids
            for asked in (prompts[:2], prompts)
            for output in llm.generate(asked, greedy, use_tqdm=False)
        ]

    monkeypatch.setattr(latent_attention, "attend_expanded", counted)
    found = tokens()
    assert calls
    if not options.get("kv_cache_dtype"):
        expected = [reference_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]
        assert found == [*expected[:2], *expected]
    monkeypatch.setattr(latent_attention, "expanded_sequences", lambda *arguments: [])
    assert found == tokens()
