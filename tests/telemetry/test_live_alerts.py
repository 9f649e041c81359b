"""Alerts fire and clear under real faults (`live_alerts.py`). `make prove` writes the seconds down."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator

import msgspec
import pytest

from tests.patience import PATIENCE_S
from tests.telemetry import live_alerts
from tests.telemetry.alert_faults import FAULTS, Impossible, World, check, quick_rules, served
from tests.telemetry.live_alerts import Outcome, Record, Row, main, observe, table
from tests.telemetry.prometheus import promtool
from tests.telemetry.test_alerts import FILE

GOOD = Row("the disk is full", "MantaErrorBudgetBurnsFast", True, 12.0, 15.0)


def test_the_shorter_rules_are_rules(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rules.yml").write_text(quick_rules())
    done = promtool("check", "rules", tmp_path / "rules.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[15s]" in quick_rules()
    assert "[5m]" not in quick_rules()
    assert "ratio_rate5m" in quick_rules()


def test_the_table_has_what_did_not_happen_too() -> None:
    rows = [
        Row("the disk is full", "MantaSlow", True, 40.2, None),
        Row("the disk is full", "MantaB", False, 3.0, 1.6),
        Row("the disk is full", "MantaC", True, None, None),
    ]
    assert [row.is_good for row in rows] == [False, True, False]
    found = [Outcome("the disk is full", rows), Outcome("the engine is stopped", [], "no", was_done=False)]
    assert [each.is_good for each in found] == [False, True]
    assert table(found, 600.0).splitlines()[2:] == [
        "| the disk is full | MantaSlow | 40 | not within 600 s |",
        "| the disk is full | MantaB, too | 3 | 2 |",
        "| the disk is full | MantaC | not within 600 s |  |",
        "",
        "- the engine is stopped: no.",
    ]


def test_a_record_goes_on_with_what_is_not_good(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "record" / "lines"
    record = Record(path)
    outcomes = [
        Outcome("the disk is full", [GOOD]),
        Outcome("the engine is stopped", [], "no", was_done=False),
        Outcome("the queue is full", [Row("the queue is full", "MantaA", True, 1.0, None)]),
        Outcome("a rank hangs again and again", [], "streams ended with 500"),
    ]
    for each in outcomes:
        record.add(each)
    assert [name for name in FAULTS if Record(path).has(name)] == ["the disk is full"]
    again = Outcome("the queue is full", [Row("the queue is full", "MantaA", True, 1.0, 2.0)])
    Record(path).add(again)
    assert {each.fault: each for each in Record(path).outcomes()} == {
        each.fault: each for each in [*outcomes[:2], again, outcomes[3]]
    }


@pytest.mark.parametrize(("last", "code"), [(GOOD, 0), (msgspec.structs.replace(GOOD, cleared_s=None), 1)])
def test_an_interrupted_run_goes_on(
    last: Row, code: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run writes each outcome at once, and the next one does what is left."""
    done: list[str] = []

    def outcome(name: str, world: World, patience_s: float) -> Outcome:
        done.append(name)
        if len(done) == 3:
            raise KeyboardInterrupt
        return Outcome(name, [last] if name == last.fault else [])

    monkeypatch.setattr(live_alerts, "ROOT", tmp_path)
    monkeypatch.setattr(live_alerts, "source_key", lambda root: "key")
    monkeypatch.setattr(live_alerts, "served", contextlib.nullcontext)
    monkeypatch.setattr(live_alerts, "outcome", outcome)
    assert main(["--folder", str(tmp_path)]) == 130
    assert main(["--folder", str(tmp_path)]) == code
    assert done == [*list(FAULTS)[:3], *list(FAULTS)[2:]]
    assert "The 8 faults took" in next(tmp_path.glob("alerts-*.md")).read_text()


def test_faults_raise_alerts_that_there_are() -> None:
    rules = FILE.read_text()
    for fault in FAULTS.values():
        assert all(f"- alert: {alert}\n" in rules for alert in fault.expected)


def test_lost_streams_are_told() -> None:
    check([200, 200])
    with pytest.raises(Exception, match="streams ended with 408, 500"):
        check([500, 200, 408])


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
    assert Outcome(name, rows).is_good, table([Outcome(name, rows)], PATIENCE_S)
    assert world.ask(max_tokens=2) == 200
