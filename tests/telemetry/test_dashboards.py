"""Grafana's dashboards: every query against a live `/metrics`, and what Grafana and Prometheus read beside them."""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from manta.cluster.config import ServeConfig
from manta.cluster.http.exchange.metrics import Metrics
from manta.specdecode.speculative_config import SpeculativeConfig
from tests.local_server import local_server

GRAFANA = pathlib.Path(__file__).resolve().parents[2] / "configs" / "grafana"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(GRAFANA.glob("dashboards/*.json"))}
GROUPS = yaml.safe_load((GRAFANA.parent / "prometheus" / "rules.yml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
"""Alerts and recorded ratios; `test_alerts.py` evaluates them."""
QUERIES = [
    (f"{name}: {panel['title']} {target['refId']}", target["expr"])
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    for target in panel["targets"]
]
"""(where it stands, PromQL with Grafana's variables)."""

GROWING = ("rate", "increase")
"""Functions of counters."""


class Exposed(NamedTuple):
    """What a server exposes, by the name of a series."""

    model: str
    labels: dict[str, list[dict[str, str]]]
    """Labels of each series."""
    grows: dict[str, bool]
    """Whether each metric is a counter."""


@pytest.fixture(scope="module")
def exposed() -> Exposed:
    """By a server after requests of each kind: of a client with a key, with a constraint, with drafts."""

    async def run() -> tuple[str, bytes]:
        key = "operators:0123456789abcdef"
        drafts = SpeculativeConfig(proposers=("ngram",), ngram_min=1, adaptive=False)
        async with local_server(api_keys=(key,), engine_options={"speculative": drafts}) as server:
            bearer = [f"Authorization: Bearer {key.partition(':')[2]}"]
            for fields in ({"prompt": [5, 9] * 16}, {"structured_outputs": {"regex": "(ab)+"}, "ignore_eos": False}):
                status, body = await server.post(headers=bearer, max_tokens=30, **fields)
                assert status == 200, body
            assert (await server.get("/nothing"))[0] == 404
            _, text = await server.get("/metrics")
            return server.model, text

    model, text = asyncio.run(run())
    found = Exposed(model, {}, {})
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.labels.setdefault(sample.name, []).append(sample.labels)
            found.grows[sample.name] = family.type in ("counter", "histogram")
    return found


def parsed(query: str, model: str) -> promql.Expr:
    """Raises `ValueError` for what is no PromQL."""
    return promql.parse(query.replace("$model", model).replace("$__rate_interval", "1m"))


def selectors(expression: Any, function: str = "") -> Iterator[tuple[Any, str]]:
    """Every series that an expression selects, and the function that gets it over a range of time, if one does."""
    if isinstance(expression, promql.MatrixSelector):
        yield expression.vector_selector, function
    elif isinstance(expression, promql.VectorSelector):
        yield expression, ""
    elif isinstance(expression, promql.Call):
        for argument in expression.args:
            yield from selectors(argument, expression.func.name)
    elif isinstance(expression, promql.BinaryExpr):
        yield from selectors(expression.lhs)
        yield from selectors(expression.rhs)
    elif isinstance(expression, promql.AggregateExpr | promql.ParenExpr):
        yield from selectors(expression.expr, function)


def groups(expression: Any) -> Iterator[tuple[Any, list[str]]]:
    """Every aggregation, with the labels that it keeps."""
    if isinstance(expression, promql.AggregateExpr):
        yield expression, expression.modifier.labels if expression.modifier else []
        yield from groups(expression.expr)
    elif isinstance(expression, promql.BinaryExpr):
        yield from groups(expression.lhs)
        yield from groups(expression.rhs)
    elif isinstance(expression, promql.Call):
        for argument in expression.args:
            yield from groups(argument)


def check(query: str, exposed: Exposed) -> None:
    """Raises `ValueError` if the query cannot show anything of this server."""
    expression = parsed(query, exposed.model)
    for selector, function in selectors(expression):
        if selector.name not in exposed.labels:
            raise ValueError(f"there is no series {selector.name}")
        if exposed.grows[selector.name] != (function in GROWING):
            raise ValueError(f"{selector.name} {'is no counter' if function in GROWING else 'counts: show its rate'}")
        wanted = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
        if not any(wanted.items() <= labels.items() for labels in exposed.labels[selector.name]):
            raise ValueError(f"no series {selector.name} has {wanted}")
    for aggregate, kept in groups(expression):
        for selector, _ in selectors(aggregate):
            # Of several ingresses each has a name, as `test_metrics.py` shows; this server has one.
            missing = set(kept) - {"replica"} - set(exposed.labels[selector.name][0])
            if missing:
                raise ValueError(f"{selector.name} has no labels {sorted(missing)}")


@pytest.mark.parametrize(("place", "query"), QUERIES, ids=[place for place, _ in QUERIES])
def test_every_dashboard_query_selects_exposed_series(place: str, query: str, exposed: Exposed) -> None:
    assert 'model_name="$model"' in query
    check(query, exposed)


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("sum(rate(manta:tokens_total[1m]))", "no series manta:tokens_total"),
        ('manta:option{option="engine.max_sequences"}', "no series manta:option has"),
        ('manta:num_requests_running{model_name="other"}', "no series manta:num_requests_running has"),
        ("sum by (reason) (rate(manta:sequences_total[1m]))", "no labels"),
        ("manta:generation_tokens_total", "counts"),
        ("rate(manta:kv_cache_blocks[1m])", "no counter"),
        ("sum by (", "parenthesis"),
    ],
)
def test_a_query_with_a_mistake_is_found(query: str, complaint: str, exposed: Exposed) -> None:
    with pytest.raises(ValueError, match=complaint):
        check(query, exposed)


