"""Logits processors in the sampler: their place in the order, one victim a failure, the life of their instances.

What processors are given is compared with `tests/workers/sampling/sampling_reference.py`;
`tests/engine/test_logits_processors_engine.py` runs them in whole engines.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from manta.cluster.llm import LogitsProcessorSpec, SamplingParams
from manta.structured.logits_processors import (
    MAX_ARGUMENT_BYTES,
    MAX_LOGITS_PROCESSORS,
    LogitsProcessorError,
    LogitsProcessorRegistry,
)
from manta.structured.masks import LATE, NO_MASK, MaskBatch
from manta.workers.sampling.sampling_state import SamplingState
from manta.workers.step import RowError, SamplePoint, SequenceStart
from manta.workers.torch_worker.sampler import HostSample
from tests.workers.sampling import sampling_reference as reference
from tests.workers.sampling.samplers import sample
from tests.workers.sampling.test_masks import packed
from tests.workers.sampling.test_sampler import CASES, EOS, some_logits

pytestmark = pytest.mark.usefixtures("plugin")


# ---- the sampler ---------------------------------------------------------------------------------------------------


class Recorded:
    """What the instances of `stateless` were given, call by call."""

    def __init__(self) -> None:
        self.outputs: list[list[int]] = []
        self.logits: list[torch.Tensor] = []


def stateless(change: Callable[[torch.Tensor], Any], recorded: Recorded | None = None) -> Callable[..., Any]:
    """A factory of processors that only change logits."""

    def call(output_token_ids: np.ndarray, logits: torch.Tensor) -> Any:
        if recorded is not None:
            recorded.outputs.append(output_token_ids.tolist())
            recorded.logits.append(logits.clone())
        return change(logits)

    return lambda arguments, prompt, output, vocab_size: call


def forbid(*token_ids: int) -> Callable[..., Any]:
    return stateless(lambda logits: logits.index_fill_(0, torch.tensor(token_ids), -torch.inf))


def fails(logits: torch.Tensor) -> None:
    logits[0] = torch.nan
    raise KeyError("as it was told to")


identity = stateless(lambda logits: None)


def named(*names: str, **fields: Any) -> SamplingParams:
    return SamplingParams(logits_processors=tuple(LogitsProcessorSpec(name=name) for name in names), **fields)


def state_of(vocab_size: int, starts: list[SequenceStart], **factories: Callable[..., Any]) -> SamplingState:
    registry = LogitsProcessorRegistry()
    for name, factory in factories.items():
        registry.register(name, factory)
    state = SamplingState(vocab_size, registry)
    for start in starts:
        state.start(start)
    return state


def draw_rows(
    logits: torch.Tensor, params: list[SamplingParams], masks: MaskBatch | None = None, **factories: Callable[..., Any]
) -> HostSample:
    """One draw from each row, by sequences that differ in their parameters and seeds only."""
    tokens = [1, 2, 3, 4, 5, 4]
    starts = [SequenceStart(row, one, row, tokens, 2, (EOS,)) for row, one in enumerate(params)]
    points = [SamplePoint(row, row, len(tokens)) for row in range(len(params))]
    return sample(logits, points, state_of(logits.shape[1], starts, **factories), masks).to_host()


@pytest.mark.axes_in_turns
@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_it_runs_between_penalties_and_temperature(name: str, dtype: torch.dtype) -> None:
    chooser = random.Random(name)
    decided = 0
    for case, vocab_size in enumerate([16, 37, 600, 5003] * 3):
        prompt = [chooser.randrange(16) for _ in range(chooser.randrange(1, 6))]
        output = [chooser.randrange(16) for _ in range(chooser.randrange(0, 12))]
        logits = some_logits(vocab_size, case, spread=2.0).to(dtype)
        shift = torch.rand(vocab_size, generator=torch.Generator().manual_seed(case)) * 4
        recorded = Recorded()
        params = named("shift", **CASES[name])
        start = SequenceStart(0, params, case, prompt + output, len(prompt), (EOS,))
        position = len(prompt) + len(output)
        factory = stateless(lambda row, shift=shift: row + shift, recorded)
        state = state_of(vocab_size, [start], shift=factory)
        drawn = sample(logits, [SamplePoint(0, 0, position)], state).to_host()
        values = reference.processed_logits(logits[0].float().numpy(), params, prompt, output, (EOS,))
        assert recorded.outputs == [output]
        np.testing.assert_allclose(recorded.logits[0].numpy(), values, rtol=1e-5, atol=1e-5)
        expected = reference.draw(values + shift.numpy(), params, case, position)
        assert drawn.errors == {}
        if not expected.is_close:
            decided += 1
            assert drawn.token_ids == [expected.token_id]
    assert decided >= 9


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", CASES)
def test_a_no_op_changes_nothing(name: str) -> None:
    logits = some_logits(600, 3, rows=2)
    row = logits[:1].expand(2, -1)
    fields = {"logprobs": 3, **CASES[name]}
    starts = [
        SequenceStart(index, params, 7, [1, 2, 9, 2, 4], 2, (EOS,))
        for index, params in enumerate([SamplingParams(**fields), named("identity", **fields)])
    ]
    points = [SamplePoint(index, index, 5) for index in range(2)]
    drawn = sample(row, points, state_of(600, starts, identity=identity)).to_host()
    assert drawn.token_ids[0] == drawn.token_ids[1]
    assert drawn.logprobs[0] == drawn.logprobs[1]


@pytest.mark.usefixtures("implementation")
def test_reported_logprobs_are_those_of_the_models_distribution() -> None:
    logits = some_logits(300, 1)
    best = int(logits.argmax())
    drawn = draw_rows(logits, [named("forbid", temperature=0, logprobs=1)], forbid=forbid(best))
    report = drawn.logprobs[0]
    assert report.rank == 2
    assert report.top_token_ids == [best]
    assert report.logprob == pytest.approx(float(logits.log_softmax(1)[0, drawn.token_ids[0]]), abs=1e-5)


@pytest.mark.usefixtures("implementation")
def test_several_run_in_the_order_given() -> None:
    logits = torch.arange(8.0)[None]
    last = Recorded()
    factories = {
        "add": stateless(lambda row: row.add_(1)),
        "double": stateless(lambda row: row * 2),
        "last": stateless(lambda row: None, last),
    }
    for names in (("add", "double"), ("double", "add"), ("double", "double")):
        draw_rows(logits, [named(*names, "last", logit_bias={0: 10.0})], **factories)
    biased = logits[0].index_add(0, torch.tensor([0]), torch.tensor([10.0]))
    assert torch.equal(torch.stack(last.logits), torch.stack([(biased + 1) * 2, biased * 2 + 1, biased * 4]))


@pytest.mark.usefixtures("implementation")
def test_the_mask_comes_last_and_adjustments_add() -> None:
    allowed = np.zeros((1, 64), dtype=bool)
    allowed[0, [5, 6]] = True
    params = [SamplingParams(temperature=0), named("favour", temperature=0), named("favour", temperature=0)]
    favour = stateless(lambda row: row.copy_(torch.arange(64) % 6))  # token 59 of all, 5 of the two
    adjustments = {2: (np.array([6], dtype=np.int32), np.array([9.0], dtype=np.float32))}
    logits = torch.zeros(3, 64)
    drawn = draw_rows(logits, params, MaskBatch(0, [0, 0, 0], packed(allowed), adjustments), favour=favour)
    assert drawn.token_ids == [5, 5, 6]
    assert draw_rows(logits, params, favour=favour).token_ids == [0, 5, 5]


@pytest.mark.usefixtures("implementation")
def test_late_rows_are_not_processed() -> None:
    recorded = Recorded()
    allowed = np.zeros((2, 64), dtype=bool)
    allowed[0, 40], allowed[1, 50] = True, True
    params = [named("record"), named("record"), SamplingParams(), named("record")]
    masks = MaskBatch(0, [LATE, 1, 0, NO_MASK], packed(allowed), {})
    drawn = draw_rows(some_logits(64, 1, rows=4), params, masks, record=stateless(lambda row: None, recorded))
    assert len(recorded.outputs) == 2
    assert drawn.token_ids[:3] == [None, 50, 40]


BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (stateless(fails), r"logits processor 'bad' raised KeyError: .*told to.* \(position 6\)"),
    "nan": (stateless(lambda row: row * torch.nan), r"logits processor 'bad' returned NaN or \+inf \(position 6\)"),
    "inf": (stateless(lambda row: row.index_fill_(0, torch.tensor([3]), torch.inf)), r"'bad' returned NaN or \+inf"),
    "shape": (stateless(lambda row: row[:-1]), r"'bad' returned torch.Size\(\[299\]\), not logits of torch.Size"),
    "type": (stateless(lambda row: "no"), r"'bad' returned str, not logits"),
    "factory": (lambda *arguments: 1 / 0, r"the factory of logits processor 'bad' raised ZeroDivisionError"),
    "masks": (
        stateless(lambda row: row.fill_(-torch.inf)),
        r"every token is masked at position 6: .* the logits processors 'identity', 'bad', 'identity' and",
    ),
}


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"top_p": 0.9, "seed": 1}], ids=["greedy", "top_p"])
def test_one_that_fails_ends_its_own_row(case: str, fields: dict[str, Any]) -> None:
    bad, message = BAD[case]
    logits = some_logits(300, 2, rows=4)
    good = draw_rows(logits, [named("identity", **fields), SamplingParams(**fields)] * 2, identity=identity)
    params = [
        named("identity", **fields),
        named("identity", "bad", "identity", logprobs=1, **fields),
        named("identity", **fields),
        SamplingParams(**fields),
    ]
    drawn = draw_rows(logits, params, bad=bad, identity=identity)
    assert list(drawn.errors) == [1]
    assert not drawn.errors[1].is_corrupt
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(drawn.errors[1].reason)
    assert drawn.token_ids == [good.token_ids[0], 0, *good.token_ids[2:]]
    assert drawn.logprobs == {}


@pytest.mark.usefixtures("implementation")
def test_a_models_nan_is_not_blamed_on_processors() -> None:
    logits = some_logits(300, 2, rows=3)
    logits[0, 7], logits[1, 7], logits[2, 7] = torch.nan, torch.inf, torch.nan
    hide = forbid(7)
    drawn = draw_rows(logits, [named("hide"), named("hide"), named("bad")], hide=hide, bad=stateless(fails))
    nan = RowError("the model produced NaN logits at position 6", is_corrupt=True)
    assert drawn.errors == {0: nan, 1: RowError("the model produced infinite logits at position 6", True), 2: nan}


@pytest.mark.usefixtures("implementation")
def test_rows_beside_processors_keep_their_tokens() -> None:
    """Each next row of logits is a function of the sequence's own tokens, as a model's would be."""
    names = list(CASES)

    def generate(with_processors: bool) -> dict[int, list[int]]:
        starts = []
        for index in range(20):
            fields = CASES[names[index % len(names)]]
            params = named("identity", "ban", **fields) if with_processors and index % 3 == 0 else None
            starts.append(SequenceStart(index, params or SamplingParams(**fields), index, [index, 7, 9], 1, (EOS,)))
        state = state_of(700, starts, identity=identity, ban=forbid(1, 2))
        outputs: dict[int, list[int]] = {index: [] for index in range(20)}
        for _ in range(6):
            points = [SamplePoint(row, row, len(state.tokens(row))) for row in range(20)]
            rows = [some_logits(700, int(state.tokens(row).sum()) * 100 + row)[0] for row in range(20)]
            for row, token_id in enumerate(sample(torch.stack(rows), points, state).to_host().token_ids):
                state.append(row, [token_id])
                outputs[row].append(token_id)
        return outputs

    plain, beside = generate(False), generate(True)
    assert [plain[row] for row in plain if row % 3] == [beside[row] for row in plain if row % 3]
    assert not any({1, 2} & set(beside[row]) for row in plain if row % 3 == 0)


def test_arguments_are_each_instances_own() -> None:
    seen = []

    def factory(arguments, prompt, output, vocab_size):
        seen.append((copy.deepcopy(arguments), prompt.tolist(), output.tolist(), vocab_size))
        arguments["left"]["count"] = 0
        with pytest.raises(ValueError, match="read-only"):
            prompt[0] = 1
        return lambda output, logits: None

    given = {"left": {"count": 3}, "pair": (1, 2.5)}
    params = SamplingParams(logits_processors=(LogitsProcessorSpec(name="f", arguments=given),))
    given["left"] = {"count": 9}
    draw_rows(some_logits(50, 1, rows=2), [params, params], f=factory)
    assert seen == [({"left": {"count": 3}, "pair": [1, 2.5]}, [1, 2], [3, 4, 5, 4], 50)] * 2


class Follower:
    """A processor that checks what it is told of its sequence; `events` is what became of all instances."""

    events: list[str]

    def __init__(self, arguments: dict, prompt: np.ndarray, output: np.ndarray, vocab_size: int) -> None:
        self.events.append(f"new {output.tolist()}")
        self.seen = output.tolist()

    def __call__(self, output: np.ndarray, logits: torch.Tensor) -> None:
        assert output.tolist()[: len(self.seen)] == self.seen
        self.seen = output.tolist()

    def close(self) -> None:
        self.events.append(f"close {self.seen}")


class CloningFollower(Follower):
    def clone(self) -> CloningFollower:
        self.events.append(f"clone {self.seen}")
        other = object.__new__(type(self))
        other.events, other.seen = self.events, list(self.seen)
        return other


class BadCloner(Follower):
    def clone(self) -> BadCloner:
        raise RuntimeError("as it was told to")


def fork_in_the_middle(kind: type[Follower]) -> tuple[list[str], SamplingState]:
    """A sequence draws twice, is forked, and both draw once more."""
    kind.events = []
    state = state_of(50, [SequenceStart(0, named("f"), 1, [4, 5], 2)], f=kind)

    def draw(*ids: int) -> None:
        points = [SamplePoint(row, key, len(state.tokens(key))) for row, key in enumerate(ids)]
        assert sample(torch.zeros(len(ids), 50), points, state).to_host().errors == {}
        for key in ids:
            state.append(key, [10 + key])

    draw(0)
    draw(0)
    state.fork(0, 1, 9)
    draw(0, 1)
    return kind.events, state


def test_forks_clone_and_every_instance_is_closed() -> None:
    made_anew = ["new []", "new [10, 10]"]
    for kind, begin in ((Follower, made_anew), (CloningFollower, ["new []", "clone [10]"]), (BadCloner, made_anew)):
        events, state = fork_in_the_middle(kind)
        assert events == begin
        state.forget(1)
        state.forget(1)
        assert events == [*begin, "close [10, 10]"]
        state.clear()
        assert events == [*begin, "close [10, 10]", "close [10, 10]"]
        assert state.num_with_processors == 0


def test_rejected_tokens_make_a_new_instance() -> None:
    """What verifying drafts needs: positions ascend within a step, and the next step may begin before their end."""
    Follower.events = []
    tokens = [1, 2, 3, 4]
    state = state_of(50, [SequenceStart(0, named("f"), 1, tokens, 1)], f=Follower)
    points = [SamplePoint(0, 0, position) for position in (2, 3, 4)]
    assert sample(torch.zeros(3, 50), points, state).to_host().errors == {}
    assert Follower.events == ["new [2]"]
    state.start(SequenceStart(0, named("f"), 1, [1, 2, 3, 7], 1))
    assert sample(torch.zeros(1, 50), points[2:], state).to_host().errors == {}
    state.sequences[0].tokens[3] = 8
    assert sample(torch.zeros(1, 50), points[2:], state).to_host().errors == {}
    assert Follower.events[1:] == ["close [2, 3, 4]", "new [2, 3, 7]", "close [2, 3, 7]", "new [2, 3, 8]"]


def test_one_that_cannot_be_closed_harms_nobody() -> None:
    class Sticky(Follower):
        events: list[str] = []

        def close(self) -> None:
            raise RuntimeError("as it was told to")

    state = state_of(50, [SequenceStart(0, named("s", "f"), 1, [1], 1)], s=Sticky, f=Follower)
    Follower.events = []
    sample(torch.zeros(1, 50), [SamplePoint(0, 0, 1)], state)
    state.forget(0)
    assert Follower.events == ["new []", "close []"]


# ---- specs and names -----------------------------------------------------------------------------------------------


def test_wrong_specs_name_bound_and_remedy() -> None:
    circular: dict[str, Any] = {}
    circular["self"] = circular
    for arguments in ({"a": {1, 2}}, {"a": float("nan")}, {"a": object()}, circular):
        with pytest.raises(ValueError, match=r"the arguments of 'p' are not plain JSON: .*; give objects, lists"):
            LogitsProcessorSpec(name="p", arguments=arguments)
    with pytest.raises(ValueError, match=rf"of 'p' have \d+ bytes .* limit is {MAX_ARGUMENT_BYTES}; shorten them"):
        LogitsProcessorSpec(name="p", arguments={"a": "x" * MAX_ARGUMENT_BYTES})
    with pytest.raises(ValueError, match=f"logits_processors has 17 entries; at most {MAX_LOGITS_PROCESSORS}"):
        named(*["p"] * (MAX_LOGITS_PROCESSORS + 1))


def test_names_are_found_where_they_are_registered() -> None:
    import manta_example_processor

    path = "manta_example_processor:Automaton"
    registry = LogitsProcessorRegistry({"mine": path, "automaton": None})
    assert registry.factory("mine") is manta_example_processor.Automaton
    assert registry.factory("automaton") is manta_example_processor.Automaton
    assert LogitsProcessorRegistry().factory("automaton") is manta_example_processor.Automaton
    assert registry.names() == ["automaton", "mine"]
    with pytest.raises(LogitsProcessorError, match="'other' is unknown; use one of automaton, mine"):
        registry.factory("other")
    with pytest.raises(LogitsProcessorError, match="'mine' is not allowed: it is registered already"):
        registry.register("mine", identity)
    with pytest.raises(LogitsProcessorError, match="a str is no factory"):
        registry.register("text", "identity")  # type: ignore[arg-type]
    for wrong in ("manta_no_such_module:A", "manta_example_processor:NoSuch", "manta_example_processor"):
        with pytest.raises(LogitsProcessorError, match=f"'mine': '{wrong}' .*(cannot be imported|no factory)"):
            LogitsProcessorRegistry({"mine": wrong})
