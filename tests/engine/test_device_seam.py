"""The engine on a worker of another framework: its whole suite again, over a Llama in numpy.

Every test imported here runs a second time, with `tests/engine/numpy_worker.py` in the place of torch's worker.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from manta.workers.ranks import rank_worker
from tests.engine.numpy_worker import NumpyWorker
from tests.engine.test_engine import *  # noqa: F403
from tests.engine.test_engine import GREEDY, make_engine, make_prompts, run
from tests.engine_parts import worker_of
from tests.specdecode.test_speculative import *  # noqa: F403


@pytest.fixture(autouse=True)
def numpy_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in rank_worker.WORKERS:
        monkeypatch.setitem(rank_worker.WORKERS, device, "tests.engine.numpy_worker:NumpyWorker")


def test_the_worker_is_the_one_in_numpy() -> None:
    engine = make_engine("llama")
    assert type(worker_of(engine)) is NumpyWorker
    assert run(engine, make_prompts()[:1], GREEDY)


@pytest.mark.parametrize(
    "module",
    [
        "manta.workers.models.families",
        "manta.workers.ranks.rank_worker",
        "manta.specdecode.speculative_worker",
        "manta.cluster.engine.engine",
    ],
)
def test_the_seam_and_above_import_no_framework(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'jax', 'ray') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
