"""Paged attention in Triton beside what libraries have: the part `attention` of `make gpu-check`.

All read the same keys and values in bfloat16, and their results are compared. flash-attn and flashinfer are measured if
they are installed; else the row says why not. torch's own attention, over keys without pages, is there always.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu_device import Device, graph_seconds, measure_device
from benchmarks.gpu_rows import Figure, one_line
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.triton.attention import paged_attention
from manta.workers.kernels.triton.metadata import build_metadata
from manta.workers.kernels.triton.work import WorkShape
from manta.workers.models.model_config import HeadShape

PAGE, LARGE_PAGE = 16, 256
"""Tokens of Manta's blocks, and of flash-attn's, which are so many of these in a row."""
LEAST_BYTES = 256 << 20
"""Keys and values of a case: several times what the device's cache holds."""
MOST_DIFFERENCE = 0.02
"""Largest relative difference of two results (norm). bfloat16's rounding makes about a fifth of it."""
WORKSPACE_BYTES = 128 << 20
"""Bytes of workspace that flashinfer needs."""
SHAPES = {"llama-3.1-8b": (32, 8, 128), "qwen2.5-0.5b": (14, 2, 64)}
"""Heads, KV heads and head size."""
BATCHES = {
    "decode, 1 row of 8k": ([8192], 1),
    "decode, 1 row of 128k": ([131_072], 1),
    "decode, 64 rows of 1k": ([1024] * 64, 1),
    "decode, 256 rows of 256": ([256] * 256, 1),
    "decode, 256 rows of 1k": ([1024] * 256, 1),
    "decode, 31 rows of 1k and one of 100k": ([1024] * 31 + [400 * 256], 1),
    "prefill, 4 of 2k": ([2048] * 4, 2048),
}
"""Keys of each sequence, and how many of them are this step's. Peers that want all alike are not measured on others."""


Calls = list[Callable[[], torch.Tensor]]
"""Calls that compute a case, layer by layer."""


