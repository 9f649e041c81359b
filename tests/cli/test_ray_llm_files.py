"""Configurations of Ray Serve LLM, as its own repository has them: what has a counterpart is taken over, and what has
none is refused by its name.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import yaml

from manta.cluster.config import AutoscalingOptions, load_config

ENGINE = {"max_model_len": 8192, "enforce_eager": False}
WITHOUT_ACCELERATOR = {
    "applications": [
        {
            "name": "llm-endpoint",
            "route_prefix": "/",
            "import_path": "ray.serve.llm:build_openai_app",
            "args": {
                "llm_configs": [
                    {
                        "model_loading_config": {"model_id": "meta-llama/Llama-3.2-1B-Instruct"},
                        "engine_kwargs": {"max_model_len": 8192},
                    }
                ]
            },
        }
    ]
}
"""The content of `release/llm_tests/serve/configs/serve_llama_3dot2_1b_no_accelerator.yaml` in Ray's repository."""
TWO_RANKS = {
    "model_loading_config": {"model_id": "meta-llama/Llama-3.1-8B-Instruct"},
    "accelerator_type": "A10G",
    "placement_group_config": {"strategy": "STRICT_PACK", "bundles": [{"GPU": 1}, {"GPU": 1}]},
    "engine_kwargs": ENGINE | {"tensor_parallel_size": 2},
}
"""That of `model_config/llama_3dot1_8b_tp2.yaml` beside it."""
QUANTISED = {
    "model_loading_config": {"model_id": "RedHatAI/Qwen3.5-9B-quantized.w4a16"},
    "accelerator_type": "A10G",
    "engine_kwargs": ENGINE | {"tensor_parallel_size": 1, "language_model_only": True},
}
"""That of `model_config/qwen3dot5_9b_quantized_tp1.yaml`."""


def written(folder: pathlib.Path, data: Any, name: str = "serve.yaml") -> pathlib.Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(data))
    return path


def test_three_files_of_rays_own_are_read(tmp_path: pathlib.Path) -> None:
    (model,) = load_config(written(tmp_path, WITHOUT_ACCELERATOR)).models
    assert model.model_name == model.engine.model == "meta-llama/Llama-3.2-1B-Instruct"
    assert (model.engine.max_model_len, model.engine.device) == (8192, "auto")

    written(tmp_path, TWO_RANKS, "models/two.yaml")
    written(tmp_path, QUANTISED, "models/quantised.yaml")
    files = {"llm_configs": ["models/two.yaml", "models/quantised.yaml"]}
    two, quantised = load_config(written(tmp_path, files)).models
    assert (two.engine.device, two.engine.tensor_parallel_size) == ("cuda", 2)
    assert two.engine.placement_strategy == "STRICT_PACK"
    assert quantised.model_name == "RedHatAI/Qwen3.5-9B-quantized.w4a16"


def test_options_of_the_command_are_added(tmp_path: pathlib.Path) -> None:
    """A shared engine fills in what a file leaves out, as with `models` of one's own."""
    path = written(tmp_path, WITHOUT_ACCELERATOR)
    config = load_config(path, {"port": 8001, "engine.kv_cache_bytes": "8MiB"})
    assert (config.port, config.models[0].engine.kv_cache_bytes) == (8001, 8 << 20)


def entry(**fields: Any) -> dict[str, Any]:
    return {"llm_configs": [{"model_loading_config": {"model_id": "m", "model_source": "demo"}, **fields}]}


def test_every_part_has_its_place(tmp_path: pathlib.Path) -> None:
    scaling = {"min_replicas": 0, "max_replicas": 3, "initial_replicas": 1, "target_ongoing_requests": 9}
    data = entry(
        engine_kwargs={
            "max_num_seqs": 7,
            "dtype": "half",
            "enable_prefix_caching": False,
            "enable_expert_parallel": True,
            "trust_remote_code": False,
        },
        deployment_config={"autoscaling_config": scaling | {"look_back_period_s": 5}},
        placement_group_config={"bundle_per_worker": {"CPU": 2}, "strategy": "SPREAD"},
    )
    (model,) = load_config(written(tmp_path, data)).models
    assert (model.model_name, model.engine.model, model.engine.dtype) == ("m", "demo", "float16")
    assert (model.engine.max_num_sequences, model.engine.enable_prefix_caching) == (7, False)
    assert (model.engine.num_threads, model.engine.placement_strategy) == (2, "SPREAD")
    assert model.engine.expert_parallel
    expected = AutoscalingOptions(min_replicas=0, max_replicas=3, target_ongoing_requests=9, look_back_s=5)
    assert model.autoscaling == expected


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (entry(lora_config={"dynamic_lora_loading_path": "s3://x"}), "lora_config"),
        (entry(llm_engine="vLLM"), "llm_engine"),
        (entry(runtime_env={"env_vars": {}}), "runtime_env"),
        (entry(accelerator_type="AMD-Instinct-MI300X"), "accelerator_type 'AMD-Instinct-MI300X'"),
        (entry(engine_kwargs={"gpu_memory_utilization": 0.9}), "engine_kwargs.gpu_memory_utilization"),
        (entry(engine_kwargs={"trust_remote_code": True}), "engine_kwargs.trust_remote_code True"),
        (entry(engine_kwargs={"pipeline_parallel_size": 2}), "engine_kwargs.pipeline_parallel_size 2"),
        (entry(deployment_config={"max_ongoing_requests": 64}), "deployment_config.max_ongoing_requests"),
        (
            entry(deployment_config={"autoscaling_config": {"min_replicas": 1, "initial_replicas": 3}}),
            "autoscaling_config.initial_replicas 3",
        ),
        (entry(placement_group_config={"bundles": [{"GPU": 1}, {"GPU": 1}]}), "placement_group_config.bundles"),
        (entry(model_loading_config={"model_id": "m", "model_source": {"bucket_uri": "s3://x"}}), "model_source"),
        (entry(model_loading_config={}), "model_loading_config.model_id"),
        (entry() | {"other": 1}, "other"),
        ({"llm_configs": "model.yaml"}, "llm_configs 'model.yaml'"),
        ({"llm_configs": []}, "llm_configs []"),
        ({"applications": [{"args": entry(), "route_prefix": "/x"}]}, "route_prefix"),
        ({"applications": [{"args": entry()}, {"args": entry()}]}, "applications 2"),
        ({"applications": [{"args": entry() | {"ingress_cls_config": {}}}]}, "ingress_cls_config"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(data: dict[str, Any], key: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="has no counterpart here") as refused:
        load_config(written(tmp_path, data))
    assert key in str(refused.value)


def test_a_number_that_is_null_is_left_out(tmp_path: pathlib.Path) -> None:
    scaling = {"min_replicas": None, "max_replicas": 3, "initial_replicas": 1}
    data = entry(deployment_config={"autoscaling_config": scaling})
    (model,) = load_config(written(tmp_path, data)).models
    assert model.autoscaling == AutoscalingOptions(max_replicas=3)


def test_values_keep_the_bounds_of_the_options(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"models\[0\]\.engine\.max_model_len"):
        load_config(written(tmp_path, entry(engine_kwargs={"max_model_len": 0})))
    with pytest.raises(ValueError, match="must hold mappings"):
        load_config(written(tmp_path, {"llm_configs": [7]}))
