"""Families whose attention is code of their own in transformers, not its attention interface: Falcon, Bloom, MPT,
GPT-Neo and XGLM.

For each stands here what its attention does before and after the attending itself, which `TransformersModel` does over
the paged cache. The rest of such a model stays transformers' own. Its configuration is judged in
`workers/checkpoints/transformers_support.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import transformers
from torch import nn
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.mpt import modeling_mpt
from transformers.models.xglm import modeling_xglm

_MASK_NAME = "manta_paged_without_mask"
Attended = tuple[torch.Tensor, None]


class Attend(Protocol):
    """One layer's attention over the paged cache."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Returns [1, num_tokens, num_heads, head_dim] of query [1, num_heads, num_tokens, head_dim], and of keys and
        values that have `num_kv_heads` heads.
        """
        ...


def replace_attention(model: Any, attend: Attend) -> None:
    """Makes every attention module of `model` attend by `attend`, and the model prepare no mask."""
    # Some of these models compute with their mask, so this one is empty and not None.
    transformers.AttentionMaskInterface.register(_MASK_NAME, lambda *_, **__: torch.empty(0))
    model.config._attn_implementation = _MASK_NAME
    for module in model.modules():
        forward = FORWARDS.get(type(module))
        if forward is not None:
            module.forward = _bound(forward, module, attend)
        if isinstance(module, modeling_gpt_neo.GPTNeoSelfAttention):
            del module.bias  # its mask of all positions, which nothing reads any more


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes what `nn.Linear` does."""
    return type(module) in (nn.Linear, modeling_falcon.FalconLinear)


def alibi_bias(model: Any, num_positions: int) -> torch.Tensor:
    """Returns what a model with ALiBi (Press et al., 2022) adds to a scaled product of a query and the key at each
    position: float32 [num_heads, num_positions], each head's slope times the position. That differs from the paper's
    slope times the distance by the same amount for all keys of a query, so the probabilities are the same.
    """
    config = model.config
    num_heads = config.num_attention_heads
    mask = torch.ones((1, num_positions), dtype=torch.int64)
    if config.model_type == "bloom":
        return modeling_bloom.build_alibi_tensor(mask, num_heads, torch.float32).view(num_heads, num_positions)
    if config.model_type == "falcon":  # rounds to bfloat16, and scales the bias as it does the products
        bias = modeling_falcon.build_alibi_tensor(mask, num_heads, torch.float32).view(num_heads, num_positions)
        return bias * config.head_dim**-0.5
    slopes = -modeling_mpt.build_mpt_alibi_tensor(num_heads, 2)[:, 0, :1]
    return slopes * torch.arange(num_positions)


def _bound(forward: Callable[..., Attended], module: nn.Module, attend: Attend) -> Callable[..., Attended]:
    def run(*arguments: Any, **named: Any) -> Attended:
        return forward(module, attend, *arguments, **named)

    return run


def _falcon(module: Any, attend: Attend, hidden: torch.Tensor, *, position_embeddings: Any, **_: Any) -> Attended:
    """The keys of a group of queries stay one head; transformers repeats them."""
    num_kv_heads = module.num_kv_heads
    by_group = module.query_key_value(hidden).unflatten(-1, (num_kv_heads, -1, module.head_dim))
    query, key, value = by_group.split((module.num_heads // num_kv_heads, 1, 1), dim=3)
    query, key, value = (each.flatten(2, 3).transpose(1, 2) for each in (query, key, value))
    if not module.config.alibi:
        query, key = modeling_falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
    attended = attend(module.layer_idx, query, key, value, module.inv_norm_factor, None)
    return module.dense(attended.flatten(2)), None


def _bloom(module: Any, attend: Attend, hidden: torch.Tensor, residual: torch.Tensor, **_: Any) -> Attended:
    query, key, value = module._reshape(module.query_key_value(hidden))
    attended = attend(module.layer_idx, query, key, value, module.inv_norm_factor, None)
    return module.dense(attended.flatten(2)) + residual, None


def _mpt(module: Any, attend: Attend, hidden: torch.Tensor, **_: Any) -> Attended:
    mixed = module.Wqkv(hidden)
    if module.clip_qkv:
        mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = mixed.unflatten(-1, (3, module.n_heads, module.head_dim)).permute(2, 0, 3, 1, 4)
    attended = attend(module.layer_idx, query, key, value, module.softmax_scale, None)
    return module.out_proj(attended.flatten(2)), None


def _gpt_neo(module: Any, attend: Attend, hidden: torch.Tensor, **_: Any) -> Attended:
    """GPT-Neo does not scale products, and a token of a local layer sees the last `window_size` positions."""
    window = module.config.window_size if module.attention_type == "local" else None
    projected = (module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden))
    query, key, value = (_by_head(each, module) for each in projected)
    attended = attend(module.layer_id, query, key, value, 1.0, window)
    return module.out_proj(attended.flatten(2)), None


def _xglm(module: Any, attend: Attend, hidden: torch.Tensor, **_: Any) -> Attended:
    projected = (module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden))
    query, key, value = (_by_head(each, module) for each in projected)
    attended = attend(module.layer_idx, query, key, value, module.scaling, None)
    return module.out_proj(attended.flatten(2)), None


def _by_head(projected: torch.Tensor, module: Any) -> torch.Tensor:
    return projected.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)


FORWARDS: dict[type[nn.Module], Callable[..., Attended]] = {
    modeling_falcon.FalconAttention: _falcon,
    modeling_bloom.BloomAttention: _bloom,
    modeling_mpt.MptAttention: _mpt,
    modeling_gpt_neo.GPTNeoSelfAttention: _gpt_neo,
    modeling_xglm.XGLMAttention: _xglm,
}
"""Functions that replace the `forward` of each class of attention modules."""
