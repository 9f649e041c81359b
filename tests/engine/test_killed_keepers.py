"""Engines are killed while they keep prefixes, at any moment and within a write. The next one computes the tokens of an
engine that has never seen a prefix store.
"""

from __future__ import annotations

import gc
import multiprocessing
import pathlib
import random
import signal
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest

from manta.cluster.llm import LLM, SamplingParams
from manta.workers.kernels import build
from tests import garbage
from tests.checkpoints import checkpoint
from tests.engine import dying_keeper
from tests.engine.dying_keeper import NOWHERE, WITHIN, Death
from tests.engine.test_exact import whole_numbers
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.prove

NUM_KILLS = 20
BLOCK = 16
STORE = {"prefix_store_bytes": 1 << 28}
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "kv_cache_bytes": 1 << 22, "num_threads": 1},
    "exact": {"exact": True, "weights": "int8", "kv_cache_bytes": 1 << 22, "num_threads": 1},
}


@pytest.fixture(scope="module")
def servers() -> ForkServerContext:
    """Makes processes that are forked from one which has imported an engine."""
    build.load_library()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engine.dying_keeper", "manta.workers.torch_worker.torch_worker"])
    first = context.Process(target=len, args=((),))  # before a test changes the variables that it inherits
    first.start()
    first.join()
    return context


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    garbage.leave_alone()
    return {"float32": str(checkpoint("llama")), "exact": whole_numbers(tmp_path_factory.mktemp("exact") / "model")}


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """The folder of kept blocks."""
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path))
    yield tmp_path / "prefixes"
    gc.collect()


def ask(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    """Returns the tokens after a prompt, and how many of its own were cached."""
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    llm.engine.step()
    llm.engine.check_integrity()
    assert output.usage is not None
    return output.outputs[0].token_ids, output.usage.num_cached_tokens


def kept(cache: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of whole blocks."""
    return [each for each in cache.glob("*") if each.name[:1] in "0123456789abcdef"]


def drawn(seed: int) -> tuple[random.Random, list[int]]:
    """Returns a generator, and the prefix of at least two blocks that it has drawn."""
    generator = random.Random(seed)
    return generator, generator.choices(range(5, 300), k=generator.randrange(2 * BLOCK, 300))


def kill(context: ForkServerContext, arguments: tuple[Any, ...], is_due: Callable[[], bool]) -> None:
    """Starts an engine and kills it when that is due, unless it ends itself before."""
    process = context.Process(target=dying_keeper.run, args=arguments)
    process.start()
    try:
        wait_until(lambda: is_due() or not process.is_alive(), poll_s=0.001)
    finally:
        process.kill()
        process.join(PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("seed", range(NUM_KILLS))
@pytest.mark.parametrize("name", OPTIONS)
def test_the_next_engine_computes_the_same_tokens(
    name: str,
    seed: int,
    servers: ForkServerContext,
    folders: dict[str, str],
    cache: pathlib.Path,
    record_property: Callable[[str, object], None],
) -> None:
    generator, prefix = drawn(seed)
    options, num_blocks = OPTIONS[name], len(prefix) // BLOCK
    until = generator.randrange(1, num_blocks + 1)
    arguments = (folders[name], options | STORE, str(cache.parent), prefix, Death(NOWHERE, 0))
    kill(servers, arguments, lambda: len(kept(cache)) >= until)
    record_property("cached", check(folders[name], options, prefix, cache))


@pytest.mark.parametrize("seed", range(NUM_KILLS))
@pytest.mark.parametrize("name", OPTIONS)
def test_a_kill_within_a_write_leaves_nothing_that_counts(
    name: str,
    seed: int,
    servers: ForkServerContext,
    folders: dict[str, str],
    cache: pathlib.Path,
    record_property: Callable[[str, object], None],
) -> None:
    generator, prefix = drawn(seed)
    options, place = OPTIONS[name], WITHIN[seed % len(WITHIN)]
    number = generator.randrange(len(prefix) // BLOCK)
    arguments = (folders[name], options | STORE, str(cache.parent), prefix, Death(place, number))
    kill(servers, arguments, lambda: False)
    assert len(kept(cache)) == number, "the writes before it"
    found = check(folders[name], options, prefix, cache)
    assert found == number * BLOCK
    record_property("killed", f"{place} of write {number}")
    record_property("cached", found)


def check(folder: str, options: dict[str, Any], prefix: list[int], cache: pathlib.Path) -> int:
    """Compares an engine that finds the store with a cold one. Returns how many tokens it found."""
    prompt, num_kept = [*prefix, 9], len(kept(cache))
    cold, _ = ask(LLM(folder, **options), prompt)
    llm = LLM(folder, **options, **STORE)
    tokens, num_cached = ask(llm, prompt)
    assert tokens == cold
    assert num_cached == num_kept * BLOCK
    assert ask(llm, prompt)[0] == cold
    return num_cached
