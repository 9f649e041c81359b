"""Whatever ends a call of `LLM` early, its caller alone is told, and nothing of it stays in the engine."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from manta.cluster.engine.engine import EngineDead
from manta.cluster.engine.interrupts import uninterrupted
from manta.cluster.engine.request import FinishStatus
from manta.cluster.errors import QueueFull, RequestRefused
from manta.cluster.llm import LLM, BeamSearchParams, ConstraintSpec, LogitsProcessorSpec, RequestOutput, SamplingParams
from tests.checkpoints import checkpoint
from tests.engine_parts import device_of
from tests.patience import PATIENCE_S

PROMPTS = ["The quick brown fox", "Hello", "A scheduler decides"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
TOO_LONG = [5] * 600
LONE_SURROGATE = "a\ud800b"


def make_llm(**options: Any) -> LLM:
    return LLM(str(checkpoint("llama", dtype="float32")), kv_cache_bytes=2**22, **options)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Python's own way to take it, whatever an event loop of an earlier test left there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Of an engine that has served nobody."""
    return tokens(make_llm().generate(PROMPTS, GREEDY, use_tqdm=False))


@pytest.fixture(scope="module")
def shared() -> LLM:
    llm = make_llm()
    for name, exception in (("raises", ValueError), ("interrupts", KeyboardInterrupt), ("exits", SystemExit)):
        llm.register_logits_processor(name, AfterSome(exception))
    llm.register_logits_processor("no-instance", refuse)
    llm.register_logits_processor("ctrl-c", press_ctrl_c)
    return llm


@pytest.fixture
def llm(shared: LLM, expected: list[list[int]]) -> Iterator[LLM]:
    """Nothing may stay in it after the test, and it must serve as a fresh one."""
    yield shared
    whole(shared, expected)


def whole(llm: LLM, expected: list[list[int]]) -> None:
    assert (llm.engine.scheduler.num_running, llm.engine.scheduler.num_waiting) == (0, 0)
    llm.engine.check_integrity()
    assert llm.engine.stats().num_free_blocks == llm.engine.stats().num_blocks
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert not llm._tracked
    assert not llm._streams


class AfterSome:
    """A factory of processors that raise at their fourth token."""

    def __init__(self, exception: type[BaseException]) -> None:
        self.exception = exception

    def __call__(self, arguments: Any, prompt: np.ndarray, output: np.ndarray, vocab_size: int) -> Callable:
        def process(output_token_ids: np.ndarray, logits: torch.Tensor) -> None:
            if len(output_token_ids) == 3:
                raise self.exception("the processor's own")

        return process


def refuse(*arguments: Any) -> None:
    raise ValueError("no instance today")


def press_ctrl_c(arguments: Any, prompt: np.ndarray, output: np.ndarray, vocab_size: int) -> Callable:
    """A processor that gets a real SIGINT in the middle of a step."""

    def process(output_token_ids: np.ndarray, logits: torch.Tensor) -> None:
        if len(output_token_ids) == 3:
            signal.raise_signal(signal.SIGINT)

    return process


def processed(name: str, **fields: Any) -> SamplingParams:
    return SamplingParams(
        logits_processors=(LogitsProcessorSpec(name=name),),
        **{"temperature": 0, "max_tokens": 30, "ignore_eos": True, **fields},
    )


# ---- generate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "exception", "words"),
    [
        ([*PROMPTS, LONE_SURROGATE], RequestRefused, r"'\\ud800' at character 1.*remove it"),
        ([*PROMPTS, TOO_LONG], RequestRefused, "shorten the prompt"),
        ([*PROMPTS, [5, None]], TypeError, "NoneType"),
    ],
    ids=["surrogate", "refused", "no-ids"],
)
def test_an_unacceptable_prompt_ends_the_whole_batch(
    llm: LLM, prompts: list, exception: type[Exception], words: str
) -> None:
    with pytest.raises(exception, match=words):
        llm.generate(prompts, LONG, use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "exception"),
    [("interrupts", KeyboardInterrupt), ("exits", SystemExit), ("ctrl-c", KeyboardInterrupt)],
)
def test_generate_interrupted_in_a_step_aborts_all(llm: LLM, name: str, exception: type[BaseException]) -> None:
    prompts = [[*range(200, 240), 5 + number] for number in range(20)]
    each = [GREEDY] * (len(prompts) - 1) + [processed(name)]
    with pytest.raises(exception):
        llm.generate(prompts, each, use_tqdm=False)
    assert not llm.engine.has_unfinished
    fresh = tokens(make_llm().generate(prompts, GREEDY, use_tqdm=False))
    assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == fresh