class Case:
    """Random queries, keys and values; the pages of every sequence lie anywhere. Of so many layers that the device's
    cache does not hold the keys and values from one round to the next.
    """

    def __init__(self, shape: tuple[int, int, int], batch: tuple[list[int], int]) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = shape
        self.contexts, self.query_len = np.array(batch[0]), batch[1]
        self.count = len(self.contexts)
        device = torch.device("cuda")
        widths = self.contexts // LARGE_PAGE
        large = np.zeros((self.count, widths.max()), dtype=np.int64)
        large[np.arange(widths.max()) < widths[:, None]] = np.random.default_rng(0).permutation(widths.sum())
        small = (large[:, :, None] * (LARGE_PAGE // PAGE) + np.arange(LARGE_PAGE // PAGE)).reshape(self.count, -1)
        self.large_tables = torch.from_numpy(large.astype(np.int32)).to(device)
        self.tables = torch.from_numpy(small.astype(np.int32)).to(device)
        self.num_pages = widths * (LARGE_PAGE // PAGE)
        self.kv_bytes = 4 * int(self.contexts.sum()) * self.num_kv_heads * self.head_dim
        layer = (2, int(self.num_pages.sum()), PAGE, self.num_kv_heads, self.head_dim)
        kv = torch.randn(-(-LEAST_BYTES // self.kv_bytes), *layer, device=device, dtype=torch.bfloat16)
        self.layers = [(each[0], each[1]) for each in kv]
        num_tokens = self.count * self.query_len
        self.queries = torch.randn(num_tokens, self.num_heads * self.head_dim, device=device, dtype=torch.bfloat16)
        lens = np.full(self.count, self.query_len)
        tokens = QueryTokens(self.contexts - lens, lens, small.astype(np.int32), PAGE)
        work = WorkShape.of(self.num_heads, self.num_kv_heads, device)
        self.metadata: AttentionMetadata = build_metadata(tokens, device, shape=work)

    @property
    def context_len(self) -> int:
        """Keys of every sequence. Raises `ValueError` where they differ."""
        if len(set(self.contexts.tolist())) > 1:
            raise ValueError("it takes sequences of one length only")
        return int(self.contexts[0])

    @property
    def by_head(self) -> torch.Tensor:
        """The queries, [tokens, heads, dim]."""
        return self.queries.view(-1, self.num_heads, self.head_dim)

    @property
    def by_sequence(self) -> torch.Tensor:
        """[sequences, tokens, heads, dim]."""
        return self.queries.view(self.count, self.query_len, self.num_heads, self.head_dim)

    def without_pages(self, cache: torch.Tensor) -> torch.Tensor:
        """[sequences, KV heads, keys, dim]."""
        pages = cache[self.tables.long()]
        return pages.view(self.count, self.context_len, self.num_kv_heads, self.head_dim).transpose(1, 2)

    def floor(self, device: Device) -> float:
        """Seconds to read keys and values once, or of a prefill to make its products."""
        if self.query_len == 1:
            return self.kv_bytes / device.bytes_per_second
        seen = self.query_len * (2 * self.context_len - self.query_len + 1) / 2
        return 4 * self.count * seen * self.num_heads * self.head_dim / device.operations_per_second


def _triton(case: Case) -> Calls:
    heads = HeadShape(case.num_heads, case.num_kv_heads, case.head_dim, case.head_dim**-0.5)
    return [functools.partial(paged_attention, case.queries, *layer, case.metadata, heads) for layer in case.layers]


def _torch(case: Case) -> Calls:
    query, is_causal = case.by_sequence.transpose(1, 2), case.query_len > 1

    def attend(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
        return attended.transpose(1, 2)

    return [functools.partial(attend, *map(case.without_pages, layer)) for layer in case.layers]


def _flash_attn(case: Case) -> Calls:
    import flash_attn

    shape = (-1, LARGE_PAGE, case.num_kv_heads, case.head_dim)
    lens = torch.from_numpy(case.contexts.astype(np.int32)).cuda()
    fixed = {"cache_seqlens": lens, "block_table": case.large_tables, "causal": True}
    attend = flash_attn.flash_attn_with_kvcache
    return [functools.partial(attend, case.by_sequence, k.view(shape), v.view(shape), **fixed) for k, v in case.layers]


def _flashinfer(case: Case) -> Calls:
    import flashinfer

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    page_start = torch.zeros(case.count + 1, dtype=torch.int32, device="cuda")
    page_start[1:] = torch.from_numpy(np.cumsum(case.num_pages)).cuda()
    last_page = torch.full((case.count,), PAGE, dtype=torch.int32, device="cuda")
    is_page = torch.arange(case.tables.shape[1]) < torch.from_numpy(case.num_pages)[:, None]
    paged = (page_start, case.tables[is_page.cuda()], last_page)
    shape = (case.num_heads, case.num_kv_heads, case.head_dim, PAGE)
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    if case.query_len == 1:  # without tensor cores it takes few sizes of groups
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*paged, *shape, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        query_start = torch.arange(case.count + 1, dtype=torch.int32, device="cuda") * case.query_len
        wrapper.plan(query_start, *paged, *shape, causal=True, **dtypes)
    return [functools.partial(wrapper.run, case.by_head, layer) for layer in case.layers]


PEERS: dict[str, Callable[[Case], Calls]] = {
    "torch, keys without pages": _torch,
    "flash-attn": _flash_attn,
    "flashinfer": _flashinfer,
}


@torch.inference_mode()
def attention_figures() -> Iterator[Figure]:
    device = measure_device()
    for model, shape in SHAPES.items():
        for batch, sizes in BATCHES.items():
            case = Case(shape, sizes)
            what = f"{model}: attention, {batch}"
            seconds = graph_seconds(_triton(case))
            share = case.floor(device) / seconds
            yield Figure(f"{what}, Triton", f"{seconds * 1e6:.0f} us, {share:.2f} of the floor")
            for name, prepare in PEERS.items():
                yield Figure(f"{what}, {name}", _compare(prepare, case, seconds))


def _compare(prepare: Callable[[Case], Calls], case: Case, seconds: float) -> str:
    try:
        calls = prepare(case)
        own, actual = graph_seconds(calls), calls[0]()
    except Exception as error:
        return f"not measured: {one_line(f'{type(error).__name__}: {error}')}"
    expected = _triton(case)[0]().float()
    difference = (actual.reshape(expected.shape).float() - expected).norm() / expected.norm()
    verdict = "" if difference < MOST_DIFFERENCE else f"; failed: the results differ by {difference:.1%}"
    return f"{own * 1e6:.0f} us, {own / seconds:.2f} times Triton's{verdict}"
