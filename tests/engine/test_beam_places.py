"""Beams give way and go on: paused ones hold places and blocks while others of their request wait for some."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import given, settings

from manta.cluster.engine.request import FinishStatus
from manta.cluster.engine.sequence import Sequence
from manta.workers.sampling_params import SamplingParams
from tests.engine.scheduler_harness import Harness, name_of
from tests.engine.test_scheduler import EXAMPLES


class BeamHarness(Harness):
    """A scheduler with searches, whose beams branch once each has said what may follow, as
    `cluster/engine/beam_search.py` does.
    """

    def __init__(self, num_blocks: int, budget: int, slots: int) -> None:
        super().__init__(num_blocks, budget, slots)
        self.searches: dict[str, tuple[int, int]] = {}
        """Request to its width and the rounds that are left."""

    def search(self, prompt: list[int], width: int, num_rounds: int, priority: int = 0) -> str:
        number = len(self.sequences)
        params = SamplingParams(max_tokens=num_rounds + 1, ignore_eos=True)
        root = Sequence(number, str(number), list(prompt), params, 0, priority=priority, num_branches=width)
        self.scheduler.add(root)
        self._know(root)
        self.searches[root.request_id] = (width, num_rounds)
        return root.request_id

    def _know(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)
        self.gained.setdefault(name_of(sequence), [])

    def branch(self, request_id: str, parents: list[int]) -> None:
        """A continuation for each entry, which is the index of its beam; distinct ones get distinct tokens."""
        beams = {beam.index: beam for beam in self.scheduler.of_request(request_id)}
        pairs = []
        for index, parent in enumerate(parents):
            child = beams[parent].continued(len(self.sequences), index, 1 + index)
            self._know(child)
            pairs.append((beams[parent], child))
        self.scheduler.branch(request_id, pairs)

    def step_and_branch(self, chooser: random.Random) -> None:
        self.step()
        for request_id, (width, num_rounds) in list(self.searches.items()):
            beams = self.scheduler.of_request(request_id)
            if all(beam.is_paused for beam in beams):
                self.branch(request_id, chooser.choices(range(len(beams)), k=width if num_rounds else 0))
                self.searches[request_id] = (width, num_rounds - 1)
                if not num_rounds:
                    del self.searches[request_id]

    def step(self, *arguments, **options) -> None:
        super().step(*arguments, **options)
        self.check_places()

    def check_places(self) -> None:
        taken = sum(sequence.num_places for sequence in self.scheduler.running)
        assert taken <= self.scheduler.max_num_sequences, "more sequences run than have places"


arrivals = st.tuples(
    st.sampled_from(["search", "plain"]),
    st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.integers(-1, 1)),
    st.integers(0, 3),
)
"""Kind; length of the prompt, beams or choices, their tokens, priority; steps until the next."""


@settings(max_examples=EXAMPLES // 3, deadline=None)
@given(
    load=st.lists(arrivals, min_size=2, max_size=8),
    num_blocks=st.integers(16, 30),
    budget=st.integers(1, 24),
    slots=st.integers(4, 6),
    seed=st.integers(0, 10**6),
)
def test_every_search_ends_and_nobody_exceeds_places(load, num_blocks, budget, slots, seed) -> None:
    harness, chooser = BeamHarness(num_blocks, budget, slots), random.Random(seed)
    for kind, (length, size, rounds, priority), num_steps in load:
        if kind == "search":
            harness.search([1] * length, size, rounds, priority)
        else:
            harness.add([2] * length, SamplingParams(max_tokens=rounds, ignore_eos=True), priority, n=size)
        for _ in range(num_steps):
            harness.step_and_branch(chooser)
    bound = 1000
    while harness.scheduler.has_unfinished:
        harness.step_and_branch(chooser)
        bound -= 1
        assert bound > 0, "no progress"
    assert not harness.searches
    assert all(end.finish is FinishStatus.FINISHED_LENGTH for end in harness.ends.values())


def test_searches_that_lost_places_go_on() -> None:
    """Children of a running beam find the places of the queued ones taken, and who waits for a place finds it held by a
    beam that waits itself.
    """
    harness = BeamHarness(num_blocks=40, budget=100, slots=4)
    first = harness.search([1] * 4, width=4, num_rounds=9)
    harness.step()
    harness.branch(first, [0, 0, 0, 0])
    harness.add([2], SamplingParams(max_tokens=2, ignore_eos=True), priority=-1)
    harness.step()  # takes the place of beam 3, which has not said what may follow
    harness.add([2], SamplingParams(max_tokens=1), priority=-1, n=2)
    harness.step()  # takes those of beams 1 and 2, which have
    second = harness.search([2] * 4, width=2, num_rounds=9)
    harness.step()  # beam 3 and the second search get those places
    assert all(beam.is_paused for beam in harness.scheduler.of_request(first))
    harness.branch(second, [0, 0])
    harness.branch(first, [0, 0, 0, 1])
    harness.check_places()
    harness.step()
    assert not all(beam.is_paused for beam in harness.scheduler.of_request(first))
    assert not all(beam.is_paused for beam in harness.scheduler.of_request(second))
    harness.step()  # schedules the beam that the first search waits for, and fails where nothing can be scheduled
    assert all(beam.is_paused for beam in harness.scheduler.of_request(first))
