"""The caches of constraints hold what they say: a process that fills one grows by no more, and not by far less.

Each is measured in a process of its own: `python -m tests.structured.test_cache_memory CACHE` prints, for each kind of
constraint, what the cache counts and by how many bytes the process has grown.
"""

from __future__ import annotations

import ctypes
import gc
import json
import pathlib
import random
import string
import subprocess
import sys
from collections.abc import Callable, Iterator

import hypothesis
import msgspec
import psutil
import pytest
from hypothesis import strategies as st

from manta.structured.constraint import ConstraintSpec, Resolved
from manta.structured.lru import ByteLRU
from manta.structured.masks import FINISHED

MARGIN_BYTES = 2 * 2**20
"""Growth of a process besides the cache."""


def word(seed: int, length: int = 6) -> str:
    chooser = random.Random(seed)
    return "".join(chooser.choice(string.ascii_lowercase) for _ in range(length))


def schema(seed: int, num_properties: int) -> str:
    names = [f"{word(seed)}{index}" for index in range(num_properties)]
    types = ("string", "integer", "boolean", "number")
    properties = {name: {"type": types[index % 4]} for index, name in enumerate(names)}
    return json.dumps({"type": "object", "properties": properties, "required": names[:1]})


def choices(seed: int) -> str:
    return json.dumps([word(1000 * seed + index) for index in range(3)])


MAKE: dict[str, Callable[[int], ConstraintSpec]] = {
    "regex": lambda seed: ConstraintSpec(kind="regex", text=f"[a-z]{{2,9}}{word(seed)}[0-9]+{seed}"),
    "repeated": lambda seed: ConstraintSpec(kind="regex", text=f"([a-z]{{3}}-){{1,{100 + seed}}}"),
    "unicode": lambda seed: ConstraintSpec(kind="regex", text=rf"\w+{word(seed)}\s\w"),
    "schema": lambda seed: ConstraintSpec(kind="json_schema", text=schema(seed, 2)),
    "large": lambda seed: ConstraintSpec(kind="json_schema", text=schema(seed, 100)),
    "choice": lambda seed: ConstraintSpec(kind="choice", text=choices(seed)),
    "lark": lambda seed: ConstraintSpec(kind="lark", text=f'start: "{word(seed)}" b\nb: /[0-9]+/ | "(" b ")"'),
}
"""Constraints by kind and seed."""
NUMBERS: dict[str, dict[str, int]] = {
    "llguidance": {"regex": 150, "unicode": 30, "schema": 100, "large": 20, "choice": 150, "lark": 150},
    "xgrammar": {"repeated": 25, "regex": 50, "choice": 150, "lark": 150},
    "compiler": {"regex": 20_000, "schema": 20_000},
}
"""Number of each kind that fill each cache."""


def resident_bytes() -> int:
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what is free would else be taken first
    return psutil.Process().memory_info().rss


def fill_worker(backend: str) -> Iterator[tuple[int, int]]:
    """Counted bytes and growth of a grammar worker, whose sessions fill up to four rows each, for each kind."""
    from manta.structured.backend import make_backend
    from manta.structured.grammar_pool import grammar_worker
    from manta.structured.grammar_pool.grammar_worker import GrammarWorker, Job, Message, SessionStart
    from manta.structured.masks import BufferShape, MaskBuffer, row_words
    from manta.structured.vocabulary import Vocabulary
    from tests.grammar_pools import DEMO, EOS, VOCAB_SIZE, bits

    vocabulary = Vocabulary.load(str(DEMO), VOCAB_SIZE, (EOS,))
    made = make_backend(backend, vocabulary)
    buffer = MaskBuffer(BufferShape(1, row_words(VOCAB_SIZE), 1))
    grammar_worker.GRAMMAR_CACHE_BYTES = 2**30  # nothing is evicted while it is measured
    worker = GrammarWorker(vocabulary, buffer, 0)

    def serve(start: SessionStart | None) -> None:
        output: list[int] = []
        for number in range(1, 5):
            worker.handle(Message(0, [Job(0, number, 0, max(0, len(output) - 1), output[-1:], start=start)], []))
            if buffer.flags[0] == FINISHED:
                return
            assert not buffer.flags[0], buffer.error(0)
            start = None
            output.append([token for token in bits(buffer.rows[0]) if token != EOS][-1])

    for kind, number in NUMBERS[backend].items():
        specs = [msgspec.structs.replace(MAKE[kind](seed), backend=backend, loose=True) for seed in range(number)]
        starts = [SessionStart(spec, made.compile(spec), (EOS,)) for spec in specs]
        serve(starts.pop())
        counted, before = int(buffer.cached[0, 1]), resident_bytes()
        for start in starts:
            serve(start)
        yield int(buffer.cached[0, 1]) - counted, resident_bytes() - before


def fill_compiler() -> Iterator[tuple[int, int]]:
    """The same of a compiler's cache; constraints and answers are as they come to it."""
    from manta.structured.compiling.compiler import _num_bytes

    decode = msgspec.msgpack.Decoder(Resolved).decode
    for kind, number in NUMBERS["compiler"].items():
        cache: ByteLRU[ConstraintSpec, Resolved] = ByteLRU(2**30)
        before = resident_bytes()
        for spec in map(MAKE[kind], range(number)):
            answer = Resolved(spec=spec, compiled=spec.text.encode(), not_enforced=["a"])
            resolved = decode(msgspec.msgpack.encode(answer))
            cache.put(spec, resolved, _num_bytes(resolved))
        yield cache.num_bytes, resident_bytes() - before


@pytest.mark.few(1)
@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is measured as Linux counts it")
@pytest.mark.parametrize("cache", NUMBERS)
def test_a_cache_holds_about_what_it_counts(cache: str) -> None:
    command = [sys.executable, "-m", "tests.structured.test_cache_memory", cache]
    root = pathlib.Path(__file__).parents[2]
    lines = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True).stdout.splitlines()
    assert len(lines) == len(NUMBERS[cache])
    for line in lines:
        counted, grown = map(int, line.split())
        assert grown <= 1.5 * counted + MARGIN_BYTES
        assert counted <= 8 * grown + MARGIN_BYTES  # a bound that is far off would leave the cache empty


@hypothesis.given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.booleans())), st.integers(0, 20))
def test_a_cache_keeps_its_bound_by_lru_eviction(actions: list[tuple[int, int, bool]], max_bytes: int) -> None:
    cache: ByteLRU[int, int] = ByteLRU(max_bytes)
    kept: dict[int, int] = {}  # in the order of their use
    for key, size, is_put in actions:
        if is_put:
            cache.put(key, size, size)
            kept.pop(key, None)
            kept[key] = size
            while sum(kept.values()) > max_bytes:
                del kept[next(iter(kept))]
        else:
            assert cache.get(key) == kept.get(key)
            if key in kept:
                kept[key] = kept.pop(key)
        assert (len(cache), cache.num_bytes) == (len(kept), sum(kept.values()))


if __name__ == "__main__":
    for numbers in fill_compiler() if sys.argv[1] == "compiler" else fill_worker(sys.argv[1]):
        print(*numbers)
