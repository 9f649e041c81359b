"""`engine.exact` over a KV cache of int8: the same tokens and log-probabilities in every form and schedule.

The digests are written down here, like those of `test_exact.py`, whose model and requests these are.
"""

from __future__ import annotations

import pytest

from tests.conftest import PROVE
from tests.engine.test_exact import DIGESTS as WITHOUT
from tests.engine.test_exact import NUM_REQUESTS, SCHEDULES, answers, folder, make
from tests.workers.cpu_forms import COMPILED, QUANTIZED, in_form

DIGESTS = {24: "80b7f9ac35858948", 200: "8841b3c6e792edcc"}
__all__ = ["folder"]


@pytest.mark.parametrize("form", QUANTIZED if PROVE else COMPILED[:2])
def test_every_form_gives_the_same_answers(form: str, folder: str) -> None:
    assert DIGESTS[NUM_REQUESTS] != WITHOUT[NUM_REQUESTS], "rounding changes some log-probability"
    with in_form(form):
        assert answers(make(folder, kv_cache_dtype="int8")) == DIGESTS[NUM_REQUESTS]


@pytest.mark.parametrize("schedule", SCHEDULES if PROVE else ["chunks of 7", "drafts"])
def test_every_schedule_gives_the_same_answers(schedule: str, folder: str) -> None:
    assert answers(make(folder, kv_cache_dtype="int8", **SCHEDULES[schedule])) == DIGESTS[NUM_REQUESTS]


def test_preemption_changes_nothing(folder: str) -> None:
    llm = make(folder, kv_cache_dtype="int8", kv_cache_bytes=50 * 16 * 432)
    assert answers(llm) == DIGESTS[NUM_REQUESTS]
    assert llm.engine.stats().num_preemptions > 0
