"""The prefix store: an engine finds what an earlier one has computed, and computes the same tokens from it as without.

Kept blocks of other values, other numbers, other owners or damaged files are no hits, and never other tokens.
"""

from __future__ import annotations

import gc
import os
import pathlib
import random
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from manta.cluster.config import EngineConfig
from manta.cluster.engine.kv_blocks import hash_blocks
from manta.cluster.llm import LLM, SamplingParams
from manta.workers.kernels import build
from manta.workers.models.model_config import ModelError
from manta.workers.prefix_store import PrefixStore, check_prefix_store
from tests import garbage
from tests.checkpoints import checkpoint
from tests.conftest import PROVE
from tests.engine import test_layer_kinds_engine, test_recurrent_engine
from tests.engine.histories import BLOCK, GREEDY, NGRAM, prompts
from tests.engine.test_exact import whole_numbers
from tests.workers.test_cache_folder import STRANGER, needs_root

STORE: dict[str, Any] = {"prefix_store_bytes": 1 << 28}
SHARED = random.Random(1).choices(range(5, 300), k=200)
"""A system prompt of 12 whole blocks."""
NUM_FOUND = 192
"""Its tokens in whole blocks."""
NUM_FUZZED = 40 if PROVE else 6


@pytest.fixture(autouse=True, scope="module")
def only_garbage_of_this_file() -> None:
    """Engines are in cycles, and each test collects those that it has ended."""
    garbage.leave_alone()


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of kept blocks."""
    build.load_library()  # from the cache that all tests share
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path))
    return tmp_path / "prefixes"


def make_llm(folder: str | None = None, **options: Any) -> LLM:
    """Makes one of the tiny Llama."""
    defaults = {"dtype": "float32", "num_threads": 1, "kv_cache_bytes": 1 << 22}
    return LLM(folder or str(checkpoint("llama")), **(defaults | options))


def writers() -> list[threading.Thread]:
    """Returns the threads that write the blocks of the engines that are alive."""
    return [thread for thread in threading.enumerate() if thread.name == "manta-prefixes"]


def end() -> None:
    """Ends the engines that nobody holds any more, and waits until what they keep is on disk."""
    ending = writers()
    gc.collect()
    for thread in ending:
        thread.join()


def ask(llm: LLM, *prompt: int, num_tokens: int = 6, shared: list[int] = SHARED) -> tuple[list[int], int]:
    """Returns the tokens after the shared prompt and the given tokens, and how many of the prompt's were cached."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    (output,) = llm.generate([[*shared, *prompt]], params, use_tqdm=False)
    llm.engine.step()
    llm.engine.check_integrity()
    assert output.usage is not None
    return output.outputs[0].token_ids, output.usage.num_cached_tokens


def keep(make: Callable[[], LLM]) -> None:
    """Has an engine keep the shared prompt, and ends it."""
    llm = make()
    assert ask(llm, 7)[1] == 0
    assert ask(llm, 8)[1] == NUM_FOUND
    del llm
    end()


# ---- every kind of model -----------------------------------------------------------------------------------------


KINDS: dict[str, Callable[..., LLM]] = {
    "llama": lambda _, **options: make_llm(**options),
    **dict.fromkeys(("gemma3", "deepseek_v3", "gpt_oss"), test_layer_kinds_engine.make_llm),
    **dict.fromkeys(("lfm2", "lfm2, convolutions only", "qwen3_next"), test_recurrent_engine.make_llm),
}
"""One group of layers, windows, latent vectors, windows with sinks, and recurrent states."""
CHEAP = ("llama", "gemma3", "deepseek_v3", "lfm2")


@pytest.mark.parametrize(
    "kind", [kind if kind in CHEAP else pytest.param(kind, marks=pytest.mark.prove) for kind in KINDS]
)
def test_a_new_engine_goes_on_from_what_an_earlier_one_computed(kind: str) -> None:
    def run(llm: LLM) -> tuple[list[list[int]], int]:
        outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
        llm.engine.step()
        llm.engine.check_integrity()
        return [output.outputs[0].token_ids for output in outputs], llm.engine.stats().prefix_cache_hits

    first = KINDS[kind](kind, **STORE)
    tokens, _ = run(first)
    _, hits = run(first)
    assert hits > 0
    del first
    end()
    second = KINDS[kind](kind, **STORE)
    found, hits = run(second)
    assert found == tokens
    assert hits > 48, "more than the prompts of one batch share"


OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "int4 cache": {"kv_cache_dtype": "int4"},
    "rounded weights": {"weights": "int8"},
    "chunks": {"max_num_batched_tokens": 64},
    "blocks of 32": {"block_size": 32},
    "steps under way": {"overlap": "on"},
    "prompt lookup": {"speculative": NGRAM},
    "draft model": {
        "speculative": {"proposers": ("draft",), "draft_model": str(checkpoint("llama")), "adaptive": False}
    },
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_no_token(name: str) -> None:
    options = OPTIONS[name]
    cold, _ = ask(make_llm(**options), 9)
    keep(lambda: make_llm(**STORE, **options))
    tokens, num_cached = ask(make_llm(**STORE, **options), 9)
    assert num_cached == NUM_FOUND
    if name not in ("bfloat16", "int8 cache", "int4 cache"):  # there a cold prompt's tokens may depend on its chunks
        assert tokens == cold


def test_exact_tokens_stay_exact(tmp_path: pathlib.Path) -> None:
    folder = whole_numbers(tmp_path / "exact")
    make = lambda **options: LLM(folder, exact=True, weights="int8", kv_cache_bytes=1 << 22, num_threads=1, **options)  # noqa: E731
    cold = ask(make(), 9, num_tokens=24)
    keep(lambda: make(prefix_store_bytes=1 << 28))
    assert ask(make(prefix_store_bytes=1 << 28), 9, num_tokens=24) == (cold[0], NUM_FOUND)


def test_engines_of_a_node_share_their_blocks() -> None:
    other = make_llm(**STORE)
    others = writers()
    one = make_llm(**STORE)
    own = [thread for thread in writers() if thread not in others]
    ask(one, 7)
    ask(one, 8)
    del one
    gc.collect()
    for thread in own:
        thread.join()
    assert ask(other, 9)[1] == NUM_FOUND


def test_a_prompt_that_is_sent_once_is_not_kept(cache: pathlib.Path) -> None:
    llm = make_llm(**STORE)
    ask(llm, 7)
    ask(llm, 8)
    del llm
    end()
    kept = set(os.listdir(cache))
    llm = make_llm(**STORE)
    other = random.Random(2).choices(range(5, 300), k=100)
    llm.generate([other], SamplingParams(max_tokens=1), use_tqdm=False)
    del llm
    end()
    assert set(os.listdir(cache)) == kept
    assert len(kept) == NUM_FOUND // BLOCK


# ---- never stale -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "int4"},
        {"weights": "int8"},
        {"block_size": 8},
        {"weights": "int4"},
    ],
    ids=str,
)
def test_other_numbers_are_another_key(options: dict[str, Any]) -> None:
    keep(lambda: make_llm(**STORE))
    assert ask(make_llm(**(STORE | options)), 9)[1] == 0


def test_other_values_are_another_key_and_the_same_values_elsewhere_are_not(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    make = lambda: LLM(str(folder), dtype="float32", kv_cache_bytes=1 << 22, num_threads=1, **STORE)  # noqa: E731
    keep(make)
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    assert ask(LLM(str(again), dtype="float32", kv_cache_bytes=1 << 22, num_threads=1, **STORE), 9)[1] == NUM_FOUND

    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][0, 0] += 1
    inode = (folder / "model.safetensors").stat().st_ino
    save_file(weights, tmp_path / "changed", metadata={"format": "pt"})
    with open(folder / "model.safetensors", "r+b") as file:  # in place: the same file, size and, by utime, time
        before = os.fstat(file.fileno())
        file.write((tmp_path / "changed").read_bytes())
    os.utime(folder / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (folder / "model.safetensors").stat().st_ino == inode
    cold = LLM(str(folder), dtype="float32", kv_cache_bytes=1 << 22, num_threads=1)
    assert ask(make(), 9) == (ask(cold, 9)[0], 0)


# ---- damaged and foreign files -----------------------------------------------------------------------------------


def damaged(path: pathlib.Path, generator: random.Random) -> None:
    """Does to a file what a kill within a write, a full disk or a fault of the disk may leave."""
    content = bytearray(path.read_bytes())
    place = generator.randrange(len(content))
    match generator.randrange(5):
        case 0:
            path.write_bytes(content[:place])
        case 1:
            content[place] ^= 1 << generator.randrange(8)
            path.write_bytes(content)
        case 2:
            path.write_bytes(bytes(place) + content[place:])
        case 3:
            path.unlink()
        case 4:  # another block's bytes under this name
            other = generator.choice(sorted(each for each in path.parent.iterdir() if each != path))
            shutil.copyfile(other, path)


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(NUM_FUZZED))
def test_damaged_files_are_no_hits_and_change_no_token(seed: int, cache: pathlib.Path) -> None:
    generator = random.Random(seed)
    tokens = _cold()
    keep(lambda: make_llm(**STORE))
    for path in generator.sample(sorted(cache.iterdir()), generator.randrange(1, 4)):
        damaged(path, generator)
    llm = make_llm(**STORE)
    found, num_cached = ask(llm, 9)
    assert found == tokens
    assert num_cached < NUM_FOUND
    assert ask(llm, 9)[0] == tokens


