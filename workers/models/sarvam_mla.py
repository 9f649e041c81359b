"""Sarvam-105B (Sarvam AI, 2026): DeepSeek-V3 in another size. Its configuration has other names for some keys, and
leaves out others.
"""

from __future__ import annotations

from manta.workers.models.raw_config import RawConfig

MODEL_TYPE = "sarvam_mla"

_USUAL = {
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Values of keys that are missing or null."""
_SPELLINGS = {
    "n_routed_experts": ("num_experts", 128),
    "n_shared_experts": ("num_shared_experts", 1),
    "num_nextn_predict_layers": ("num_mtp_layers", 0),
}
"""Keys of DeepSeek-V3 with other names in configurations of Sarvam, and their usual values."""
_YARN = "deepseek_yarn"
"""The name of yarn in published configurations."""


def as_deepseek(raw: RawConfig) -> RawConfig:
    """Returns a configuration of Sarvam with the keys of DeepSeek-V3."""
    raw.ignore("q_head_dim", "use_qk_norm")  # the sum of other widths, and a flag that no code of Sarvam reads
    usual = dict(_USUAL)
    for key, (spelled, value) in _SPELLINGS.items():
        other = raw[spelled].value
        usual[key] = value if other is None else other
    rope, key = raw["rope_scaling"].object(), "type"
    fixed = {}
    if _YARN in (rope[key].value, rope["rope_type"].value):
        values = {name: value for name, value in rope.values.items() if name != key}
        fixed["rope_scaling"] = values | {"rope_type": "yarn"}
    return raw.completed(usual, fixed)
