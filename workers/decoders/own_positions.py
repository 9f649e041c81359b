"""Families that count positions themselves, from the first token of a call: their modules are given the positions of
the tokens in Manta's flat batches instead. The same for XLM's language. `TransformersModel` calls it after loading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_LOOK_UPS = {
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
"""Classes of tables of positions that look up the `position_ids` that they are given, and else count them."""
_COUNTING = "TrOCRSinusoidalPositionalEmbedding"
"""A class that always counts, from the position after that of padding."""


def give_positions(model: Any, positions: Callable[[], torch.Tensor]) -> None:
    """Makes the tables of positions in `model` look up what `positions` returns, int64 [num_tokens], in each call."""
    for module in model.modules():
        name = type(module).__name__
        if name in _LOOK_UPS:
            module.forward = _looking_up(module, positions)
        elif name == _COUNTING:
            module.forward = _after_padding(module, positions)


def _looking_up(module: nn.Module, positions: Callable[[], torch.Tensor]) -> Callable[..., torch.Tensor]:
    forward = module.forward

    def run(shape: Any, *_: Any, **__: Any) -> torch.Tensor:
        return forward(shape, position_ids=positions())

    return run


def _after_padding(module: Any, positions: Callable[[], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(*_: Any, **__: Any) -> torch.Tensor:
        places = positions() + module.padding_idx + 1
        return module.weights.to(places.device).index_select(0, places).unsqueeze(0)

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
