"""The overlapped loop against the plain one, token for token, whatever the requests ask for and whatever happens to
them; and that it overlaps at all.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine import Engine, EngineDead
from manta.cluster.engine.executor_choice import make_executor
from manta.cluster.engine.executors.executor import StepCall
from manta.cluster.engine.executors.in_process import InProcessExecutor
from manta.cluster.engine.executors.thread_executor import ThreadExecutor
from manta.cluster.engine.request import ContinuedChoice, EngineRequest, FinishStatus, SequenceOutput, Usage
from manta.specdecode.lengths import Costs, StepCost
from manta.specdecode.pace import Pace
from manta.specdecode.run_ahead import RunAhead
from manta.specdecode.speculative_config import SpeculativeConfig
from manta.structured.constraint import ConstraintLimits, ConstraintSpec, Resolved
from manta.structured.logits_processors import LogitsProcessorSpec
from manta.structured.masks import MaskBatch
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.platforms.cpu import CpuPlatform
from manta.workers.ranks.rank_worker import Drawn
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import StepInput, StepOutput
from tests.checkpoints import VOCAB_SIZE, checkpoint
from tests.conftest import PROVE
from tests.engine_parts import device_of, speculative_worker_of, worker_of
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("plugin")

EXAMPLES = 1000 if PROVE else 15
NUM_STEPS = 2000
"""More than any workload takes."""
ROOMY, TIGHT = 256, 9
"""Blocks of the KV cache: in the second one sequences preempt each other all the time."""
CONSTRAINTS = (
    ConstraintSpec(kind="regex", text="[a-c]{3,9}"),
    ConstraintSpec(kind="choice", text='["red", "green", "blue green"]'),
    ConstraintSpec(kind="json_schema", text='{"type": "object", "properties": {"a": {"type": "integer"}}}'),
)
PROMPTS = ([5, 9, 11] * 11, [7] * 3, list(range(20, 60)), [5, 9, 11] * 11 + [80, 81])
"""Two begin alike; one fills no block, none ends with one."""


class TakingTurns(Pace):
    """Drafts and rests in turns, whatever is measured."""

    def __init__(self) -> None:
        super().__init__()
        self._num_steps = 0

    def drafts(self, num_sequences: int) -> bool:
        self._num_steps += 1
        return self._num_steps % 11 < 5

    def num_plain_steps(self, num_sequences: int, seconds: float) -> int:
        return 1


class Resting(Pace):
    """Rests, whatever is measured."""

    def drafts(self, num_sequences: int) -> bool:
        return False


class MostlyAhead(RunAhead):
    """Plans so many of 13 steps ahead of drafts, whatever it may gain."""

    def __init__(self, num_ahead: int) -> None:
        super().__init__()
        self._num_ahead = num_ahead
        self._num_asked = 0

    def is_due(self) -> bool:
        self._num_asked += 1
        self.is_ahead = self._num_asked % 13 < self._num_ahead
        return False


@functools.cache
def engine(num_blocks: int, overlap: str) -> Engine:
    """One for all examples, so that each finds what the ones before it left in the prefix cache. `device` is the
    overlapped loop as on a device that works by itself: the host hears of tokens only when it asks. `drafts` is the
    overlapped loop of an engine that speculates, and `device drafts` is that on such a device. `rests` is the loop of
    one whose proposers rest half of the time. `device ahead` assumes that all drafts are accepted.
    """
    if overlap.startswith("device"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CpuPlatform, "runs_ahead", True)
            return engine.__wrapped__(num_blocks, overlap.removeprefix("device").strip() or "on")
    folder = checkpoint("llama", dtype="float32")
    speculates = overlap in ("drafts", "rests", "ahead")
    one = Engine(
        EngineConfig(
            model=str(folder),
            num_threads=1,
            kv_cache_bytes=load_model_config(folder).kv_bytes_per_token("float32") * 16 * num_blocks,
            max_num_batched_tokens=48,
            max_num_sequences=6,
            overlap="on" if speculates else overlap,  # type: ignore[arg-type]
            speculative=SpeculativeConfig(
                proposers=("forced", "prediction", "ngram"), ngram_min=1, adaptive=overlap == "rests"
            )
            if speculates
            else None,
            constraints=ConstraintLimits(compile_seconds=PATIENCE_S),
            logits_processors={"automaton": None},
        )
    )
    if overlap == "rests":
        chain = speculative_worker_of(one).chain
        chain.pace, chain.costs = TakingTurns(), Costs(StepCost([(1, 1.0), (128, 1.0)]), {})
    if speculates:
        speculative_worker_of(one).chain.run_ahead = MostlyAhead(12 if overlap == "ahead" else 0)
    one.warm_up()  # what `resolved` proves is proven by one engine for all
    return one


@functools.cache
def resolved(constraint: ConstraintSpec) -> Resolved:
    return engine(ROOMY, "off").constraints.resolve(constraint).result()


class Request(msgspec.Struct, frozen=True):
    """A request and what happens to it: it arrives before step `arrival`; `abort` steps later, or when choice 0 has
    `stop` tokens, as if its text had reached a stop string, somebody ends it.
    """

    prompt: int
    params: SamplingParams
    arrival: int
    priority: int = 0
    num_continued: int = 0
    """Output tokens of each choice that another engine brought."""
    abort: int | None = None
    stop: int | None = None


def params_of(n: int, max_tokens: int, temperature: float, kind: str, stops: int) -> SamplingParams:
    fields: dict[str, Any] = {
        "constrained": {"constraint": CONSTRAINTS[stops % len(CONSTRAINTS)]},
        "stops": {"stop_token_ids": tuple(range(10 + stops, VOCAB_SIZE, 12)), "min_tokens": 2},
        "eos": {"logit_bias": {2: 3.0}},
        "penalties": {"presence_penalty": 0.9, "repetition_penalty": 1.2, "ignore_eos": True, "logprobs": 1},
        "processors": {"logits_processors": (LogitsProcessorSpec(name="automaton", arguments={"num_states": 97}),)},
        "prompt": {"prompt_logprobs": 0, "ignore_eos": True},
    }[kind]
    return SamplingParams(n=n, max_tokens=max_tokens, temperature=temperature, seed=3, **fields)


requests = st.builds(
    Request,
    prompt=st.integers(0, len(PROMPTS) - 1),
    params=st.builds(
        params_of,
        n=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.integers(1, 30),
        temperature=st.sampled_from([0.0, 1.0]),
        kind=st.sampled_from(["constrained", "constrained", "stops", "eos", "penalties", "processors", "prompt"]),
        stops=st.integers(0, 11),
    ),
    arrival=st.integers(0, 12),
    priority=st.sampled_from([0, 0, 0, -1]),
    num_continued=st.sampled_from([0, 0, 1, 5]),
    abort=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 20)),
    stop=st.one_of(st.none(), st.none(), st.integers(1, 8)),
)

Answer = tuple[list[int], FinishStatus | None, int | None]
"""Tokens, finish and stop token of a choice."""
Answers = dict[tuple[str, int], Answer]
"""Answers by request and index."""


class Run:
    """A workload on one engine."""

    def __init__(self, engine: Engine, workload: list[Request]) -> None:
        self._engine = engine
        self._workload = workload
        self.answers: Answers = {}
        for step in range(NUM_STEPS):
            self._arrive_and_leave(step)
            self._take(engine.step())
            if step > max(request.arrival for request in workload) and not engine.has_unfinished:
                break
        engine.step()  # an idle step checks the books
        engine.check_integrity()
        assert not engine.has_unfinished
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
        assert not worker_of(engine).sequences.sampling.sequences, "the rank remembers a sequence"

    def _arrive_and_leave(self, step: int) -> None:
        for number, request in enumerate(self._workload):
            if request.arrival == step:
                self._add(str(number), request)
            if request.abort is not None and request.arrival + request.abort == step:
                self._take(self._engine.abort(str(number)))

    def _add(self, name: str, request: Request) -> None:
        params, prompt = request.params, PROMPTS[request.prompt]
        continued = None
        count = min(request.num_continued, (params.max_tokens or 1) - 1)
        if count and params.constraint is None:
            usage = Usage(len(prompt), count, 0)
            continued = [ContinuedChoice(index, [100 + index] * count, usage) for index in range(params.n)]
        self.answers |= {(name, index): ([], None, None) for index in range(params.n)}
        self._engine.add_request(
            EngineRequest(
                request_id=name,
                prompt_token_ids=prompt,
                params=params,
                priority=request.priority,
                continued=continued,
            ),
            None if params.constraint is None else resolved(params.constraint),
        )

    def _take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            key = output.request_id, output.index
            tokens, finish, _ = self.answers[key]
            if finish is not None:
                continue  # it reached its stop string before
            tokens += output.token_ids
            self.answers[key] = tokens, output.finish, output.stop_token_id
            stop = self._workload[int(output.request_id)].stop
            if stop is not None and output.index == 0 and len(tokens) >= stop:
                del tokens[stop:]
                # Nothing is left to end where accepted drafts brought the end in the same step.
                self._engine.finish(output.request_id, output.index, stop)
                self.answers[key] = tokens, FinishStatus.FINISHED_STOPPED, None


@settings(max_examples=EXAMPLES, deadline=None)
@given(workload=st.lists(requests, min_size=1, max_size=7), num_blocks=st.sampled_from([ROOMY, TIGHT, TIGHT]))
def test_both_loops_give_the_same_tokens(workload: list[Request], num_blocks: int) -> None:
    plain = Run(engine(num_blocks, "off"), workload).answers
    kinds = ("on", "device", "drafts", "device drafts", "device ahead", "device rests")
    for overlap in (*kinds, *(("rests",) if PROVE else ())):
        compare(plain, Run(engine(num_blocks, overlap), workload).answers)


def compare(plain: Answers, overlapped: Answers) -> None:
    assert plain.keys() == overlapped.keys()
    for key, (tokens, *ends) in plain.items():
        others, *other_ends = overlapped[key]
        if FinishStatus.FINISHED_ABORTED in (ends[0], other_ends[0]):
            # It came at some step, and each loop was elsewhere by then.
            shorter, longer = sorted((tokens, others), key=len)
            assert longer[: len(shorter)] == shorter
        else:
            assert (others, other_ends) == (tokens, ends), f"choice {key}"


def test_the_small_cache_made_sequences_give_way() -> None:
    """What the test above relies on."""
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, n=3)
    workload = [Request(prompt=number, params=greedy, arrival=number) for number in range(3)]
    for overlap in ("off", "on"):
        before = engine(TIGHT, overlap).stats().num_preemptions
        Run(engine(TIGHT, overlap), workload)
        assert engine(TIGHT, overlap).stats().num_preemptions > before


def add(one: Engine, name: str = "a", constraint: ConstraintSpec | None = None, **fields: Any) -> None:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields}, constraint=constraint)
    request = EngineRequest(request_id=name, prompt_token_ids=PROMPTS[0], params=params)
    one.add_request(request, None if constraint is None else resolved(constraint))


def drain(one: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while one.has_unfinished:
        for output in one.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def test_a_step_launches_before_previous_tokens_are_known(monkeypatch) -> None:
    """The device gives no tokens away before the next step lies behind it: the plain loop would wait for ever."""
    one = engine(ROOMY, "on")
    device, submit, sample = device_of(one), one.executor.submit, device_of(one).sample
    lies_behind = [threading.Event() for _ in range(8)]
    steps: list[StepInput] = []

    def launch(step: StepInput) -> StepCall:
        if steps and len(steps) <= len(lies_behind):
            lies_behind[len(steps) - 1].set()
        steps.append(step)
        return submit(step)

    def reluctant_sample(masks: MaskBatch | None = None) -> StepOutput:
        output = sample(masks)
        index = next(index for index, step in enumerate(steps) if step.step_id == output.step_id)
        assert index >= len(lies_behind) or lies_behind[index].wait(PATIENCE_S), "the next step was not launched"
        return output

    monkeypatch.setattr(one.executor, "submit", launch)
    monkeypatch.setattr(device, "sample", reluctant_sample)
    add(one)
    (tokens,) = drain(one).values()
    assert len(tokens) == 12


def test_what_is_drawn_after_the_end_is_dropped() -> None:
    (free,) = Run(engine(ROOMY, "off"), [Request(0, SamplingParams(temperature=0, max_tokens=20), 0)]).answers.values()
    stop = free[0][5]
    one = engine(ROOMY, "on")
    for number in range(3):  # each finds what the one before it left in the prefix cache
        add(one, str(number), stop_token_ids=(stop,), max_tokens=20)
        tokens = drain(one)[str(number)]
        assert tokens == free[0][: free[0].index(stop) + 1]


def test_unconstrained_rows_do_not_wait_for_masks(monkeypatch) -> None:
    one = engine(ROOMY, "on")
    pool = one.masks.pool
    assert pool is not None
    monkeypatch.setattr(pool, "is_ready", lambda session_id: False)
    add(one, "free")
    add(one, "held", CONSTRAINTS[0])
    tokens: list[int] = []
    while len(tokens) < 12:
        for output in one.step():
            assert output.request_id == "free"
            tokens += output.token_ids
    monkeypatch.undo()
    assert len(drain(one)["held"]) >= 3


@pytest.mark.parametrize("overlap", ["on", "device"])
def test_a_failed_step_voids_the_next_one_too(overlap, monkeypatch) -> None:
    one = engine(ROOMY, overlap)
    add(one)
    expected = drain(one)
    model = worker_of(one).runner.model
    forward, calls = model.forward, []

    def fail_once(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("the device went away")
        return forward(*arguments)

    monkeypatch.setattr(model, "forward", fail_once)
    add(one)
    assert drain(one) == expected
    assert len(calls) > 12


def test_two_failures_in_a_row_end_the_engine() -> None:
    folder = checkpoint("llama", dtype="float32")
    one = Engine(EngineConfig(model=str(folder), kv_cache_bytes=2**20, overlap="on"))

    def fail(*arguments):
        raise RuntimeError("the device went away")

    worker_of(one).runner.model.forward = fail
    add(one)
    with pytest.raises(EngineDead, match="the device went away"):
        drain(one)


def test_with_drafts_tokens_are_delivered_during_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device ends none of the first steps before the call that launched it has returned."""
    one = engine(ROOMY, "drafts")
    sample = device_of(one).sample
    returned = [threading.Event() for _ in range(4)]
    waiting = iter(returned)
    returning = iter(returned)

    def reluctant_sample(masks: MaskBatch | None = None) -> StepOutput:
        event = next(waiting, None)
        assert event is None or event.wait(PATIENCE_S), "the engine waited for the step that it had just launched"
        return sample(masks)

    monkeypatch.setattr(device_of(one), "sample", reluctant_sample)
    add(one, max_tokens=30)
    tokens: list[int] = []
    while one.has_unfinished:
        for output in one.step():
            tokens += output.token_ids
        if (event := next(returning, None)) is not None:
            event.set()
    assert tokens == Run(engine(ROOMY, "off"), [Request(0, greedy(30), 0)]).answers["0", 0][0]
    assert sum(one.stats().drafts.accepted.get("ngram", ())) > 0


