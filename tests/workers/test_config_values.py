"""Every key of families without a table of their own, set to values of other types, which it is refused for by name."""

from __future__ import annotations

import pathlib

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from manta.workers.models.families import FAMILIES
from manta.workers.models.harmless_keys import HARMLESS_KEYS
from manta.workers.models.raw_config import ConfigError
from tests.workers.test_config_keys import (
    CHOICE,
    FLAG,
    LIST,
    NUMBER,
    OBJECT,
    OWN,
    WHOLE,
    read,
    refused_key,
    values_of,
)

OF_TYPE = {bool: FLAG, int: WHOLE, float: NUMBER, str: CHOICE, list: LIST, dict: OBJECT}
"""Values that are refused in place of a served one, by its type."""
NO_WHOLE_NUMBER = {"expand", "mamba_expand"}
WITHOUT_EFFECT = {
    # Training, and the first weights.
    "final_w_init_variance_scale",
    "hidden_dropout",
    "linear_a_log_max",
    "linear_a_log_min",
    "linear_dt_init_floor",
    "linear_dt_max",
    "linear_dt_min",
    "mtp_layers_block_type",
    "mtp_loss_scaling_factor",
    "rescale_prenorm_residual",
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_max",
    "time_step_scale",
    "w_init_variance_scale",
    "z_loss_coefficient",
    # How transformers and others compute.
    "block_size",
    "chunk_size",
    "mamba_chunk_size",
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "num_logits_to_keep",
    "residual_in_fp32",
    "use_associative_scan",
    "use_mamba_kernels",
    "use_mambapy",
}
"""Keys of families with recurrent mixers that change no number."""
SAID_OTHERWISE = {
    ("FalconH1ForCausalLM", "mamba_expand"),
    ("NemotronHForCausalLM", "expand"),
    ("NemotronHForCausalLM", "mamba_proj_bias"),
    ("Mamba2ForCausalLM", "intermediate_size"),
    ("Mamba2ForCausalLM", "time_step_rank"),
    *(
        (family, key)
        for family in ("Mamba2ForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM")
        for key in ("num_attention_heads", "num_key_value_heads", "time_step_min")
    ),
    ("Gemma3nForCausalLM", "altup_coef_clip"),  # while training
    *(
        ("Zamba2ForCausalLM", key)
        for key in (
            "attention_hidden_size",
            "hybrid_layer_ids",
            "kv_channels",
            "num_query_groups",
            "use_mem_eff_path",
        )
    ),
    ("BailingHybridForCausalLM", "rope_theta"),
    ("InklingForCausalLM", "chain_hidden_post_norm"),  # of draft heads, as the next
    ("InklingForCausalLM", "mtp_hidden_states_first"),
    ("InklingForCausalLM", "number_of_conv_states"),
    ("Inkling2ForCausalLM", "number_of_conv_states"),
    ("Inkling2LoopForCausalLM", "number_of_conv_states"),
    ("InklingForCausalLM", "rms_norm_eps_moe_gate"),
    ("Qwen4ExpForCausalLM", "number_of_conv_states"),
    *(("RwkvForCausalLM", key) for key in ("context_length", "num_attention_heads", "num_key_value_heads")),
    *(("ZambaForCausalLM", key) for key in ("attention_hidden_size", "time_step_min")),
    *(
        ("xLSTMForCausalLM", key)
        for key in (
            "autocast_kernel_dtype",
            "chunkwise_kernel",
            "embedding_dim",
            "inference_state_dtype",
            "intermediate_size",
            "max_inference_chunksize",
            "mode",
            "num_attention_heads",
            "num_blocks",
            "num_key_value_heads",
            "return_last_states",
            "sequence_kernel",
            "step_kernel",
            "weight_mode",
        )
    ),
}
"""Keys of a family without effect, which matter in others or whose meaning other keys have."""


@pytest.mark.few(5)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in OWN])
def test_a_value_of_another_type_is_refused_by_its_key_in_other_families(family: str, tmp_path: pathlib.Path) -> None:
    values = values_of(family)
    usual, known = read(tmp_path, values), HARMLESS_KEYS | {"architectures", "eos_token_id"}
    for key in [key for key, value in values.items() if value is not None and key not in known]:
        for value in OF_TYPE[type(values[key])]:
            if value == 1.5 and key in NO_WHOLE_NUMBER:
                continue
            if value == -1 and key in ("kda_lower_bound", "linear_lower_bound"):
                continue  # bounds below 0
            if value == 7 and (family, key) == ("Gemma3nForCausalLM", "intermediate_size"):
                continue  # one number for all layers
            if key in WITHOUT_EFFECT or (family, key) in SAID_OTHERWISE:
                assert read(tmp_path, values | {key: value}) == usual, key
                continue
            with pytest.raises(ConfigError) as caught:
                read(tmp_path, values | {key: value})
            assert caught.value.key.partition("[")[0].partition(".")[0] == key, value


@pytest.mark.parametrize("family", ["KimiLinearForCausalLM", "BailingHybridForCausalLM"])
def test_either_name_of_a_key_is_read(family: str, tmp_path: pathlib.Path) -> None:
    """Published files have DeepSeek-V3's names for some of them, and transformers writes others."""
    written = values_of(family)
    names = {other: name for name, other in CONFIG_MAPPING[written["model_type"]].attribute_map.items()}
    published = {names.get(key, key): value for key, value in written.items()}
    assert len(published.keys() - written.keys()) >= 5
    assert read(tmp_path, published) == read(tmp_path, written)


def test_time_steps_have_two_bounds(tmp_path: pathlib.Path) -> None:
    values = values_of("Mamba2ForCausalLM")
    for limits in ([], [0.0], [0.0, 1.0, 2.0], [0.0, {"a": 1}]):
        refused = refused_key(tmp_path, values | {"time_step_limit": limits})
        assert refused in ("time_step_limit", "time_step_limit[1]"), limits
    assert refused_key(tmp_path, values | {"time_step_limit": [0.0, {"__float__": "Infinity"}]}) is None
