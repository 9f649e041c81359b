"""Compile processes of engines in a test's process are forked by servers that its engines share.

A server takes a quarter of a second of a core to load the backends, and hundreds of tests make an engine of their own.
Each engine's compile processes stay its own. `own_fork_servers` gives a file servers as users have them.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Iterator

import pytest

from manta.structured.compiling.compile_process import ForkServer
from manta.structured.constraint import ConstraintLimits, JsonObjects
from manta.structured.vocabulary import Vocabulary

MOST = 4
"""Servers that a test's process keeps, each with tens of megabytes."""
PLACE = "manta.structured.compiling.compiler.ForkServer"

_kept: dict[tuple[bytes, tuple[str, ...], str | None], ForkServer] = {}
"""The servers by what they were started with: vocabulary and limits, where modules come from, and the variable that
says so to processes. The one that was used last is the last one.
"""


class SharedForkServer(ForkServer):
    """A server for one compiler, which uses another one that was started alike."""

    def __init__(self, vocabulary: Vocabulary, limits: ConstraintLimits, objects: JsonObjects) -> None:
        super().__init__(vocabulary, limits, objects)
        self._make = functools.partial(ForkServer, vocabulary, limits, objects)

    def connect(self) -> socket.socket:
        key = (self._setup, tuple(sys.path), os.environ.get("PYTHONPATH"))
        _kept[key] = server = _kept.pop(key, None) or self._make()
        while len(_kept) > MOST:
            _kept.pop(next(iter(_kept))).close()
        return server.connect()


@pytest.fixture(autouse=True, scope="session")
def shared_fork_servers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PLACE, SharedForkServer)
        yield
    while _kept:
        _kept.popitem()[1].close()


@pytest.fixture(scope="module")
def own_fork_servers() -> Iterator[None]:
    """Compilers that a file makes have servers of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PLACE, ForkServer)
        yield
