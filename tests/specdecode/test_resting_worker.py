"""Steps in which all proposers rest: one of many is timed, and it counts for the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from manta.specdecode.speculative_config import SpeculativeConfig
from manta.specdecode.speculative_worker import SpeculativeWorker
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import SamplePoint, ScheduledSequence, SequenceStart, StepInput, StepOutput

IDS = range(3)
SLOW, PLAIN = 1.5, 1.0
"""Seconds of a step with drafts, and of one without."""


class Info(msgspec.Struct):
    max_model_len: int = 10**9
    step_costs: tuple[tuple[int, float], ...] = ()


class Device:
    """A worker whose steps take simulated time, and whose text repeats for the proposer but goes on otherwise."""

    draft = None
    info = Info()
    runs_ahead = False

    def __init__(self) -> None:
        self.now = 0.0
        self.sequences = SimpleNamespace(sampling=SimpleNamespace(sequences={}))
        self._step = StepInput(0)

    def measure(self) -> list[tuple[int, float]]:
        return [(1, PLAIN), (64, PLAIN)]

    def add(self, sequence_id: int, params: SamplingParams) -> None:
        self.sequences.sampling.sequences[sequence_id] = SimpleNamespace(
            stop_ids=np.zeros(0, int), params=params, num_prompt_tokens=1, num_tokens=8, tokens=np.full(4096, 7)
        )

    def execute(self, step: StepInput) -> None:
        self._step = step

    def sample(self, masks: Any = None) -> StepOutput:
        self.now += SLOW if any(item.draft_token_ids for item in self._step.scheduled) else PLAIN
        return StepOutput(self._step.step_id, token_ids={item.sequence_id: [9] for item in self._step.scheduled})


class Loop:
    """An engine's loop around a worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.num_observed, self.num_steps = Device(), 0, 0
        self._drafts: dict[int, list[int]] = {}
        for module in ("proposers", "speculative_worker"):
            clock = SimpleNamespace(perf_counter=lambda: self.device.now)
            monkeypatch.setattr(f"manta.specdecode.{module}.time", clock)
        device: Any = self.device
        self.worker = SpeculativeWorker(device, SpeculativeConfig(proposers=("prediction", "ngram")), 64)
        observe = self.worker.chain.observe

        def watched(*arguments: Any) -> None:
            self.num_observed += 1
            observe(*arguments)

        monkeypatch.setattr(self.worker.chain, "observe", watched)
        for sequence_id in IDS:
            self.device.add(sequence_id, SamplingParams())

    def step(self, *started: SequenceStart) -> StepOutput:
        scheduled = [
            ScheduledSequence(each, 7, 1 + len(drafts), [], drafts, "ngram")
            for each in self.device.sequences.sampling.sequences
            for drafts in (self._drafts.get(each, []),)
        ]
        step = StepInput(self.num_steps, started=list(started), scheduled=scheduled)
        step.sample_points = [SamplePoint(row, 0, 0) for row in range(step.num_tokens)]
        self.num_steps += 1
        self.worker.execute(step)
        output = self.worker.sample()
        self._drafts = output.draft_token_ids
        return output


def test_a_rest_times_few_steps_and_lasts_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget of trials grows with the time of all steps."""
    loop = Loop(monkeypatch)
    for _ in range(1000):
        output = loop.step()
        assert not (output.drafts_rest and output.draft_token_ids)
    before = loop.num_observed
    for _ in range(1000):
        loop.step()
    (comparison,) = loop.worker.chain.pace._comparisons.values()
    assert comparison.clock == pytest.approx(loop.device.now, rel=0.02)
    assert loop.num_observed - before < 400, "those of trials, 16 plain ones before each, and one of 16 in a rest"


def test_a_prediction_ends_a_rest_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    while loop.num_observed == loop.num_steps:
        loop.step()
    params = SamplingParams(prediction_token_ids=(9,) * 20)
    loop.device.add(9, params)
    loop.worker.target.sequences.sampling.sequences[9].tokens[:] = 9
    output = loop.step(SequenceStart(9, params, 0, [9], 1))
    assert not output.drafts_rest
    assert output.draft_token_ids[9][:3] == [9, 9, 9]
