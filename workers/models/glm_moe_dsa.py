"""GLM-5 (Z.ai, 2026): DeepSeek-V3.2's layers in another size. Some layers have no indexer and attend to the tokens that
the last layer before them chose (https://arxiv.org/abs/2603.12201).
"""

from __future__ import annotations

from manta.workers.models import deepseek_v3, latent
from manta.workers.models.indexer import OWN, SHARED, read_indexer, read_shared_layers, with_shared_layers
from manta.workers.models.model_config import ExpertsConfig, IndexerShape, LatentShape, ModelConfig
from manta.workers.models.raw_config import RawConfig

ARCHITECTURE = "GlmMoeDsaForCausalLM"

_USUAL = LatentShape(query_rank=2048, kv_rank=512, plain_dim=192, rope_dim=64, value_dim=256)
_INDEXER = IndexerShape(num_heads=32, head_dim=128, num_chosen=2048, is_interleaved=True)
_EXPERTS = ExpertsConfig(num_experts=256, num_chosen=8, intermediate_size=2048, scale=2.5, dense_layers=(0, 1, 2))
_LETTERS = {"F": OWN, "S": SHARED}

describe = deepseek_v3.describe


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent`, `read_indexer`, `read_shared_layers` and
    `read_sigmoid_experts` do, and for ropes whose pairs are not neighbours.
    """
    for key in ("rope_interleave", "indexer_rope_interleave"):
        raw[key].only(True)
    indexer = read_indexer(raw, _INDEXER, _USUAL.rope_dim)
    config = latent.read_latent(raw, _USUAL, norm_eps=("rms_norm_eps", 1e-5), indexer=indexer)
    config = deepseek_v3.read_sigmoid_experts(raw, config, _EXPERTS)
    usual = usual_indexer_kinds(raw, config.num_layers)
    return with_shared_layers(config, read_shared_layers(raw, config.num_layers, usual))


def usual_indexer_kinds(raw: RawConfig, num_layers: int) -> list[str]:
    """Returns the kinds of layers by a text of letters, or a list, or by how often layers have an indexer."""
    pattern = raw["index_topk_pattern"]
    period, first = raw["index_topk_freq"].whole(1), raw["index_skip_topk_offset"].whole(2, least=0)
    if isinstance(pattern.value, str):
        if len(pattern.value) != num_layers or set(pattern.value) - _LETTERS.keys() or pattern.value[0] != "F":
            raise pattern.refused(f"{num_layers} letters F and S, of which the first is F")
        return [_LETTERS[letter] for letter in pattern.value]
    if pattern.value is not None:
        kinds = [kind.one_of(OWN, SHARED) for kind in pattern.items()]
        if len(kinds) != num_layers or kinds[0] != OWN:
            raise pattern.refused(f"a list of {num_layers} kinds, one for each layer, of which the first is {OWN}")
        return kinds
    return [SHARED if max(layer - first + 1, 0) % period else OWN for layer in range(num_layers)]
