"""The text decoder of GLM-5.3 Flash as a causal language model. transformers has its layers, and a class for the whole
model with its tower alone.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.modeling_outputs import MultimodalMoeCausalLMOutputWithPast
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel, Glm5NextTextModel


class Glm5NextForCausalLM(Glm5NextPreTrainedModel, transformers.GenerationMixin):  # type: ignore[misc]
    config_class = transformers.Glm5NextTextConfig
    config: transformers.Glm5NextTextConfig

    def __init__(self, config: transformers.Glm5NextTextConfig) -> None:
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **others: Any,
    ) -> MultimodalMoeCausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, cache=cache, use_cache=use_cache, **others
        )
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        return MultimodalMoeCausalLMOutputWithPast(logits=logits, cache=outputs.cache)


transformers.AutoModelForCausalLM.register(transformers.Glm5NextTextConfig, Glm5NextForCausalLM, exist_ok=True)
