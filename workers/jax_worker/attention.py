"""Attention over a paged KV cache, and writing keys and values into it: one function with two implementations.

On TPUs it is the Pallas kernel that comes with JAX. Elsewhere it is a loop over chunks of keys with a running softmax
(Milakov and Gimelshein, 2018), which any backend compiles. Each device computes its own heads. Pages have the kernel's
layout: [num_blocks, block_size, 2 * num_kv_heads, head_dim], with the key and the value of a head side by side. In
latent attention they are one: pages are [num_blocks, block_size, 1, head_dim], whole on every device.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from manta.workers.jax_worker.batch import StepBatch
from manta.workers.jax_worker.mesh import AXIS

KERNEL_HEAD_DIM = 128
"""Multiple of which the kernel's head dimension must be; smaller heads are padded with zeros."""
CHUNK_TOKENS = 128
"""Keys of each token that one iteration of the loop reads."""
_KERNEL_BUFFER_BYTES = 4 << 20
"""Bytes of the kernel's buffer for a block of keys. It fills one such buffer while it reads the other."""
_KERNEL_MEMORY_BYTES = 64 << 20
"""Bytes of VMEM that the kernel may take: half of what a v5e or v6e core has."""
_KERNEL_QUERIES = 32
"""Queries of one block of the kernel: JAX's default for shapes that it has not tuned."""
_HEADS = PartitionSpec(None, AXIS, None)
_PAGES = PartitionSpec(None, None, AXIS, None)
_WHOLE = PartitionSpec()


class AttentionForm(NamedTuple):
    """The static parameters of a model's attention."""

    mesh: Mesh | AbstractMesh
    scale: float
    """Factor on the products of queries and keys."""
    uses_kernel: bool
    """Whether Pallas's kernel computes it."""
    logit_cap: float = 0.0
    """Soft bound of the scaled products (`HeadShape.logit_cap`); 0 for none."""
    keys_are_values: bool = False
    """Whether the cached head is key and value of all query heads (`HeadShape.latent_dim`)."""

    @property
    def page_split(self) -> PartitionSpec:
        """The split of pages over the devices."""
        return _WHOLE if self.keys_are_values else _PAGES


