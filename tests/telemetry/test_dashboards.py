"""Grafana's dashboards: every query against a live `/metrics`, and what Grafana and Prometheus read beside them."""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import math
import pathlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import promql_parser as promql
import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from manta.cluster.config import ServeConfig
from manta.cluster.http.exchange.metrics import Metrics
from manta.specdecode.speculative_config import SpeculativeConfig
from tests.local_server import local_server
from tests.telemetry.panels import DASHBOARDS, GRAFANA, PANELS, filled, legend
from tests.telemetry.prometheus import COUNTING, Prometheus, hold, need

GROUPS = yaml.safe_load((GRAFANA.parent / "prometheus" / "rules.yml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
"""Alerts and recorded ratios; `test_alerts.py` evaluates them."""
QUERIES = [
    (f"{place} {target['refId']}", target["expr"]) for place, panel in PANELS.items() for target in panel["targets"]
]
"""(where it stands, PromQL with Grafana's variables)."""

GROWING = ("rate", "increase")
"""Functions of counters."""
UNITS = {"s": "seconds", "bytes": "bytes"}
"""Grafana's units that a metric has in its name. Panels with other units show none of these metrics first."""
OTHER_UNITS = ("short", "reqps", "percentunit")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
"""The data source that the reader of a dashboard has chosen."""


class Exposed(NamedTuple):
    """What a server exposes, by the name of a series."""

    model: str
    labels: dict[str, list[dict[str, str]]]
    """Labels of each series."""
    grows: dict[str, bool]
    """Whether each metric is a counter."""
    families: list[Metric]


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
    found = Exposed(model, {}, {}, list(text_string_to_metric_families(text.decode())))
    for family in found.families:
        for sample in family.samples:
            found.labels.setdefault(sample.name, []).append(sample.labels)
            found.grows[sample.name] = family.type in COUNTING
    return found


def parsed(query: str, model: str) -> promql.Expr:
    """Raises `ValueError` for what is no PromQL."""
    return promql.parse(filled(query, model))


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


@pytest.fixture(scope="module")
def held(exposed: Exposed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with five minutes of what the server exposes."""
    need("prometheus")
    prometheus = hold(tmp_path_factory.mktemp("prometheus"), exposed.families, time.time())
    yield prometheus
    prometheus.stop()


@pytest.mark.parametrize("place", PANELS)
def test_no_panel_is_empty(place: str, exposed: Exposed, held: Prometheus) -> None:
    """Each query finds series, with the labels that its legend names, and no two series of a panel have one legend."""
    panel = PANELS[place]
    legends = []
    for target in panel["targets"]:
        series = held.query(filled(target["expr"], exposed.model))
        assert series, f"{target['refId']} finds nothing"
        for each in series:
            # A single ingress has no name, as `test_several_ingresses_have_names` shows.
            assert {*re.findall(r"{{(\w+)}}", target["legendFormat"])} <= {*each["metric"], "replica"}
            legends.append(legend(target["legendFormat"], each["metric"]))
            value = float(each["value"][1])
            assert panel["fieldConfig"]["defaults"]["unit"] != "percentunit" or math.isnan(value) or 0 <= value <= 1
    assert len({*legends}) == len(legends)


def test_an_empty_panel_is_found(exposed: Exposed, held: Prometheus) -> None:
    """Of two series that exist, a sum finds nothing if their labels differ; only an evaluation shows that."""
    query = f'manta:option{{model_name="{exposed.model}"}} + manta:num_requests_running'
    check(query, exposed)
    assert held.query(query) == []


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
def test_a_dashboard_asks_for_its_source_and_its_model(name: str, exposed: Exposed, held: Prometheus) -> None:
    """Grafana's default source need not be the Prometheus that scrapes Manta. Without a `current` one it takes that."""
    source, model = DASHBOARDS[name]["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert source["current"] == {}
    assert (model["name"], model["datasource"]) == ("model", SOURCE)
    (listing,) = re.findall(r"label_values\((\S+), (\w+)\)", model["query"])
    series = held.query(f"group by ({listing[1]}) ({listing[0]})")
    assert [each["metric"] for each in series] == [{"model_name": exposed.model}]
    assert all(panel["datasource"] == SOURCE for panel in DASHBOARDS[name]["panels"])


@pytest.mark.parametrize("place", PANELS)
def test_a_panel_has_the_unit_of_what_it_shows(place: str, exposed: Exposed) -> None:
    panel = PANELS[place]
    (first, _), *_ = selectors(parsed(panel["targets"][0]["expr"], exposed.model))
    unit = panel["fieldConfig"]["defaults"]["unit"]
    assert unit in (*UNITS, *OTHER_UNITS)
    for known, word in UNITS.items():
        assert (unit == known) == bool(re.search(rf"[:_]{word}(_|$)", first.name))


@pytest.fixture(scope="module")
def read_by_grafana() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Reads a dashboard into Grafana's own types, and returns what they have kept of it. `pip install
    grafana-foundation-sdk` brings them.
    """
    types = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = importlib.import_module("grafana_foundation_sdk.cog.encoder").JSONEncoder()
    importlib.import_module("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    return lambda dashboard: json.loads(encoder.encode(types.Dashboard.from_json(dashboard)))


def unknown(ours: Any, kept: Any, place: str = "") -> list[str]:
    """Returns where a dashboard has something that was not kept."""
    if isinstance(ours, dict) and isinstance(kept, dict):
        return [each for name, value in ours.items() for each in unknown(value, kept.get(name), f"{place}/{name}")]
    if isinstance(ours, list) and isinstance(kept, list) and len(ours) == len(kept):
        pairs = enumerate(zip(ours, kept, strict=True))
        return [each for number, pair in pairs for each in unknown(*pair, f"{place}/{number}")]
    return [] if ours == kept else [place]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_grafanas_types_keep_every_field(
    name: str, read_by_grafana: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Grafana ignores what it does not know, so a mistake in a name would go unseen."""
    dashboard = DASHBOARDS[name]
    assert unknown(dashboard, read_by_grafana(dashboard)) == []
    wrong = copy.deepcopy(dashboard)
    wrong["panels"][0]["fieldConfig"]["defaults"]["units"] = "s"
    assert unknown(wrong, read_by_grafana(wrong)) == ["/panels/0/fieldConfig/defaults/units"]


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
    assert source["isDefault"], "a dashboard takes it until its reader has chosen another one"
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/manta.yaml").read_text())["providers"]
    assert provider["type"] == "file"
    assert pathlib.PurePath(provider["options"]["path"]).name == "dashboards"
    scraping = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())
    (job,) = scraping["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"localhost:{ServeConfig().port}"]}]
    assert job["metrics_path"] == "/metrics"
    assert source["jsonData"]["timeInterval"] == scraping["global"]["scrape_interval"]
