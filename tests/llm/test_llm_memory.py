"""A dropped `LLM` holds no memory, so that the next one finds it free."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from manta.cluster.llm import LLM, ConstraintSpec, SamplingParams
from tests import garbage
from tests.checkpoints import checkpoint
from tests.engine_parts import device_of
from tests.patience import wait_until

pytestmark = pytest.mark.usefixtures("own_fork_servers")

LETTERS = ConstraintSpec(kind="regex", text="[ab]{3}")
DRAFT = {"draft_model": str(checkpoint("llama", dtype="float32")), "max_draft_tokens": 2}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Cycles are not collected: only what nobody refers to is freed."""
    garbage.leave_alone()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": "on"},
        {"speculative": {"proposers": ["ngram"]}},
        {"speculative": {"proposers": ["draft"], **DRAFT}},
    ],
    ids=["plain", "overlapped", "n-grams", "a draft model"],
)
def test_a_dropped_llm_frees_its_model_at_once(no_collector: None, options: dict[str, Any]) -> None:
    """Neither a collection of cycles nor a call is needed, and the processes that compiled constraints end."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    llm = LLM(str(checkpoint("llama", dtype="float32")), kv_cache_bytes=1 << 22, num_threads=1, **options)
    params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, constraint=LETTERS)]
    llm.generate([[5, 6], [7]], params, use_tqdm=False)

    async def stream(llm: LLM) -> None:
        async for _ in llm.stream([5], SamplingParams(max_tokens=3)):
            pass

    asyncio.run(stream(llm))
    held = [weakref.ref(each) for each in (llm, llm.engine, llm.engine.scheduler, device_of(llm.engine))]
    del llm
    wait_until(lambda: all(each() is None for each in held))  # the last step of the stream may still run
    wait_until(lambda: {child.pid for child in psutil.Process().children(recursive=True)} <= before)
