"""The engine goes on: a sequence that waits for a mask holds up no other, nothing spins, and a standstill shows.

Slow masks are those of the example backend (`tests/plugin`); steps and orders are counted, never short times.
"""

from __future__ import annotations

import asyncio
import pathlib
import time

import pytest

from manta.cluster.config import EngineConfig
from manta.cluster.engine import engine
from manta.cluster.engine.request import EngineRequest, FinishStatus, SequenceOutput
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.llm import LLM, SamplingParams
from manta.structured.pool_config import PoolConfig
from tests.checkpoints import checkpoint
from tests.engine.test_constrained_engine import constrained, example, make_llm, settled, spec
from tests.patience import PATIENCE_S
from tests.replicas import Replicas
from tests.serve.test_engine_deployment import Ingress, until

pytestmark = pytest.mark.usefixtures("plugin")

PATIENT = {"mask_seconds": PATIENCE_S}
"""Options of a grammar pool that waits for slow masks."""


@pytest.fixture
def gate(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file that slow masks wait for."""
    return tmp_path / "gate"


def slow(gate: pathlib.Path) -> SamplingParams:
    """Four tokens, of which the first waits for its mask, which comes when `gate` exists."""
    return constrained(example(length=4, at={"0": f"until {gate}"}))


def plain(num_tokens: int = 3) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def ends_in_order(llm: LLM) -> list[str]:
    ended = []
    while llm.engine.has_unfinished:
        ended += [output.request_id for output in llm.step() if output.finished]
    return ended


# ---- preempted sequences -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_constrained_requests_of_rising_priority_all_finish(num_sequences: int) -> None:
    """Each runs when the next comes, which takes its place: far more than the grammar pool has slots for."""
    llm = make_llm(max_num_sequences=num_sequences)
    num_requests = 100
    texts: dict[str, str] = {}

    def step() -> None:
        texts.update({output.request_id: output.outputs[0].text for output in llm.step() if output.finished})

    for index in range(num_requests):
        llm.add_request(str(index), [7], constrained(spec("regex", "[ab]{4}"), seed=index), priority=-index)
        step()
        assert llm.engine.stats().grammar_pool.num_sessions <= num_sequences
    for _ in range(50 * num_requests):
        step()
    assert len(texts) == num_requests
    assert all(len(text) == 4 for text in texts.values())
    assert llm.engine.stats().num_preemptions >= num_requests - 1 - num_sequences
    settled(llm)


# ---- standing still ------------------------------------------------------------------------------------------------


def test_a_standstill_is_counted_and_does_not_spin(gate: pathlib.Path) -> None:
    """The one place is taken by a sequence that waits for its mask, and another request waits for the place."""
    llm = make_llm(max_num_sequences=1, grammar_pool=PATIENT)
    llm.generate([[7]], constrained(example(length=1)), use_tqdm=False)  # the pool has started
    llm.add_request("slow", [7], slow(gate))
    llm.add_request("behind", [7], plain())
    while not llm.engine.stats().num_late_rows:
        llm.step()
    before = llm.engine.stats()
    started = time.monotonic()
    while time.monotonic() - started < 0.3:
        llm.step()
    stats = llm.engine.stats()
    assert stats.num_steps_without_progress > before.num_steps_without_progress
    assert stats.num_steps - before.num_steps == stats.num_steps_without_progress - before.num_steps_without_progress
    assert stats.num_steps - before.num_steps <= 0.3 / engine.IDLE_WAIT_S + 1, "it spins"
    assert stats.seconds_since_progress >= 0.3, "steps that bring nothing are no progress"
    metrics = Metrics("m").render([stats]).decode()
    assert f'manta:seconds_since_progress{{model_name="m"}} {stats.seconds_since_progress}' in metrics
    assert 'manta:grammar_sessions{model_name="m"} 1.0' in metrics
    gate.touch()
    assert ends_in_order(llm) == ["slow", "behind"]
    stats = llm.engine.stats()
    assert stats.seconds_since_progress == 0.0
    assert stats.num_steps_without_progress < stats.num_steps
    settled(llm)


def test_productive_steps_are_not_counted_as_idle() -> None:
    llm = make_llm(max_num_batched_tokens=8)
    llm.generate([[7] * 60, [8] * 30], plain(), use_tqdm=False)
    stats = llm.engine.stats()
    assert stats.num_steps > 10
    assert stats.num_steps_without_progress == 0


# ---- slow masks ----------------------------------------------------------------------------------------------------


def test_a_request_arriving_among_waiting_rows_is_served(gate: pathlib.Path) -> None:
    llm = make_llm(grammar_pool=PATIENT)
    llm.add_request("slow", [7], slow(gate))
    llm.step()
    llm.add_request("plain", [8], plain(8))
    while not (ended := [output.request_id for output in llm.step() if output.finished]):
        pass
    assert ended == ["plain"]
    gate.touch()
    assert ends_in_order(llm) == ["slow"]
    settled(llm)


def test_a_deadline_among_waiting_rows_ends_its_request(gate: pathlib.Path) -> None:
    llm = make_llm(grammar_pool=PATIENT)
    params = slow(gate)
    assert params.constraint is not None
    resolved = llm.engine.constraints.resolve(params.constraint).result()
    request = EngineRequest(request_id="slow", prompt_token_ids=[7], params=params, deadline_s=0.5)
    llm.engine.add_request(request, resolved)
    outputs: list[SequenceOutput] = []
    while llm.engine.has_unfinished:
        outputs += llm.engine.step()
    (end,) = outputs
    assert end.finish is FinishStatus.FINISHED_ABORTED
    assert end.usage is not None
    assert end.usage.num_output_tokens == 0
    gate.touch()
    settled(llm)


def test_a_message_wakes_an_idle_replica(new_replica: Replicas, gate: pathlib.Path) -> None:
    async def scenario() -> None:
        folder = str(checkpoint("llama", dtype="float32"))
        pool = PoolConfig(mask_seconds=PATIENCE_S)
        replica = new_replica(EngineConfig(model=folder, kv_cache_bytes=8 << 20, grammar_pool=pool))
        replica.engine.idle_wait_s = 60.0
        ingress = Ingress()
        address = await ingress.receiver.start()
        slow_one = asyncio.ensure_future(
            replica.generate(EngineRequest(request_id="slow", prompt_token_ids=[7], params=slow(gate)), address)
        )
        await until(lambda: replica.engine.stats().num_late_rows == 1)
        request = EngineRequest(request_id="plain", prompt_token_ids=[8], params=plain())
        result = await asyncio.wait_for(replica.generate(request, address), PATIENCE_S)
        assert result.finish is FinishStatus.FINISHED_LENGTH
        assert not slow_one.done()
        gate.touch()
        assert (await asyncio.wait_for(slow_one, PATIENCE_S)).finish is FinishStatus.FINISHED_STOPPED

    asyncio.run(scenario())
