"""`/metrics`: overlapping scrapes, engines that restart, several ingresses, and the configured limits.

`tests/serve/test_resume.py` asks several ingresses of a live application.
"""

from __future__ import annotations

import asyncio
import math
import pathlib
import re
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from manta.cluster.config import AutoscalingOptions, EngineConfig, ServeConfig
from manta.cluster.engine.request import FinishStatus
from manta.cluster.engine.stats import DraftCounts, EngineStats, ServiceStats
from manta.cluster.http.exchange.metrics import Metrics, numbers
from tests.async_tests import async_test
from tests.engine.test_engine import make_engine
from tests.local_server import local_server

RULES = pathlib.Path(__file__).resolve().parents[2] / "configs" / "prometheus" / "rules.yml"
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def series(text: str | bytes) -> Series:
    """By name and labels but the model's; asserts that each family and each series is there once."""
    found: Series = {}
    names = set()
    for family in text_string_to_metric_families(text if isinstance(text, str) else text.decode()):
        assert family.name not in names
        names.add(family.name)
        for sample in family.samples:
            labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "model_name"))
            assert (sample.name, labels) not in found
            found[sample.name, labels] = sample.value
    return found


@pytest.fixture(scope="module")
def stats() -> EngineStats:
    return make_engine("llama").stats()


def counted(stats: EngineStats, engine_id: str, hits: int, accepted: int = 0) -> EngineStats:
    drafts = DraftCounts({"ngram": [hits]}, {"ngram": [accepted]})
    return msgspec.structs.replace(stats, engine_id=engine_id, prefix_cache_hits=hits, drafts=drafts)


