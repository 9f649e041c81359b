"""VaultGemma (VaultGemma Team, 2025): Gemma 2's layers without the norms after attention and MLP."""

from __future__ import annotations

from manta.workers.models import gemma2
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec

ARCHITECTURE = "VaultGemmaForCausalLM"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as Gemma 2 does."""
    return gemma2.read_config(raw)


def describe(config: ModelConfig) -> DecoderSpec:
    layers = (gemma2.layer(config, index) for index in range(config.num_layers))
    return gemma2.decoder(config, [layer._replace(mixer_output_norm=None, mlp_output_norm=None) for layer in layers])
