"""What low-rank adapters add to the weight between latent vectors and heads, which attention absorbs: its keys' part
multiplies queries, and its values' part multiplies results (`latent_attention.py`).

An adapter's part of a head is never multiplied out. A query goes through the second half to ranks, and through the
first one to a latent vector; a result goes the other way. Sums are those of `Kernels.head_products`, so they are exact
where these are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from manta.workers.kernels.adapted_linear import LowRank, LowRankPart
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import Kernels
from manta.workers.models.model_config import LatentShape


class _Half(NamedTuple):
    """An adapter's keys or values."""

    latents: torch.Tensor
    """[rank, head_dim]: the first half, laid out as cached tokens are."""
    heads: torch.Tensor
    """[num_heads, rank, outputs]: the second half of each head."""
    scale: float


class LatentAdapters:
    """The adapters of one layer's weight between latent vectors and heads, by number. `keys` is the keys' part of that
    weight on the device (`LatentAttentionWeights.keys`).
    """

    def __init__(self, shape: LatentShape, keys: torch.Tensor) -> None:
        self._shape = shape
        self._num_heads, plain_dim, self._head_dim = keys.shape
        self._num_keys = self._num_heads * plain_dim
        self._device = keys.device
        self._keys: dict[int, _Half] = {}
        self._values: dict[int, _Half] = {}

    def hold(self, number: int, low_rank: LowRank) -> None:
        """Keeps the values of an adapter."""
        for part in low_rank.parts:
            halves = self._keys if part.first_output < self._num_keys else self._values
            halves[number] = self._half(low_rank.a, part)

    def drop(self, number: int) -> None:
        """Forgets the values of an adapter; harmless if there are none."""
        self._keys.pop(number, None)
        self._values.pop(number, None)

    def _half(self, a: torch.Tensor, part: LowRankPart) -> _Half:
        rank = len(part.b)
        latents = a.new_zeros((rank, self._head_dim))
        own = a[part.first_rank : part.first_rank + rank]
        latent_part(latents, self._shape).copy_(own.unflatten(-1, (2, -1)))
        heads = part.b.unflatten(1, (self._num_heads, -1)).transpose(0, 1).contiguous()
        return _Half(latents.to(self._device), heads.to(self._device), part.scale)

    def add_to_queries(
        self, plain: torch.Tensor, queries: torch.Tensor, step: AttentionMetadata, kernels: Kernels
    ) -> None:
        """Adds to queries of cached tokens [num_tokens, num_heads, head_dim], which are made of unrotated queries
        `plain` [num_tokens, num_heads, plain_dim].
        """
        for rows, half, scale in self._of_step(self._keys, step):
            products = kernels.head_products(plain[rows], half.heads.transpose(1, 2))
            added = kernels.head_products(_one_head(products), half.latents[None])
            _add(queries, rows, added, scale)

    def add_to_values(
        self, attended: torch.Tensor, values: torch.Tensor, step: AttentionMetadata, kernels: Kernels
    ) -> None:
        """Adds to values [num_tokens, num_heads, value_dim], which are made of attended cached tokens
        [num_tokens, num_heads, head_dim].
        """
        for rows, half, scale in self._of_step(self._values, step):
            products = kernels.head_products(_one_head(attended[rows]), half.latents.T[None])
            added = kernels.head_products(products.view(len(rows), self._num_heads, -1), half.heads)
            _add(values, rows, added, scale)

    def _of_step(self, halves: dict[int, _Half], step: AttentionMetadata) -> list[tuple[torch.Tensor, _Half, float]]:
        """Returns the rows of each adapter of a step that is here, int64 [num_rows], its half and the factor on what it
        adds.
        """
        if step.adapters is None or not halves:
            return []
        found = []
        for number, first, count, scale in step.adapters.segments.tolist():
            if (half := halves.get(number)) is not None:
                rows = torch.from_numpy(step.adapters.rows[first : first + count]).long().to(self._device)
                found.append((rows, half, half.scale * scale))
        return found


def latent_part(head: torch.Tensor, shape: LatentShape) -> torch.Tensor:
    """Returns the view [..., 2, kv_rank / 2] of the dimensions of latent vectors in cached tokens [..., head_dim]."""
    return head.unflatten(-1, (2, -1))[..., shape.rope_dim // 2 : shape.cached_dim // 2]


def _one_head(x: torch.Tensor) -> torch.Tensor:
    """Returns [num_tokens, num_heads, n] as [num_tokens * num_heads, 1, n]."""
    return x.reshape(-1, 1, x.shape[-1])


def _add(to: torch.Tensor, rows: torch.Tensor, added: torch.Tensor, scale: float) -> None:
    total = to[rows].float() + added.reshape(len(rows), *to.shape[1:]).float() * scale
    to[rows] = total.to(to.dtype)
