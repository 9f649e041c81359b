"""The parts of a description of weights: tensors, linears and norms, how ranks split them, and how they are stored.

`specs.py` makes layers of them. The names are those of Hugging Face's checkpoints. The split over ranks is that of
Megatron-LM (Shoeybi et al., 2019).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from manta.workers.models.row_places import ExpertRows, HeadOrder, HeadPiece, TailOrder


class Split(enum.Enum):
    """The way in which ranks split the outputs of a linear."""

    NOTHING = enum.auto()
    """Every rank has all outputs."""
    QUERY_HEADS = enum.auto()
    KV_HEADS = enum.auto()
    """KV heads; with fewer heads than ranks, several ranks hold the same head."""
    INNER = enum.auto()
    """The inner width of the MLP."""
    VOCABULARY = enum.auto()
    """Rows of the vocabulary, padded with zeros on the last ranks."""
    CHANNELS = enum.auto()
    """Channels or heads of a recurrent mixer."""
    OUTPUTS = enum.auto()
    """Outputs without a structure, where ranks do not split the inputs and sum (`workers/parallel/split.py`)."""


class NormSpec(NamedTuple):
    """The weight of a norm: the tensor `NAME.weight` [size]."""

    name: str
    size: int
    adds_one: bool = False
    """Whether the tensor holds the weight less one (Gemma)."""
    split: Split = Split.NOTHING
    """The split of a norm over the whole width of queries or keys, instead of over each head (OLMo 2)."""
    order: HeadOrder | None = None
    """The order in which the numbers of a head's norm are read, that of the head's rows."""
    is_stored: bool = True
    """Whether there is a tensor. Otherwise the weight is one."""
    elsewhere: str | None = None
    """The name in checkpoints that store it under another one; None if all have one name."""
    has_bias: bool = False
    """Whether the tensor `NAME.bias` [size] is added to the result (RWKV)."""


class TensorSpec(NamedTuple):
    """A tensor of a recurrent mixer that is neither a linear's weight nor a norm's. Ranks split its first dimension."""

    name: str
    """The whole name in the checkpoint."""
    shape: tuple[int, ...]
    split: Split = Split.CHANNELS
    first_row: int = 0
    """The first row in the stored tensor."""
    stored_rows: int | None = None
    """Number of rows of the stored tensor, of which this one is a piece; None if it is the whole tensor."""
    stored_shape: tuple[int, ...] | None = None
    """The shape of the stored tensor, if it has more dimensions than `shape`; None otherwise."""
    is_transposed: bool = False
    """Whether the stored tensor has these two dimensions in the other order."""
    is_log_rate: bool = False
    """Whether the tensor holds logarithms of the negatives of its numbers, as rates of decay are stored."""


class WeightPart(NamedTuple):
    """A linear as a checkpoint stores it: `NAME.weight` [out_features, in_features] and perhaps `NAME.bias`."""

    name: str
    out_features: int
    split: Split = Split.NOTHING
    order: HeadOrder | TailOrder | None = None
    """The order in which rows are read; None for the checkpoint's."""
    piece: HeadPiece | None = None
    """The rows of each head, if the stored tensor has others too; with it `first_row` is not used."""
    first_row: int = 0
    """The part's first row in the stored tensor."""
    stored_rows: int | None = None
    """Number of rows of the stored tensor, of which this part is a piece; None if it is the whole tensor."""
    expert: ExpertRows | None = None
    """The place in a tensor of all experts, named `NAME` and `NAME_bias`; None if the tensors are the part's own."""
    scale: float = 1.0
    """Factor on the part's outputs, by which its weight and its bias are multiplied."""
    elsewhere: WeightPart | None = None
    """The same part in checkpoints that store it in another way; None if all store it in one."""

    def forms(self) -> Iterator[WeightPart]:
        """Yields the part in each form in which checkpoints store it."""
        form: WeightPart | None = self
        while form is not None:
            yield form
            form = form.elsewhere

    @property
    def weight_name(self) -> str:
        return f"{self.name}.weight" if self.expert is None else self.name

    @property
    def bias_name(self) -> str:
        return f"{self.name}.bias" if self.expert is None else f"{self.name}_bias"


class LinearSpec(NamedTuple):
    """One linear: parts with the same input, whose outputs are concatenated."""

    parts: tuple[WeightPart, ...]
    in_features: int
    has_bias: bool = False
    is_gated: bool = False
    """The first of two parts gates the second: the result is `activation(gate) * up` (Shazeer, 2020)."""
    splits_inputs: bool = False
    """Whether ranks split the inputs and sum their outputs."""
    activation: str | None = None
    """The function of the outputs of a linear without gates, a key of `reference.ACTIVATIONS`; None for none."""
    gate_sparsity: float = 0.0
    """The part of a token's gates that are turned off, if they are normally distributed (Gemma 3n); 0 for none."""
    gate_limit: float = 0.0
    """Bound of the gates and of what they let through (`ExpertsConfig.gate_limit`); 0 for none."""
    gate_caps: tuple[float, ...] = ()
    """Soft bounds of the gates and of what they let through. A gate's sigmoid is not bounded (Inkling 2): the result is
    `cap(gate) * sigmoid(gate) * cap(up)`. Empty for none.
    """

    @property
    def name(self) -> str:
        return " + ".join(dict.fromkeys(part.name for part in self.parts))

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return sum(part.out_features for part in self.parts)

    def stored_as(self, name: str) -> LinearSpec:
        """Returns the same linear, whose parts the checkpoint stores as one tensor, one after the other."""
        starts = [sum(part.out_features for part in self.parts[:index]) for index in range(len(self.parts))]
        pieces = tuple(
            part._replace(name=name, first_row=start, stored_rows=self.out_features)
            for part, start in zip(self.parts, starts, strict=True)
        )
        return self._replace(parts=pieces)

    def or_as(self, other: LinearSpec) -> LinearSpec:
        """Returns the same linear, whose parts some checkpoints store as those of `other`."""
        pairs = zip(self.parts, other.parts, strict=True)
        return self._replace(parts=tuple(part._replace(elsewhere=elsewhere) for part, elsewhere in pairs))

    @property
    def gathers(self) -> bool:
        """Whether ranks gather the inputs before and the outputs after."""
        return any(part.split is Split.OUTPUTS for part in self.parts)


class ConnectionSpec(NamedTuple):
    """The weights of which a part of a layer computes its shares of the residual streams, in float32."""

    shares: TensorSpec
    """[num_shares, num_streams * hidden]: the matrix from all streams to the shares, those for reading first."""
    bases: TensorSpec
    """[num_shares]: what is added to each share."""
    scales: TensorSpec
    """A factor for all shares of a kind, of which there are one to three: for reading, writing and mixing."""
    num_streams: int

    def tensors(self) -> Iterator[TensorSpec]:
        yield from (self.shares, self.bases, self.scales)
