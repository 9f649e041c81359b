"""The type and the range of every value of a GGUF file's metadata that Manta reads or knows.

`gguf_file.py` checks all of them before it uses one, whatever the others say. What belongs together, such as the number
of heads and their width, is checked where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from manta.workers.checkpoints.gguf_header import GgufArray
from manta.workers.models.dense import MOST_LAYERS
from manta.workers.models.experts import MOST_EXPERTS
from manta.workers.models.raw_config import MOST_VOCABULARY, RawConfig, RawValue

_MOST_FACTOR = 1e6
_NO_ID = 2**32 - 1
"""Padding token of some published files, which have none."""


def _whole(least: int = 1, **most: int) -> Callable[[RawValue], object]:
    return lambda value: value.whole(least=least, **most)


def _number(least: float, most: float) -> Callable[[RawValue], object]:
    return lambda value: value.number(least=least, most=most)


def _flag(value: RawValue) -> object:
    return value.flag(False)


def _of_layers(value: RawValue) -> object:
    """Checks one number, or leaves a list of one for each layer to `GgufFile.of_layers`."""
    return None if isinstance(value.value, GgufArray) else value.whole(least=0)


OF_MODELS: dict[str, Callable[[RawValue], object]] = {
    "context_length": _whole(),
    "embedding_length": _whole(),
    "block_count": _whole(most=MOST_LAYERS),
    "feed_forward_length": _of_layers,
    "vocab_size": _whole(most=MOST_VOCABULARY),
    "attention.head_count": _whole(least=0),
    "attention.head_count_kv": _of_layers,
    "attention.key_length": _whole(),
    "attention.value_length": _whole(),
    "attention.key_length_swa": _whole(),
    "attention.value_length_swa": _whole(),
    "attention.key_length_mla": _whole(),
    "attention.value_length_mla": _whole(),
    "attention.kv_lora_rank": _whole(),
    "attention.q_lora_rank": _whole(),
    "attention.shared_kv_layers": _whole(least=0, most=MOST_LAYERS),
    "embedding_length_per_layer_input": _whole(least=0),
    "altup.num_inputs": _whole(),
    "altup.active_idx": _whole(least=0),
    "full_attention_interval": _whole(),
    "ssm.conv_kernel": _whole(),
    "ssm.inner_size": _whole(),
    "ssm.state_size": _whole(),
    "ssm.time_step_rank": _whole(),
    "ssm.group_count": _whole(),
    "ssm.dt_b_c_rms": _flag,
    "ssm.has_mup": _flag,
    "attention.sliding_window": _whole(least=0),
    "attention.layer_norm_rms_epsilon": _number(0, 1),
    "attention.scale": _number(0, _MOST_FACTOR),
    "attention.layer_norm_epsilon": _number(0, 1),
    "attn_logit_softcapping": _number(0, _MOST_FACTOR),
    "final_logit_softcapping": _number(0, _MOST_FACTOR),
    "embedding_scale": _number(0, _MOST_FACTOR),
    "residual_scale": _number(0, _MOST_FACTOR),
    "logit_scale": _number(0, _MOST_FACTOR),
    "shortconv.l_cache": _whole(least=0),
    "expert_count": _whole(least=0, most=MOST_EXPERTS),
    "expert_used_count": _whole(least=0, most=MOST_EXPERTS),
    "expert_shared_count": _whole(least=0, most=MOST_EXPERTS),
    "expert_group_count": _whole(least=0, most=MOST_EXPERTS),
    "expert_group_used_count": _whole(least=0, most=MOST_EXPERTS),
    "expert_feed_forward_length": _whole(least=0),
    "expert_shared_feed_forward_length": _whole(least=0),
    "expert_weights_scale": _number(0, _MOST_FACTOR),
    "expert_weights_norm": _flag,
    "expert_gating_func": _whole(least=0),
    "leading_dense_block_count": _whole(least=0, most=MOST_LAYERS),
    "nextn_predict_layers": _whole(least=0, most=MOST_LAYERS),
    "rope.dimension_count": _whole(),
    "rope.dimension_count_swa": _whole(),
    "rope.freq_base": _number(1.001, 1e15),
    "rope.freq_base_swa": _number(1.001, 1e15),
    "rope.scale_linear": _number(0, _MOST_FACTOR),
    "rope.scaling.type": RawValue.text,
    "rope.scaling.factor": _number(0, _MOST_FACTOR),
    "rope.scaling.attn_factor": _number(0, _MOST_FACTOR),
    "rope.scaling.original_context_length": _whole(),
    "rope.scaling.finetuned": _flag,
    "rope.scaling.yarn_beta_fast": _number(0, _MOST_FACTOR),
    "rope.scaling.yarn_beta_slow": _number(0, _MOST_FACTOR),
    "rope.scaling.yarn_ext_factor": _number(-1, _MOST_FACTOR),
    "rope.scaling.yarn_log_multiplier": _number(0, _MOST_FACTOR),
}
"""Keys below the architecture's name."""
OF_FILES: dict[str, Callable[[RawValue], object]] = {
    "general.architecture": RawValue.text,
    "general.name": RawValue.text,
    "general.file_type": _whole(least=0),
    "general.quantization_version": _whole(least=0),
    "split.count": _whole(least=0),
    "split.no": _whole(least=0),
    "split.tensors.count": _whole(least=0),
    "tokenizer.ggml.bos_token_id": _whole(least=0),
    "tokenizer.ggml.eos_token_id": _whole(least=0),
    "tokenizer.ggml.eot_token_id": _whole(least=0),
    "tokenizer.ggml.eom_token_id": _whole(least=0),
    "tokenizer.ggml.unknown_token_id": _whole(least=0),
    "tokenizer.ggml.padding_token_id": _whole(least=0, most=_NO_ID),
    "tokenizer.ggml.add_bos_token": _flag,
    "tokenizer.ggml.add_eos_token": _flag,
    "tokenizer.ggml.add_space_prefix": _flag,
    "tokenizer.chat_template": RawValue.text,
}
"""Keys of all files."""


def check_values(values: Mapping[str, Any], file: str) -> None:
    """Raises `ConfigError` naming the first known key whose value has the wrong type or lies outside its range."""
    raw = RawConfig(values, file)
    architecture = raw["general.architecture"].text()
    for key, check in {**OF_FILES, **{f"{architecture}.{name}": check for name, check in OF_MODELS.items()}}.items():
        if key in raw:
            check(raw[key])
