"""What Ray says at length reaches the operator as one sentence, which names the file with the rest."""

from __future__ import annotations

import logging
import pathlib
import re

import pytest
from ray import exceptions

from manta.cluster.serve.starting.ray_messages import RayMessages
from manta.cluster.serve.starting.start_failure import in_words, unexpected

DIED = """A worker died or was killed while executing a task by an unexpected system error. To troubleshoot the problem,
check the logs for the dead worker.
Lease ID: 010000004f66 Worker ID: 067b89c058c1 Node ID: 349387c64a32 Worker PID: 13594 Worker exit type: SYSTEM_ERROR"""
LONG = "\n\t".join([DIED, "class_name: ServeReplica:manta:engine", *(f"actor_id: {number}" for number in range(20))])


def test_a_dead_worker_is_one_sentence_and_once(caplog: pytest.LogCaptureFixture) -> None:
    messages = RayMessages()
    with caplog.at_level(logging.WARNING):
        for text in (DIED, DIED, "The node ran out of disk"):
            messages.tell({"lines": [text], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert not [line for line in told if "\n" in line or "Lease ID" in line]
    named = re.search(r"Its whole text is in (\S+)$", told[0])
    assert named is not None
    path = pathlib.Path(named[1])
    assert path.read_text().count("Worker PID: 13594") == 2
    path.unlink()


def made(kind: type[exceptions.RayError]) -> exceptions.RayError:
    """One with a long text, whatever its constructor takes."""
    error = kind.__new__(kind)
    Exception.__init__(error, LONG)
    for name in ("error_msg", "error_message", "msg", "traceback_str"):
        error.__dict__[name] = LONG
    error.__dict__ |= {"_actor_init_failed": False, "cause": None}
    return error


KINDS = [
    kind
    for kind in vars(exceptions).values()
    if isinstance(kind, type) and issubclass(kind, exceptions.RayError) and kind is not exceptions.RayError
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_of_ray_is_one_sentence(kind: type[exceptions.RayError], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "__str__", lambda _: LONG)
    told = in_words(made(kind))
    assert "\n" not in told
    assert len(told) < 250


def test_the_cause_of_a_remote_error_is_told_with_its_file() -> None:
    trace = "Traceback (most recent call last):\n  a\nValueError: b"
    told = str(unexpected(exceptions.RayTaskError("f", trace, ValueError("no room"))))
    assert told.startswith("the application did not start: no room. The whole story is in ")
    pathlib.Path(told.rpartition(" ")[2]).unlink()
