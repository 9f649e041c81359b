"""Finds the sliding window of each layer of a transformers model, and shrinks windows for a probe.

transformers applies a window in the mask that it hands to a layer. Some models name the window to the attention
function too, and some do not. So the mask decides. It is read here as the function of positions that it is, at any
length, and no mask is made. `TransformersModel` calls it while it loads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from manta.workers.models.model_config import ModelError

SHRUNK = 4
"""Positions of every window, chunk and block while a model is probed. Products of two of them, such as blocks of
positions, are still shorter than a probe.
"""
LENGTHS = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "attention_chunk_size",
    "keep_window_size",
    "local_attention_window_len",
    "index_block_size",
    "index_topk",
    "index_topk_blocks",
    "index_local_blocks",
    "floor_scale",
    "log_scaling_n_floor",
    "max_seq_len_cached",
    "original_max_seq_len",
    "original_max_position_embeddings",
)
"""Names under which configurations and modules of transformers keep a length at which attention or positions change.
Attributes of these names are shrunk for the probe.
"""
_OBSERVED = "manta_observed"
Windows = list[int | None]
"""The windows of a token's attentions, in the order in which the model computes them, in positions, the token's own
included; None for all positions.
"""


def observe_windows(model: Any, num_positions: int) -> Windows:
    """Returns the windows up to contexts of `num_positions`. Computes a few tokens with the attention left out, and
    leaves that attention set.

    Raises `ModelError` if a token sees anything else than the last positions.
    """
    windows: Windows = []
    refusals: list[ModelError] = []

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        if attention_mask is None and not getattr(module, "is_causal", True):
            raise ModelError(f"{type(module).__name__} attends otherwise than causally")
        window = sliding_window if attention_mask is None else _window_of(attention_mask, module)
        if window is not None and window < 0:
            raise refusals[-window - 1]
        windows.append(window)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None

    def describe(*_: Any, mask_function: Callable[..., torch.Tensor], **named: Any) -> torch.Tensor:
        try:
            return torch.full((1, 1, 1, 1), _read_window(mask_function, num_positions) or 0)
        except ModelError as error:  # no matter if no layer reads this mask, as that of an encoder that is not there
            refusals.append(error)
            return torch.full((1, 1, 1, 1), -len(refusals))

    transformers.AttentionInterface.register(_OBSERVED, attend)
    transformers.AttentionMaskInterface.register(_OBSERVED, describe)
    model.set_attn_implementation(_OBSERVED)
    device = next(model.parameters()).device
    model(input_ids=torch.tensor([[1, 2, 3]], device=device), use_cache=False)
    return windows


def check_cache(config: Any, windows: Windows, num_positions: int) -> None:
    """Raises `ModelError` if transformers' own cache keeps fewer positions of a layer than its mask shows, because its
    answers then depend on the cache. A model whose layers attend less or more often than once is not checked.
    """
    layers: list[Any] = transformers.DynamicCache(config=config).layers
    if len(layers) != len(windows):
        return
    for layer, (cached, window) in enumerate(zip(layers, windows, strict=True)):
        kept = cached.sliding_window if cached.is_sliding else num_positions
        seen = window or num_positions
        if min(kept, num_positions) < seen:
            raise ModelError(
                f"transformers keeps {kept} positions of layer {layer} in its cache, and the layer's mask shows "
                f"{'all' if seen == num_positions else seen}"
            )


@contextlib.contextmanager
def shrunk_lengths(model: Any) -> Iterator[None]:
    """Shrinks every length of `LENGTHS` in a model's configuration and modules to `SHRUNK` positions, while it is
    open.
    """
    modules = list(model.modules())
    configs = {id(each): each for each in (getattr(module, "config", None) for module in modules) if each is not None}
    ropes = [getattr(each, "rope_parameters", None) or {} for each in configs.values()]
    by_layer = [value for rope in ropes for value in rope.values() if isinstance(value, dict)]
    holders: list[Any] = [*map(vars, configs.values()), *ropes, *by_layer, *map(vars, modules)]
    kept = [(holder, {name: holder[name] for name in LENGTHS if _is_longer(holder.get(name))}) for holder in holders]
    for holder, values in kept:
        holder.update(dict.fromkeys(values, SHRUNK))
    try:
        yield
    finally:
        for holder, values in kept:
            holder.update(values)


def _is_longer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > SHRUNK


def _window_of(mask: torch.Tensor, module: Any) -> int | None:
    """Returns what `describe` wrote in place of a mask: its window, or the negative number of a refusal."""
    if mask.shape != (1, 1, 1, 1) or mask.dtype != torch.int64:
        raise ModelError(f"{type(module).__name__} is not supported: it makes attention masks of its own")
    return int(mask) or None


def _read_window(mask_function: Callable[..., torch.Tensor], num_positions: int) -> int | None:
    """Returns the window of a mask by what its function says of single queries and all keys before them."""
    keys, zero = torch.arange(num_positions), torch.tensor(0)

    def seen(query: int) -> torch.Tensor:
        return mask_function(zero, zero, torch.tensor(query), keys).expand(num_positions)

    window = int(seen(num_positions - 1).sum())
    queries = {0, 1, window - 1, window, window + 1, 2 * window - 1, 2 * window, num_positions // 2, num_positions - 2}
    for query in sorted(each for each in queries if 0 <= each < num_positions):
        if not torch.equal(seen(query), (keys <= query) & (keys > query - window)):
            raise ModelError(
                f"its mask shows the token at position {query} other positions than the last {window}, and only causal "
                "attention with sliding windows is implemented"
            )
    return None if window == num_positions else window
