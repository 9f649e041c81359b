"""ALiBi (Press et al., 2022) for attention kernels that know nothing of it: the bias of a key is part of the key.

A head's bias depends on the key's position alone, up to what all keys of a query have in common. So each key gets
further columns that hold its bias. Each query has the same constant in these columns, and each value zeros. A product
of query and key is then the old one plus the bias. The cache grows by those columns, and shared prefixes, windows and
every kernel work as they are.
"""

from __future__ import annotations

import torch

from manta.workers.checkpoints.transformers_support import ALIBI_COLUMNS

_QUERY_COLUMN = 256.0
"""The constant in the queries' further columns: a power of two, so that it rounds nothing. The keys' columns hold that
much less, or the largest would exceed float16.
"""


class Alibi:
    """The bias of every head at every position, and queries, keys and values of one model that are widened by it."""

    def __init__(self, bias: torch.Tensor, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """`bias` is float32 [num_heads, num_positions]: what is added to scaled products with the key there. `width` is
        that of the widened heads, in `dtype`.
        """
        self._bias = (bias.t() / _QUERY_COLUMN).to(device)
        self._width = width
        self._dtype = dtype

    def widen(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns [1, num_heads, num_tokens, width] of each. `positions` is int64 [num_tokens], and `scale` the factor
        on the products of the attention to come.
        """
        further = self._width - query.shape[-1]
        query_columns = query.new_zeros((*query.shape[:-1], further))
        query_columns[..., :ALIBI_COLUMNS] = _QUERY_COLUMN
        key_columns = key.new_zeros((*key.shape[:-1], further))
        key_columns[0, :, :, :ALIBI_COLUMNS] = _parts(self._bias[positions] / scale).transpose(0, 1).to(self._dtype)
        return (
            torch.cat((query, query_columns), dim=-1),
            torch.cat((key, key_columns), dim=-1),
            torch.cat((value, torch.zeros_like(key_columns)), dim=-1),
        )


def _parts(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of bfloat16's precision in a further dimension of `ALIBI_COLUMNS` whose sum is each float32 number."""
    parts = []
    for _ in range(ALIBI_COLUMNS):
        part = numbers.bfloat16().float()
        parts.append(part)
        numbers = numbers - part
    return torch.stack(parts, dim=-1)
