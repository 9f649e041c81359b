"""The ways in which llama.cpp stores tensors unlike Hugging Face. `gguf_forms.py` names them, and `Checkpoint` undoes
them.
"""

from __future__ import annotations

from typing import NamedTuple


class StoredForm(NamedTuple):
    """What a file has done to a tensor. The usual values stand for nothing."""

    interleaved_head_dim: int = 0
    """Width of a head whose two halves are interleaved in the rows; 0 if they are not."""
    added: float = 0.0
    """The number that was added to each element, as to some norms."""
    is_rate: bool = False
    """Whether the file has rates of decay below 0, and the tensor the logarithms of their negatives."""
    head_order: tuple[int, ...] = ()
    """The file's head for each head of the tensor, whose rows are heads of one width; empty if both have one order."""
    orders_inputs: bool = False
    """Whether `head_order` is that of the inputs, instead of the rows."""
    transposed_heads: int = 0
    """Number of heads whose matrices the file has transposed; 0 if it has not."""


AS_IT_IS = StoredForm()
