"""The alerts of `configs/prometheus/`: each fires at its fault, alone, and clears after it, as Prometheus does it.

`tests/telemetry/prometheus.py` says what it needs.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any, NamedTuple

import yaml

from tests.telemetry.prometheus import promtool
from tests.telemetry.test_dashboards import GRAFANA, RULES

CONFIGS = GRAFANA.parent
FILE = CONFIGS / "prometheus" / "rules.yml"
DOCS = CONFIGS.parent / "docs"
RUNBOOK = DOCS / "runbook.md"
LENGTH = 120
"""Minutes of each case."""

WELL = {
    "manta:engines_serving": f"2x{LENGTH}",
    "manta:engines_wanted": f"2x{LENGTH}",
    "manta:engines_unconnected": f"0x{LENGTH}",
    "manta:engine_configurations": f"1x{LENGTH}",
    "manta:seconds_since_progress": f"1x{LENGTH}",
    'manta:option{option="health_bound_s"}': f"30x{LENGTH}",
    'manta:option{option="engine.max_num_waiting"}': f"100x{LENGTH}",
    "manta:num_requests_waiting": f"3x{LENGTH}",
    "manta:kv_cache_usage_perc": f"0.5x{LENGTH}",
    "manta:num_preemptions_total": f"0x{LENGTH}",
    'manta:start_seconds{engine="a",phase="process"}': f"1x{LENGTH}",
    'manta:start_seconds{engine="b",phase="process"}': f"1x{LENGTH}",
    'manta:answers_total{status="200"}': f"0+1000x{LENGTH}",
    'manta:answers_total{status="500"}': f"0x{LENGTH}",
    'manta:answers_total{status="429"}': f"0x{LENGTH}",
    "manta:rank_rebuilds_total": f"0x{LENGTH}",
    "manta:rank_disagreements_total": f"0x{LENGTH}",
    "manta:constraint_num_compilers": f"2x{LENGTH}",
    "manta:constraint_num_compilers_alive": f"2x{LENGTH}",
    "manta:grammar_workers_replaced_total": f"0x{LENGTH}",
    "manta:late_mask_rows_total": f"0x{LENGTH}",
    "manta:generation_tokens_total": f"0+6000x{LENGTH}",
    **{
        f'manta:{name}_bucket{{le="{le}"}}': f"0+1000x{LENGTH}"
        for name, bounds in (
            ("time_to_first_token_seconds", ("1", "10", "+Inf")),
            ("inter_token_latency_seconds", ("0.1", "1", "+Inf")),
        )
        for le in bounds
    },
}
"""Series of a cluster of two engines, a value a minute, while all is well."""


class Fault(NamedTuple):
    """Series that differ from `WELL`, when the alert has to fire, and when it has to have cleared, in minutes."""

    series: dict[str, str]
    fires: int
    clears: int


def gauge(name: str, value: str, minutes: int = 40, otherwise: str = "0") -> dict[str, str]:
    return {name: f"{value}x{minutes} {otherwise}x{LENGTH - minutes}"}


def counter(name: str, per_minute: int, minutes: int = 40) -> dict[str, str]:
    last = per_minute * minutes
    return {name: f"0+{per_minute}x{minutes} {last}x{LENGTH - minutes}"}


FAULTS = {
    "MantaSlowFirstToken": Fault(
        {'manta:time_to_first_token_seconds_bucket{le="1"}': f"0x40 1000+1000x{LENGTH - 40}"}, 12, 60
    ),
    "MantaSlowTokens": Fault(
        {'manta:inter_token_latency_seconds_bucket{le="0.1"}': f"0x40 1000+1000x{LENGTH - 40}"}, 12, 60
    ),
    "MantaErrorBudgetBurnsFast": Fault(counter('manta:answers_total{status="500"}', 50), 10, 90),
    "MantaErrorBudgetBurnsSlowly": Fault(counter('manta:answers_total{status="500"}', 10), 30, 90),
    "MantaRefusesRequests": Fault(counter('manta:answers_total{status="429"}', 100), 10, 60),
    "MantaDown": Fault({"manta:engines_serving": f"_x40 2x{LENGTH - 40}"}, 5, 60),
    "MantaNoEngine": Fault(gauge("manta:engines_serving", "0", otherwise="2"), 3, 60),
    "MantaEngineMissing": Fault(gauge("manta:engines_serving", "1", otherwise="2"), 10, 60),
    "MantaEngineUnconnected": Fault(gauge("manta:engines_unconnected", "1"), 10, 60),
    "MantaNoProgress": Fault(gauge("manta:seconds_since_progress", "31"), 5, 60),
    "MantaQueueNearlyFull": Fault(gauge("manta:num_requests_waiting", "161"), 5, 60),
    "MantaKvCacheFull": Fault(
        gauge("manta:kv_cache_usage_perc", "0.99") | counter("manta:num_preemptions_total", 5), 12, 60
    ),
    "MantaEnginesRestart": Fault(
        {f'manta:start_seconds{{engine="{name}",phase="process"}}': f"_x5 1x3 _x{LENGTH - 8}" for name in "cdef"},
        20,
        60,
    ),
    "MantaUpdateStuck": Fault(gauge("manta:engine_configurations", "2", otherwise="1"), 35, 60),
    "MantaRanksRestart": Fault(counter("manta:rank_rebuilds_total", 1), 20, 90),
    "MantaRanksDisagree": Fault(counter("manta:rank_disagreements_total", 1, 5), 10, 60),
    "MantaNoGrammarCompiler": Fault(gauge("manta:constraint_num_compilers_alive", "0", otherwise="2"), 5, 60),
    "MantaGrammarTimeouts": Fault(counter("manta:grammar_workers_replaced_total", 1), 20, 70),
    "MantaLateMasks": Fault(counter("manta:late_mask_rows_total", 900), 20, 60),
}


def cases(faults: dict[str, Fault], rules: pathlib.Path = FILE) -> dict[str, Any]:
    """Returns a file of promtool: at each fault its alert alone fires, and clears; without one none ever fires."""
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    tests = []
    for alert, fault in [*faults.items(), ("", Fault({}, 0, 0))]:
        series = [{"series": _labelled(name), "values": values} for name, values in (WELL | fault.series).items()]
        when = [(fault.fires, [{"labels": f'{{alertname="{alert}"}}', "value": 1}]), (fault.clears, [])]
        if not alert:
            when = [(minute, []) for minute in range(0, LENGTH, 10)]
        expected = [{"expr": firing, "eval_time": f"{minute}m", "exp_samples": found} for minute, found in when]
        tests.append({"name": alert, "interval": "1m", "input_series": series, "promql_expr_test": expected})
    return {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}


def _labelled(series: str) -> str:
    name, _, labels = series.partition("{")
    return f'{name}{{model_name="m",{labels or "}"}'


def test_each_alert_fires_at_its_fault_and_clears(tmp_path: pathlib.Path) -> None:
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases(FAULTS)))
    done = promtool("test", "rules", tmp_path / "cases.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_bound_is_found(tmp_path: pathlib.Path) -> None:
    name, rules = "MantaKvCacheFull", tmp_path / "rules.yml"
    rules.write_text(FILE.read_text().replace("> 0.95", "> 1.95"))
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases({name: FAULTS[name]}, rules)))
    done = promtool("test", "rules", tmp_path / "cases.yml")
    assert done.returncode == 1
    assert name in done.stdout + done.stderr


def test_prometheus_takes_its_configuration() -> None:
    done = promtool("check", "config", CONFIGS / "grafana" / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_and_a_place_in_the_runbook() -> None:
    alerts = {rule["alert"]: rule for rule in RULES if "alert" in rule}
    assert set(alerts) == set(FAULTS)
    headings = set(re.findall(r"(?m)^### (\w+)$", RUNBOOK.read_text()))
    assert set(alerts) <= headings
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")


def rows(page: pathlib.Path, heading: str) -> list[list[str]]:
    """Returns the cells of the first table below a heading, without its head."""
    section = page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = re.findall(r"(?m)^\| (.*) \|$", section)
    return [line.split(" | ") for line in table[2:]]


def test_every_failure_has_a_symptom_and_a_remedy() -> None:
    """`docs/operate.md` says what each failure does, and the runbook what to look at and to do, by the same names. Rows
    that begin with an ellipsis go on with the failure above them.
    """
    failures = {re.sub(r" \(.*?\)", "", cells[0]) for cells in rows(DOCS / "operate.md", "When anything else fails")}
    entries = rows(RUNBOOK, "When a part fails")
    assert {name for name in failures if not name.startswith("…")} <= {cells[0] for cells in entries}
    assert len(failures) > 10
    assert all(len(cells) == 4 and all(cells) for cells in entries)


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    sections = re.split(r"(?m)^### ", RUNBOOK.read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0])[1:]
    assert {section.split("\n")[0] for section in sections} == set(FAULTS)
    for section in sections:
        assert {"Means", "Look"} <= set(re.findall(r"- \*\*(\w+)\*\*", section))
        assert re.search(r"\*\*(Do|do)\*\*", section)