@pytest.mark.parametrize("rule", RULES, ids=[rule.get("alert") or rule["record"] for rule in RULES])
def test_every_rule_reads_exposed_series(rule: dict[str, Any], exposed: Exposed) -> None:
    recorded = {other["record"] for other in RULES if "record" in other}
    for selector, function in selectors(parsed(rule["expr"], exposed.model)):
        if selector.name not in recorded:
            assert selector.name in exposed.labels
            assert exposed.grows[selector.name] == (function in GROWING)
            labels = set(exposed.labels[selector.name][0])
            assert {matcher.name for matcher in selector.matchers.matchers} <= labels


def test_several_ingresses_have_names() -> None:
    (tokens,) = (family for family in _counted("x") if family.name == "manta:generation_tokens")
    assert {sample.labels.get("replica") for sample in tokens.samples} == {"x"}


def _counted(replica: str) -> list[Any]:
    metrics = Metrics("m", replica)
    metrics.generation_tokens.inc()
    return metrics.own()


def test_every_metric_is_on_a_dashboard() -> None:
    shown = "".join(query for _, query in QUERIES)
    metrics = Metrics("m")
    names = {family.name for registry in (metrics._own, metrics._of_engines) for family in registry.collect()}
    assert not [name for name in sorted(names) if name not in shown], "give it a panel in configs/grafana/dashboards/"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_grafana_can_lay_a_dashboard_out(name: str) -> None:
    """Its grid has 24 columns; panels do not overlap, and each query of a panel has a letter of its own."""
    dashboard = DASHBOARDS[name]
    assert dashboard["uid"] == f"manta-{name}"
    panels, cells = dashboard["panels"], set()
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not covered & cells
        assert max(x for x, _ in covered) < 24
        cells |= covered
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0


def test_grafana_finds_its_source_and_its_dashboards() -> None:
    """And Prometheus the server, at the port that it has by default."""
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["isDefault"], "the panels name no source of their own"
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/manta.yaml").read_text())["providers"]
    assert provider["type"] == "file"
    assert pathlib.PurePath(provider["options"]["path"]).name == "dashboards"
    scraping = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())
    (job,) = scraping["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"localhost:{ServeConfig().port}"]}]
    assert job["metrics_path"] == "/metrics"
    assert source["jsonData"]["timeInterval"] == scraping["global"]["scrape_interval"]