def page_head_dim(head_dim: int, uses_kernel: bool) -> int:
    """Returns the size of a head in the KV cache."""
    return -(-head_dim // KERNEL_HEAD_DIM) * KERNEL_HEAD_DIM if uses_kernel else head_dim


def page_dtype(dtype: Any, uses_kernel: bool) -> Any:
    """Returns the dtype of the KV cache of a model in `dtype`.

    Without the kernel, 16-bit floats are stored as integers, because XLA's CPU backend widens the whole cache to
    scatter into floats.
    """
    dtype = jnp.dtype(dtype)
    return dtype if uses_kernel or dtype.itemsize == 4 else jnp.dtype(jnp.uint16)


def attend(
    form: AttentionForm,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | None,
    pages: jax.Array,
    batch: StepBatch,
    sliding_window: int | None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes keys and values into the pages. Returns the attention's output for each query, and the pages.

    `query` is [num_tokens, num_heads, head_dim], `key` and `value` are [num_tokens, num_kv_heads, head_dim]. Query head
    `h` reads KV head `h // (num_heads // num_kv_heads)` of its device. A token sees `sliding_window` positions
    including its own; None means all. `sinks`, float32 [num_heads], are a further logit of each head, which has no
    value. If `form.keys_are_values`, there is no `value`, and the only key is that of all query heads. Pallas's kernel
    has neither, so the loop computes such layers on TPUs too.
    """
    body = functools.partial(_attend_on_device, form, sliding_window)
    of_key = _WHOLE if form.keys_are_values else _HEADS
    specs = (_HEADS, of_key, of_key, form.page_split, _WHOLE, PartitionSpec(AXIS))
    mapped = jax.shard_map(body, mesh=form.mesh, in_specs=specs, out_specs=(_HEADS, form.page_split), check_vma=False)
    attended, pages = mapped(query, key, value, pages, batch, sinks)
    return attended, pages


def _attend_on_device(
    form: AttentionForm,
    sliding_window: int | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | None,
    pages: jax.Array,
    batch: StepBatch,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    head_dim = query.shape[-1]
    padding = ((0, 0), (0, 0), (0, pages.shape[-1] - head_dim))
    query, *cached = (jnp.pad(each, padding) for each in (query, key, value) if each is not None)
    pages = write_pages(tuple(cached), pages, batch)
    if form.uses_kernel and sinks is None and not form.keys_are_values:
        attended = attend_by_kernel(query, pages, batch, form.scale, sliding_window, form.logit_cap)
    else:
        attended = attend_by_chunks(query, pages, batch, form.scale, sliding_window, form.logit_cap, sinks)
    return attended[:, :, :head_dim], pages


def write_pages(cached: tuple[jax.Array, ...], pages: jax.Array, batch: StepBatch) -> jax.Array:
    """Writes each token's key and value, or its key alone, into its slot; those of padding are dropped."""
    num_blocks, block_size, num_combined, head_dim = pages.shape
    position = jnp.maximum(batch.positions, 0)
    block = batch.block_tables[batch.sequences, position // block_size]
    block = jnp.where(batch.positions < 0, num_blocks, block)
    together = jnp.stack(cached, axis=2).reshape(-1, num_combined, head_dim)
    if pages.dtype == jnp.uint16:
        together = jax.lax.bitcast_convert_type(together, jnp.uint16)
    return pages.at[block, position % block_size].set(together, mode="drop")


def attend_by_kernel(
    query: jax.Array,
    pages: jax.Array,
    batch: StepBatch,
    scale: float,
    sliding_window: int | None,
    logit_cap: float = 0.0,
) -> jax.Array:
    """Computes what `attend_by_chunks` does without sinks by the Pallas kernel, on TPUs only."""
    if sliding_window is not None:
        batch = batch._replace(block_tables=_tables_from_window(batch, sliding_window, pages.shape[1]))
    page_bytes = pages[0].size * pages.dtype.itemsize
    return ragged_paged_attention(
        query,
        pages,
        batch.context_lens,
        batch.block_tables,
        batch.query_start,
        batch.num_sequences,
        sm_scale=scale,
        sliding_window=sliding_window,
        soft_cap=logit_cap or None,
        num_kv_pages_per_block=min(batch.block_tables.shape[1], max(1, _KERNEL_BUFFER_BYTES // page_bytes)),
        num_queries_per_block=min(query.shape[0], _KERNEL_QUERIES),
        vmem_limit_bytes=_KERNEL_MEMORY_BYTES,
    )


def _tables_from_window(batch: StepBatch, sliding_window: int, block_size: int) -> jax.Array:
    """Returns block tables whose entries before the window of a sequence's first query name the first block of the
    window. The kernel reads those too, and weighs them with zero, which hides no NaN; and the sequence may have given
    them back.
    """
    query_lens = batch.query_start[1:] - batch.query_start[:-1]
    first_seen = jnp.maximum(batch.context_lens - query_lens - sliding_window + 1, 0)
    columns = jnp.arange(batch.block_tables.shape[1])
    return jnp.take_along_axis(
        batch.block_tables, jnp.maximum(columns, (first_seen // block_size)[:, None]), axis=1, mode="clip"
    )


def attend_by_chunks(
    query: jax.Array,
    pages: jax.Array,
    batch: StepBatch,
    scale: float,
    sliding_window: int | None,
    logit_cap: float = 0.0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Returns the attention of every token over its sequence's pages, [num_tokens, num_heads, head_dim], without a
    kernel. Pages with a single head have a key that is the value too. Results for padding are undefined.
    """
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = pages.shape[1], max(1, pages.shape[2] // 2)
    blocks = max(1, CHUNK_TOKENS // block_size)
    width = batch.block_tables.shape[1]
    tables = jnp.pad(batch.block_tables, ((0, 0), (0, -width % blocks)))
    grouped = query.reshape(num_tokens, num_kv_heads, -1, head_dim).astype(jnp.float32) * scale
    positions = batch.positions
    chunk = blocks * block_size
    first_seen = jnp.int32(0)
    if sliding_window is not None:
        first_seen = jnp.min(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions)) - sliding_window + 1
    precision = jax.lax.Precision.HIGHEST

    def add_chunk(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, mixed = state
        ids = jax.lax.dynamic_slice_in_dim(tables, index * blocks, blocks, axis=1)[batch.sequences]
        chosen = pages[ids]
        if chosen.dtype == jnp.uint16:
            chosen = jax.lax.bitcast_convert_type(chosen, query.dtype)
        cached = chosen.reshape(num_tokens, chunk, num_kv_heads, -1, head_dim).astype(jnp.float32)
        key, value = cached[:, :, :, 0], cached[:, :, :, -1]
        scores = soft_cap(jnp.einsum("tkgd,tskd->tkgs", grouped, key, precision=precision), logit_cap)
        distance = positions[:, None] - (index * chunk + jnp.arange(chunk))
        visible = distance >= 0
        if sliding_window is not None:
            visible &= distance < sliding_window
        visible = visible[:, None, None, :]
        new_largest = jnp.maximum(largest, jnp.max(jnp.where(visible, scores, -jnp.inf), axis=-1))
        # The largest score of a row is -inf until it has seen a key.
        reference = jnp.where(new_largest == -jnp.inf, 0.0, new_largest)
        weights = jnp.where(visible, jnp.exp(scores - reference[..., None]), 0.0)
        kept = jnp.where(largest == -jnp.inf, 0.0, jnp.exp(largest - reference))
        # Blocks beyond a sequence's own may hold NaN, which a weight of 0 would not hide.
        value = jnp.where(visible[:, 0, 0, :, None, None], value, 0.0)
        mixed = mixed * kept[..., None] + jnp.einsum("tkgs,tskd->tkgd", weights, value, precision=precision)
        return new_largest, total * kept + weights.sum(-1), mixed

    shape = (num_tokens, num_kv_heads, num_heads // num_kv_heads)
    state = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    if sinks is not None:  # the softmax has seen one logit, without a value
        state = (jnp.broadcast_to(sinks.reshape(1, num_kv_heads, -1), shape), jnp.ones(shape), state[2])
    num_chunks = jnp.max(positions) // chunk + 1
    _, total, mixed = jax.lax.fori_loop(jnp.maximum(first_seen, 0) // chunk, num_chunks, add_chunk, state)
    attended = mixed / jnp.where(total == 0, 1.0, total)[..., None]
    return attended.reshape(num_tokens, num_heads, head_dim).astype(query.dtype)


def soft_cap(x: jax.Array, limit: float) -> jax.Array:
    """Returns soft-capped numbers (Gemma 2): `limit * tanh(x / limit)`; x itself if `limit` is 0."""
    return jnp.tanh(x / limit) * limit if limit else x
