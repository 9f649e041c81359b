"""`manta batch`: answers the requests of a JSONL file with engines that it starts here or on the cluster that it joins.

`cluster/batch/batch_job.py` runs the batch. This module opens files, starts and stops engines, and shows
progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import pathlib
import sys
from collections.abc import AsyncIterator
from typing import Any, BinaryIO

from tqdm import tqdm

from manta.cluster.batch.batch_job import Answer, BatchJob, LineProgress, run
from manta.cluster.batch.journal import BatchRefused, Journal, check_encoding
from manta.cluster.cli.check import check_machine, check_quickly
from manta.cluster.cli.interruption import abandoned_when_interrupted, note_start, stopped_by_sigterm
from manta.cluster.cli.invocation import ray_to_use
from manta.cluster.cli.refusal import NotStarted, Refusal
from manta.cluster.config import ServeConfig, load_config, ray_address
from manta.cluster.serve.starting.replica_process import REPLICA_ENVIRONMENT, collect_rarely, yield_to_engines
from manta.structured.visible_text import say
from manta.workers.models.model_config import ModelError

IN_FLIGHT_PER_PLACE = 2
"""Open requests for each sequence that may run; the ones that wait in the engine keep it full."""
SHOWN_EVERY_S = (0.5, 10.0)
"""Seconds between two updates of the progress, on a terminal and elsewhere (a log)."""


def run_batch(source: str, target: str, config_path: str | None, overrides: dict[str, Any]) -> int:
    """Runs a batch. Returns 0 when every line has its result, which may be an error. Raises `Refusal` for errors that
    the user can fix.
    """
    try:
        config = load_config(config_path, overrides)
    except ValueError as error:
        raise Refusal(f"{error}{_why_missing(config_path)}") from error
    if config.has_several_models:
        raise Refusal("a batch runs one model, and the configuration has models; give one: --set engine.model=MODEL")
    try:
        check_quickly(config.engine)
        if ray_address() is None:
            check_machine(config.engine)
        with _opened(source) as lines:
            check_encoding(lines, source)
            with Journal(pathlib.Path(target), lines, config.max_body_bytes) as journal, stopped_by_sigterm():
                return _run(lines, journal, config)
    except ModelError as error:
        why = _why_missing(config.engine.model)
        raise Refusal(f"{config.engine.model} cannot be served: {error}{why}") from error
    except BatchRefused as error:
        raise Refusal(str(error)) from error
    except OSError as error:  # a full disk, or a storage that went away
        message = f"{source} or {target} failed: {error.strerror or error}"
        raise Refusal(f"{message}; the same command goes on where it was") from error


def _opened(source: str) -> BinaryIO:
    """Opens the input. Raises `Refusal` if it is no file, because only a file can be read twice."""
    path = pathlib.Path(source)
    try:
        if path.exists() and not path.is_file():
            raise Refusal(f"cannot read {source}: it is no file")
        return path.open("rb")
    except OSError as error:
        raise Refusal(f"cannot read {source}: {error.strerror}{_why_missing(source)}") from error


def _why_missing(path: str | None) -> str:
    """Returns the words behind an error about a file that did not come with a Ray job."""
    if path is None or ray_address() is None:
        return ""
    from manta.cluster.serve.starting.ray_job import why_missing  # imports Ray, which takes seconds

    return why_missing(path)


def _run(source: BinaryIO, journal: Journal, config: ServeConfig) -> int:
    num_lines, num_done = journal.num_lines, journal.num_done
    say("{:,} of {:,} lines are done.", num_done, num_lines, file=sys.stderr)
    if num_done == num_lines:
        return 0
    say("{} and loading {} ...", ray_to_use(), config.engine.model, file=sys.stderr)
    os.environ.update(REPLICA_ENVIRONMENT)  # this process calls the engines as an ingress does
    from manta.cluster.serve import app  # imports Ray, which takes seconds and reads it
    from manta.cluster.serve.starting.ray_job import fate_of

    fate = fate_of(journal.path)
    if fate:
        say("{}", fate, file=sys.stderr)
    # A batch that is started again on a cluster finds the engines that it left there when it was killed.
    journal_digest = hashlib.blake2b(str(journal.path.resolve()).encode(), digest_size=4).hexdigest()
    name = app.engines_name(f"batch-{journal_digest}", config)
    try:
        engine, host = _start_engines(config, name)
        with Counter(num_lines, num_done) as counter:
            asyncio.run(_answer_all(engine, host, source, journal, config, counter))
    except app.StartFailed as error:
        raise NotStarted(str(error)) from error
    finally:
        app.stop()
    say("{} in {}", counter.summary(), journal.path, file=sys.stderr)
    if fate:
        say("{}", fate, file=sys.stderr)
    return 0


def _start_engines(config: ServeConfig, name: str) -> tuple[Any, str]:
    from manta.cluster.serve import app

    if ray_address() is not None:  # engines on a cluster must be deleted there
        return app.start_engines(config, name)
    with abandoned_when_interrupted():
        note_start()
        return app.start_engines(config, name)


async def _answer_all(
    engine: Any, host: str, source: BinaryIO, journal: Journal, config: ServeConfig, counter: Counter
) -> None:
    async with answering_by(engine, host, config) as answer:
        places = asyncio.Semaphore(num_in_flight(config))
        await run(BatchJob(answer, journal, places, config.max_body_bytes, counter.add), source)


def num_in_flight(config: ServeConfig) -> int:
    return IN_FLIGHT_PER_PLACE * config.max_engines * config.engine.max_num_sequences


@contextlib.asynccontextmanager
async def answering_by(engine: Any, host: str, config: ServeConfig) -> AsyncIterator[Answer]:
    """Yields the function that answers lines with the engines that `app.start_engines` returned. From then on this
    process yields to them.
    """
    from manta.cluster.batch.line_endpoints import batch_endpoints  # imports Ray, which takes seconds

    # These engines have no other clients, so lines may have any priority.
    endpoints, client = batch_endpoints(config, engine, host, priority_clients=("*",))
    yield_to_engines()
    collect_rarely()
    try:
        yield endpoints.answer
    finally:
        await client.close()
        await engine.shutdown_async()


class Counter:
    """A progress bar with tokens per second and the time left, and a sentence at the end."""

    def __init__(self, num_lines: int, num_done: int) -> None:
        self._num_failed = 0
        self._num_tokens = 0
        self._bar = tqdm(
            total=num_lines,
            initial=num_done,
            unit="line",
            mininterval=SHOWN_EVERY_S[not sys.stderr.isatty()],
            file=sys.stderr,
        )

    def add(self, progress: LineProgress) -> None:
        self._num_failed += progress.has_failed
        self._num_tokens += progress.num_prompt_tokens + progress.num_output_tokens
        seconds = self._bar.format_dict["elapsed"]
        self._bar.set_postfix_str(f"{self._num_tokens / max(seconds, 1e-3):,.0f} tokens/s", refresh=False)
        self._bar.update()

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def summary(self) -> str:
        failed = f"; {self._num_failed} of this run's answers are errors" if self._num_failed else ""
        return f"{self._bar.n} lines are answered{failed}"
