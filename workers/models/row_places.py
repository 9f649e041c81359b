"""The places and orders of a linear's rows in the tensors of checkpoints. Plain data; imports no framework."""

from __future__ import annotations

from typing import Any, NamedTuple


class HeadOrder(NamedTuple):
    """The order of the rows of query and key heads. The kernels rotate dimension `i` of a head together with dimension
    `i + head_dim / 2`, so rows are read in an order in which the checkpoint's pairs lie like that. Products of queries
    and keys do not depend on the order.
    """

    head_dim: int
    rotary_dim: int
    """Number of first dimensions that rotate. `rope_table` gives the others a cosine of 1 and a sine of 0."""
    is_interleaved: bool
    """Whether the checkpoint's pairs are neighbours, instead of halves of the rotated dimensions."""

    def rows(self, num_rows: int) -> list[int]:
        """Returns the checkpoint's row for each row of the model."""
        half, rest = self.rotary_dim // 2, (self.head_dim - self.rotary_dim) // 2
        step, second = (2, 1) if self.is_interleaved else (1, half)
        first_half = [*range(0, half * step, step), *range(self.rotary_dim, self.rotary_dim + rest)]
        second_half = [*range(second, second + half * step, step), *range(self.rotary_dim + rest, self.head_dim)]
        return [head + row for head in range(0, num_rows, self.head_dim) for row in first_half + second_half]


class HeadPiece(NamedTuple):
    """The place of a part in a tensor that has several things for each head, such as a query and its gate."""

    head_rows: int
    """Rows of a head in the stored tensor."""
    first: int
    """The part's first row of each head."""
    size: int
    """The part's rows of each head."""

    def rows(self, num_rows: int) -> list[int]:
        """Returns the stored row for each of the part's `num_rows` rows."""
        heads = range(num_rows // self.size)
        return [head * self.head_rows + self.first + row for head in heads for row in range(self.size)]


class TailOrder(NamedTuple):
    """The order of the rows of heads whose last `rotary_dim` dimensions rotate in pairs of neighbours, which are read
    as two halves. Used by latent attention.
    """

    head_dim: int
    rotary_dim: int

    def rows(self, num_rows: int) -> list[int]:
        """Returns the checkpoint's row for each row of the model."""
        first = self.head_dim - self.rotary_dim
        order = [*range(first), *range(first, self.head_dim, 2), *range(first + 1, self.head_dim, 2)]
        return [head + row for head in range(0, num_rows, self.head_dim) for row in order]


class ExpertRows(NamedTuple):
    """The place of a part in a tensor of all experts of a layer, [num_experts, in_features, columns], whose columns are
    the outputs of linears (gpt-oss).
    """

    expert: int
    num_experts: int
    first: int = 0
    """The first column of the part."""
    step: int = 1
    """Distance between columns of the part."""
    are_rows: bool | None = False
    """Whether outputs are rows: the tensor is [num_experts, columns, in_features]. None if checkpoints have either."""

    def are_rows_of(self, shape: tuple[int, ...], num_outputs: int, in_features: int) -> bool:
        """Returns whether outputs are rows in a stored tensor of this shape."""
        if self.are_rows is not None:
            return self.are_rows
        return shape[1:] == (num_outputs, in_features)

    def rows_of(self, outputs: Any) -> Any:
        """Returns the part's outputs, given an array of an expert whose first dimension is all of its outputs."""
        return outputs[self.first :: self.step]
