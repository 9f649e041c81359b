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
TaskOption = Literal["auto", "generate", "embed", "score"]
"""Values of the option `task`."""


class DenseLayer(msgspec.Struct, frozen=True):
    """A linear layer behind the pooling. Its weights are `linear.weight` and `linear.bias` in a file of `folder`."""

    folder: str
    """Folder within the checkpoint."""
    in_features: int
    out_features: int
    has_bias: bool
    activation: Activation


class PromptMessages(msgspec.Struct, frozen=True, kw_only=True):
    """The messages that a template writes as the model's prompt, and how texts become them.

    As in sentence-transformers, a single text is a message of the role `user`, and the texts of a pair are messages of
    `query` and `document`. A prompt, which says what the texts are compared for, is a message of `system` before them.
    """

    template: str = ""
    """Jinja source. Empty means the checkpoint's own chat template."""
    variables: dict[str, bool | int | float | str] = {}
    """Values that the template gets beside the messages."""
    has_parts: bool = False
    """Whether the content of a message is a list with one part of type `text`, instead of the text itself."""


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
    messages: PromptMessages | None = None
    """How texts become messages; None if the tokenizer reads them as they are."""
    answer_tokens: tuple[int, ...] = ()
    """Ids of the tokens whose logits at the end of the prompt are the score of a model that generates: the first one
    says that two texts fit, and the second one, if there is one, that they do not. The score is their difference,
    before the activation. Empty for a model with a head for labels.
    """
    source: str = ""
    """Where the description comes from, for display."""

    @property
    def scores_pairs(self) -> bool:
        """Whether it gives one number, so that two texts can be scored against each other."""
        return self.task == "classify" and self.dimension == 1
