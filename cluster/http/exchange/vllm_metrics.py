"""Metrics under vLLM's names too, for gateways and dashboards that were made for vLLM (`vllm_metrics`).

A gateway with an endpoint picker reads `vllm:num_requests_waiting`, `vllm:num_requests_running`,
`vllm:kv_cache_usage_perc` and the labels `block_size` and `num_gpu_blocks` of `vllm:cache_config_info`, as the model
server protocol of the Gateway API Inference Extension says (proposal 003).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

OWN, VLLM = "manta:", "vllm:"
CACHE_CONFIG, NUM_BLOCKS = "cache_config_info", "kv_cache_blocks"
SAME_MEANING = frozenset(
    {
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", CACHE_CONFIG),
        *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
        *("prompt_tokens", "generation_tokens", "request_success"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    }
)
"""Metrics that vLLM has under the same name and with the same meaning. Some have more labels here."""


LOAD = frozenset({"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"})
"""Gauges by which a gateway chooses the server with the least load. While no engine of a model answers, they would be 0
and draw requests to it, so they are left out; gateways take that for a load that they do not know.
"""


def as_vllm(families: Iterable[Metric]) -> Iterator[Metric]:
    """Yields copies of the metrics that vLLM has too, under its names."""
    by_name = {family.name.removeprefix(OWN): family for family in families}
    unknown = _models_without_an_answer(by_name)
    num_blocks = sum(sample.value for sample in by_name[NUM_BLOCKS].samples)
    for name in sorted(SAME_MEANING & by_name.keys()):
        family = by_name[name]
        more = {"num_gpu_blocks": f"{num_blocks:.0f}"} if name == CACHE_CONFIG else {}
        copy = Metric(f"{VLLM}{name}", family.documentation, family.type)
        copy.samples = [
            _renamed(sample, more)
            for sample in family.samples
            if name not in LOAD or sample.labels["model_name"] not in unknown
        ]
        yield copy


def _models_without_an_answer(families: Mapping[str, Metric]) -> set[str]:
    """Returns the models of which engines should serve and none does. One that needs none has no load."""
    serving, wanted = (
        {sample.labels["model_name"]: sample.value for sample in families[name].samples}
        for name in ("engines_serving", "engines_wanted")
    )
    return {model for model, number in wanted.items() if number and not serving[model]}


def _renamed(sample: Sample, more: dict[str, str]) -> Sample:
    return Sample(f"{VLLM}{sample.name.removeprefix(OWN)}", {**sample.labels, **more}, sample.value)