def _cold() -> list[int]:
    if not _COLD:
        _COLD.append(ask(make_llm(), 9)[0])
    return _COLD[0]


_COLD: list[list[int]] = []
"""The tokens of an engine without a store, computed once."""


def test_a_file_that_cannot_be_read_is_no_hit(cache: pathlib.Path) -> None:
    """A folder stands in for a disk that fails: opening it succeeds, and reading it does not."""
    keep(lambda: make_llm(**STORE))
    llm = make_llm(**STORE)
    for path in cache.iterdir():
        path.unlink()
        path.mkdir(mode=0o700)
    assert ask(llm, 9) == (_cold(), 0)


@needs_root
def test_a_file_of_another_user_is_no_hit(cache: pathlib.Path) -> None:
    """It comes into the folder after the engine has looked at it."""
    keep(lambda: make_llm(**STORE))
    llm = make_llm(**STORE)
    for path in cache.iterdir():
        os.chown(path, STRANGER, STRANGER)
    assert ask(llm, 9)[1] == 0


def test_a_file_that_others_may_write_is_no_hit(cache: pathlib.Path) -> None:
    keep(lambda: make_llm(**STORE))
    llm = make_llm(**STORE)
    for path in cache.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o666)
    assert ask(llm, 9)[1] == 0


# ---- bounds ------------------------------------------------------------------------------------------------------


def store(max_bytes: int = 1 << 20, keep_s: float = 1000.0, key: str = "0" * 32) -> PrefixStore:
    return PrefixStore(key, 0, max_bytes, keep_s)


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_the_store_is_bounded_and_the_least_recently_used_leave_first(cache: pathlib.Path) -> None:
    one, other = store(), store(key="1" * 32)
    part = memoryview(bytes(10_000))
    for number in range(200):
        (one, other)[number % 2].write(name(number), 0, part)
        os.utime(next(cache.glob(f"*{name(number).hex()}*")), (time.time() - 900 + number,) * 2)
        assert one.read(name(0), 0, 10_000) is not None, "it is used all the time"
    assert sum(path.stat().st_size for path in cache.iterdir()) <= (1 << 20) * 18 // 16
    assert one.read(name(198), 0, 10_000) == part
    assert one.read(name(2), 0, 10_000) is None


def test_dropped_blocks_are_gone(cache: pathlib.Path) -> None:
    """Those that are kept, and those that wait to be kept."""
    llm = make_llm(**STORE)
    ask(llm, 7)
    ask(llm, 8)
    hashes = hash_blocks(SHARED, NUM_FOUND // BLOCK, BLOCK)
    llm.engine.drop_kept(hashes[3:])
    del llm
    end()
    assert {path.name.split("-")[2] for path in cache.iterdir()} == {each.hex() for each in hashes[:3]}
    assert ask(make_llm(**STORE), 9)[1] == 3 * BLOCK


def test_what_is_not_used_for_long_counts_no_more_and_is_removed(cache: pathlib.Path) -> None:
    short, long = store(keep_s=500.0), store(keep_s=5000.0)
    short.write(name(1), 0, memoryview(b"part"))
    (path,) = cache.iterdir()
    os.utime(path, (time.time() - 1000,) * 2)
    assert short.read(name(1), 0, 4) is None
    assert long.read(name(1), 0, 4) == b"part"
    os.utime(path, (time.time() - 1000,) * 2)
    long.make_room()
    assert path.exists()
    short.make_room()
    assert not path.exists()


def test_the_configured_bounds_are_the_stores(cache: pathlib.Path) -> None:
    size = 20 * 4096
    keep(lambda: make_llm(**(STORE | {"prefix_store_bytes": size})))
    assert 0 < len(list(cache.iterdir())) <= 20
    for path in cache.iterdir():
        os.utime(path, (time.time() - 60,) * 2)
    assert ask(make_llm(**(STORE | {"prefix_store_keep_s": 30.0})), 9)[1] == 0


def test_without_a_size_nothing_is_kept(cache: pathlib.Path) -> None:
    keep(lambda: make_llm())
    assert not cache.exists()


@pytest.mark.parametrize("device", ["cuda", "tpu"])
def test_other_devices_have_no_store(device: str) -> None:
    check_prefix_store(EngineConfig(), device)
    with pytest.raises(ModelError, match="prefix_store_bytes 1 is for CPUs"):
        check_prefix_store(EngineConfig(prefix_store_bytes=1), device)
