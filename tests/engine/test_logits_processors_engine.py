"""Logits processors in whole engines: right for each sequence, one victim a failure, nothing left behind.

The automaton of `tests/plugin` is followed token by token by a version of its own here.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ray import cloudpickle

from manta.cluster.engine.request import FinishStatus
from manta.cluster.errors import RequestRefused
from manta.cluster.llm import LogitsProcessorSpec, RequestOutput, SamplingParams
from manta.structured.logits_processors import MAX_LOGITS_PROCESSORS, LogitsProcessorError
from tests.checkpoints import VOCAB_SIZE
from tests.engine.llms import make_llm
from tests.engine_parts import worker_of
from tests.local_server import ThreadedServer
from tests.workers.sampling.test_logits_processors import identity, named

pytestmark = pytest.mark.usefixtures("plugin")

NUM_STATES = 97


def automaton(name: str = "automaton", **fields: Any) -> SamplingParams:
    spec = LogitsProcessorSpec(name=name, arguments={"num_states": NUM_STATES})
    return SamplingParams(logits_processors=(spec,), **{"max_tokens": 24, "ignore_eos": True, **fields})


def follows(prompt: list[int], output: list[int]) -> bool:
    """Whether the automaton lets every token of `output` pass."""
    state = 0
    for token_id in prompt:
        state = (state + token_id) % NUM_STATES
    for token_id in output:
        if (token_id + state) % 7 not in (0, 1):
            return False
        state = (state * 3 + token_id) % NUM_STATES
    return True


@contextlib.contextmanager
def all_released() -> Iterator[Any]:
    """The plugin's automaton; when the block ends, what was created in it must be released."""
    from manta_example_processor import Automaton

    created, released = Automaton.num_created, Automaton.num_released
    yield Automaton
    assert Automaton.num_created - created == Automaton.num_released - released > 0


def some_prompts(count: int) -> list[list[int]]:
    chooser = random.Random(5)
    return [[chooser.randrange(5, VOCAB_SIZE) for _ in range(chooser.randrange(1, 50))] for _ in range(count)]


def test_many_streams_share_an_automaton() -> None:
    llm = make_llm(num_blocks=16)
    prompts = some_prompts(32)
    params = automaton(n=3)
    finals: dict[int, RequestOutput] = {}

    async def consume(index: int) -> None:
        num_seen = [0] * 3
        async for output in llm.stream(prompts[index], params):
            for choice in output.outputs:
                assert follows(prompts[index], choice.token_ids)
                assert len(choice.token_ids) >= num_seen[choice.index]
                num_seen[choice.index] = len(choice.token_ids)
            finals[index] = output

    async def consume_all() -> None:
        await asyncio.gather(*(consume(index) for index in range(32)))

    with all_released() as kind:
        created = kind.num_created
        asyncio.run(consume_all())
        assert llm.engine.stats().num_preemptions > 0
        assert kind.num_created - created > 96, "no instance was made again"
    assert all(final.finished for final in finals.values())
    outputs = [choice for final in finals.values() for choice in final.outputs]
    assert [choice.finish_reason for choice in outputs] == [FinishStatus.FINISHED_LENGTH] * 96
    assert {len(choice.token_ids) for choice in outputs} == {24}
    assert len({tuple(choice.token_ids) for choice in outputs}) == 96
    llm.engine.step()
    llm.engine.check_integrity()


def test_tokens_do_not_depend_on_pool_or_failures() -> None:
    prompts = some_prompts(8)
    each = [
        automaton(seed=index, n=2) if index % 2 else SamplingParams(seed=index, max_tokens=24) for index in range(8)
    ]
    roomy, tight = make_llm(), make_llm(num_blocks=9)

    def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
        assert all(choice.error is None for output in outputs for choice in output.outputs)
        return [[choice.token_ids for choice in output.outputs] for output in outputs]

    with all_released():
        alone = [tokens(roomy.generate(prompts[i], each[i], use_tqdm=False))[0] for i in range(8)]
        assert tokens(tight.generate(prompts, each, use_tqdm=False)) == alone
        assert tight.engine.stats().num_preemptions > 0
        model = worker_of(roomy.engine).runner.model
        forward, countdown = model.forward, [9]

        def fail_once(*arguments: Any) -> torch.Tensor:
            countdown[0] -= 1
            if countdown[0] == 0:
                raise RuntimeError("as it was told to")
            return forward(*arguments)

        model.forward = fail_once
        assert tokens(roomy.generate(prompts, each, use_tqdm=False)) == alone
        assert countdown[0] < 0
    assert all(follows(prompts[i], output) for i in range(1, 8, 2) for output in alone[i])


