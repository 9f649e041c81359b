"""`manta bench prefix-attention`: decode attention that reads a shared prefix once, against once for every sequence.

One layer of Qwen2.5-0.5B's shape in bfloat16: `n` sequences whose first blocks are the same, each with a few tokens of
its own. The two forms take turns in one process and give equal bits. The floors are what the hardware would need alone:
every key and value once at the bandwidth of a plain sum, every product at the rate of torch's largest product.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.kernels import (
    BLOCK_SIZE,
    HEAD_DIM,
    HEAD_SHAPE,
    HEADS,
    KV_HEADS,
    alternate,
    product_rate,
    read_bandwidth,
)
from manta.workers.kernels import cpu
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.cpu_kv_cache import allocate_kv
from manta.workers.kernels.query_tokens import QueryTokens

NUM_LAYERS = 24
OWN_TOKENS = 64
"""The sequences' own keys are spread evenly from 1 to this many."""


class SharedPrefixCase:
    """`num_sequences` decodes over a common prefix; a layer's caches in turn, as a model's step reads them."""

    def __init__(self, prefix_len: int, num_sequences: int) -> None:
        own = np.linspace(1, OWN_TOKENS, num_sequences).astype(np.int64)
        starts, query_lens = prefix_len + own - 1, np.ones_like(own)
        prefix_blocks, own_blocks = prefix_len // BLOCK_SIZE, -(-OWN_TOKENS // BLOCK_SIZE)
        num_blocks = prefix_blocks + num_sequences * own_blocks
        blocks = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        tables = np.concatenate(
            (
                np.broadcast_to(blocks[:prefix_blocks], (num_sequences, prefix_blocks)),
                blocks[prefix_blocks:].reshape(num_sequences, own_blocks),
            ),
            axis=1,
        )
        tokens = QueryTokens(starts, query_lens, tables, BLOCK_SIZE)
        self.build = functools.partial(AttentionMetadata.build, tokens)
        self.build_alone = functools.partial(AttentionMetadata.build, tokens._replace(may_share=False))
        self.forms = self.build(), self.build_alone()
        kv = allocate_kv(NUM_LAYERS, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, torch.bfloat16).normal_()
        self.layers = [(layer[0], layer[1]) for layer in kv]
        self.qkv = torch.randn(num_sequences, (HEADS + 2 * KV_HEADS) * HEAD_DIM).bfloat16()
        self.read_bytes = 4 * (prefix_len + int(own.sum())) * KV_HEADS * HEAD_DIM
        self.operations = 4 * (num_sequences * prefix_len + int(own.sum())) * HEADS * HEAD_DIM

    def step(self, metadata: AttentionMetadata) -> list[torch.Tensor]:
        return [cpu.paged_attention(self.qkv, *layer, metadata, HEAD_SHAPE) for layer in self.layers]

    def times(self, seconds: float) -> tuple[float, float]:
        """Median seconds a layer: grouped, and each sequence alone."""
        grouped, alone = alternate(
            functools.partial(self.step, self.forms[0]), functools.partial(self.step, self.forms[1]), seconds
        )
        return grouped / NUM_LAYERS, alone / NUM_LAYERS

    def build_times(self, seconds: float) -> tuple[float, float]:
        """Median seconds of a step's metadata: with the search for groups, and without."""
        return alternate(self.build, self.build_alone, seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="manta bench prefix-attention", description=__doc__)
    parser.add_argument("--prefix", type=int, nargs="+", default=[128, 512, 2048], help="shared keys")
    parser.add_argument("--n", type=int, nargs="+", default=[4, 16, 64], help="sequences of the group")
    parser.add_argument("--seconds", type=float, default=2.0, help="time of each line")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    with torch.inference_mode():
        bandwidth, rate = read_bandwidth(), product_rate()
        print(f"{torch.get_num_threads()} threads, reads {bandwidth / 1e9:.0f} GB/s, products {rate / 1e12:.2f} T/s")
        print("us a layer; build: us a step more for finding the group\n")
        names = ("prefix", "n", "alone", "grouped", "ratio", "bytes floor", "product floor", "of floor", "build")
        print("| " + " | ".join(names) + " |\n|" + " ---: |" * len(names))
        for prefix_len in options.prefix:
            for num_sequences in options.n:
                case = SharedPrefixCase(prefix_len, num_sequences)
                grouped, alone = case.times(options.seconds)
                searched, plain = case.build_times(options.seconds / 8)
                floors = case.read_bytes / bandwidth, case.operations / rate
                cells = (
                    f"{prefix_len} | {num_sequences} | {alone * 1e6:.0f} | {grouped * 1e6:.0f} | {alone / grouped:.2f}",
                    f"{floors[0] * 1e6:.0f} | {floors[1] * 1e6:.0f} | {max(floors) / grouped:.0%}",
                    f"{(searched - plain) * 1e6:.0f}",
                )
                print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
