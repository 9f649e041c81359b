"""Finds the part of a multimodal model of transformers that reads and writes text.

`TransformersModel` runs it alone. What sees or hears is dropped after loading.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from manta.workers.checkpoints.transformers_support import text_config


def text_part(model: Any) -> tuple[Any, Any]:
    """Returns what turns token ids into logits, and its part that turns them into final hidden states.

    Of a model of text alone these are the model and its base. A multimodal model may hold a causal language model, or
    the decoder and the head of one: then that language model computes the logits, with the scales and caps that
    transformers leaves out of some multimodal models. If transformers has no such language model, the whole model
    computes them.
    """
    text = text_config(model.config)
    if text is model.config:
        base = getattr(model, base_name(model))
        if model.config.model_type == "chameleon":
            del base.vqmodel  # which sees
        return model, base
    causal_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    if causal_class is None:
        return model, model.get_decoder()
    own = next((module for module in model.modules() if isinstance(module, causal_class)), None)
    if own is None:
        with torch.device("meta"):
            own = causal_class(text)
        setattr(own, base_name(own), model.get_decoder())
        own.set_output_embeddings(model.get_output_embeddings())
    return own, getattr(own, base_name(own))


def base_name(model: Any) -> str:
    """Returns the name of the attribute that is the base of a model with a head. Mllama's class names another one."""
    name = model.base_model_prefix
    return name if hasattr(model, name) else "model"
