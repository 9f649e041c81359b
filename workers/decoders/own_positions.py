"""Families that count positions themselves, from the first token of a call: their tables are given the positions of the
tokens in Manta's flat batches instead. XLM is given the language too. Called by `TransformersModel`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_TABLES = {
    f"{family}PositionalEmbedding"
    for family in (
        "BartLearned",
        "BigBirdPegasusLearned",
        "BlenderbotLearned",
        "BlenderbotSmallLearned",
        "MBartLearned",
        "MarianSinusoidal",
        "MvpLearned",
        "PLBartLearned",
        "PegasusSinusoidal",
        "RoFormerSinusoidal",
        "TrOCRLearned",
    )
}
"""Classes of tables of positions, which look up the `position_ids` that they are given, and count them otherwise."""


def give_positions(model: Any, positions: Callable[[], torch.Tensor]) -> None:
    """Makes the tables of positions in `model` look up what `positions` returns, int64 [num_tokens], in each call."""
    for module in model.modules():
        if type(module).__name__ in _TABLES:
            module.forward = _looking_up(module, positions)


def _looking_up(table: nn.Module, positions: Callable[[], torch.Tensor]) -> Callable[..., torch.Tensor]:
    forward = table.forward

    def run(shape: Any, *_: Any, **__: Any) -> torch.Tensor:
        return forward(shape, position_ids=positions())

    return run


def further_inputs(config: Any, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the inputs of a model besides `token_ids` [1, num_tokens]. XLM takes the number of the text's language,
    as transformers gives it to it when it generates, and no token for padding.
    """
    if config.model_type != "xlm":
        return {}
    inputs = {"attention_mask": torch.ones_like(token_ids)}
    if config.use_lang_emb and config.n_langs > 1:
        inputs["langs"] = torch.full_like(token_ids, config.lang_id)
    return inputs
