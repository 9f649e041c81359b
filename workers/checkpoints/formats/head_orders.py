"""The orders in which GGUF files store heads: of rows, of inputs, and of the two in each head's matrix."""

from __future__ import annotations

import torch


def in_head_order(head_order: tuple[int, ...], size: int) -> torch.Tensor:
    """Returns the file's row, or input, for each of `size` ones of the tensor, which are heads: int64 [size]."""
    return torch.arange(size).view(len(head_order), -1)[list(head_order)].flatten()


def rows_of_transposed(stored: torch.Tensor, num_heads: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a weight [out_features, in_features], of which the file has each head's rows as columns."""
    return stored.view(num_heads, shape[1], -1).transpose(1, 2).reshape(shape)


def in_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Returns the rows of heads whose two halves were interleaved, with one half behind the other."""
    heads = torch.arange(rows.shape[0]).view(-1, head_dim // 2, 2)
    return rows[heads.transpose(1, 2).reshape(-1)]
