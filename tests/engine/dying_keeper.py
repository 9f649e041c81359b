"""An engine with a prefix store in a process of its own, which is killed (`test_killed_keepers.py`)."""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from manta.cluster.llm import LLM, SamplingParams
from manta.workers import cache_folder, prefix_store
from manta.workers.kernels import build

NOWHERE, HALF_WRITTEN, NOT_LINKED, NOT_RENAMED, NAMED = "nowhere", "half", "link", "rename", "named"
"""Places within a write at which the process ends: none, behind the first half of the bytes, before the file gets its
first name, before it gets its last one, and behind the first half where files have a name from the beginning.
"""
WITHIN = (HALF_WRITTEN, NOT_LINKED, NOT_RENAMED, NAMED)


class Death(NamedTuple):
    place: str
    number: int
    """Number of the write in which the process ends, from 0."""


def run(folder: str, options: dict[str, Any], cache: str, prefix: list[int], death: Death) -> None:
    """Answers prompts that begin with `prefix` until this process is killed."""
    build.load_library()  # from the cache that all tests share
    os.environ["MANTA_CACHE"] = cache
    if death.place != NOWHERE:
        _die_within(death)
    llm = LLM(folder, **options)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    while True:
        for token in (7, 8, 11):
            llm.generate([[*prefix, token]], params, use_tqdm=False)
            llm.engine.step()


def _die_within(death: Death) -> None:
    countdown = iter(range(death.number, -1, -1))
    if death.place == NAMED:
        del os.O_TMPFILE  # as on a system where every file has a name
    if death.place in (HALF_WRITTEN, NAMED):
        prefix_store.write_private = _half_writer(countdown)
    else:
        name = death.place
        setattr(cache_folder.os, name, _dying(getattr(os, name), countdown))


def _half_writer(countdown: Iterator[int]) -> Callable[..., None]:
    write = cache_folder.write_private

    def write_private(path: pathlib.Path, *parts: bytes | memoryview) -> None:
        if next(countdown) > 0:
            write(path, *parts)
            return
        with cache_folder.new_private(path) as file:
            content = b"".join(parts)
            file.write(content[: len(content) // 2])
            file.flush()
            _die()

    return write_private


def _dying(call: Callable[..., None], countdown: Iterator[int]) -> Callable[..., None]:
    """Returns a system call that ends the process instead, when it is about a kept block for the last time."""

    def called(*arguments: Any, **options: Any) -> None:
        if any(pathlib.Path(str(each)).parent.name == "prefixes" for each in arguments) and next(countdown) == 0:
            _die()
        call(*arguments, **options)

    return called


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")
