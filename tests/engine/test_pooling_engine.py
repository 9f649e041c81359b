"""The steps of a model that pools: what runs when, and what a failure costs, with a model that only counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from manta.cluster.config import EngineConfig
from manta.cluster.engine.pooling_engine import ModelBroken, PoolingEngine
from manta.cluster.engine.pooling_queue import PoolingJob
from manta.cluster.engine.pooling_request import PooledInput, PoolingRequest, PoolingResult
from manta.cluster.errors import QueueFull, RequestRefused
from manta.workers.pooling.pooling_model import PooledText
from manta.workers.pooling_info import PoolingInfo
from tests.http.test_routes import MODEL

NAN, POISON = 400, 401
"""Tokens at which the model below gives no number, and at which it fails."""


class Counting:
    """A model of three layers whose vector is a text's first token and its length."""

    def __init__(self) -> None:
        self.info = msgspec.structs.replace(
            MODEL, platform="cpu", max_model_len=300, pooling=PoolingInfo(task="embed", modes=("mean",), dimension=2)
        )
        self.fails = False
        self.steps: list[list[int]] = []
        """First tokens of the texts of each step, in the order in which steps began."""
        self.on_layer: list[Callable[[], object]] = []
        """What happens in the next layers, one function each."""

    def run(self, texts: Sequence[PooledText], between: Callable[[], None] | None = None) -> np.ndarray:
        first = [text.token_ids[0] for text in texts]
        self.steps.append(first)
        for _ in range(3):
            if self.on_layer:
                self.on_layer.pop(0)()
            if between is not None:
                between()
        if POISON in first or self.fails:
            raise RuntimeError("poison")
        rows = [
            [np.nan if token == NAN else token, len(text.token_ids)] for token, text in zip(first, texts, strict=True)
        ]
        return np.array(rows, dtype=np.float32)


class Asked:
    """An engine around `Counting`, with the results of its requests by name."""

    def __init__(self, **options: int) -> None:
        self.model = Counting()
        self.engine = PoolingEngine(EngineConfig(**options), self.model)
        self.results: dict[str, PoolingResult] = {}

    def add(self, name: str, *firsts: int, length: int = 10, deadline_s: float | None = None) -> PoolingJob:
        texts = [PooledInput([first] * length, length) for first in firsts]
        request = PoolingRequest(request_id=name, texts=texts, client=name, deadline_s=deadline_s)
        return self.engine.add(request, self._note)

    def _note(self, job: PoolingJob, result: PoolingResult) -> None:
        assert job.request.request_id not in self.results
        self.results[job.request.request_id] = result

    def run(self) -> None:
        while self.engine.step():
            pass
        stats = self.engine.stats()
        assert stats.num_running == stats.num_waiting == 0


def test_rows_come_in_the_order_of_the_texts() -> None:
    asked = Asked()
    asked.add("a", 7, 3, 9)
    asked.run()
    np.testing.assert_array_equal(asked.results["a"].rows(), [[7, 10], [3, 10], [9, 10]])


def test_a_short_request_runs_between_two_layers_of_a_long_step() -> None:
    asked = Asked()
    asked.add("long", *range(1, 11), length=100)
    asked.model.on_layer = [lambda: asked.add("short", 50)]
    asked.engine.step()
    assert asked.model.steps[1] == [50]
    assert list(asked.results) == ["short"]
    asked.run()
    assert list(asked.results) == ["short", "long"]


def test_short_requests_cannot_hold_a_long_step_up_for_ever() -> None:
    asked = Asked()
    asked.add("long", *range(1, 6), length=100)
    asked.model.on_layer = [lambda: [asked.add(f"short {number}", 50, length=60) for number in range(40)]] * 1
    asked.engine.step()
    nested = sum(60 * len(step) for step in asked.model.steps[1:])
    assert 0 < nested <= 500
    asked.run()
    assert len(asked.results) == 41


def test_one_text_without_a_number_fails_its_request_alone() -> None:
    asked = Asked()
    asked.add("good", 1, 2)
    asked.add("bad", 3, NAN)
    asked.run()
    assert asked.results["good"].refusal is None
    refusal = asked.results["bad"].refusal
    assert refusal is not None
    assert (refusal.kind, asked.results["bad"].text) == ("failed", 1)


def test_one_text_that_the_model_fails_at_fails_its_request_alone() -> None:
    asked = Asked()
    for name, token in (("a", 1), ("bad", POISON), ("b", 2)):
        asked.add(name, token)
    asked.run()
    assert [asked.results[name].refusal is None for name in ("a", "bad", "b")] == [True, False, True]


def test_a_model_that_fails_at_any_text_ends_its_engine() -> None:
    """As after an error of a GPU: failed requests would be answered at once, and so draw all others here."""
    asked = Asked()
    asked.add("a", 1)
    asked.model.fails = True
    with pytest.raises(ModelBroken):
        asked.run()
    assert not asked.engine.stats().alive
    assert not asked.results, "it is asked of another engine"


def test_a_request_ends_at_its_deadline() -> None:
    asked = Asked()
    asked.add("late", 1, deadline_s=1e-6)
    asked.add("other", 2)
    time.sleep(0.001)
    asked.run()
    refusal = asked.results["late"].refusal
    assert refusal is not None
    assert refusal.kind == "deadline"
    assert asked.model.steps == [[2]]


def test_an_aborted_request_runs_no_more() -> None:
    asked = Asked()
    job = asked.add("gone", *range(1, 30), length=100)
    asked.add("other", 40)
    asked.engine.step()
    asked.engine.abort(job)
    asked.run()
    assert "gone" not in asked.results
    assert sum(map(len, asked.model.steps)) < 30


@pytest.mark.parametrize(
    ("token_ids", "kind"), [([], "empty"), ([1] * 301, "context_length"), ([512], "outside_vocabulary")]
)
def test_a_text_that_does_not_fit_is_refused(token_ids: list[int], kind: str) -> None:
    asked = Asked()
    text = PooledInput(token_ids, len(token_ids))
    with pytest.raises(RequestRefused) as caught:
        asked.engine.add(PoolingRequest(request_id="a", texts=[text]), lambda _, result: None)
    assert (caught.value.refusal.kind, caught.value.refusal.field) == (kind, "texts[0]")


def test_the_queue_is_bounded_by_tokens() -> None:
    asked = Asked(max_num_waiting=2)
    asked.add("a", *[1] * 7, length=100)
    with pytest.raises(QueueFull) as caught:
        asked.add("b", 1)
    assert caught.value.refusal.unit == "tokens of texts wait"
