"""A row of `make gpu-check`'s table, as one of its processes tells it to the one that writes the table."""

from __future__ import annotations

from typing import NamedTuple

FIGURE = "FIGURE "
"""Begins the line that tells a row, as JSON."""


def one_line(text: str) -> str:
    """As a cell of the table can show it."""
    return " ".join(text.split()).replace("|", "/")[:300]


class Figure(NamedTuple):
    what: str
    value: str
    bar: str = ""
    """The required value, if there is one."""
