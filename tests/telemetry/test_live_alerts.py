"""Alerts fire and clear under real faults (`live_alerts.py`). `make prove` writes the seconds down."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import pytest

from tests.telemetry.live_alerts import FAULTS, Impossible, Row, World, observe, quick_rules, served, table
from tests.telemetry.test_alerts import FILE, promtool


def test_the_shorter_rules_are_rules(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rules.yml").write_text(quick_rules())
    done = promtool("check", "rules", tmp_path / "rules.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[50s]" in quick_rules()
    assert "ratio_rate5m" in quick_rules()


def test_the_table_has_what_did_not_happen_too() -> None:
    rows = [Row("the disk is full", "MantaSlow", True, 40.2, None), Row("the disk is full", "MantaB", False, 3.0, 1.6)]
    assert not rows[0].is_good
    assert rows[1].is_good
    shown = table(rows, 600.0).splitlines()[2:]
    assert shown == [
        "| the disk is full | MantaSlow | 40 | not within 600 s |",
        "| the disk is full | MantaB, too | 3 | 2 |",
    ]


def test_faults_raise_alerts_that_there_are() -> None:
    rules = FILE.read_text()
    for _, expected in FAULTS.values():
        assert all(f"- alert: {alert}\n" in rules for alert in expected)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    try:
        with served() as world:
            yield world
    except Impossible as error:
        pytest.skip(str(error))


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAULTS)
def test_alerts_fire_under_a_fault_and_clear_after_it(
    name: str, world: World, record_property: Callable[[str, object], None]
) -> None:
    try:
        rows = observe(name, world)
    except Impossible as error:
        pytest.skip(str(error))
    for row in rows:
        if row.fired_s is not None and row.cleared_s is not None:
            record_property(f"{row.alert}, s", f"{row.fired_s:.0f}, cleared after {row.cleared_s:.0f}")
    assert all(row.is_good for row in rows if row.is_expected), table(rows, 600.0)
    assert world.ask(max_tokens=2) == 200
