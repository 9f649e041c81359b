"""What streams that can go on elsewhere cost while nothing fails: `manta bench cluster --parts resume`.

Measured directly: what an ingress adds to each frame (it keeps the tokens) and several times a second (it looks who was
heard), and what an engine adds (signs of life), as a share of a step with as many streams. The same as throughput,
against the commit before: `make bench ARGS="--workloads http --compare manta --peer-checkout PATH"`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from cluster.engine.request import EngineRequest, SequenceOutput
from cluster.serve.channel import BEAT_S, OutputReceiver, OutputSender
from cluster.serve.prompt_run import PromptRun
from cluster.serve.routing.replicas import Replicas
from workers.sampling_params import SamplingParams

NUM_STREAMS = 32
NUM_STEPS = 2000
STEP_S = 0.025
"""Of so many streams of the 0.5B shape on two cores it takes twice as long, so that the share is told too high."""


class Cost(NamedTuple):
    what: str
    seconds: float
    """A step for what comes with steps, a second for what comes with time."""
    is_by_step: bool


class _Connection:
    replica = "a"


class _Caller:
    """In the place of the ingress."""

    def forget_sent(self, request_id: str) -> None: ...

    def note_output(self, request_id: str) -> None: ...


def measure() -> list[Cost]:
    """For `NUM_STREAMS` streams of one engine."""
    caller, connection = _Caller(), _Connection()
    runs = [PromptRun(caller, _request(index), lambda _: None) for index in range(NUM_STREAMS)]  # type: ignore[arg-type]
    outputs = [SequenceOutput(f"request-{index}", 0, [index]) for index in range(NUM_STREAMS)]
    replicas = Replicas()
    replicas.running["engine"] = frozenset({"a", "b"})

    def keep_tokens() -> None:
        replicas.hear("a")
        for run, output in zip(runs, outputs, strict=True):
            run.receive(output, connection)  # type: ignore[arg-type]

    def watch() -> None:
        owing = {run.replica or "" for run in runs}
        replicas.beat(owing)
        _ = {replica for replica in owing if not replicas.is_good(replica)}

    beats = 1 / BEAT_S
    return [
        Cost("ingress: tokens kept, engine heard", _time(keep_tokens), is_by_step=True),
        Cost("ingress: watch", beats * _time(watch), is_by_step=False),
        Cost("engine and ingress: empty frames", beats * asyncio.run(_time_beat()), is_by_step=False),
    ]


def table(step_s: float) -> list[str]:
    """Markdown; a step with `NUM_STREAMS` streams takes `step_s`."""
    head = f"| {NUM_STREAMS} streams, steps of {step_s * 1e3:g} ms | us | share of the time, % |"
    lines = [head, "| --- | --- | --- |"]
    total = 0.0
    for cost in measure():
        share = cost.seconds / step_s if cost.is_by_step else cost.seconds
        total += share
        unit = "a step" if cost.is_by_step else "a second"
        lines.append(f"| {cost.what} | {cost.seconds * 1e6:.1f} {unit} | {share * 100:.3f} |")
    return [*lines, f"| together | | {total * 100:.3f} |"]


def _request(index: int) -> EngineRequest:
    params = SamplingParams(seed=index)
    return EngineRequest(request_id=f"request-{index}", prompt_token_ids=[5], params=params, deadline_s=60.0)


def _time(function: Callable[[], None]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    for _ in range(NUM_STEPS):
        function()
    return (time.perf_counter() - started) / NUM_STEPS


async def _time_beat() -> float:
    """Seconds of one empty frame, sent and received in this process."""
    num_received = 0
    done, lost = asyncio.Event(), asyncio.Event()

    def on_outputs(*_: object) -> None:
        nonlocal num_received
        num_received += 1
        if num_received == NUM_STEPS:
            done.set()

    receiver = OutputReceiver("127.0.0.1", on_outputs, lambda _: lost.set())
    sender = OutputSender("engine", lambda _: None, lambda _: None)
    address = await receiver.start()
    await sender.connect(address)
    sender.send(address, [])
    started = time.perf_counter()
    while num_received < NUM_STEPS:
        sender.beat()
        await asyncio.sleep(0)
    await done.wait()
    seconds = time.perf_counter() - started
    sender._connections[address].result().close()
    await lost.wait()
    return seconds / NUM_STEPS


def main() -> int:
    print("\n".join(table(STEP_S)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
