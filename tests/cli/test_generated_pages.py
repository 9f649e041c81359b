"""docs/metrics.md, docs/errors.md and docs/flags.md list every metric, error and flag as they are."""

from __future__ import annotations

import re

import msgspec
import pytest

from manta.cluster.cli import errors_page, flags_page, metrics_page
from manta.cluster.http.exchange.vllm_metrics import SAME_MEANING
from manta.structured.refusals import WORDS
from tests.house.pages import ROOT

PAGES = {"metrics": metrics_page.page, "errors": errors_page.page, "flags": flags_page.page}


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    again = f"python -m manta.cluster.cli.{name}_page > docs/{name}.md"
    assert (ROOT / "docs" / f"{name}.md").read_text() == PAGES[name](), again


def test_every_metric_has_a_row_with_a_meaning() -> None:
    rows = re.findall(r"(?m)^\| `manta:(\w+)` \| (\w+) \| (.+) \| (.*) \|$", metrics_page.page())
    assert len(rows) > 40
    assert all(meaning.endswith(".") for _, _, meaning, _ in rows)
    assert {kind for _, kind, _, _ in rows} == {"counter", "gauge", "histogram"}
    assert {name.removesuffix("_total") for name, _, _, also in rows if also} == SAME_MEANING


def test_every_kind_of_error_has_a_row() -> None:
    rows = re.findall(r"(?m)^\| (\d{3}) \| (\S*) \| `(\w+)` \| (.+) \|$", errors_page.page())
    assert len(rows) == len(WORDS)
    assert {int(status) for status, *_ in rows} >= {400, 401, 403, 404, 408, 409, 429, 500, 503}
    assert not msgspec.json.encode(rows).count(b"{")
