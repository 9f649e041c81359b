"""The kernels of a decoder layer in plain torch: slow, but they define what each kernel computes.

Every faster form (`workers/kernels/cpu.py`, `workers/kernels/triton/`) is tested against these functions. They compute
in float32 and round once to the input's dtype, so bfloat16 forms differ by rounding alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from manta.workers.kernels import kv_cache
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.models.model_config import HeadShape


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square normalisation (Zhang and Sennrich, 2019) of x [..., hidden] by `weight` [hidden]."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x to `residual` in place and returns the norm of the sum, [num_tokens, hidden]."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalisation by mean and deviation (Ba et al., 2016) of x [..., hidden] by `weight` [hidden], without a bias."""
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), eps=eps).to(x.dtype)


def clamped_gate(gates: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's gates: clamped to 7, a sigmoid of 1.702 times the gate, and one added to what is let through."""
    gates, up = gates.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gates * torch.sigmoid(gates * 1.702))


GATES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": lambda gates, up: F.silu(gates) * up,
    "gelu": lambda gates, up: F.gelu(gates) * up,
    "gelu_tanh": lambda gates, up: F.gelu(gates, approximate="tanh") * up,
    "clamped": clamped_gate,
}
"""The functions of gates, by the names of `ModelConfig.activation`."""


def gate(activation: str, gate_up: torch.Tensor) -> torch.Tensor:
    """`activation(gate) * up` of gate_up [num_tokens, 2 * intermediate] (gate first), [num_tokens, intermediate]."""
    return GATES[activation](*gate_up.float().chunk(2, dim=-1)).to(gate_up.dtype)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}
"""Activations of MLPs without gates."""


def activate(activation: str, x: torch.Tensor) -> torch.Tensor:
    return ACTIVATIONS[activation](x.float()).to(x.dtype)


silu_and_mul = functools.partial(gate, "silu")


def cap(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Soft-capped numbers (Gemma 2): `limit * tanh(x / limit)`; x itself if `limit` is 0."""
    return torch.tanh(x / limit) * limit if limit else x


def log1p(x: torch.Tensor) -> torch.Tensor:
    return x.log1p()


def head_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Products of x [num_tokens, num_heads, in] with a weight of each head [num_heads, in, out], which are
    [num_tokens, num_heads, out].
    """
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def rope_and_cache(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    metadata: AttentionMetadata,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    heads: HeadShape,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotates queries in place and writes rotated keys and plain values to their KV slots.

    qkv is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; afterwards its key part is undefined. It has no
    values if `heads.keys_are_values`, where both caches are one. With no KV heads it has queries only, and nothing is
    cached. `cos_sin` is float32 [max_position, head_dim], cosines then sines, for rotary embedding (Su et al., 2021) in
    the half-split order of GPT-NeoX and Hugging Face. If norm weights [head_dim] are given, each query and key head is
    RMS-normalised before the rotation (Qwen3). A rounded cache gets keys and values from the dtype of qkv.
    """
    by_head = qkv.view(qkv.shape[0], sum(heads.counts), heads.head_dim)
    query, key, value = by_head.split(heads.counts, dim=1)
    cos, sin = cos_sin[metadata.positions].unsqueeze(1).chunk(2, dim=-1)
    query.copy_(_rotate(query, cos, sin, q_norm_weight, eps))
    if not heads.num_kv_heads:  # the layer reads keys and values of another one
        return
    rotated = _rotate(key, cos, sin, k_norm_weight, eps)
    kv_cache.write(k_cache, metadata.slot_mapping, rotated, metadata.block_size)
    if not heads.keys_are_values:
        kv_cache.write(v_cache, metadata.slot_mapping, value, metadata.block_size)


def _rotate(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm_weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    wide = heads.float()
    if norm_weight is not None:
        wide = rms_norm(wide, norm_weight, eps)
    low, high = wide.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(heads.dtype)


def paged_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    heads: HeadShape,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of every query token over its sequence's paged keys, [num_tokens, num_heads * head_dim].

    Call it after `rope_and_cache`: qkv begins with the query heads; query head `h` reads KV head
    `h // (num_heads // num_kv_heads)`. `sliding_window` is how many positions a token sees, itself included (Mistral).
    `sinks`, float32 [num_heads], are a further logit of each head, whose probability goes nowhere (gpt-oss).
    """
    num_heads, num_kv_heads, head_dim, scale = heads[:4]
    query = qkv[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    query_start = metadata.query_start.tolist()
    for sequence, context_len in enumerate(metadata.context_lens.tolist()):
        first, last = query_start[sequence], query_start[sequence + 1]
        start, block_size = context_len - (last - first), metadata.block_size
        first_seen = 0 if sliding_window is None else max(0, start - sliding_window + 1)
        first_block, num_blocks = first_seen // block_size, -(-context_len // block_size)
        blocks = metadata.block_tables[sequence, first_block:num_blocks].long()
        seen = slice(first_seen - first_block * block_size, context_len - first_block * block_size)
        key = kv_cache.read(k_cache, blocks, block_size, heads)[seen]
        value = kv_cache.read(v_cache, blocks, block_size, heads)[seen]
        distance = torch.arange(start, context_len, device=qkv.device).unsqueeze(1)
        distance = distance - torch.arange(first_seen, context_len, device=qkv.device)
        visible = distance >= 0
        if sliding_window is not None:
            visible &= distance < sliding_window
        if heads.logit_cap or sinks is not None:
            output[first:last] = _attend(query[first:last], key, value, visible, heads, sinks)
            continue
        attended = F.scaled_dot_product_attention(
            query[first:last].to(key.dtype).transpose(0, 1).unsqueeze(0),
            key.transpose(0, 1).unsqueeze(0),
            value.transpose(0, 1).unsqueeze(0),
            attn_mask=visible,
            scale=scale,
            enable_gqa=num_heads != num_kv_heads,
        )
        output[first:last] = attended.squeeze(0).transpose(0, 1)
    return output.view(-1, num_heads * head_dim)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    heads: HeadShape,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention in float32 of one sequence: query [n, num_heads, head_dim] over key and value [context, num_kv_heads,
    head_dim], of which `visible` [n, context] are seen.
    """
    group = heads.num_heads // heads.num_kv_heads
    wide_key, wide_value = (each.float().repeat_interleave(group, dim=1) for each in (key, value))
    products = torch.einsum("qhd,khd->hqk", query.float(), wide_key) * heads.scale
    logits = cap(products, heads.logit_cap).masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sink = sinks.view(-1, 1, 1).expand(-1, len(query), 1)
        probabilities = torch.cat((logits, sink), dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = logits.softmax(-1)
    return torch.einsum("hqk,khd->qhd", probabilities, wide_value).to(query.dtype)
