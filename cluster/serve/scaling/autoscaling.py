"""Serve's autoscaling configuration for engines and ingresses, made from the options in `cluster/config.py`."""

from __future__ import annotations

import warnings
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from manta.cluster.config import AutoscalingOptions, EngineConfig
from manta.cluster.serve.scaling.decision import EnginePolicy, Targets, desired_ingresses

REPORT_S = 1.0
"""Seconds between two reports of a replica or ingress to Serve's controller. A request that finds no engine waits for
one.
"""
WAITING_STEPS = 4
"""Full steps of prompt tokens that may wait at each replica, if the options set no `target_waiting_tokens`."""


def autoscaling_config(options: AutoscalingOptions, engine: EngineConfig) -> AutoscalingConfig:
    """Returns the configuration for engines. Serve asks `EnginePolicy` several times a second, and follows its answer
    once the answer has stood for the delay.
    """
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
    """Returns the configuration for ingresses: never fewer than `num_nodes`, the cluster's nodes when it starts, and no
    delays, because the engines that they follow have delays.
    """
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
        # Serve 2.60 warns of environment variables that will replace the interval, but does not read them yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(metrics_interval_s=REPORT_S, look_back_period_s=options.look_back_s, **fields)
