"""What every test run shares: hypothesis without randomness or deadlines, no usage reports, and the long tests' switch.

`MANTA_PROVE=1` (`make prove`) runs the tests marked `prove` too and ten times the examples, and goes on where an
interrupted run of the same sources stopped; see `tests/prove.py`.
"""

from __future__ import annotations

import os

import hypothesis
import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

PROVE = os.environ.get("MANTA_PROVE") == "1"

hypothesis.settings.register_profile("fast", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("prove", derandomize=True, deadline=None, database=None, max_examples=1000)
hypothesis.settings.load_profile("prove" if PROVE else "fast")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "prove: takes minutes; runs with MANTA_PROVE=1 only")
    if PROVE:
        from tests.prove import ProofRecord

        config.pluginmanager.register(ProofRecord(config.rootpath), "manta-prove")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PROVE:
        return
    skip = pytest.mark.skip(reason="takes minutes; run it with make prove")
    for item in items:
        if "prove" in item.keywords:
            item.add_marker(skip)


def pytest_sessionfinish() -> None:
    from tests.server import shared_server

    if shared_server.cache_info().currsize:
        shared_server().stop()
