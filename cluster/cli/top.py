"""`manta top`: a live view of a running server's engines, queue, KV usage, speed, constraints and drafts.

Each frame is drawn from one answer of `GET /status` and one of `GET /metrics`, which need no key. Rates compare two
answers. Without a terminal the command prints one frame. `cluster/cli/status.py` says what a server is doing once, in
words.
"""

from __future__ import annotations

import contextlib
import time
from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from manta.cluster.cli.refusal import Refusal
from manta.cluster.cli.server import connect
from manta.cluster.cli.status import ANSWER_S, ENGINES, MAX_CELL, duration, engine_row, engine_trouble, read_status
from manta.cluster.http.endpoints.status import Status
from manta.structured.visible_text import visible

INTERVAL_BOUNDS_S = (0.2, 3600.0)
"""Bounds of `--interval`. Each answer takes a little of the server's time, so 5 times a second is enough."""
PRINTED_WIDTH = 140
"""Columns of a frame without a terminal."""
BAR_WIDTH = 20


class Reading(NamedTuple):
    """The state of the server at one time."""

    at: float
    """Time of the answers on the monotonic clock, in seconds."""
    status: Status
    samples: list[Sample]
    """Series of `/metrics`; empty if it did not answer."""

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of the series `manta:NAME` with these labels, over all engines and ingresses."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == f"manta:{name}" and labels.items() <= sample.labels.items()
        )


def run_top(url: str, interval_s: float) -> int:
    """Shows the server until Ctrl-C, or prints one frame without a terminal.

    Raises `Refusal` if no server answers at first, if the answer is not Manta's, or if the interval is out of bounds.
    """
    low, high = INTERVAL_BOUNDS_S
    if not low <= interval_s <= high:
        raise Refusal(f"--interval {interval_s:g} is not between {low:g} and {high:g} seconds")
    client, base = connect(url, read_timeout_s=ANSWER_S)
    console = Console(markup=False, highlight=False, emoji=False)
    with client:
        first = _read(client, base)
        if console.is_interactive:
            with contextlib.suppress(KeyboardInterrupt):
                _show(console, client, base, first, interval_s)
        else:
            time.sleep(interval_s)
            console.width = PRINTED_WIDTH
            console.print(frame(base, _read(client, base), first))
    return 0


def _show(console: Console, client: httpx.Client, base: str, first: Reading, interval_s: float) -> None:
    """Draws frames until Ctrl-C. While the server does not answer, the last frame stays with a sentence above it."""
    before: Reading | None = None
    latest, problem = first, ""
    with Live(frame(base, first), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                before, latest, problem = latest, _read(client, base), ""
            except Refusal as error:
                problem = f"Nothing new for {duration(time.monotonic() - latest.at)}: {error}"
            live.update(frame(base, latest, before, problem), refresh=True)


def _read(client: httpx.Client, base: str) -> Reading:
    """Raises `Refusal` if the server does not answer."""
    status, _ = read_status(client, base)
    try:
        answer = client.get("/metrics")
        families = text_string_to_metric_families(answer.text) if answer.status_code == 200 else ()
        samples = [sample for family in families for sample in family.samples]
    except (httpx.HTTPError, ValueError):  # the next reading may have them; /status has answered
        samples = []
    return Reading(time.monotonic(), status, samples)


def frame(base: str, latest: Reading, before: Reading | None = None, problem: str = "") -> RenderableType:
    """Returns the view of the latest reading. Rates are those since `before`; without it they are "-"."""
    status = latest.status
    title = f"Manta {status.version} at {visible(base)}, for {duration(status.uptime_s)}"
    parts: list[RenderableType] = [Text(title, "bold")]
    if problem:
        parts.append(Text(visible(problem), "bold red"))
    if (trouble := engine_trouble(status)) is not None:
        parts.append(Text(trouble, "bold red"))
    parts += [Text(), _speed(latest, before), Text()]
    if status.engines:
        parts += [_engines(status), Text()]
    elif trouble is None:
        parts += [Text("No engine runs; a request starts one."), Text()]
    parts += [_constraints(latest, before), Text(), _drafts(latest, before)]
    return Group(*parts)


def _speed(latest: Reading, before: Reading | None) -> Table:
    engines = latest.status.engines
    return _table(
        ("tokens/s", "prompt tokens/s", "requests/s", "running", "waiting", "held", "preemptions/s"),
        [
            (
                _rate(latest, before, "generation_tokens_total"),
                _rate(latest, before, "prompt_tokens_total"),
                _rate(latest, before, "request_success_total"),
                str(sum(engine.num_running for engine in engines)),
                str(sum(engine.num_waiting for engine in engines)),
                str(latest.status.num_held),
                _rate(latest, before, "num_preemptions_total"),
            )
        ],
    )


def _engines(status: Status) -> Table:
    columns = ENGINES[:-1]  # the phases of a start do not change
    rows = []
    for engine in status.engines:
        cells = dict(zip(ENGINES, engine_row(engine), strict=True))
        cells["KV"] = f"{_bar(engine.kv_usage)} {cells['KV']}"
        rows.append(tuple(cells[name] for name in columns))
    return _table(columns, rows)


def _constraints(latest: Reading, before: Reading | None) -> Table:
    held, allowed = latest.total("constraint_cached_bytes"), latest.total("constraint_max_cached_bytes")
    alive, wanted = latest.total("constraint_num_compilers_alive"), latest.total("constraint_num_compilers")
    return _table(
        ("constraints", "compiled/s", "kept", "compilers", "late rows/s", "dead ends"),
        [
            (
                f"{latest.total('grammar_sessions'):.0f} running",
                _rate(latest, before, "constraints_compiled_total"),
                f"{latest.total('constraint_num_cached'):.0f} ({held / 2**20:.1f} of {allowed / 2**20:.1f} MiB)",
                f"{alive:.0f} of {wanted:.0f}",
                _rate(latest, before, "late_mask_rows_total"),
                f"{latest.total('constraint_dead_ends_total'):.0f}",
            )
        ],
    )


def _drafts(latest: Reading, before: Reading | None) -> RenderableType:
    drafted, accepted = (f"spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted"))
    proposers = sorted({sample.labels["proposer"] for sample in latest.samples if sample.name == f"manta:{drafted}"})
    if not proposers:
        return Text("No drafts so far.")
    rows = []
    for name in proposers:
        count = latest.total(drafted, proposer=name)
        share = f"{latest.total(accepted, proposer=name) / count:.0%}" if count else "-"
        rates = [_rate(latest, before, metric, proposer=name) for metric in (drafted, accepted)]
        rows.append((name, *rates, share))
    return _table(("drafts", "proposed/s", "accepted/s", "accepted so far"), rows)


def _rate(latest: Reading, before: Reading | None, name: str, **labels: str) -> str:
    """Returns the growth of a counter per second. Returns "-" if one reading lacks the metrics, or if the counter fell
    because an engine or an ingress has gone.
    """
    if before is None or not before.samples or not latest.samples:
        return "-"
    growth = latest.total(name, **labels) - before.total(name, **labels)
    return f"{growth / (latest.at - before.at):,.1f}" if growth >= 0 else "-"


def _bar(share: float) -> str:
    filled = round(share * BAR_WIDTH)
    return f"[{'|' * filled}{' ' * (BAR_WIDTH - filled)}]"


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for row in rows:
        table.add_row(*(Text(visible(cell, MAX_CELL)) for cell in row))
    return table
