"""Attention over texts that lie end to end in one row, so that nothing is padded. Each text sees only itself.

transformers' models call it as one of their attention functions. `pooling_model.py` says which texts lie in the row,
and checks at load that a model computes the same with it as with its own attention.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from torch.nn import functional

NAME = "manta_packed"
"""Name of the function among transformers' attention functions."""
_REFUSED = ("softcap", "s_aux", "position_bias")
"""Arguments of attentions that are more than a softmax over products."""


class CannotPack(Exception):
    """A model's attention does something that this function does not compute."""


class _Texts(threading.local):
    ends: Sequence[int] = ()
    """Ends of the texts in the row."""


_texts = _Texts()


def register() -> None:
    """Makes the function known to transformers."""
    transformers.AttentionInterface.register(NAME, _attend)


@contextlib.contextmanager
def packed(ends: Sequence[int]) -> Iterator[None]:
    """Has attention in this thread take the row as texts with these ends. May be nested: a step that is interrupted
    goes on with its own texts.
    """
    outer, _texts.ends = _texts.ends, ends
    try:
        yield
    finally:
        _texts.ends = outer


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Returns [1, num_tokens, num_heads, head_dim] of query, key and value [1, num_heads, num_tokens, head_dim]."""
    if attention_mask is not None or any(arguments.get(name) is not None for name in _REFUSED):
        raise CannotPack(type(module).__name__)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    grouped = key.shape[1] != query.shape[1]
    outputs, start = [], 0
    for end in _texts.ends:
        own = slice(start, end)
        mask = _window_mask(end - start, sliding_window, causal, query.device)
        outputs.append(
            functional.scaled_dot_product_attention(
                query[:, :, own],
                key[:, :, own],
                value[:, :, own],
                attn_mask=mask,
                is_causal=causal and mask is None,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
        start = end
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _window_mask(num_tokens: int, window: int | None, causal: bool, device: torch.device) -> torch.Tensor | None:
    """Returns which tokens see which in a text that is longer than a window: those less than `window` positions away,
    if `causal` only before them. None if all see what they would without a window.
    """
    if window is None or num_tokens <= window:
        return None
    position = torch.arange(num_tokens, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window) if causal else distance.abs() < window
