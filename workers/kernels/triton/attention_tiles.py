"""The sizes of attention's programs (`attention.py`): which query heads and tokens are rows of one tile, how many keys
it reads at a time, and the warps and stages that its registers and shared memory allow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from manta.workers.kernels.triton.launch import num_processors, padded_size, shared_bytes
from manta.workers.kernels.triton.work import PROGRAMS_PER_PROCESSOR, TILE_ROWS, WorkShape
from manta.workers.models.model_config import HeadShape

LEAST_DOT = 16
"""Smallest side of a matrix product in Triton."""
TILE_BYTES = 16384
"""Bytes of keys, and of values, in one tile of keys."""
MOST_TILE_KEYS, MOST_KEYS_IN_REGISTERS = 128, 64
LARGE_SHARED_BYTES = 200 << 10
"""Shared memory from which on a device multiplies out of it (Hopper and later). Others multiply out of registers, which
`MOST_KEYS_IN_REGISTERS` keys fill.
"""
_OTHER_BYTES = 2048
"""Shared memory of a program beside its tiles of queries and keys."""
WIDE_DIM = 256
"""Largest head size whose results fit in the registers of four warps, 64 rows of them."""
PROMPT_ROWS = 128
"""Rows of a tile of prompts where the device multiplies out of shared memory. On an H200, prompts of Llama-3.1-8B's
shape took 423 us so and 441 us with 64 rows, and those of Qwen2.5-0.5B's 97 and 121 us.
"""
MOST_VISIBLE_DIM = 128
"""Largest head size with a loop of its own for the tiles that every row sees: with 256, two loops spill registers.
"""


class Tiles(NamedTuple):
    """The tiles of one launch."""

    num_head_tiles: int
    """Programs among which the query heads of a token are divided: one for each KV head, or with latent attention,
    whose query heads all read one cached head, as many as the most rows of a tile require.
    """
    group: int
    """Query heads of a token in a tile. The last tile may have fewer."""
    num_tokens: int
    """Query tokens of a tile."""
    num_keys: int
    """Keys that a tile reads at a time."""
    num_warps: int
    num_stages: int
    """Key and value tiles in flight."""

    @property
    def num_rows(self) -> int:
        """Rows of a tile, padded."""
        return padded_size(self.num_tokens * self.group, LEAST_DOT)


def tiles_of(heads: HeadShape, dtype: torch.dtype, device: torch.device, decodes: bool = False) -> Tiles:
    """Returns the tiles of a step, or of one in which every sequence `decodes` one token.

    One size serves every step that does more than decode, because each size is a separate kernel, which takes seconds
    to compile. A tile of float32 has `LEAST_DOT` rows, because a product of three passes takes four times the
    registers. Every warp holds all rows of its queries, and 256 float32 exceed the registers of four warps, as do the
    results of 64 rows of 512.
    """
    if heads.latent_dim:
        return _latent_tiles_of(heads, dtype, device, decodes)
    group, most_shared = heads.num_heads // heads.num_kv_heads, shared_bytes(device)
    is_narrow = dtype.itemsize == 2 and heads.head_dim <= MOST_VISIBLE_DIM
    if is_narrow and not decodes and most_shared >= LARGE_SHARED_BYTES:
        return Tiles(heads.num_kv_heads, group, max(1, PROMPT_ROWS // group), num_keys=64, num_warps=8, num_stages=5)
    row_bytes = padded_size(heads.head_dim, LEAST_DOT) * dtype.itemsize
    most_rows = TILE_ROWS if dtype.itemsize == 2 else LEAST_DOT
    while most_rows * row_bytes > most_shared // 2:
        most_rows //= 2
    num_tokens = 1 if decodes else max(1, most_rows // group)
    num_rows = padded_size(num_tokens * group, LEAST_DOT)
    free_bytes = most_shared - num_rows * row_bytes
    is_wide = heads.head_dim > WIDE_DIM and num_rows > LEAST_DOT
    tile_bytes = 2 * TILE_BYTES if is_wide and free_bytes >= 8 * TILE_BYTES else TILE_BYTES
    most_keys = MOST_TILE_KEYS if most_shared >= LARGE_SHARED_BYTES else MOST_KEYS_IN_REGISTERS
    return Tiles(
        heads.num_kv_heads,
        group,
        num_tokens,
        num_keys=max(LEAST_DOT, min(most_keys, tile_bytes // row_bytes)),
        num_warps=8 if is_wide or (dtype.itemsize == 4 and heads.head_dim > MOST_VISIBLE_DIM) else 4,
        num_stages=max(1, min(3 if dtype.itemsize == 2 else 2, free_bytes // (2 * tile_bytes))),
    )


def work_shape_of(heads: HeadShape, dtype: torch.dtype, device: torch.device) -> WorkShape:
    """Returns the sizes by which a step's attention is cut. A program of latent attention reads the cached head for a
    tile of query heads, and only small programs share a processor.
    """
    if not heads.latent_dim:
        shape = WorkShape.of(heads.num_heads, heads.num_kv_heads, device)
        return shape._replace(item_tokens=tiles_of(heads, dtype, device).num_tokens)
    tiles = tiles_of(heads, dtype, device, decodes=True)
    most_programs = num_processors(device) * (PROGRAMS_PER_PROCESSOR if tiles.num_rows == LEAST_DOT else 1)
    return WorkShape(tiles_of(heads, dtype, device).num_tokens, max(1, most_programs // tiles.num_head_tiles))


class _LatentTile(NamedTuple):
    """The largest tile of latent attention with so many rows. The results of 64 rows of 512 are half of the registers
    of 8 warps.
    """

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int
    num_buffers: int
    """Tiles of keys in shared memory. A stage is no buffer, because block tables are loaded in stages of their own."""


_LATENT_TILES = (
    _LatentTile(64, 64, 8, num_stages=2, num_buffers=2),
    _LatentTile(32, 64, 8, num_stages=5, num_buffers=2),
    _LatentTile(32, 32, 8, num_stages=2, num_buffers=1),
    _LatentTile(16, 32, 4, num_stages=5, num_buffers=2),
)
"""Tiles of latent attention in 16 bits. Of those with the same number of rows, the best comes first."""
_SMALL_LATENT_TILE = _LatentTile(16, 16, 8, num_stages=2, num_buffers=1)
"""The tile of float32, and of devices with less shared memory than any other tile needs."""


def _latent_tiles_of(heads: HeadShape, dtype: torch.dtype, device: torch.device, decodes: bool) -> Tiles:
    fitting = [_SMALL_LATENT_TILE]
    if dtype.itemsize == 2:
        dims = padded_size(heads.latent_dim, LEAST_DOT) + padded_size(heads.head_dim - heads.latent_dim, LEAST_DOT)
        most = (shared_bytes(device) - _OTHER_BYTES) // (dims * dtype.itemsize)
        own = [tile for tile in _LATENT_TILES if tile.num_rows + tile.num_buffers * tile.num_keys <= most]
        fitting = own or fitting
    most_rows = fitting[0].num_rows
    num_head_tiles = triton.cdiv(heads.num_heads, most_rows)
    group = triton.cdiv(heads.num_heads, num_head_tiles)
    num_tokens = 1 if decodes else max(1, most_rows // group)
    large = [tile for tile in fitting if tile.num_rows >= num_tokens * group]
    tile = min(large, key=lambda tile: tile.num_rows)
    return Tiles(num_head_tiles, group, num_tokens, tile.num_keys, tile.num_warps, tile.num_stages)
