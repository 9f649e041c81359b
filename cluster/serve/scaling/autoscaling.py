"""Serve's configuration of autoscaling, for engines and ingresses, from the options in `cluster/config.py`."""

from __future__ import annotations

import warnings
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from cluster.config import AutoscalingOptions, EngineConfig
from cluster.serve.scaling.decision import EnginePolicy, Targets, desired_ingresses

REPORT_S = 1.0
"""Between two reports of replicas and ingresses to Serve's controller. A request that finds no engine waits for one."""
WAITING_STEPS = 4
"""Steps full of prompt tokens that may wait at each replica if the options do not say how many tokens may."""


def autoscaling_config(options: AutoscalingOptions, engine: EngineConfig) -> AutoscalingConfig:
    """Serve asks `EnginePolicy` several times a second, and does what it says when it has said so for the delay."""
    targets = Targets(
        ongoing_requests=options.target_ongoing_requests or engine.max_num_sequences,
        kv_usage=options.target_kv_usage,
        waiting_tokens=options.target_waiting_tokens or WAITING_STEPS * engine.max_num_batched_tokens,
        ttft_s=options.target_ttft_s,
    )
    return _config(
        options,
        min_replicas=options.min_replicas,
        initial_replicas=options.num_initial,
        max_replicas=options.max_replicas,
        upscale_delay_s=options.upscale_delay_s,
        downscale_delay_s=options.downscale_delay_s,
        downscale_to_zero_delay_s=options.to_zero_delay_s,
        policy=AutoscalingPolicy(policy_function=EnginePolicy, policy_kwargs=targets._asdict()),
    )


def ingress_autoscaling_config(options: AutoscalingOptions, num_nodes: int) -> AutoscalingConfig:
    """At least one for each of the nodes that there are at the start. They follow the engines, whose delays suffice."""
    return _config(
        options,
        min_replicas=num_nodes,
        max_replicas=max(num_nodes, options.max_replicas),
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=AutoscalingPolicy(policy_function=desired_ingresses),
    )


def _config(options: AutoscalingOptions, **fields: Any) -> AutoscalingConfig:
    with warnings.catch_warnings():
        # Serve names environment variables that are to replace the interval, and does not read them yet (2.60).
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(metrics_interval_s=REPORT_S, look_back_period_s=options.look_back_s, **fields)
