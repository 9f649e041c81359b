"""Processes that judge model types one after the other. One that dies, or takes too long, is a result too."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection

from tests.families.judge import Verdict, judge
from tests.families.tiny import architecture_of

MOST_SECONDS = 600.0
"""Longest time for one model type, on a machine that may have much else to do."""


class Child:
    """A process that judges one model type after the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def judge(self, model_type: str) -> Verdict | None:
        """Returns the verdict; None if the process is dead, because it died or took too long."""
        self._pipe.send(model_type)
        with contextlib.suppress(EOFError, ConnectionResetError):
            if self._pipe.poll(MOST_SECONDS):
                return self._pipe.recv()
        self.close()
        return None

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with contextlib.suppress(EOFError):
        while True:
            model_type = pipe.recv()
            try:
                verdict = judge(model_type)
            except Exception as error:  # what Manta should have said in a sentence
                verdict = _died(model_type, repr(error))
            pipe.send(verdict)


def _died(model_type: str, reason: str) -> Verdict:
    return Verdict(model_type=model_type, architecture=architecture_of(model_type), result="died", reason=reason[:300])


def verdicts(model_types: Iterable[str]) -> Iterator[Verdict]:
    """Yields the verdict on each model type, as soon as it is known."""
    child: Child | None = None
    for model_type in model_types:
        child = child or Child()
        verdict = child.judge(model_type)
        if verdict is None:
            child = None
        yield verdict or _died(model_type, f"the process died, or took {MOST_SECONDS:g} s")
    if child is not None:
        child.close()
