"""The engine on the JAX worker: its suites again, with `JaxWorker` in the place of torch's worker."""

from __future__ import annotations

import pytest

from tests.engine.test_engine import *  # noqa: F403
from tests.specdecode.test_speculative import *  # noqa: F403
from workers.ranks import rank_worker


@pytest.fixture(autouse=True)
def jax_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in rank_worker.WORKERS:
        monkeypatch.setitem(rank_worker.WORKERS, device, "workers.jax_worker.jax_worker:JaxWorker")