def unread_draws(one: Engine, patch: pytest.MonkeyPatch) -> list[object]:
    """Returns a list that from now on has the draws of the engine's device whose tokens nobody has read yet."""
    draw, unread = device_of(one).draw, list[object]()

    def watched_draw(masks: MaskBatch | None = None) -> Drawn:
        drawn = draw(masks)
        unread.append(drawn)
        result = drawn.result

        def read() -> StepOutput:
            unread.remove(drawn)
            return result()

        drawn.result = read  # type: ignore[method-assign]
        return drawn

    patch.setattr(device_of(one), "draw", watched_draw)
    return unread


def test_devices_verify_drafts_when_tokens_are_read() -> None:
    """A step that verifies drafts does not wait for its tokens, and no step is launched before they are read."""
    one = engine(ROOMY, "device drafts")
    submit = one.executor.submit

    def watched_submit(step: StepInput) -> StepCall:
        assert not unread
        return submit(step)

    with pytest.MonkeyPatch.context() as patch:
        unread = unread_draws(one, patch)
        patch.setattr(one.executor, "submit", watched_submit)
        add(one, max_tokens=30)
        tokens: list[int] = []
        num_unread = 0
        while one.has_unfinished:
            for output in one.step():
                tokens += output.token_ids
            num_unread += len(unread)
    assert num_unread > 10, "each call of `step` waited for its own tokens"
    assert tokens == Run(engine(ROOMY, "off"), [Request(0, greedy(30), 0)]).answers["0", 0][0]


