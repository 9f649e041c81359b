"""Whatever goes wrong with one constraint, other requests keep their tokens and nothing is left over.

The load is the one of `manta bench faults`, which also says what the others' time between tokens becomes.
"""

from __future__ import annotations

import pytest

from benchmarks.faults import COSTLY, FaultLoad
from manta.cluster.llm import LLM
from tests.checkpoints import checkpoint
from tests.patience import wait_until

pytestmark = pytest.mark.usefixtures("plugin")

NUM_TOKENS = 24


def make_load(form: str) -> FaultLoad:
    folder = str(checkpoint("llama", dtype="float32"))
    options = {"grammar_pool": {"form": form, "mask_seconds": 1.5}, "constraints": {"compile_seconds": 2.0}}
    load = FaultLoad(LLM(folder, kv_cache_bytes=2**24, **options), NUM_TOKENS)
    load.block(None)
    return load


@pytest.fixture(scope="module")
def threads(plugin: None) -> FaultLoad:
    return make_load("threads")


@pytest.fixture(scope="module")
def actors(local_ray: None) -> FaultLoad:
    return make_load("actors")


@pytest.mark.parametrize("fault", ["raise", "hang", *COSTLY])
def test_a_fault_beside_threads_costs_its_own_request(threads: FaultLoad, fault: str) -> None:
    threads.block(fault)
    threads.block(None)


@pytest.mark.parametrize("fault", ["kill", "raise", "hang"])
def test_a_fault_beside_actors_costs_its_own_request(actors: FaultLoad, fault: str) -> None:
    actors.block(fault)
    actors.block(None)
    pool = actors.llm.engine.masks.pool
    assert pool is not None
    if fault != "raise":  # sessions may have moved before the end of their worker was known
        wait_until(lambda: pool.supervise() or pool.workers.num_replaced > 0)
