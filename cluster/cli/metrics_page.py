"""Writes the page of the manual with every metric: `python -m manta.cluster.cli.metrics_page > docs/metrics.md`.

The page is made from what `/metrics` answers (`cluster/http/exchange/metrics.py`), and a test checks that it is up to
date.
"""

from __future__ import annotations

from prometheus_client.metrics_core import Metric

from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.vllm_metrics import OWN, SAME_MEANING, VLLM
from manta.structured.visible_text import pass_on

HEAD = """# Metrics

This page is generated from the metrics' source: `python -m manta.cluster.cli.metrics_page > docs/metrics.md`.
[Operating](operate.md#read-the-metrics) says how to read them, [the runbook](runbook.md) what their alerts mean.

- Every metric has the label `model_name`. With several ingresses the counters have `replica` too: sum their rates.
- A request is one prompt with all its choices; a sequence is one choice.
- Those with a name of vLLM's are shown under it as well with `vllm_metrics: true`.

| metric | type | meaning | vLLM's name |
| --- | --- | --- | --- |
"""


def page() -> str:
    """Returns the page in Markdown: a table of all metrics in the order of their names."""
    metrics = Metrics("")
    families = {each.name: each for each in (*metrics.own(), *metrics.of_engines([]))}
    return HEAD + "".join(_row(families[name]) for name in sorted(families))


def _row(family: Metric) -> str:
    suffix = "_total" if family.type == "counter" else ""
    name = family.name.removeprefix(OWN)
    also = f"`{VLLM}{name}{suffix}`" if name in SAME_MEANING else ""
    return f"| `{family.name}{suffix}` | {family.type} | {family.documentation} | {also} |\n"


if __name__ == "__main__":
    pass_on(page())
