"""What held streams up: the longest pauses that clients saw, and what the request log says of each.

A pause consists of the phases of a takeover (`takeover.py`), of the seconds until another ingress adopted the stream,
and of those for which readers waited for its copy. The rest is what nobody measures: the client's own reconnections,
preemption, and steps that computed others.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from manta.cluster.http.exchange.metrics import TAKEOVER_PHASES
from tests.serve.resuming_client import History

PARTS = ("adopt", *TAKEOVER_PHASES, "keep", "rest")
"""Parts of a pause, in the order in which they come."""
TOLERANCE_S = 1.5
"""Seconds by which the time of a line may lie outside of a pause: the log has whole seconds."""

LEAST_S = 0.05
"""Shortest time between two events, in seconds, that counts as a pause after a death."""

Event = dict[str, Any]
"""A line of the request log."""


class Death(NamedTuple):
    """A fault that was done."""

    at: float
    """Time in seconds since 1970."""
    kind: str


class Pause(NamedTuple):
    """A time between two events of one stream."""

    seconds: float
    begun: float
    """Time of the first event, in seconds since 1970."""
    request_id: str
    parts: dict[str, float]
    """Seconds of each of `PARTS`; they add up to the pause, unless lines overlap."""
    after: Death | None
    """The last death before its end."""
    notes: Counter[str]
    """Answers that brought nothing, and other events of the stream, with their numbers."""

    def words(self) -> str:
        """Returns a line for people."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.parts.items() if seconds >= 0.005)
        cause = "" if self.after is None else f"; {self.after.kind} died {self.begun - self.after.at:+.1f} s before"
        notes = "".join(f"; {count} x {name}" for name, count in sorted(self.notes.items()))
        return f"{self.seconds:.2f} s: {parts}{cause}{notes}"


def longest_pauses(
    histories: Iterable[History], events: Iterable[Event], deaths: Sequence[Death], count: int
) -> list[Pause]:
    """Returns the longest pause of each of the streams that paused longest, longest first."""
    to_epoch = time.time() - time.monotonic()
    found: list[tuple[float, float, History]] = []
    for history in histories:
        times = [event.at for event in history.events]
        pairs = [(later - earlier, earlier) for earlier, later in itertools.pairwise(times)]
        if pairs:
            seconds, begun = max(pairs)
            found.append((seconds, begun, history))
    found.sort(key=lambda each: -each[0])
    by_name: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_name[event["request_id"]].append(event)
    return [_explained(seconds, begun, history, to_epoch, by_name, deaths) for seconds, begun, history in found[:count]]


def _explained(
    seconds: float,
    begun: float,
    history: History,
    to_epoch: float,
    by_name: dict[str, list[Event]],
    deaths: Sequence[Death],
) -> Pause:
    first, last = begun + to_epoch, begun + seconds + to_epoch
    lines = [*by_name.get(history.request_id, ()), *by_name.get(history.stream_id, ())]
    meanwhile = [line for line in lines if first - TOLERANCE_S <= _time(line) <= last + TOLERANCE_S]
    parts, notes = dict.fromkeys(PARTS, 0.0), Counter[str]()
    for line in meanwhile:
        match line.get("event"):
            case "resumed":
                for phase in TAKEOVER_PHASES:
                    parts[phase] += line[f"{phase}_s"]
                notes[f"takeover ({line['cause']}, {line['calls']} calls)"] += 1
            case "adopted":
                parts["adopt"] += line["seconds"]
            case "kept":
                parts["keep"] = max(parts["keep"], line["seconds"])
            case "preempted" | "failed" | "aborted" as event:
                notes[event] += 1
            case "continued" if "cause" in line:
                notes[f"left ({line['cause']})"] += 1
    parts["rest"] = max(0.0, seconds - sum(parts.values()))
    notes.update(what for at, what in history.attempts if begun <= at <= begun + seconds)
    before = [death for death in deaths if death.at <= last]
    return Pause(seconds, first, history.request_id, parts, before[-1] if before else None, notes)


def _time(line: Event) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()


def by_death(histories: Iterable[History], deaths: Sequence[Death]) -> dict[str, list[float]]:
    """Returns for each kind the longest pause of any stream after each death of that kind and before the next one."""
    to_epoch = time.time() - time.monotonic()
    longest = [0.0] * len(deaths)
    ends = [death.at for death in deaths[1:]]
    pauses = sorted(
        (later + to_epoch, later - earlier)
        for history in histories
        for earlier, later in itertools.pairwise([event.at for event in history.events])
        if later - earlier > LEAST_S
    )
    index = 0
    for at, seconds in pauses:
        while index < len(ends) and at >= ends[index]:
            index += 1
        if deaths and at >= deaths[0].at:
            longest[index] = max(longest[index], seconds)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for death, seconds in zip(deaths, longest, strict=True):
        found[death.kind].append(seconds)
    return dict(found)


def markdown(pauses: Sequence[Pause], found: dict[str, list[float]]) -> str:
    """Returns the tables of the longest pauses by their parts, and of those after each kind of death."""
    lines = [
        f"| pause, s | {' | '.join(PARTS)} | the last death | notes |",
        f"| ---: | {'---: | ' * len(PARTS)}--- | --- |",
    ]
    for pause in pauses:
        after = "" if pause.after is None else f"{pause.after.kind}, {pause.begun - pause.after.at:+.1f} s before"
        notes = ", ".join(f"{count} x {name}" for name, count in sorted(pause.notes.items()))
        parts = " | ".join(f"{pause.parts[name]:.2f}" for name in PARTS)
        lines.append(f"| {pause.seconds:.2f} | {parts} | {after} | {notes} |")
    head = "| death of | how often | longest pause after it, s: median | longest |"
    lines += ["", head, "| --- | ---: | ---: | ---: |"]
    for kind, longest in found.items():
        ordered = sorted(longest)
        lines.append(f"| {kind} | {len(ordered)} | {ordered[len(ordered) // 2]:.2f} | {ordered[-1]:.2f} |")
    return "\n".join(lines) + "\n"
