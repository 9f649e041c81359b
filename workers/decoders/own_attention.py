"""Families whose attention is code of their own in transformers, not its attention interface: from the first GPT and
the descendants of BERT to Falcon and Doge.

For each stands here what its attention does before and after the attending itself, which `TransformersModel` does over
the paged cache. The rest of such a model stays transformers' own. Its configuration is judged in
`workers/checkpoints/transformers_support.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

_MASK_NAME = "manta_paged_without_mask"
Attended = Sequence[torch.Tensor | None]
"""What an attention module returns: its result first, then what its layer takes besides, such as None for weights."""


class Attend(Protocol):
    """A token's next attention over the paged cache. Called in the same order for all tokens."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None = None,
        sliding_window: int | None = None,
        *,
        key_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns [1, num_tokens, num_heads, head_dim] of query [1, num_heads, num_tokens, head_dim], and of keys and
        values that have `num_kv_heads` heads. `scale` is `head_dim ** -0.5` if it is None. `key_bias`, float32
        [num_kv_heads, num_tokens], is added to scaled products with the keys.
        """
        ...


def replace_attention(model: Any, attend: Attend) -> None:
    """Makes every attention module of `model` attend by `attend`, and the model prepare no mask."""
    # Some of these models compute with their mask, so this one is empty and not None.
    transformers.AttentionMaskInterface.register(_MASK_NAME, lambda *_, **__: torch.empty(0))
    model.config._attn_implementation = _MASK_NAME
    own = OWN[model.config.model_type]
    for module in model.modules():
        if type(module).__name__ == own.class_name:
            module.forward = _bound(own.forward, module, attend)
            if "bias" in dict(module.named_buffers(recurse=False)):
                del module.bias  # a mask of all positions, which nothing reads any more
    if model.config.model_type == "xlm":
        model.base_model.causal = False  # its own mask, of all pairs of tokens, which nothing reads any more
    if model.config.model_type == "git":
        del model.base_model.image_encoder, model.base_model.visual_projection


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


def _falcon(
    module: Any, attend: Attend, hidden_states: torch.Tensor, *, position_embeddings: Any, **_: Any
) -> Attended:
    """The keys of a group of queries stay one head; transformers repeats them."""
    num_kv_heads = module.num_kv_heads
    by_group = module.query_key_value(hidden_states).unflatten(-1, (num_kv_heads, -1, module.head_dim))
    query, key, value = by_group.split((module.num_heads // num_kv_heads, 1, 1), dim=3)
    query, key, value = (each.flatten(2, 3).transpose(1, 2) for each in (query, key, value))
    if not module.config.alibi:
        query, key = modeling_falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
    return module.dense(attend(query, key, value, module.inv_norm_factor).flatten(2)), None


def _bloom(module: Any, attend: Attend, hidden_states: torch.Tensor, residual: torch.Tensor, **_: Any) -> Attended:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    return module.dense(attend(query, key, value, module.inv_norm_factor).flatten(2)) + residual, None


def _mpt(module: Any, attend: Attend, hidden_states: torch.Tensor, **_: Any) -> Attended:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = mixed.unflatten(-1, (3, module.n_heads, module.head_dim)).permute(2, 0, 3, 1, 4)
    return module.out_proj(attend(query, key, value, module.softmax_scale).flatten(2)), None


def _gpt_neo(module: Any, attend: Attend, hidden_states: torch.Tensor, **_: Any) -> Attended:
    """GPT-Neo does not scale products, and a token of a local layer sees the last `window_size` positions."""
    window = module.config.window_size if module.attention_type == "local" else None
    linears = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = _heads(linears, hidden_states, module.head_dim)
    return module.out_proj(attend(query, key, value, 1.0, window).flatten(2)), None


def _bart(module: Any, attend: Attend, hidden_states: torch.Tensor, **_: Any) -> Attended:
    linears = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = _heads(linears, hidden_states, module.head_dim)
    return module.out_proj(attend(query, key, value, module.scaling).flatten(2)), None


def _bert(module: Any, attend: Attend, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Attended:
    linears = (module.query, module.key, module.value)
    query, key, value = _heads(linears, hidden_states, module.attention_head_size)
    return attend(query, key, value).flatten(2), None


def _roformer(
    module: Any, attend: Attend, hidden_states: torch.Tensor, *_: Any, sinusoidal_pos: torch.Tensor, **__: Any
) -> Attended:
    """RoFormer (Su et al., 2021) rotates values too if it is told so."""
    linears = (module.query, module.key, module.value)
    *rotating, value = _heads(linears, hidden_states, module.attention_head_size)
    if module.rotary_value:
        rotating.append(value)
    query, key, *rotated = module.apply_rotary_position_embeddings(sinusoidal_pos, *rotating)
    return attend(query, key, *(rotated or [value])).flatten(2), None


def _gpt_neox_japanese(
    module: Any, attend: Attend, hidden_states: torch.Tensor, *, position_embeddings: Any, **_: Any
) -> Attended:
    """The first `rotary_ndims` dimensions of a head rotate. The last layer adds a bias."""
    mixed = module.query_key_value(hidden_states).unflatten(-1, (module.num_attention_heads, 3, module.head_size))
    query, key, value = mixed.permute(3, 0, 2, 1, 4)
    num_rotating = module.rotary_ndims
    rotating = (each[..., :num_rotating] for each in (query, key))
    rotated = _functions(module).apply_rotary_pos_emb(*rotating, *position_embeddings)
    query, key = (
        torch.cat((first, each[..., num_rotating:]), dim=-1) for first, each in zip(rotated, (query, key), strict=True)
    )
    return module.dense(attend(query, key, value).flatten(2)), None, module.dense_bias


def _openai_gpt(module: Any, attend: Attend, x: torch.Tensor, **_: Any) -> Attended:
    query, key, value = module.c_attn(x).unflatten(-1, (3, module.n_head, -1)).permute(2, 0, 3, 1, 4)
    return [module.c_proj(attend(query, key, value, None if module.scale else 1.0).flatten(2))]


def _xlm(module: Any, attend: Attend, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Attended:
    linears = (module.q_lin, module.k_lin, module.v_lin)
    query, key, value = _heads(linears, hidden_states, module.head_dim)
    return (module.out_lin(attend(query, key, value).flatten(2)),)


def _doge(module: Any, attend: Attend, hidden_states: torch.Tensor, *, position_embeddings: Any, **_: Any) -> Attended:
    """Doge (Shi et al., 2025) computes of each value a bias on all products with its key. Beyond `keep_window_size`
    positions, which is the longest context here, it also leaves out the keys with the least bias.
    """
    linears = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = _heads(linears, hidden_states, module.head_dim)
    rotated = _functions(module).apply_rotary_pos_emb(module.q_norm(query), module.k_norm(key), *position_embeddings)
    time_steps = F.softplus(module.dt_proj(value.transpose(1, 2).flatten(2)))
    bias = torch.exp(module.A * time_steps)[0].t().float()
    query, key = rotated
    attended = attend(query, key, value, module.scaling, module.config.sliding_window, key_bias=bias)
    return module.o_proj(attended.flatten(2)), None


def _heads(linears: Sequence[nn.Module], hidden_states: torch.Tensor, head_dim: int) -> list[torch.Tensor]:
    """Returns the results of linears as [1, heads, num_tokens, head_dim]."""
    return [linear(hidden_states).unflatten(-1, (-1, head_dim)).transpose(1, 2) for linear in linears]


def _functions(module: nn.Module) -> Any:
    """Returns the module of transformers that has the functions of an attention module's family."""
    return sys.modules[type(module).__module__]


