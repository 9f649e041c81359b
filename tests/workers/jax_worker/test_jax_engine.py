"""The engine on the JAX worker: its suites again, with `JaxWorker` in the place of torch's worker."""

from __future__ import annotations

import tests.workers.jax_worker.devices  # isort: skip  # noqa: F401
import pytest

from tests.conftest import PROVE
from tests.engine.test_engine import *  # noqa: F403
from tests.engine.test_engine import GREEDY, LIMITS, make_engine, make_prompts, run
from tests.engine_parts import worker_of
from tests.specdecode.test_speculative import *  # noqa: F403
from workers.ranks import rank_worker


@pytest.fixture(autouse=True)
def jax_worker(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """`make test` runs one family here, because each engine compiles its programs; `test_jax_model.py` has them all."""
    if not PROVE and getattr(request.node, "callspec", None) is not None:
        parameters = request.node.callspec.params
        if request.node.originalname == "test_greedy_tokens_equal_transformers" and parameters["family"] != "llama":
            pytest.skip("make prove runs every family")
    for device in rank_worker.WORKERS:
        monkeypatch.setitem(rank_worker.WORKERS, device, "workers.jax_worker.jax_worker:JaxWorker")
    monkeypatch.setitem(LIMITS, "max_num_batched_tokens", 256)
    monkeypatch.setitem(LIMITS, "max_num_sequences", 16)


def test_the_worker_is_the_one_in_jax() -> None:
    engine = make_engine("llama")
    assert type(worker_of(engine)).__name__ == "JaxWorker"
    assert run(engine, make_prompts()[:1], GREEDY)