def test_generate_interrupted_by_the_bar_aborts_all(llm: LLM, monkeypatch) -> None:
    steps = 0

    def step() -> list[RequestOutput]:
        nonlocal steps
        steps += 1
        if steps == 5:
            raise KeyboardInterrupt
        return LLM.step(llm)

    monkeypatch.setattr(llm, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5 + number] for number in range(50)], LONG, use_tqdm=False)
    monkeypatch.undo()


def test_a_raising_processor_ends_its_own_sequence(llm: LLM, expected: list[list[int]]) -> None:
    each = [processed("raises"), GREEDY, processed("no-instance")]
    failed, good, refused = llm.generate(PROMPTS, each, use_tqdm=False)
    assert good.outputs[0].token_ids == expected[1]
    for output, words in ((failed, "the processor's own"), (refused, "no instance today")):
        assert output.outputs[0].finish_reason is FinishStatus.FINISHED_INTERNAL_ERROR
        assert words in str(output.outputs[0].error)


def test_ctrl_c_waits_for_the_step_once() -> None:
    done = []

    def step(num_signals: int) -> None:
        with uninterrupted():
            for _ in range(num_signals):
                signal.raise_signal(signal.SIGINT)
            done.append(num_signals)

    step(0)
    with pytest.raises(KeyboardInterrupt):
        step(1)
    with pytest.raises(KeyboardInterrupt):
        step(2)
    assert done == [0, 1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_engine_hears_streams_between_steps() -> None:
    llm = make_llm()

    async def ask() -> None:
        assert not llm.engine._has_messages()
        asked = llm._when_free(lambda: None)
        assert llm.engine._has_messages(), "an engine that waits for a mask must stop waiting"
        await asked
        assert not llm.engine._has_messages()

    asyncio.run(ask())


# ---- beam search ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [TOO_LONG, LONE_SURROGATE, []], ids=["long", "surrogate", "empty"])
def test_a_refused_prompt_leaves_no_beams_behind(bad: Any, expected: list[list[int]]) -> None:
    llm = make_llm(max_num_sequences=12)
    for _ in range(5):  # four times the places of three beams for one prompt
        with pytest.raises(RequestRefused):
            llm.beam_search([PROMPTS[0], bad], BEAMS)
        assert not llm.engine.has_unfinished
    whole(llm, expected)


def test_beam_searches_may_exceed_the_queue(expected: list[list[int]]) -> None:
    llm = make_llm(max_num_sequences=3, max_num_waiting=2)
    alone = [llm.beam_search(prompt, BEAMS)[0] for prompt in PROMPTS]
    found = llm.beam_search(PROMPTS * 4, BEAMS)
    assert [[beam.token_ids for beam in beams] for beams in found] == [
        [beam.token_ids for beam in beams] for beams in alone * 4
    ]
    llm.add_request("running", [5], LONG)
    llm.step()
    for number in range(4):
        llm.add_request(str(number), [5], LONG)
    with pytest.raises(QueueFull):
        llm.add_request("one more", [5], LONG)
    for name in ("running", "0", "1", "2", "3"):
        llm.abort(name)
    whole(llm, expected)


@pytest.mark.parametrize("is_signal", [False, True], ids=["raised", "ctrl-c"])
def test_an_interrupted_beam_search_leaves_nothing(llm: LLM, is_signal: bool, monkeypatch) -> None:
    # Of several blocks: those of the step that never ran must not be found in the prefix cache.
    prompts = [[*range(100, 160), 5 + number] for number in range(3)]
    executor = device_of(llm.engine)
    execute = executor.execute

    def interrupted(step: Any) -> None:
        if not is_signal:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)
        execute(step)

    monkeypatch.setattr(executor, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search(prompts, BEAMS)
    monkeypatch.undo()
    assert not llm.engine.has_unfinished
    fresh = tokens(make_llm().generate(prompts, GREEDY, use_tqdm=False))
    assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == fresh


# ---- streams -------------------------------------------------------------------------------------------------------


async def read(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> list[int]:
    token_ids: list[int] = []
    async for output in llm.stream(prompt, params):
        if output.outputs[0].error is not None:
            raise RuntimeError(output.outputs[0].error)
        token_ids = output.outputs[0].token_ids
    return token_ids


async def until_idle(llm: LLM) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while llm.engine.has_unfinished:
        assert time.monotonic() < deadline, "a request stays behind"
        await asyncio.sleep(0.01)


BAD_STREAMS: list[tuple[Any, SamplingParams, type[Exception], str]] = [
    (LONE_SURROGATE, GREEDY, RequestRefused, "surrogate"),
    (PROMPTS[0], SamplingParams(bad_words=(LONE_SURROGATE,)), ValueError, "surrogate"),
    ([5, None], GREEDY, TypeError, "NoneType"),
    (PROMPTS[0], SamplingParams(max_tokens=10**6), RequestRefused, "max_tokens"),
    (PROMPTS[0], processed("unknown"), RequestRefused, "unknown"),
    (PROMPTS[0], processed("raises"), RuntimeError, "the processor's own"),
    (PROMPTS[0], processed("no-instance"), RuntimeError, "no instance today"),
    (PROMPTS[0], SamplingParams(constraint=ConstraintSpec(kind="regex", text="(")), RequestRefused, "regex"),
]


def test_a_bad_request_ends_its_own_stream_alone(llm: LLM, expected: list[list[int]]) -> None:
    async def main() -> list[Any]:
        good = [read(llm, prompt) for prompt in PROMPTS]
        bad = [read(llm, prompt, params) for prompt, params, _, _ in BAD_STREAMS]
        found = await asyncio.gather(*good, *bad, return_exceptions=True)
        await until_idle(llm)
        return found

    found = asyncio.run(main())
    assert found[: len(PROMPTS)] == expected
    for error, (_, _, exception, words) in zip(found[len(PROMPTS) :], BAD_STREAMS, strict=True):
        assert isinstance(error, exception), error
        assert words in str(error)


def test_a_stream_cancelled_before_its_start_never_runs(llm: LLM, expected: list[list[int]]) -> None:
    async def main() -> None:
        other = asyncio.ensure_future(read(llm, PROMPTS[0]))
        tasks = [asyncio.ensure_future(read(llm, PROMPTS[1], LONG)) for _ in range(4)]
        for number, task in enumerate(tasks):
            for _ in range(number):
                await asyncio.sleep(0)
            task.cancel()
        assert all(
            isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*tasks, return_exceptions=True)
        )
        assert await other == expected[0]
        await until_idle(llm)

    asyncio.run(main())


def test_a_stream_may_be_closed_from_another_task(llm: LLM, expected: list[list[int]]) -> None:
    async def main() -> None:
        stream = cast(AsyncGenerator[RequestOutput, None], llm.stream(PROMPTS[1], LONG))
        other = asyncio.ensure_future(read(llm, PROMPTS[0]))
        await anext(stream)
        await asyncio.ensure_future(stream.aclose())
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert await other == expected[0]
        assert not llm.engine.has_unfinished, "a closed stream has ended its request"

    asyncio.run(main())


def test_an_ending_event_loop_ends_its_streams(llm: LLM) -> None:
    left: list[Any] = []  # nobody closes or awaits them

    async def main() -> None:
        for prompt in PROMPTS:
            stream = cast(AsyncGenerator[RequestOutput, None], llm.stream(prompt, LONG))
            left.append(stream)
            await anext(stream)
        left.append(asyncio.ensure_future(read(llm, PROMPTS[0], LONG)))
        await asyncio.sleep(0.02)

    asyncio.run(main())
    assert not llm.engine.has_unfinished


def test_a_closed_event_loop_blocks_no_other(llm: LLM, expected: list[list[int]]) -> None:
    streams = []

    async def begin() -> None:
        streams.append(cast(AsyncGenerator[RequestOutput, None], llm.stream(PROMPTS[0], LONG)))
        await anext(streams[0])

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(read(llm, PROMPTS[1]))
    loop.close()
    assert asyncio.run(asyncio.wait_for(read(llm, PROMPTS[1]), PATIENCE_S)) == expected[1]


def test_the_death_of_the_engine_reaches_every_stream(monkeypatch) -> None:
    llm = make_llm()

    def fail(step: Any) -> None:
        raise RuntimeError("the device went away")

    async def read_on(stream: AsyncIterator[RequestOutput]) -> None:
        async for _ in stream:
            pass

    async def main() -> list[Any]:
        tasks = [asyncio.ensure_future(read(llm, prompt, LONG)) for prompt in PROMPTS]
        idle = llm.stream(PROMPTS[0], LONG)
        await anext(idle)
        monkeypatch.setattr(llm.engine.executor, "execute", fail)
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
        with pytest.raises(EngineDead):
            await read_on(idle)
        with pytest.raises(EngineDead):
            await asyncio.wait_for(read(llm, PROMPTS[0]), PATIENCE_S)
        return found

    assert [type(error) for error in asyncio.run(main())] == [EngineDead] * 3
    assert (llm.engine.scheduler.num_running, llm.engine.scheduler.num_waiting) == (0, 0)
    with pytest.raises(EngineDead):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