class Own(NamedTuple):
    """The attention of a family."""

    class_name: str
    """The class of its attention modules."""
    forward: Callable[..., Attended]
    """The function that replaces their `forward`: it takes the module and an `Attend` before the usual arguments."""


OWN = {
    "big_bird": Own("BigBirdSelfAttention", _bert),
    "bloom": Own("BloomAttention", _bloom),
    "doge": Own("DogeAttention", _doge),
    "falcon": Own("FalconAttention", _falcon),
    "git": Own("GitSelfAttention", _bert),
    "gpt_neo": Own("GPTNeoSelfAttention", _gpt_neo),
    "gpt_neox_japanese": Own("GPTNeoXJapaneseAttention", _gpt_neox_japanese),
    "megatron-bert": Own("MegatronBertSelfAttention", _bert),
    "mpt": Own("MptAttention", _mpt),
    "mvp": Own("MvpAttention", _bart),
    "openai-gpt": Own("Attention", _openai_gpt),
    "rembert": Own("RemBertSelfAttention", _bert),
    "roformer": Own("RoFormerSelfAttention", _roformer),
    "trocr": Own("TrOCRAttention", _bart),
    "xglm": Own("XGLMAttention", _bart),
    "xlm": Own("MultiHeadAttention", _xlm),
}
"""The attention of each family by `model_type`."""
