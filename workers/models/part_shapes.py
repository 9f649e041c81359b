"""The sizes and factors of parts that few families have. Plain data; imports no framework."""

from __future__ import annotations

import msgspec


class SharedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of attention and an MLP that several layers share (Zamba)."""

    owners: tuple[int | None, ...]
    """The layer under whose name the checkpoint has the block of each layer; None for a layer without one."""
    rank: int = 0
    """The rank of what each layer adds to the weights of its block; 0 for nothing."""
    adapts_attention: bool = False
    """Whether layers add to the weights of attention too."""


class StreamsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Several residual streams, of which each layer updates one and predicts the others (Gemma 3n)."""

    num_streams: int
    rank: int
    """The rank of the residual beside attention."""
    scales_outputs: bool
    """Whether the first stream is scaled where a layer's own input is gated."""
    gate_sparsities: tuple[float, ...]
    """The part of gates that each layer's MLP turns off; 0 for none."""


class HyperConnections(msgspec.Struct, frozen=True, kw_only=True):
    """Several residual streams, which each part of a layer reads and writes by shares that it computes of them (Zhu et
    al., 2024). `workers/decoders/hyper_connections.py` computes them.
    """

    num_streams: int
    eps: float
    """Number that is added to each share by which a part reads."""
    write_eps: float = 0.0
    """Number that is added to each share by which a part writes."""
    magnitude: float = 2.0
    """Bound of the shares by which a part writes."""
    mixing_steps: int = 0
    """Steps of Sinkhorn and Knopp's algorithm that make the matrix by which streams are mixed (mHC; Xie et al., 2026);
    0 if they are not mixed.
    """


class Eagle3Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A draft head that reads the residual stream of its model between some layers (EAGLE-3), which
    `workers/models/eagle3.py` describes.
    """

    taps: tuple[int, ...]
    """The layers of the model whose inputs the head reads, ascending: `ModelConfig.taps` of the model."""
    target_size: int
    """Width of the model's residual stream."""
    target_vocab_size: int
    """Width of the model's logits, and number of tokens that the head reads. `ModelConfig.vocab_size` of the head is
    the number of those that it drafts.
    """
    norms_stream: bool
    """Whether the head's own residual stream begins after its norm, instead of before it."""
    layer: str
    """How the names of the tensors of the head's layer begin."""


class PartScales(msgspec.Struct, frozen=True, kw_only=True):
    """Factors inside the layers of Falcon-H1."""

    attention_input: float
    attention_output: float
    keys: float
    recurrent_input: float
    recurrent_output: float
    recurrent_parts: tuple[float, ...]
    """Those on gates, x, B, C and time steps."""
    mlp: tuple[float, ...]
    """Those on the gates of the MLP, before their activation, and on its result."""
