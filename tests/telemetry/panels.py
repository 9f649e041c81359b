"""Grafana's dashboards as data, and pictures of their panels from what a Prometheus answers.

The pictures are SVG that is written here, because no Grafana can be had where the tests run: the same queries, legends,
units and places, in another hand. `tests/telemetry/pictures.py` draws those of the documents.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

GRAFANA = pathlib.Path(__file__).resolve().parents[2] / "configs" / "grafana"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(GRAFANA.glob("dashboards/*.json"))}
PANELS = {f"{name}: {panel['title']}": panel for name, dashboard in DASHBOARDS.items() for panel in dashboard["panels"]}
"""By where they stand."""

COLUMN, ROW = 42.0, 23.0
"""Pixels of a column and of a row of Grafana's grid."""
GAP, TITLE, TIMES, LEFT = 4.0, 34.0, 22.0, 62.0
"""Pixels between panels, and of what is above, below and left of a panel's plot."""
LEGEND, LETTER = 13.0, 6.3
"""Pixels from one row of a legend to the next, and of a letter."""
NUM_VALUES, NUM_TIMES = 2, 3
"""Intervals of the axes."""
COLOURS = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#b877d9", "#5794f2", "#ffa6b0", "#96d98d", "#fade2a")
PREFIXES = {
    "short": (1000.0, ("", "k", "M", "G")),
    "reqps": (1000.0, (" req/s", "k req/s")),
    "bytes": (1024.0, (" B", " KiB", " MiB", " GiB", " TiB")),
}
"""Units that grow: the factor from one name to the next."""


def filled(query: str, model: str, rate_interval: str = "1m") -> str:
    """Returns a query with values in place of Grafana's variables."""
    return query.replace("$model", model).replace("$__rate_interval", rate_interval)


def legend(form: str, labels: dict[str, str]) -> str:
    """Returns what Grafana writes at a series; a label that the series lacks leaves nothing."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), form)


class Line(NamedTuple):
    """A series of a panel. Values are NaN where there is nothing to show."""

    name: str
    points: list[tuple[float, float]]
    """Times in seconds, and values."""

    @property
    def has_data(self) -> bool:
        return any(not math.isnan(value) for _, value in self.points)


class Span(NamedTuple):
    """A range of time, in seconds."""

    begin: float
    end: float


class Axis(NamedTuple):
    """Maps `low` to the pixel `at_low` and `high` to `at_high`."""

    low: float
    high: float
    at_low: float
    at_high: float

    def at(self, value: float) -> float:
        return self.at_low + (value - self.low) / (self.high - self.low) * (self.at_high - self.at_low)


def draw(dashboard: dict[str, Any], lines: dict[int, list[Line]], span: Span) -> str:
    """Returns a dashboard as SVG, with the lines of each panel by its `id`."""
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    width = COLUMN * max(place["x"] + place["w"] for place in places)
    height = ROW * max(place["y"] + place["h"] for place in places)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="11" fill="#ccccdc">',
        f"<title>{escape(dashboard['title'])}</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="#111217"/>',
    ]
    for panel in dashboard["panels"]:
        parts += _panel(panel, lines[panel["id"]], span)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: dict[str, Any], lines: Sequence[Line], span: Span) -> Iterable[str]:
    place, defaults = panel["gridPos"], panel["fieldConfig"]["defaults"]
    left, top = COLUMN * place["x"], ROW * place["y"]
    width, height = COLUMN * place["w"] - GAP, ROW * place["h"] - GAP
    across = Axis(span.begin, span.end, left + LEFT, left + width - 8)
    low, high = _bounds(lines, defaults)
    legends = _legends(lines, width - 16)
    num_rows = 1 + max((row for row, _ in legends), default=0)
    up = Axis(low, high, top + height - TIMES - LEGEND * num_rows, top + TITLE)
    yield f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="2" fill="#181b1f"/>'
    yield f'<text x="{left + 8:g}" y="{top + 16:g}" font-weight="bold">{escape(panel["title"])}</text>'
    for number in range(NUM_VALUES + 1):
        value = low + (high - low) * number / NUM_VALUES
        y, written = up.at(value), in_unit(value, defaults["unit"])
        yield f'<path d="M{across.at_low:.1f} {y:.1f}H{across.at_high:.1f}" stroke="#2c2f36"/>'
        yield f'<text x="{across.at_low - 5:.1f}" y="{y + 4:.1f}" text-anchor="end">{written}</text>'
    for number in range(NUM_TIMES + 1):
        at = span.begin + (span.end - span.begin) * number / NUM_TIMES
        anchor = ("start", *["middle"] * (NUM_TIMES - 1), "end")[number]
        written = f"{at - span.begin:.0f} s"
        yield f'<text x="{across.at(at):.1f}" y="{up.at_low + 13:.1f}" text-anchor="{anchor}">{written}</text>'
    for number, (line, (row, beside)) in enumerate(zip(lines, legends, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        for piece in _pieces(line.points):
            shown = " ".join(f"{across.at(at):.1f},{up.at(value):.1f}" for at, value in piece)
            yield f'<polyline points="{shown}" fill="none" stroke="{colour}" stroke-width="1.4"/>'
        at = f'x="{left + 8 + beside:.0f}" y="{top + height - 6 - LEGEND * (num_rows - 1 - row):g}"'
        yield f'<text {at} fill="{colour}">{escape(line.name)}</text>'


def _legends(lines: Sequence[Line], width: float) -> list[tuple[int, float]]:
    """Returns the row of each line's name below the plot, and where in the row it begins, in pixels."""
    places, row, beside = list[tuple[int, float]](), 0, 0.0
    for line in lines:
        length = LETTER * len(line.name) + 12
        if beside and beside + length > width:
            row, beside = row + 1, 0.0
        places.append((row, beside))
        beside += length
    return places


def _bounds(lines: Sequence[Line], defaults: dict[str, Any]) -> tuple[float, float]:
    """Returns the least and the largest value of the axis: those that the panel names, or 0 and a round number."""
    values = [value for line in lines for _, value in line.points if math.isfinite(value)]
    return defaults.get("min", 0.0), defaults.get("max") or _round_up(max(values, default=1.0), defaults["unit"])


def _round_up(value: float, unit: str) -> float:
    """Returns a number that is not below `value` and has one digit, or 1.5 or 2.5 times a power of ten, in its unit; 1
    for 0.
    """
    if value <= 0:
        return 1.0
    if unit == "bytes" and value >= 1024:
        return 1024 * _round_up(value / 1024, unit)
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * digit for digit in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if value <= power * digit * (1 + 1e-9))


def _pieces(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Splits a line where it has nothing to show. A single point becomes a short stroke."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if math.isfinite(value):
            pieces[-1].append((at, value))
        elif pieces[-1]:
            pieces.append([])
    return [piece if len(piece) > 1 else [piece[0], (piece[0][0] + 0.5, piece[0][1])] for piece in pieces if piece]


def in_unit(value: float, unit: str) -> str:
    """Returns a value as Grafana writes it in one of the units of our dashboards."""
    if unit == "percentunit":
        return f"{100 * value:.0f}%"
    if unit == "s":
        if 0 < abs(value) < 0.9995e-3:
            return f"{value * 1e6:.3g} µs"
        return f"{value * 1e3:.3g} ms" if 0 < abs(value) < 0.9995 else f"{value:.3g} s"
    factor, names = PREFIXES[unit]
    number = 0
    while abs(value) >= factor and number < len(names) - 1:
        value /= factor
        number += 1
    return f"{value:.3g}{names[number]}"
