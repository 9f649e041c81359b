"""The part `loops` of `manta bench host`: what overlap hides of the host's work behind a device of its own.

The device takes `DEVICE_S` for each step and none of the host's cores. The step of the plain loop is the sum of the
device's time and the host's; of the overlapped one it should be the larger of the two. The host's work includes what a
caller does with the tokens: `LLM.step` makes text of them.

    plain          one token a sequence and step, the device in this process
    speculative    n-gram drafts, all of them accepted: several tokens a sequence and step. Two more tables have the
                   phases between a step's tokens and the next launch, in which the device waits for the host if steps
                   are not planned ahead of drafts, and what planning ahead gains by the share of accepted drafts
    at rest        the same with a proposer that finds nothing and rests, so that steps are planned ahead
    two ranks      actors of Ray; the device is a logits processor on rank 0 that waits. The ranks' own work counts as
                   the host's here, as they have no other device

The last line is the tiny model on this machine's cores, where the engine and the model share them.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.host import PROMPT, FreeExecutor, config_of
from benchmarks.report import in_turns, markdown_head, markdown_row, ratio_of
from manta.cluster import own_ray
from manta.cluster.config import EngineConfig
from manta.cluster.engine import engine
from manta.cluster.engine.executor_choice import make_executor, with_depth
from manta.cluster.engine.executors.executor import SynchronousExecutor
from manta.cluster.engine.executors.in_process import InProcessExecutor
from manta.cluster.engine.ranks.ray_executor import RayExecutor
from manta.cluster.llm import LLM
from manta.specdecode.run_ahead import RunAhead
from manta.specdecode.speculative_config import SpeculativeConfig
from manta.structured.logits_processors import LogitsProcessorSpec
from manta.structured.masks import MaskBatch
from manta.workers.ranks.rank_worker import Drawn
from manta.workers.sampling import pending_draw
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import StepInput, StepOutput

DEVICE_S = 0.005
LOOP_ROUNDS = 7
WARM_UP_STEPS = 4
MAX_DRAFT_TOKENS = 4
LONGEST = 900
"""Tokens of a request, more than a round takes."""
ACCEPTANCES = (1.0, 0.98, 0.9, 0.7)
WRONG = 6
"""A token that the free model never draws."""
GAP = ("verify", "propose", "update", "schedule", "execute")
"""Phases between a step's tokens and the next launch, in order."""


