"""What every test run shares: hypothesis without randomness or deadlines, no usage reports, and the long tests' switch.

`MANTA_PROVE=1` (`make prove`) runs the tests marked `prove` too and 25 times the examples, and goes on where an
interrupted run of the same sources stopped; see `tests/prove.py`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.bare_names import refuse_everywhere
from tests.costs import Costs
from tests.pairs import axes_take_turns, few_cases, forms_take_turns, pool_forms_take_turns
from tests.sharing import end_behind, make_scheduler, put_together

pytest_plugins = ["tests.fork_servers"]

if TYPE_CHECKING:
    from manta.structured.vocabulary import Vocabulary
    from tests.grammar_pools import MakePool, Pools
    from tests.replicas import Replicas
    from tests.two_nodes import TwoNodes

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
refuse_everywhere()
# The suite runs on the CPU, Triton's kernels in their interpreter; `make gpu-check` runs them on a GPU. Triton and
# torch read this when they are first imported.
INTERPRETED = os.environ.setdefault("TRITON_INTERPRET", "1") == "1"
if INTERPRETED:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Threads that spin for long starve whatever else runs, such as a second test run.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

PLUGIN = pathlib.Path(__file__).parent / "plugin"
"""Backends and processors from outside the tree, as an installed package would register them."""

PROVE = os.environ.get("MANTA_PROVE") == "1"

hypothesis.settings.register_profile("fast", derandomize=True, deadline=None, database=None, max_examples=40)
hypothesis.settings.register_profile("prove", derandomize=True, deadline=None, database=None, max_examples=1000)
hypothesis.settings.load_profile("prove" if PROVE else "fast")


@pytest.fixture(autouse=True, scope="module")
def own_settings() -> Iterator[None]:
    """Fails a file that leaves a setting of its process to the files behind it, which would compile all kernels again
    in another cache, for example.
    """
    before = _settings()
    yield
    assert _settings() == before, "a test of this file has changed a setting of its process and left it so"


def _settings() -> dict[str, str]:
    """Returns the settings of this process that Manta reads."""
    names = [name for name in os.environ if name.startswith("MANTA_") or name == "CXX"]
    return {name: os.environ[name] for name in names} | {"temporary files": tempfile.gettempdir()}


@pytest.fixture(scope="module")
def cheap_groups() -> Iterator[None]:
    """Small groups of sequences read their shared prefix once too, which does not pay outside of tests. Their block
    tables are compared a few columns at a time, as long ones are.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("manta.workers.kernels.shared_prefixes.MEMBER_COST_KEYS", 16)
        patch.setattr("manta.workers.kernels.shared_prefixes.FIRST_BLOCKS", 2)
        yield


@pytest.fixture(scope="module")
def plugin() -> Iterator[None]:
    """What is in `PLUGIN` is found by its entry points."""
    sys.path.append(str(PLUGIN))
    yield
    sys.path.remove(str(PLUGIN))


@pytest.fixture
def trials_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`manta check` runs its step in this process. A new one, as users have it, takes seconds to import torch."""
    from manta.workers.models.model_config import ModelError
    from manta.workers.torch_worker import trial

    def try_here(asked: trial.Trial) -> trial.TrialResult:
        result = trial.run(asked)
        if result.error is not None:
            raise ModelError(result.error)
        return result

    monkeypatch.setattr("manta.cluster.cli.check.try_one_layer", try_here)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """The demo model's, padded."""
    from manta.structured.vocabulary import Vocabulary
    from tests.grammar_pools import DEMO, EOS, VOCAB_SIZE

    return Vocabulary.load(str(DEMO), VOCAB_SIZE, (EOS,))


@pytest.fixture(scope="module")
def local_ray(plugin: None) -> None:
    """A Ray runs in this process; `tests/sharing.py` says when it ends."""
    pytest.importorskip("ray")
    from tests.grammar_pools import share_ray

    share_ray()


