"""Writers of files that are killed between any two calls: what was acknowledged before stays, and they write again."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import sys
from typing import Any

import pytest

from tests.house.test_written_files import SLOW, WRITERS, Writer, new_writer
from tests.house.test_written_files import tmp_path as tmp_path

CHANGES = {"open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
"""Audit events of calls that may change a folder."""
MAX_CHANGES = 100


def dies_at(writer: Writer, number: int, call: int) -> bool:
    """Writes a value in a child process that ends before its call `call` of `CHANGES` below the root, as if it were
    killed. Returns whether it came so far.
    """
    calls = itertools.count()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES and str(writer.root) in str(arguments) and next(calls) == call:
            os._exit(1)

    child = os.fork()
    if child == 0:
        sys.addaudithook(hook)
        with contextlib.suppress(BaseException):
            writer.write(number)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind not in SLOW])
def test_a_process_that_dies_between_any_two_calls_loses_nothing(kind: type[Writer], tmp_path: pathlib.Path) -> None:
    for call in range(MAX_CHANGES):
        writer = new_writer(kind, tmp_path / f"{call}")
        writer.write(0)
        died = dies_at(writer, 1, call)
        assert 0 in writer.read(), call
        writer.write(2)
        writer.clean()
        assert {0, 2} <= writer.read(), call
        if not died:
            break
    assert 0 < call < MAX_CHANGES - 1