class PacedDevice(FreeExecutor):
    """As a device that works by itself: a call launches a step and returns, each step begins when the one before it is
    done and takes `DEVICE_S`, and its tokens are there when it is done. The model's worker waits for them.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.depth = 1 if config.overlap == "on" else 0
        self._done_at = 0.0
        target: Any = getattr(self.worker, "target", self.worker)
        execute, draw, sample = target.execute, target.draw, target.sample

        def paced_execute(step: StepInput) -> None:
            execute(step)
            if step.scheduled:
                self._done_at = max(self._done_at, time.perf_counter()) + DEVICE_S

        def paced_sample(masks: MaskBatch | None = None) -> StepOutput:
            time.sleep(max(0.0, self._done_at - time.perf_counter()))
            output: StepOutput = sample(masks)
            return output

        target.execute, target.sample = paced_execute, paced_sample
        target.draw = lambda masks=None: PacedDraw(draw(masks), self._done_at)
        target.is_computing = lambda: time.perf_counter() < self._done_at


class PacedDraw(NamedTuple):
    drawn: Drawn
    done_at: float

    def result(self) -> StepOutput:
        time.sleep(max(0.0, self.done_at - time.perf_counter()))
        return self.drawn.result()


class Waiting(RunAhead):
    """Plans no step ahead of drafts."""

    def is_due(self) -> bool:
        return False


class Wait:
    """A logits processor that takes `DEVICE_S` and none of the cores."""

    def __init__(self, arguments: dict[str, Any], prompt: np.ndarray, output: np.ndarray, vocab_size: int) -> None:
        pass

    def __call__(self, output_token_ids: np.ndarray, logits: Any) -> None:
        time.sleep(DEVICE_S)


def measure(rows: Sequence[int], num_steps: int) -> None:
    """Prints a row for each kind of engine and number of rows."""
    own_ray.start(4)  # two engines of two ranks
    print(f"\nMedians of {LOOP_ROUNDS} rounds; the last two columns are ratios.")
    host_s: dict[str, dict[int, float]] = {}
    ratios = ("over the larger of device and host", "plain over it")
    markdown_head("engine", "rows", "plain loop, ms a step", "overlapped", *ratios)
    for name, device_s, make in (
        ("plain", DEVICE_S, _paced),
        ("speculative", DEVICE_S, _speculative),
        ("at rest", DEVICE_S, _at_rest),
        ("two ranks", DEVICE_S, _two_ranks),
        ("tiny-llama on these cores", 0.0, _tiny),
    ):
        engines = {overlap: make(overlap, max(rows)) for overlap in ("off", "on")}
        for count in rows:
            sides = {
                overlap: lambda _, llm=llm: _step_seconds(llm, count, num_steps)  # type: ignore[misc]  # noqa: B023
                for overlap, llm in engines.items()
            }
            seconds = in_turns(sides, LOOP_ROUNDS, f"{name}, {count} rows")
            plain, overlapped = (statistics.median(each) for each in seconds.values())
            host_s.setdefault(name, {})[count] = plain - device_s
            larger = f"{overlapped / max(device_s, plain - device_s):.3f}" if device_s else "-"
            ratio = ratio_of(seconds["off"], seconds["on"]).median
            markdown_row(name, count, f"{plain * 1e3:.3f}", f"{overlapped * 1e3:.3f}", larger, f"{ratio:.3f}")
        del engines
    _print_gap(host_s["speculative"], num_steps)
    _print_gains(rows, num_steps)


def _print_gap(host_s: dict[int, float], num_steps: int) -> None:
    """Prints what stands between the tokens of a step with drafts and the next launch if it is not planned ahead, and
    how long a step takes at least with that. `host_s` is the host's whole work, in seconds a step, by number of rows.
    """
    print("\nBetween the tokens of a step with drafts and the next launch, if steps wait for tokens, medians in ms:")
    markdown_head("rows", *GAP, "together", "device and these over the larger of device and host")
    llm = _speculative("on", max(host_s))
    engine, worker = llm.engine, llm.engine.executor.worker  # type: ignore[attr-defined]
    worker.chain.run_ahead = Waiting()
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as watches:
        for owner, name, phase in (
            (pending_draw, "keep_verified", "verify"),
            (worker.chain, "propose", "propose"),
            (engine.scheduler, "update", "update"),
            (engine.scheduler, "schedule", "schedule"),
            (worker, "execute", "execute"),
        ):
            watches.enter_context(_watched(owner, name, seconds.setdefault(phase, [])))
        for count, host in host_s.items():
            for each in seconds.values():
                each.clear()
            _step_seconds(llm, count, num_steps)
            medians = [statistics.median(seconds[phase]) for phase in GAP]
            least = DEVICE_S + sum(medians)
            figures = [f"{each * 1e3:.3f}" for each in (*medians, sum(medians))]
            markdown_row(count, *figures, f"{least / max(DEVICE_S, host):.3f}")


def _print_gains(rows: Sequence[int], num_steps: int) -> None:
    """Prints the tokens a second of an engine that may plan ahead of drafts, over one that waits for tokens."""
    print("\nTokens a second where the engine decides whether to plan ahead of drafts, over an engine that waits:")
    markdown_head("rows", "drafts accepted", "ratio", "steps planned ahead")
    engines = {name: _speculative("on", max(rows)) for name in ("decides", "waits")}
    chains = {name: llm.engine.executor.worker.chain for name, llm in engines.items()}  # type: ignore[attr-defined]
    chains["waits"].run_ahead = Waiting()
    proposers = {name: chain.proposers[0].propose for name, chain in chains.items()}
    for acceptance in ACCEPTANCES:
        for name, chain in chains.items():
            is_wrong = np.random.default_rng(0).random(2**16) >= acceptance
            chain.proposers[0].propose = functools.partial(_spoiled, proposers[name], is_wrong.tolist())
        for count in rows:
            planned: list[bool] = []
            watch_steps(engines["decides"], planned)
            sides = {name: lambda _, llm=llm: _speed(llm, count, num_steps) for name, llm in engines.items()}  # type: ignore[misc]  # noqa: B023
            speeds = in_turns(sides, LOOP_ROUNDS, f"{acceptance:.0%}, {count} rows")
            ratio = ratio_of(speeds["decides"], speeds["waits"])
            markdown_row(count, f"{acceptance:.0%}", str(ratio), f"{statistics.mean(planned):.0%}")


def _spoiled(propose: Callable[..., dict[int, list[int]]], is_wrong: list[bool], requests: Any) -> dict[int, list[int]]:
    """Proposes a wrong token wherever `is_wrong` says so of a position of a sequence."""
    drafts = propose(requests)
    for each in (each for each in requests if each.sequence_id in drafts):
        first = 977 * each.sequence_id + each.state.num_tokens
        places = range(first, first + each.count)
        drafts[each.sequence_id] = [
            WRONG if is_wrong[place % len(is_wrong)] else token_id
            for place, token_id in zip(places, drafts[each.sequence_id], strict=False)
        ]
    return drafts


@contextlib.contextmanager
def _watched(owner: Any, name: str, seconds: list[float]) -> Iterator[None]:
    """Appends the time of each call of a function to `seconds`."""
    function = getattr(owner, name)

    def watched(*arguments: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments)
        seconds.append(time.perf_counter() - started)
        return result

    setattr(owner, name, watched)
    try:
        yield
    finally:
        setattr(owner, name, function)


def _paced(overlap: str, max_rows: int, **options: Any) -> LLM:
    return llm_on(PacedDevice, config_of("one-layer-llama", max_rows), overlap=overlap, **options)


def _speculative(overlap: str, max_rows: int) -> LLM:
    speculative = SpeculativeConfig(proposers=("ngram",), max_draft_tokens=MAX_DRAFT_TOKENS, adaptive=False)
    return _paced(overlap, max_rows, speculative=speculative)


def _at_rest(overlap: str, max_rows: int) -> LLM:
    return _paced(overlap, max_rows, speculative=SpeculativeConfig(proposers=("prediction",)))


def _two_ranks(overlap: str, max_rows: int) -> LLM:
    llm = llm_on(RayExecutor, config_of("one-layer-llama", max_rows), overlap=overlap, tensor_parallel_size=2)
    llm.register_logits_processor("wait", Wait)
    return llm


def _tiny(overlap: str, max_rows: int) -> LLM:
    return llm_on(InProcessExecutor, config_of("tiny-llama", max_rows, None), overlap=overlap)


def llm_on(make: Callable[[EngineConfig], SynchronousExecutor], config: EngineConfig, **options: Any) -> LLM:
    """Returns an `LLM` with these options whose steps run on the executor that `make` returns."""
    fields = {**msgspec.to_builtins(config), **msgspec.to_builtins(options)}
    engine.make_executor = lambda config: with_depth(make(config), config)
    try:
        return LLM(**fields)
    finally:
        engine.make_executor = make_executor


def _speed(llm: LLM, count: int, num_steps: int) -> float:
    """Returns the tokens a second of `count` greedy sequences, with twice as many steps as `_step_seconds`."""
    _start(llm, count)
    started, num_tokens = time.perf_counter(), 0
    for _ in range(2 * num_steps):
        num_tokens += sum(len(output.token_ids) for output in llm.engine.step())
    speed = num_tokens / (time.perf_counter() - started)
    _stop(llm, count)
    return speed


def watch_steps(llm: LLM, planned: list[bool]) -> None:
    """Notes in `planned` from now on whether each step was planned ahead of drafts."""
    submit = type(llm.engine.executor).submit

    def watched(step: StepInput) -> Any:
        planned.append(step.assumes_drafts)
        return submit(llm.engine.executor, step)

    llm.engine.executor.submit = watched  # type: ignore[method-assign]


def _step_seconds(llm: LLM, count: int, num_steps: int) -> float:
    """Returns the seconds of a decode step of `count` greedy sequences, the delivery of its tokens included."""
    _start(llm, count)
    started = time.perf_counter()
    for _ in range(num_steps):
        llm.step()
    seconds = (time.perf_counter() - started) / num_steps
    _stop(llm, count)
    return seconds


def _start(llm: LLM, count: int) -> None:
    """Brings `count` greedy sequences to where all decode."""
    waits = (LogitsProcessorSpec(name="wait"),) if llm.config.tensor_parallel_size > 1 else ()
    for number in range(count):
        prompt = [5 + number % 500, *[5] * (PROMPT - 1)]
        params = SamplingParams(
            temperature=0, max_tokens=LONGEST, ignore_eos=True, logits_processors=waits if not number else ()
        )
        llm.add_request(str(number), prompt, params)
    while llm.engine.num_waiting:
        llm.step()
    for _ in range(WARM_UP_STEPS):
        llm.step()


def _stop(llm: LLM, count: int) -> None:
    for number in range(count):
        llm.abort(str(number))
    llm.step()
