"""Inkling 2's looped models (Thinking Machines, 2026): some layers run several times, each time with keys, values and
states of their own, and take up messages of the time before.
"""

from __future__ import annotations

from manta.workers.models import inkling2
from manta.workers.models.inkling import Usual
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.part_shapes import LayerLoop
from manta.workers.models.raw_config import RawConfig

ARCHITECTURE = "Inkling2LoopForCausalLM"

_USUAL = Usual(num_windowed_kv_heads=8, window=1024, floor=8192)
_MOST_PASSES = 64

describe = inkling2.describe


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_layers` does, and for a loop that begins or ends within
    a block of layers.
    """
    published = raw["loop_config"].object()
    names = {
        "loop_layer_index_start": "core_start",
        "loop_layer_index_end": "core_end",
        "loop_num_passes": "num_passes",
        "loop_gate_rank": "gate_rank",
    }
    given = {key: published[name].value for key, name in names.items() if published[name].value is not None}
    raw = raw.completed({}, given)
    num_layers, per_block = raw["num_hidden_layers"].whole(), raw["n_layers_per_attn_res_block"].whole(6)
    first, end = raw["loop_layer_index_start"], raw["loop_layer_index_end"]
    loop = LayerLoop(
        first=first.whole(6),
        end=end.whole(18, most=num_layers),
        num_passes=raw["loop_num_passes"].whole(3, most=_MOST_PASSES),
        gate_rank=raw["loop_gate_rank"].whole(64),
    )
    if loop.first % per_block or loop.first >= loop.end:
        raise first.refused(f"a multiple of n_layers_per_attn_res_block, {per_block}, below loop_layer_index_end")
    if loop.end % per_block:
        raise end.refused(f"a multiple of n_layers_per_attn_res_block, {per_block}")
    return inkling2.read_model(raw, _USUAL, num_experts=128, inner=1152, loop=loop)