def test_answers_that_overlap_never_count_backwards(stats: EngineStats) -> None:
    """The second to be rendered asked the engine first."""
    metrics = Metrics("m")
    for hits, shown in ((50, 50), (70, 70), (60, 70), (80, 80)):
        found = series(metrics.render([counted(stats, "a", hits, hits // 2)]))
        assert found["manta:prefix_cache_hits_total", ()] == shown
        labels = (("position", "0"), ("proposer", "ngram"))
        assert found["manta:spec_decode_num_draft_tokens_total", labels] == shown
        assert found["manta:spec_decode_num_accepted_tokens_total", labels] == shown // 2


def test_each_of_several_ingresses_answers_for_all(stats: EngineStats) -> None:
    """Whichever replica answers, a series has one value, and none falls unless its process is gone."""
    ingresses = {name: Metrics("m", name) for name in "xy"}
    for name, count in (("x", 3), ("y", 5)):
        ingresses[name].generation_tokens.inc(count)
        ingresses[name].time_to_first_token.observe(count)
        ingresses[name].request_ended(FinishStatus.FINISHED_LENGTH)

    def ask(name: str, *engines: EngineStats) -> Series:
        others = [metrics.own() for other, metrics in ingresses.items() if other != name]
        return series(ingresses[name].render(engines, others))

    engines = [counted(stats, "a", 50, 9), counted(stats, "b", 20)]
    found = ask("x", *engines)
    assert found == ask("y", *engines)
    assert found["manta:generation_tokens_total", (("replica", "x"),)] == 3
    assert found["manta:generation_tokens_total", (("replica", "y"),)] == 5
    assert found["manta:time_to_first_token_seconds_sum", (("replica", "y"),)] == 5
    assert found["manta:request_success_total", (("finished_reason", "length"), ("replica", "x"))] == 1
    assert found["manta:prefix_cache_hits_total", (("replica", "a"),)] == 50
    assert found["manta:prefix_cache_hits_total", (("replica", "b"),)] == 20
    assert found["manta:kv_cache_blocks", ()] == 2 * stats.num_blocks, "what is so now is one number for all"
    restarted = [engines[1], counted(stats, "c", 1)]
    found = ask("x", *restarted)
    assert found == ask("y", *restarted)
    assert [key for key in found if key[0] == "manta:prefix_cache_hits_total"] == [
        ("manta:prefix_cache_hits_total", (("replica", name),)) for name in "bc"
    ]


def test_every_configured_number_is_shown_no_secret() -> None:
    config = ServeConfig(api_keys=("hidden-from-everybody",), client_timeout_s=7)
    found = dict(numbers(config))
    assert found["client_timeout_s"] == 7
    assert found["client_buffer_bytes"] == config.client_buffer_bytes
    assert found["request_timeout_s"] == config.request_timeout_s
    assert found["engine.max_num_waiting"] == config.engine.max_num_waiting
    assert found["engine.grammar_pool.mask_seconds"] == config.engine.grammar_pool.mask_seconds
    assert found["engine.constraints.compile_memory_bytes"] == config.engine.constraints.compile_memory_bytes
    assert "engine.enable_prefix_caching" not in found
    assert not [name for name in found if name.startswith("api_keys")]


@async_test
async def test_limits_and_sizes_hold_under_load() -> None:
    async with local_server(request_timeout_s=33) as server:
        prompt = list(range(5, 69))  # 4 blocks of 16 tokens

        async def ask() -> Series:
            status, text = await server.get("/metrics")
            assert status == 200
            return series(text)

        for _ in range(3):
            asking = [ask() for _ in range(8)]
            await asyncio.gather(*asking, server.post(prompt=prompt, max_tokens=20))
        found = await ask()
        info = server.replica.engine.model
        assert found["manta:option", (("option", "request_timeout_s"),)] == 33
        assert found["manta:cache_config_info", (("block_size", "16"), ("cache_dtype", "auto"))] == 1
        assert found["manta:option", (("option", "engine.max_num_sequences"),)] == 256
        assert found["manta:kv_cache_bytes", ()] == info.kv_cache_bytes
        assert found["manta:kv_cache_blocks", ()] == found["manta:kv_cache_free_blocks", ()] == info.num_blocks
        assert found["manta:prefix_cache_blocks", ()] == (64 + 20 - 1) // 16
        assert found["manta:prefix_cache_queries_total", ()] == 3 * 64
        assert all(math.isfinite(value) for value in found.values())


def test_options_are_those_that_engines_have() -> None:
    """In an update an ingress may have the new ones before an engine has."""
    metrics = Metrics("m")
    metrics.show_options(ServeConfig(engine=EngineConfig(max_num_waiting=9, block_size=32)))
    engine = make_engine("llama").stats()

    def told(name: str, **options: Any) -> EngineStats:
        service = ServiceStats(
            replica="", node="", start_seconds={}, waiting_tokens=0, ttft_s=0, requests_per_s=0,
            config=EngineConfig(**options),
        )  # fmt: skip
        return msgspec.structs.replace(engine, engine_id=name, service=service)

    def shown(*engines: EngineStats) -> tuple[float, set[str], float]:
        found = series(metrics.render(engines))
        sizes = {dict(labels)["block_size"] for name, labels in found if name == "manta:cache_config_info"}
        option = found["manta:option", (("option", "engine.max_num_waiting"),)]
        return option, sizes, found["manta:engine_configurations", ()]

    old, new = told("a", max_num_waiting=5), told("b", max_num_waiting=9, block_size=32)
    assert shown() == (9, {"32"}, 0)
    assert shown(old) == (5, {"16"}, 1)
    assert shown(old, new) == (5, {"16", "32"}, 2)
    assert shown(new, told("c", max_num_waiting=9, block_size=32)) == (9, {"32"}, 1)


@async_test
async def test_a_gateway_made_for_vllm_finds_its_metrics() -> None:
    """The names and labels of the model server protocol of the Gateway API Inference Extension (proposal 003)."""
    async with local_server(vllm_metrics=True) as server:
        await server.post(max_tokens=20)
        found = series((await server.get("/metrics"))[1])
        num_blocks = server.replica.engine.model.num_blocks
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert found[f"vllm:{name}", ()] == 0
    (labels,) = (dict(labels) for name, labels in found if name == "vllm:cache_config_info")
    assert (labels["block_size"], labels["num_gpu_blocks"]) == ("16", str(num_blocks))
    assert found["vllm:generation_tokens_total", ()] == 20
    assert found["vllm:time_to_first_token_seconds_count", ()] == 1
    copied = {name.removeprefix("vllm:"): value for (name, labels), value in found.items() if name.startswith("vllm:")}
    assert all(f"manta:{name}" in {each for each, _ in found} for name in copied)


@pytest.mark.parametrize(("least", "is_shown"), [(1, False), (0, True)])
def test_a_gateway_is_told_no_load_of_engines_that_do_not_answer(
    stats: EngineStats, least: int, is_shown: bool
) -> None:
    """A load of 0 would draw all requests to a server that computes none (https://github.com/llm-d/llm-d-router/pull/2547
    has what gateways do without it). A model that needs no engine has that load.
    """
    autoscaling = AutoscalingOptions(min_replicas=least, max_replicas=1)
    metrics = Metrics("m")
    metrics.show_options(ServeConfig(vllm_metrics=True, autoscaling=autoscaling))
    names = ["vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"]
    away = msgspec.structs.replace(stats, is_away=True, num_waiting=7)
    for engines, shown in (([], is_shown), ([away], is_shown), ([stats], True), ([away, stats], True)):
        found = series(metrics.render(engines))
        assert [name for name in names if (name, ()) in found] == names * shown
        assert ("manta:num_requests_waiting", ()) in found


def test_failures_are_counted_from_nought() -> None:
    """Prometheus takes a rate from the second sample on: a counter that begins with a failure hides it."""
    metrics = Metrics("m", "x")
    before = series(metrics.render([]))
    assert {dict(labels)["status"] for (name, labels) in before if name == "manta:answers_total"} >= {"200", "500"}
    assert not any(value for (name, _), value in before.items() if name == "manta:answers_total")
    metrics.answered(500)
    after = series(metrics.render([]))
    assert after["manta:answers_total", (("replica", "x"), ("status", "500"))] == 1
    statuses = set(re.findall(r'status="(\d+)"', RULES.read_text()))
    assert statuses <= {dict(labels)["status"] for (name, labels) in before if name == "manta:answers_total"}


def test_counters_do_not_fall_at_engine_restarts() -> None:
    one, other = make_engine("llama").stats(), make_engine("llama").stats()
    assert one.engine_id != other.engine_id
    metrics = Metrics("m")

    def hits(*queries: tuple[str, int]) -> float:
        engines = [
            msgspec.structs.replace(one, engine_id=name, prefix_cache_hits=count, kv_usage=count / 100, num_running=2)
            for name, count in queries
        ]
        text = metrics.render(engines).decode()
        assert f'manta:num_requests_running{{model_name="m"}} {2.0 * len(queries)}' in text
        mean = sum(count for _, count in queries) / len(queries) / 100
        assert f'manta:kv_cache_usage_perc{{model_name="m"}} {mean}' in text
        return next(
            float(line.split()[-1]) for line in text.splitlines() if line.startswith("manta:prefix_cache_hits_total")
        )

    assert hits(("a", 50), ("b", 25)) == 75
    assert hits(("a", 50), ("b", 25)) == 75
    assert hits(("a", 75), ("c", 25)) == 125
    assert hits(("c", 50)) == 150
