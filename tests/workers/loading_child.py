"""Loads checkpoints in a process of its own, and prints what each took: `python -m tests.workers.loading_child FOLDER`.

Reads lines of JSON, each a `Loading`, and answers each with a line of `Taken`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pathlib
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

_LOOK_EACH_S = 0.001


class Loading(NamedTuple):
    folder: str
    weights: str
    dtype: str


class Taken(NamedTuple):
    """Bytes of memory beyond those that the process had before. Counted is what the process holds by itself: anonymous
    memory (`RssAnon` of /proc/self/status) and the memory of its files without a name, in which packed weights lie. The
    pages of the mapped checkpoint are not: the system takes them back when it needs them.
    """

    peak: int
    """The most at a time while the model was loaded."""
    kept: int
    """What is left while the model lives."""


def held() -> int:
    """Returns the bytes that this process holds, as `Taken` counts them."""
    status = pathlib.Path("/proc/self/status").read_text()
    (anonymous,) = (int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))
    files = {}
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of the listing
            if os.readlink(f"/proc/self/fd/{file}").startswith("/memfd:manta-weights-"):
                found = os.fstat(int(file))
                files[found.st_ino] = found.st_blocks * 512
    return anonymous + sum(files.values())


@contextlib.contextmanager
def peak_of() -> Iterator[list[int]]:
    """Gives a list that has the most bytes held at a time, from the end of the context on."""
    found, most, is_over = [], held(), threading.Event()

    def look() -> None:
        nonlocal most
        while not is_over.wait(_LOOK_EACH_S):
            most = max(most, held())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()
        found.append(max(most, held()))


def load(loading: Loading) -> object:
    from manta.workers.checkpoints.model_folder import load_model_config, resolve_model_folder
    from manta.workers.platforms import choose_platform
    from manta.workers.torch_worker.loader import load_model

    folder = resolve_model_folder(loading.folder)
    config, platform = load_model_config(folder), choose_platform("cpu", 1)
    return load_model(folder, config, loading.dtype, platform, weights=loading.weights)


def measure(loading: Loading) -> Taken:
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what the model before has left
    before = held()
    with peak_of() as peak:
        model = load(loading)
    gc.collect()
    taken = Taken(peak[0] - before, held() - before)
    del model
    return taken


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(measure(Loading(*json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
