"""What a run takes from a recording that another ingress has begun: the rest of the request, and nothing else.

Expected is what all tokens of each choice together say: their text, searched as a whole.
"""

from __future__ import annotations

import asyncio
import itertools
import random

import msgspec
import pytest

from manta.cluster.engine.request import EngineRequest, FinishStatus, SequenceOutput, Usage
from manta.cluster.http.exchange.recordings import Opening, Recording, encode_entry
from manta.cluster.serve.recorded import recorder
from manta.cluster.serve.recorded.recorder import Reader, Recorder
from manta.cluster.serve.recorded.streams import READ_A_TURN, REPLAYED_A_TURN
from manta.cluster.serve.requests.prompt_run import PromptRun
from manta.cluster.serve.requests.turn_budget import TurnBudget
from manta.workers.sampling_params import SamplingParams
from tests.async_tests import async_test
from tests.patience import until
from tests.serve.stream_world import Ingress, World, opening, token_at

NUM_CHOICES, NUM_TOKENS = 4, 60


class Counting:
    """A meter."""

    num_tokens = 0

    def spend(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens

    def end(self) -> None: ...


def asked(stop: tuple[str, ...]) -> Opening:
    params = SamplingParams(n=NUM_CHOICES, max_tokens=2 * NUM_TOKENS, ignore_eos=True, stop=stop)
    begun = opening(1)
    engine = msgspec.structs.replace(begun.generation.engine, params=params)
    generation = msgspec.structs.replace(begun.generation, prompts=[[5, 6], [7, 8]], engine=engine)
    return msgspec.structs.replace(begun, generation=generation, seeds=[1, 2])


def recorded(chooser: random.Random, begun: Opening, ended: set[tuple[int, int]]) -> tuple[Recording, list[list[int]]]:
    """Returns a recording of both prompts, of whose choices `ended` have ended, and the tokens of each choice."""
    recording, tokens = Recording(begun), [list[int]() for _ in range(2 * NUM_CHOICES)]
    left = [(prompt, index) for prompt in range(2) for index in range(NUM_CHOICES)]
    while left:
        prompt, index = chooser.choice(left)
        own = tokens[prompt * NUM_CHOICES + index]
        new = [chooser.randrange(5, 85) for _ in range(chooser.randint(1, 3))]
        own += new
        is_last = len(own) >= NUM_TOKENS
        finish = FinishStatus.FINISHED_LENGTH if is_last and (prompt, index) in ended else None
        output = SequenceOutput("", index, new, finish=finish, usage=Usage(2, len(own), 0) if finish else None)
        recording.append(encode_entry(prompt, output))
        if is_last:
            left.remove((prompt, index))
    return recording, tokens


@pytest.mark.parametrize("has_stop", [False, True])
@async_test
async def test_a_run_goes_on_with_what_is_open(has_stop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "REPLAYED_AT_ONCE", 7)
    monkeypatch.setattr(recorder, "SEARCHED_AT_ONCE", 7)
    world, meter = World(1, 0), Counting()
    (ingress,) = world.ingresses
    sent: list[EngineRequest] = []

    def call(run: PromptRun, request: EngineRequest, pause_s: float) -> asyncio.Task[None]:
        sent.append(request)
        return asyncio.ensure_future(asyncio.sleep(0))

    ingress.call = call  # type: ignore[method-assign]
    ended = {(0, 0), (1, 3)}
    _, (_, stopped, *_) = recorded(random.Random(1), asked(()), ended)
    stop = (world.tokenizer.decode(stopped)[30:38],) if has_stop else ()
    recording, tokens = recorded(random.Random(1), asked(stop), ended)
    run = Recorder(ingress, recording, 1, meter, lambda: None, TurnBudget(REPLAYED_A_TURN))
    running = asyncio.ensure_future(run.run())
    await until(lambda: len(sent) == 2)
    running.cancel()
    await asyncio.wait([running])
    texts = [world.tokenizer.decode(each) for each in tokens]
    assert [each in texts[1] for each in stop] == [True] * has_stop
    for prompt, request in enumerate(sent):
        open_ones = [
            index
            for index in range(NUM_CHOICES)
            if (prompt, index) not in ended and not any(each in texts[prompt * NUM_CHOICES + index] for each in stop)
        ]
        assert request.continued is not None
        assert [each.index for each in request.continued] == open_ones
        assert [each.token_ids for each in request.continued] == [
            tokens[prompt * NUM_CHOICES + index] for index in open_ones
        ]
        assert request.params.seed == 1 + prompt
    assert meter.num_tokens == 0, "whoever ran the request has counted its tokens"
    world.close()


@async_test
async def test_a_long_adopted_output_is_searched_in_several_turns() -> None:
    """One output of a choice that was merged, as that of a request read whole, has as many turns as many small ones."""
    world, searched, length = World(1, 0), [0], 20 * REPLAYED_A_TURN
    (ingress,) = world.ingresses
    ingress.call = lambda *_: asyncio.ensure_future(asyncio.sleep(0))  # type: ignore[method-assign]
    recording = Recording(asked(("no such text",)))
    recording.append(encode_entry(0, SequenceOutput("", 0, [token_at(3, position) for position in range(length)])))
    run = Recorder(ingress, recording, 1, Counting(), lambda: None, TurnBudget(REPLAYED_A_TURN))
    running = asyncio.ensure_future(run.run())
    while searched[-1] < length:
        await asyncio.sleep(0)
        searched.append(run.choices[0].num_tokens)
    running.cancel()
    await asyncio.wait([running])
    assert max(later - earlier for earlier, later in itertools.pairwise(searched)) <= REPLAYED_A_TURN
    world.close()


@async_test
async def test_readers_that_catch_up_leave_turns_to_others() -> None:
    world, budget, num_turns, num_read = World(1, 0), TurnBudget(READ_A_TURN), 0, 0
    (ingress,) = world.ingresses

    async def read(ingress: Ingress, recording: Recording) -> None:
        nonlocal num_read
        reader = Reader(ingress.tokenizer, recording, budget)
        async for _ in reader:
            num_read += 1
        reader.close()

    length, num_readers = 2 * recorder.ENTRIES_AT_ONCE, 3 * READ_A_TURN // recorder.ENTRIES_AT_ONCE
    recording = Recording(opening(length))
    for position in range(length):
        finish = FinishStatus.FINISHED_LENGTH if position == length - 1 else None
        recording.append(encode_entry(0, SequenceOutput("", 0, [token_at(3, position)], finish=finish)))
    recording.is_ended = True
    recording.make_safe(length)
    reading = asyncio.gather(*(read(ingress, recording) for _ in range(num_readers)))
    while not reading.done():
        before = num_read
        await asyncio.sleep(0)
        assert num_read - before <= READ_A_TURN
        num_turns += 1
    await reading
    assert num_read == num_readers * length
    assert num_turns >= num_read // READ_A_TURN
    world.close()