def test_devices_run_ahead_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched before the drafts of the step before are verified. Some go on behind rejected ones."""
    one = engine(ROOMY, "device ahead")
    submit, unread = one.executor.submit, unread_draws(one, monkeypatch)
    num_unread, overtaken = list[int](), list[set[int]]()
    find = worker_of(one).sequences.overtaken

    def watched_submit(step: StepInput) -> StepCall:
        num_unread.append(len(unread))
        assert len(unread) or not step.assumes_drafts
        return submit(step)

    def watched_find(step: StepInput) -> set[int]:
        overtaken.append(find(step))
        return overtaken[-1]

    monkeypatch.setattr(one.executor, "submit", watched_submit)
    monkeypatch.setattr(worker_of(one).sequences, "overtaken", watched_find)
    monkeypatch.setattr(one.executor, "rebuild", lambda: pytest.fail("a step failed"))
    before = sum(one.stats().drafts.accepted.get("ngram", ()))
    add(one, max_tokens=60)
    (tokens,) = drain(one).values()
    assert tokens == Run(engine(ROOMY, "off"), [Request(0, greedy(60), 0)]).answers["0", 0][0]
    assert num_unread.count(1) > 5
    assert any(overtaken)
    assert sum(one.stats().drafts.accepted["ngram"]) > before


def test_devices_run_ahead_while_proposers_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine(ROOMY, "device rests")
    submit, unread, num_unread = one.executor.submit, unread_draws(one, monkeypatch), list[int]()

    def watched_submit(step: StepInput) -> StepCall:
        num_unread.append(len(unread))
        return submit(step)

    monkeypatch.setattr(one.executor, "submit", watched_submit)
    num_drafted = sum(one.stats().drafts.drafted.get("ngram", ()))
    add(one, max_tokens=60)
    (tokens,) = drain(one).values()
    assert tokens == Run(engine(ROOMY, "off"), [Request(0, greedy(60), 0)]).answers["0", 0][0]
    assert min(num_unread.count(0), num_unread.count(1)) > 5
    assert sum(one.stats().drafts.drafted["ngram"]) > num_drafted


def test_a_prediction_may_start_in_the_step_that_ends_another_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """That step is launched before the last row of the other sequence is read. Tokens do not show a failure of it, for
    an engine computes a failed step again.
    """
    one = engine(ROOMY, "device rests")
    monkeypatch.setattr(speculative_worker_of(one).chain, "pace", Resting())
    monkeypatch.setattr(one.executor, "rebuild", lambda: pytest.fail("a step failed"))
    free = Run(engine(ROOMY, "off"), [Request(0, greedy(40), 0)]).answers["0", 0][0]
    add(one, "long", max_tokens=40)
    add(one, "ends", max_tokens=40, stop_token_ids=(free[5],))
    tokens: dict[str, list[int]] = {"long": [], "ends": [], "predicted": []}
    while one.has_unfinished:
        for output in one.step():
            tokens[output.request_id] += output.token_ids
            if output.request_id == "ends" and output.finish is not None:
                add(one, "predicted", max_tokens=20, prediction_token_ids=tuple(free))
    assert tokens["long"] == free
    assert tokens["predicted"] == free[:20]
    assert len(tokens["ends"]) < 20


def test_requests_with_predictions_come_and_go_while_proposers_rest() -> None:
    """One may start in a step that was planned before the last tokens of another were known."""
    plain, predicted = (
        [Request(number % len(PROMPTS), greedy(4 + number % 7, prediction), arrival=2 * number) for number in range(24)]
        for prediction in ((), (7, 7, 7, 7))
    )
    assert Run(engine(ROOMY, "device rests"), predicted).answers == Run(engine(ROOMY, "off"), plain).answers


def greedy(max_tokens: int, prediction: tuple[int, ...] = ()) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, prediction_token_ids=prediction)


def test_asynchronous_devices_overlap_unless_the_option_forbids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuPlatform, "runs_ahead", True)
    folder = str(checkpoint("llama", dtype="float32"))
    drafts = SpeculativeConfig(proposers=("ngram",), adaptive=False)
    for overlap, speculative, kind, depth in (
        ("auto", None, InProcessExecutor, 1),
        ("auto", drafts, InProcessExecutor, 1),
        ("off", None, InProcessExecutor, 0),
        ("off", drafts, InProcessExecutor, 0),
    ):
        executor = make_executor(
            EngineConfig(model=folder, kv_cache_bytes=2**20, overlap=overlap, speculative=speculative)  # type: ignore[arg-type]
        )
        assert (type(executor), executor.depth) == (kind, depth)


def test_the_plain_loop_is_the_default_on_cpus() -> None:
    for overlap, kind in (
        ("on", ThreadExecutor),
        ("device", InProcessExecutor),
        ("drafts", ThreadExecutor),
        ("device drafts", InProcessExecutor),
    ):
        executor = engine(ROOMY, overlap).executor
        assert isinstance(executor, kind)
        assert executor.depth == 1
    assert engine(ROOMY, "auto").executor.depth == 0, "on a CPU"
