"""`engine.exact` over a rounded KV cache: the same tokens and log-probabilities in every form and schedule.

The digests are written down here, like those of `test_exact.py`, whose model and requests these are.
"""

from __future__ import annotations

import pytest

from tests.conftest import PROVE
from tests.engine.test_exact import DIGESTS as WITHOUT
from tests.engine.test_exact import NUM_REQUESTS, SCHEDULES, answers, folder, make
from tests.pairs import in_turns
from tests.workers.cpu_forms import COMPILED, QUANTIZED, in_form

DIGESTS = {
    "int8": {24: "80b7f9ac35858948", 200: "8841b3c6e792edcc"},
    "int4": {24: "d87d812aa18b5abf"},
}
TOKEN_BYTES = {"int8": 432, "int4": 240}
__all__ = ["folder"]


def digest(cached: str, folder: str) -> str:
    """Returns the digest that is written down, or else that of the processor's best form."""
    if NUM_REQUESTS in DIGESTS[cached]:
        return DIGESTS[cached][NUM_REQUESTS]
    with in_form(COMPILED[0]):
        return answers(make(folder, kv_cache_dtype=cached))


@pytest.mark.parametrize(("form", "cached"), in_turns(QUANTIZED if PROVE else COMPILED[:2], list(DIGESTS)))
def test_every_form_gives_the_same_answers(form: str, cached: str, folder: str) -> None:
    expected = digest(cached, folder)
    assert expected != WITHOUT[NUM_REQUESTS], "rounding changes some log-probability"
    with in_form(form):
        assert answers(make(folder, kv_cache_dtype=cached)) == expected


@pytest.mark.parametrize(
    ("schedule", "cached"), in_turns(SCHEDULES if PROVE else ["chunks of 7", "drafts"], list(DIGESTS))
)
def test_every_schedule_gives_the_same_answers(schedule: str, cached: str, folder: str) -> None:
    assert answers(make(folder, kv_cache_dtype=cached, **SCHEDULES[schedule])) == digest(cached, folder)


@pytest.mark.parametrize("cached", DIGESTS)
def test_preemption_changes_nothing(cached: str, folder: str) -> None:
    llm = make(folder, kv_cache_dtype=cached, kv_cache_bytes=50 * 16 * TOKEN_BYTES[cached])
    assert answers(llm) == digest(cached, folder)
    assert llm.engine.stats().num_preemptions > 0
