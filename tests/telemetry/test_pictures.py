"""Pictures of dashboards: what is drawn, and that no panel of a server that Prometheus scrapes is empty."""

from __future__ import annotations

import math
import pathlib
import re
from xml.etree import ElementTree

import pytest

from tests.telemetry.alert_faults import Impossible
from tests.telemetry.panels import DASHBOARDS, Line, Span, draw, in_unit
from tests.telemetry.pictures import DOCS, show, watched

SVG = "{http://www.w3.org/2000/svg}"
DASHBOARD = {
    "title": "A & B",
    "panels": [
        {
            "id": 7,
            "title": "Left < right",
            "gridPos": {"x": 0, "y": 0, "w": 12, "h": 8},
            "fieldConfig": {"defaults": {"unit": "short"}},
        }
    ],
}


def points(polyline: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in polyline.attrib["points"].split())
    return [(float(x), float(y)) for x, y in pairs]


def test_a_line_is_drawn_where_its_values_are() -> None:
    """Its places divide the plot as its times and values divide theirs; where it has no value, it has a gap."""
    values = [0.0, 10.0, math.nan, 5.0, 2.5]
    line = Line("in <use>", [(100.0 + number, value) for number, value in enumerate(values)])
    root = ElementTree.fromstring(draw(DASHBOARD, {7: [line, Line("none", [])]}, Span(100.0, 104.0)))
    first, second = (points(each) for each in root.iter(f"{SVG}polyline"))
    (left, bottom), (next_x, top) = first
    (_, half), (right, quarter) = second
    assert next_x - left == pytest.approx((right - left) / 4, abs=0.11)
    assert bottom - half == pytest.approx((bottom - top) / 2, abs=0.11)
    assert bottom - quarter == pytest.approx((bottom - top) / 4, abs=0.11)
    written = {text.text for text in root.iter(f"{SVG}text")}
    assert written >= {"Left < right", "in <use>", "none", "0", "10", "0 s", "4 s"}


def test_names_of_many_lines_stay_in_their_panel() -> None:
    """In rows, below the times and above each other."""
    lines = [Line(f"a phase of a start, {number}", [(0.0, 1.0), (1.0, 2.0)]) for number in range(12)]
    root = ElementTree.fromstring(draw(DASHBOARD, {7: lines}, Span(0.0, 1.0)))
    panel = next(each for each in root.iter(f"{SVG}rect") if "rx" in each.attrib)
    bottom = float(panel.attrib["y"]) + float(panel.attrib["height"])
    names = [text for text in root.iter(f"{SVG}text") if "phase" in (text.text or "")]
    places = {(float(name.attrib["x"]), float(name.attrib["y"])) for name in names}
    assert len(places) == len(names) == 12
    assert max(y for _, y in places) < bottom
    times = max(float(text.attrib["y"]) for text in root.iter(f"{SVG}text") if (text.text or "").endswith(" s"))
    assert min(y for _, y in places) > times
    assert max(x for x, _ in places) < float(panel.attrib["width"]) - 80


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (0.0, "s", "0 s"),
        (0.00025, "s", "250 \u00b5s"),
        (0.05, "s", "50 ms"),
        (2.5, "s", "2.5 s"),
        (0.5, "percentunit", "50%"),
        (1500.0, "short", "1.5k"),
        (3 << 20, "bytes", "3 MiB"),
        (12.0, "reqps", "12 req/s"),
    ],
)
def test_values_have_their_units(value: float, unit: str, written: str) -> None:
    assert in_unit(value, unit) == written


def test_the_documents_pictures_have_every_panel() -> None:
    """As the dashboards have them today: a new panel needs new pictures."""
    for name, dashboard in DASHBOARDS.items():
        root = ElementTree.parse(DOCS / f"dashboard-{name}.svg").getroot()
        written = {text.text for text in root.iter(f"{SVG}text")}
        assert {panel["title"] for panel in dashboard["panels"]} <= written, "python -m tests.telemetry.pictures"


@pytest.mark.prove
def test_no_panel_of_a_scraped_server_is_empty(tmp_path: pathlib.Path) -> None:
    try:
        with watched() as world:
            span = show(world, seconds=40)
            lines = {name: world.lines(name, span) for name in DASHBOARDS}
    except Impossible as error:
        pytest.skip(str(error))
    empty = [
        f"{name}: {panel['title']}"
        for name, dashboard in DASHBOARDS.items()
        for panel in dashboard["panels"]
        if not any(line.has_data for line in lines[name][panel["id"]])
    ]
    assert empty == []
    for name, dashboard in DASHBOARDS.items():
        picture = draw(dashboard, lines[name], span)
        assert not re.search(r"nan|inf", picture)
