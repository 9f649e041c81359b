"""Paged attention in Triton beside torch's over keys without pages: the part `attention` of `make gpu-check`.

Both read the same keys and values in bfloat16, and their results are compared. torch has no kernel for the shapes of
latent attention, which are compared with its float32 products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu_device import Device, graph_seconds, measure_device
from benchmarks.gpu_rows import Figure, one_line
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.triton.attention import paged_attention
from manta.workers.kernels.triton.attention_tiles import work_shape_of
from manta.workers.kernels.triton.metadata import build_metadata
from manta.workers.models.model_config import HeadShape

PAGE = 16
"""Tokens of a block."""
LEAST_BYTES = 256 << 20
"""Keys and values of a case: several times what the device's cache holds."""
MOST_DIFFERENCE = 0.02
"""Largest relative difference of two results (norm). bfloat16's rounding makes about a fifth of it."""
SHAPES = {
    "llama-3.1-8b": HeadShape(32, 8, 128, 128**-0.5),
    "qwen2.5-0.5b": HeadShape(14, 2, 64, 64**-0.5),
    "deepseek-v3": HeadShape(128, 1, 576, 192**-0.5, latent_dim=512),
    "deepseek-v3, a rank of 8": HeadShape(16, 1, 576, 192**-0.5, latent_dim=512),
}
OF_LATENT = ("decode, 1 row of 8k", "decode, 1 row of 128k", "decode, 64 rows of 1k", "prefill, 4 of 2k")
"""Batches that latent attention is measured on."""
BATCHES = {
    "decode, 1 row of 8k": ([8192], 1),
    "decode, 1 row of 128k": ([131_072], 1),
    "decode, 64 rows of 1k": ([1024] * 64, 1),
    "decode, 256 rows of 256": ([256] * 256, 1),
    "decode, 256 rows of 1k": ([1024] * 256, 1),
    "decode, 31 rows of 1k and one of 100k": ([1024] * 31 + [400 * 256], 1),
    "prefill, 4 of 2k": ([2048] * 4, 2048),
}
"""Keys of each sequence, and how many of them are this step's. torch is measured on sequences of one length only."""


Calls = list[Callable[[], torch.Tensor]]
"""Calls that compute a case, layer by layer."""


class Case:
    """Random queries, keys and values; the pages of every sequence lie anywhere. Of so many layers that the device's
    cache does not hold the keys and values from one round to the next.
    """

    def __init__(self, heads: HeadShape, batch: tuple[list[int], int]) -> None:
        self.heads = heads
        self.contexts, self.query_len = np.array(batch[0]), batch[1]
        self.count = len(self.contexts)
        device, dtype = torch.device("cuda"), torch.bfloat16
        widths = self.contexts // PAGE
        tables = np.zeros((self.count, widths.max()), dtype=np.int32)
        tables[np.arange(widths.max()) < widths[:, None]] = np.random.default_rng(0).permutation(widths.sum())
        self.tables = torch.from_numpy(tables).to(device)
        num_cached = 1 if heads.latent_dim else 2
        layer = (num_cached, int(widths.sum()), PAGE, heads.num_kv_heads, heads.head_dim)
        self.kv_bytes = 2 * math.prod(layer)
        kv = torch.randn(-(-LEAST_BYTES // self.kv_bytes), *layer, device=device, dtype=dtype)
        self.layers = [(each[0], each[-1]) for each in kv]
        num_tokens = self.count * self.query_len
        self.queries = torch.randn(num_tokens, heads.num_heads * heads.head_dim, device=device, dtype=dtype)
        lens = np.full(self.count, self.query_len)
        tokens = QueryTokens(self.contexts - lens, lens, tables, PAGE)
        self.metadata: AttentionMetadata = build_metadata(tokens, device, shape=work_shape_of(heads, dtype, device))

    @property
    def context_len(self) -> int:
        """Keys of every sequence. Raises `ValueError` where they differ."""
        if len(set(self.contexts.tolist())) > 1:
            raise ValueError("it takes sequences of one length only")
        return int(self.contexts[0])

    @property
    def by_sequence(self) -> torch.Tensor:
        """[sequences, tokens, heads, dim]."""
        return self.queries.view(self.count, self.query_len, self.heads.num_heads, self.heads.head_dim)

    def without_pages(self, cache: torch.Tensor) -> torch.Tensor:
        """[sequences, KV heads, keys, dim]."""
        pages = cache[self.tables.long()]
        return pages.view(self.count, self.context_len, self.heads.num_kv_heads, self.heads.head_dim).transpose(1, 2)

    def floor(self, device: Device) -> float:
        """Seconds to read keys and values once and to make their products, whichever takes longer."""
        seen = self.query_len * (2 * self.contexts - self.query_len + 1).sum() / 2
        heads = self.heads
        operations = 2 * seen * heads.num_heads * (heads.head_dim + (heads.latent_dim or heads.head_dim))
        return max(self.kv_bytes / device.bytes_per_second, operations / device.operations_per_second)


def _triton(case: Case) -> Calls:
    return [
        functools.partial(paged_attention, case.queries, *layer, case.metadata, case.heads) for layer in case.layers
    ]


def _torch(case: Case) -> Calls:
    query, is_causal = case.by_sequence.transpose(1, 2), case.query_len > 1

    def attend(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
        return attended.transpose(1, 2)

    return [functools.partial(attend, *map(case.without_pages, layer)) for layer in case.layers]


@torch.inference_mode()
def attention_figures() -> Iterator[Figure]:
    device = measure_device()
    for model, heads in SHAPES.items():
        for batch, sizes in BATCHES.items():
            if heads.latent_dim and batch not in OF_LATENT:
                continue
            case = Case(heads, sizes)
            what = f"{model}: attention, {batch}"
            seconds = graph_seconds(_triton(case))
            share = case.floor(device) / seconds
            yield Figure(f"{what}, Triton", f"{seconds * 1e6:.0f} us, {share:.2f} of the floor")
            if heads.latent_dim:
                yield Figure(f"{what}, its last token by products in float32", _compare_latent(case))
                continue
            yield Figure(f"{what}, torch, keys without pages", _compare(case, seconds))


def _compare_latent(case: Case) -> str:
    """Compares the last query token of the last sequence."""
    heads, cache = case.heads, case.layers[0][0]
    keys = cache[case.tables[-1].long()].flatten(0, 2)[: case.contexts[-1]].float()
    query = case.queries[-1].view(heads.num_heads, heads.head_dim).float()
    expected = (query @ keys.T * heads.scale).softmax(-1) @ keys
    actual = _triton(case)[0]()[-1].view(expected.shape).float()
    is_latent = torch.arange(heads.head_dim) % (heads.head_dim // 2) >= (heads.head_dim - heads.latent_dim) // 2
    difference = (actual - expected)[:, is_latent].norm() / expected[:, is_latent].norm()
    return f"{'' if difference < MOST_DIFFERENCE else 'failed: '}the results differ by {difference:.1%}"


def _compare(case: Case, seconds: float) -> str:
    try:
        calls = _torch(case)
        own, actual = graph_seconds(calls), calls[0]()
    except Exception as error:
        return f"not measured: {one_line(f'{type(error).__name__}: {error}')}"
    expected = _triton(case)[0]().float()
    difference = (actual.reshape(expected.shape).float() - expected).norm() / expected.norm()
    verdict = "" if difference < MOST_DIFFERENCE else f"; failed: the results differ by {difference:.1%}"
    return f"{own * 1e6:.0f} us, {own / seconds:.2f} times Triton's{verdict}"
