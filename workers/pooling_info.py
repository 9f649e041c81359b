"""The description of a model that pools: it answers a text with one vector or one score and generates nothing.

Plain data. `workers/checkpoints/pooling_folder.py` reads it from a checkpoint, `workers/pooling/` computes by it, and
an engine reports it within `ModelInfo`. Imports no framework.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PoolingTask = Literal["embed", "classify"]
"""What a model answers: a vector of the text, or a number for each label."""
PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""How the vectors of a text's tokens become one, by sentence-transformers' names."""
Activation = Literal["identity", "tanh", "relu", "gelu", "sigmoid", "softmax"]


class DenseLayer(msgspec.Struct, frozen=True):
    """A linear layer behind the pooling. Its weights are `linear.weight` and `linear.bias` in a file of `folder`."""

    folder: str
    """Folder within the checkpoint."""
    in_features: int
    out_features: int
    has_bias: bool
    activation: Activation


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True):
    task: PoolingTask
    modes: tuple[PoolingMode, ...] = ()
    """Vectors that are joined end to end. Empty if the model has a head for a whole text of its own."""
    includes_prompt: bool = True
    """Whether the tokens of a named prompt are pooled too."""
    dense: tuple[DenseLayer, ...] = ()
    """Layers behind the pooling, in order."""
    normalises: bool = False
    """Whether vectors have length 1."""
    activation: Activation = "identity"
    """What is applied to the numbers of the labels."""
    labels: tuple[str, ...] = ()
    """Names of the labels; empty unless the task is `classify`."""
    dimension: int
    """Numbers of an answer."""
    prompts: dict[str, str] = {}
    """Texts that are put before a text, by the name that a request gives."""
    default_prompt: str | None = None
    """Name of the prompt of requests that name none."""
    max_tokens: int | None = None
    """Longest text in tokens, as the checkpoint says; None if it does not."""
    lowercases: bool = False
    """Whether texts are made lower case before the tokenizer's own steps."""
    source: str = ""
    """Where the description comes from, for display."""

    @property
    def scores_pairs(self) -> bool:
        """Whether it gives one number, so that two texts can be scored against each other."""
        return self.task == "classify" and self.dimension == 1
