"""The text decoder of Qwen3-VL's mixtures of experts (Qwen Team, 2025): Qwen3's, with the experts of a layer in two
tensors. Their columns are the outputs, and in those that transformers 5 writes their rows.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama, qwen3_moe
from manta.workers.models.experts import experts, stored_either_way
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, ExpertsSpec, LayerSpec

ARCHITECTURE = "Qwen3VLMoeTextModel"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `qwen3_moe.read_config` does."""
    raw["norm_topk_prob"].only(True)
    config = qwen3_moe.read_config(raw)
    assert config.experts is not None
    return msgspec.structs.replace(config, experts=msgspec.structs.replace(config.experts, normalises=True))


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    layer = qwen3_moe.layer(config, index)
    if not isinstance(layer.mlp, ExpertsSpec):
        return layer
    together = experts(config, f"model.layers.{index}.mlp", are_stacked=True, are_rows=None)
    return layer._replace(mlp=stored_either_way(layer.mlp, together))
