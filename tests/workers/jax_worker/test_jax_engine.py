"""The engine on the JAX worker: its suites again, with `JaxWorker` in the place of torch's worker.

Each engine compiles its programs, so `make test` runs one case of each kind here, and `make prove` runs all.
"""

from __future__ import annotations

import tests.workers.jax_worker.devices  # isort: skip  # noqa: F401
import pytest

from manta.workers.ranks import rank_worker
from tests.conftest import PROVE
from tests.engine.test_engine import *  # noqa: F403
from tests.engine.test_engine import GREEDY, LIMITS, make_engine, make_prompts, run
from tests.engine_parts import worker_of
from tests.specdecode.test_speculative import *  # noqa: F403

QUICK = {
    "test_speculation_keeps_seeded_outputs": ("[draft-options4]",),
}
"""Cases that `make test` runs of the tests with many cases."""
ON_ANY_WORKER = {
    "test_the_index_proposes_what_followed_the_longest_match",
    "test_the_incremental_index_equals_a_search",
    "test_configurations_that_contradict_themselves_are_refused",
    "test_a_raising_proposer_is_left_out",
    "test_unservable_requests_are_refused_at_once",
    "test_text_only_parameters_are_not_sent_to_ranks",
    "test_full_queues_deadlines_and_aborts_free_everything",
    "test_a_draft_shares_memory_and_is_checked",
}
"""Tests of what happens before a worker gets a step or drafts; `make test` runs them on torch's worker only."""
ALIKE = {
    "test_stop_tokens_eos_and_min_tokens_end_sequences",
    "test_stop_conditions_inside_a_draft_end_sequences",
    "test_choices_of_one_request_speculate_each_for_itself",
    "test_mixed_batches_keep_their_tokens",
    "test_seeded_tokens_do_not_depend_on_batch",
    "test_a_nan_row_ends_alone_without_its_blocks",
    "test_a_draft_raising_between_tokens_leaves_no_trace",
    "test_a_failed_step_is_recomputed_once_then_unhealthy",
    "test_the_draft_reads_only_blocks_it_wrote",
}
"""Tests whose steps are like those of others that `make test` runs here."""


@pytest.fixture(autouse=True)
def jax_worker(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if not PROVE:
        name = request.node.originalname
        cases = QUICK.get(name)
        if name in ON_ANY_WORKER | ALIKE or (cases is not None and not request.node.name.endswith(cases)):
            pytest.skip("make prove runs it")
    for device in rank_worker.WORKERS:
        monkeypatch.setitem(rank_worker.WORKERS, device, "manta.workers.jax_worker.jax_worker:JaxWorker")
    monkeypatch.setitem(LIMITS, "max_num_batched_tokens", 256)
    monkeypatch.setitem(LIMITS, "max_num_sequences", 16)


def test_the_worker_is_the_one_in_jax() -> None:
    engine = make_engine("llama")
    assert type(worker_of(engine)).__name__ == "JaxWorker"
    assert run(engine, make_prompts()[:1], GREEDY)