def test_a_failure_ends_its_sequence_with_the_reason() -> None:
    llm = make_llm()

    class Late:
        """Fails at the output's fifth token."""

        def __init__(self, arguments: dict, prompt: np.ndarray, output: np.ndarray, vocab_size: int) -> None:
            self.how = arguments["how"]

        def __call__(self, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor | None:
            if len(output) < 4:
                return None
            if self.how == "raise":
                raise RuntimeError("the fifth token")
            return torch.full_like(logits, torch.nan if self.how == "nan" else -torch.inf)

    llm.register_logits_processor("late", Late)
    llm.register_logits_processor("unmakeable", lambda *arguments: [][0])
    good = [SamplingParams(seed=1, max_tokens=12, ignore_eos=True), automaton(seed=2)]
    bad = [named("late"), named("unmakeable")]
    for how in ("raise", "nan", "mask"):
        spec = LogitsProcessorSpec(name="late", arguments={"how": how})
        bad.append(SamplingParams(seed=3, ignore_eos=True, logits_processors=(spec,)))
    prompts = some_prompts(7)
    with all_released():
        expected = llm.generate(prompts[:2], good, use_tqdm=False)
        outputs = llm.generate(prompts, [*good, *bad], use_tqdm=False)
    assert [output.outputs for output in outputs[:2]] == [output.outputs for output in expected]
    choices = [output.outputs[0] for output in outputs[2:]]
    assert {choice.finish_reason for choice in choices} == {FinishStatus.FINISHED_INTERNAL_ERROR}
    assert [len(choice.token_ids) for choice in choices] == [0, 0, 4, 4, 4]
    messages = ["'late' raised KeyError", "'unmakeable' raised IndexError", "the fifth token", "'late' returned NaN"]
    for message, choice in zip([*messages, "every token is masked"], choices, strict=True):
        assert choice.error is not None
        assert message in choice.error
    llm.engine.check_integrity()


def test_ended_sequences_release_their_instances_at_once() -> None:
    llm = make_llm()
    free = llm.generate([9, 8, 7], automaton(seed=1, n=2), use_tqdm=False)[0].outputs
    with all_released():
        llm.add_request("a", [9, 8, 7], automaton(seed=1, n=2))
        for _ in range(4):
            llm.step()
        llm.abort("a")
    with all_released():
        stopped = automaton(seed=1, n=2, stop=(free[0].text[3:6], free[1].text[3:6]))
        outputs = llm.generate([9, 8, 7], stopped, use_tqdm=False)[0].outputs
        assert all(len(output.token_ids) < 24 for output in outputs)


def test_requests_naming_unknown_processors_are_refused() -> None:
    llm = make_llm()
    llm.register_logits_processor("identity", identity)
    with pytest.raises(RequestRefused) as caught:
        llm.generate([5], named("nobody"), use_tqdm=False)
    refusal = caught.value.refusal
    assert (refusal.kind, refusal.field, refusal.value) == ("unknown_value", "logits_processors", "nobody")
    assert refusal.bound == ("automaton", "identity")
    with pytest.raises(RequestRefused, match=r"num_states None must be .* between 1 and 1000; give one") as caught:
        llm.generate([5], named("identity", "automaton"), use_tqdm=False)
    refusal = caught.value.refusal
    assert (refusal.kind, refusal.field, refusal.value) == ("unfit", "logits_processors[1]", "automaton")
    with pytest.raises(LogitsProcessorError, match="'identity' is not allowed: it is registered already"):
        llm.register_logits_processor("identity", identity)
    with pytest.raises(ValueError, match="'wrong': 'nowhere:A' cannot be imported"):
        make_llm(logits_processors={"wrong": "nowhere:A"})


def test_a_python_factory_reaches_a_ray_worker() -> None:
    left_out = 12

    class Local:
        def __init__(self, arguments: dict, prompt: np.ndarray, output: np.ndarray, vocab_size: int) -> None:
            self.token_id = arguments["base"] + left_out

        def __call__(self, output: np.ndarray, logits: torch.Tensor) -> None:
            logits[: self.token_id] = -torch.inf
            logits[self.token_id + 1 :] = -torch.inf

    llm = make_llm()
    llm.register_logits_processor("local", cloudpickle.loads(cloudpickle.dumps(Local)))
    spec = LogitsProcessorSpec(name="local", arguments={"base": 30})
    params = SamplingParams(max_tokens=3, logits_processors=(spec,))
    assert llm.generate([5], params, use_tqdm=False)[0].outputs[0].token_ids == [42] * 3


# ---- HTTP ----------------------------------------------------------------------------------------------------------


def test_http_may_only_use_registered_processors(plugin: None) -> None:
    server = ThreadedServer("engine.logits_processors.mine=manta_example_processor:Automaton")
    prompt = [20, 30, 40]
    body = {"model": server.model, "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "seed": 4, "n": 3}

    def complete(*processors: Any) -> tuple[int, dict]:
        status, _, answer = server.post("/v1/completions", {**body, "logits_processors": list(processors)})
        return status, answer.get("error", answer)

    try:
        status, answer = complete({"name": "mine", "arguments": {"num_states": NUM_STATES}})
        assert status == 200
        llm = make_llm(logits_processors={"mine": "manta_example_processor:Automaton"})
        expected = llm.generate(prompt, automaton("mine", max_tokens=12, seed=4, n=3), use_tqdm=False)[0].outputs
        assert all(follows(prompt, choice.token_ids) for choice in expected)
        assert [choice["text"] for choice in answer["choices"]] == [choice.text for choice in expected]
        refusals = [
            ({"name": "automaton", "arguments": {}}, "logits_processors[0].name", "'automaton' is unknown"),
            ({"name": "mine"}, "logits_processors[0]", "num_states None must be a whole number between 1 and 1000"),
            ({"name": "mine", "arguments": [1]}, "logits_processors[0].arguments", "expected `object`, got `array`"),
            ({"nam": "mine"}, "logits_processors[0].nam", "is unknown"),
        ]
        for processor, param, message in refusals:
            status, error = complete(processor)
            assert (status, error["param"]) == (400, param)
            assert message in error["message"]
        status, error = complete(*[{"name": "mine"}] * (MAX_LOGITS_PROCESSORS + 1))
        assert (status, error["param"]) == (400, "logits_processors")
        assert f"at most {MAX_LOGITS_PROCESSORS}" in error["message"]
    finally:
        server.stop()