@pytest.fixture(scope="module")
def actor_pools(local_ray: None, vocabulary: Vocabulary) -> Iterator[Pools]:
    """Makes the pools over actors that the tests of a file share."""
    from tests.grammar_pools import Pools

    with contextlib.closing(Pools(vocabulary, "actors")) as pools:
        yield pools


@pytest.fixture(scope="module")
def namespaces() -> Iterator[TwoNodes]:
    """A cluster of two nodes, each in a network namespace."""
    from tests.two_nodes import NoNamespaces, two_nodes

    with contextlib.ExitStack() as stack:
        try:
            nodes = stack.enter_context(two_nodes())
        except NoNamespaces as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield nodes


@pytest.fixture
def new_replica() -> Iterator[Replicas]:
    """Makes engine replicas, which end with the test."""
    from tests.replicas import Replicas

    with contextlib.closing(Replicas()) as replicas:
        yield replicas


@pytest.fixture(scope="module")
def process_pools(plugin: None, vocabulary: Vocabulary) -> Iterator[Pools]:
    """Makes the pools over processes that the tests of a file share."""
    from tests.grammar_pools import Pools

    with contextlib.closing(Pools(vocabulary, "processes")) as pools:
        yield pools


@pytest.fixture(params=["threads", pytest.param("processes", marks=pytest.mark.prove), "actors"])
def make_pool(request: pytest.FixtureRequest, vocabulary: Vocabulary) -> Iterator[MakePool]:
    """Makes grammar pools over threads, over processes, or over actors."""
    from tests.grammar_pools import Pools

    fixtures = {"actors": "actor_pools", "processes": "process_pools"}
    pools: Pools
    if request.param in fixtures:
        pools = request.getfixturevalue(fixtures[request.param])
    else:
        pools = Pools(vocabulary, request.param)
    yield pools.make
    pools.give_back()


@pytest.fixture(params=["kernel", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms of the sampler."""
    from manta.workers.kernels import cpu_sampler

    if request.param == "torch":
        monkeypatch.setattr(cpu_sampler, "_library", lambda: None)
    elif cpu_sampler._library() is None:
        pytest.skip("no C++ compiler")
    return request.param


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "prove: takes minutes; runs with MANTA_PROVE=1 only")
    config.addinivalue_line("markers", "few(n): n of the cases, spread over all; all on a GPU")
    config.addinivalue_line("markers", "long_when_interpreted: runs on a GPU, and with MANTA_PROVE=1")
    config.addinivalue_line("markers", "axes_in_turns: the fewest cases that together have every value of each axis")
    config.addinivalue_line("markers", "forms_in_turns: each case has the first form and one of the others")
    config.pluginmanager.register(Costs(), "manta-costs")
    if PROVE:
        from tests.prove import ProofRecord

        config.pluginmanager.register(ProofRecord(config.rootpath), "manta-prove")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    put_together(items)
    if PROVE:
        return
    forms_take_turns(items)
    axes_take_turns(items)
    pool_forms_take_turns(items)
    if INTERPRETED:
        few_cases(items)
        for item in items:
            if "long_when_interpreted" in item.keywords:
                item.add_marker(pytest.mark.prove)
    long = [item for item in items if "prove" in item.keywords]
    if long:  # to skip each of thousands would take seconds
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if "prove" not in item.keywords]


def pytest_collection() -> None:
    """Importing all tests makes millions of objects that stay; looking for cycles among them would double the time.
    Not at the import of this module: `make fuzz` imports it too, and would keep every cycle for hours.
    """
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Whatever ran before a test in its process, it draws the same numbers from torch."""
    if (torch := sys.modules.get("torch")) is not None:
        # On a CPU alone: to ask every kind of device takes a millisecond, ten thousand times.
        (torch.default_generator.manual_seed if INTERPRETED else torch.manual_seed)(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    end_behind(item, nextitem)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return make_scheduler(config, log) if config.getvalue("dist") == "loadfile" else None
