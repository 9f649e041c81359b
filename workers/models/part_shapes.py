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


class LayerLoop(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that run several times (Inkling 2's loops). Each pass begins with what the first one began with, and has
    keys, values and states of its own.
    """

    first: int
    """The first layer of the loop."""
    end: int
    """The layer after its last one."""
    num_passes: int
    gate_rank: int
    """Width of what the gates on messages of the pass before are made of."""

    @property
    def length(self) -> int:
        return self.end - self.first

    def runs(self, num_layers: int) -> list[int]:
        """Returns the layer that runs at each place, of a model with `num_layers` layers."""
        return [*range(self.first), *(self.num_passes * [*range(self.first, self.end)]), *range(self.end, num_layers)]

    def layer_at(self, place: int) -> tuple[int, int]:
        """Returns the layer that runs at a place, and in which pass, from 0."""
        if place < self.first:
            return place, 0
        if place >= self.first + self.length * self.num_passes:
            return place - self.length * (self.num_passes - 1), 0
        number, layer = divmod(place - self.first, self.length)
        return self.first + layer, number


class InklingShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of parts that only Inkling and Inkling 2 have."""

    conv_width: int
    """Tokens that the convolutions of keys, values and results see."""
    distance_rank: int
    """Numbers of each token and head of which a bias for each distance to another token is made."""
    most_distance: int
    """Distance from which there is no bias, in layers without a window. With one it is the window."""
    head_limit: float = 0.0
    """Bound of the lengths of queries and keys of a head (Inkling 2); 0 for none."""
    number_limit: float = 0.0
    """Bound of the length of the numbers of a head for distances (Inkling 2); 0 for none."""
    gate_caps: tuple[float, ...] = ()
    """Soft bounds of the gates of MLPs and of what they let through (`LinearSpec.gate_caps`); empty for none."""
    layers_per_block: int = 0
    """Layers whose results are summed to a block, which later layers read (Inkling 2); 0 for one residual stream."""
    loop: LayerLoop | None = None
    """The layers that run several times; None if each runs once."""

    def layer_at(self, place: int) -> tuple[int, int]:
        """Returns the layer that runs at a place, and in which pass, from 0."""
        return (place, 0) if self.loop is None else self.loop.layer_at(place)
