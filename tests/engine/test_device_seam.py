"""The engine on a worker of another framework: a dozen of its tests again, over a Llama in numpy.

They run with `tests/engine/numpy_worker.py` in the place of torch's worker.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from manta.workers.ranks import rank_worker
from tests.engine import test_engine
from tests.engine.numpy_worker import NumpyWorker
from tests.engine.test_engine import GREEDY, HISTORIES, make_engine, make_prompts, run
from tests.engine_parts import worker_of
from tests.specdecode import test_speculative

SEAM: dict[str, Callable[[], None]] = {
    "prefixes and chunks": lambda: test_engine.test_greedy_tokens_equal_transformers("llama", "batched"),
    "preemption": lambda: test_engine.test_greedy_tokens_equal_transformers("qwen3", "all at once"),
    "seeds": test_engine.test_seeded_tokens_do_not_depend_on_batch,
    "ends": test_engine.test_stop_tokens_eos_and_min_tokens_end_sequences,
    "errors of rows": test_engine.test_a_nan_row_ends_alone_without_its_blocks,
    "recovery": test_engine.test_a_failed_step_is_recomputed_once_then_unhealthy,
    "logprobs": test_engine.test_logprobs_equal_the_reference,
    "drafts": lambda: test_speculative.test_speculation_keeps_seeded_outputs("ngram", HISTORIES["all at once"]),
    "a draft model": lambda: test_speculative.test_greedy_tokens_equal_transformers("llama by qwen2", "all at once"),
    "drafts of choices": test_speculative.test_choices_of_one_request_speculate_each_for_itself,
    "an end in a draft": test_speculative.test_stop_conditions_inside_a_draft_end_sequences,
    "a draft's blocks": test_speculative.test_the_draft_reads_only_blocks_it_wrote,
}
"""One test of the engine for each thing that a worker does behind the seam."""


@pytest.fixture(autouse=True)
def numpy_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in rank_worker.WORKERS:
        monkeypatch.setitem(rank_worker.WORKERS, device, "tests.engine.numpy_worker:NumpyWorker")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SEAM)
def test_the_engine_runs_on_it(name: str) -> None:
    SEAM[name]()


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
