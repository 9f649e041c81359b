"""`manta batch`: answers the requests of a JSONL file, by engines that it starts here or on the cluster that it joins.

The work is `cluster/batch/job.py`'s; here files are opened, engines started and stopped, and the progress is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import pathlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from tqdm import tqdm

from cluster.batch.job import Application, Job, Progress, run
from cluster.batch.journal import BatchRefused, Journal, count_lines
from cluster.cli.check import check_quickly
from cluster.cli.refusal import NotStarted, Refusal
from cluster.cli.serve import stopped_by_sigterm
from cluster.config import ServeConfig, load_config
from workers.checkpoints.model_config import ModelError

IN_FLIGHT_PER_PLACE = 2
"""Requests under way for each sequence that may run: what waits in the engine keeps it full."""
SHOWN_EVERY_S = (0.5, 10.0)
"""On a terminal, and elsewhere (a log)."""


def run_batch(source: str, target: str, config_path: str | None, overrides: dict[str, Any]) -> int:
    """Returns 0 when every line has its result, be it an error. Raises `Refusal` for what the user can mend."""
    try:
        config = load_config(config_path, overrides)
    except ValueError as error:
        raise Refusal(str(error)) from error
    try:
        check_quickly(config.engine)
        num_lines = count_lines(pathlib.Path(source))
        with Journal(pathlib.Path(target)) as journal, stopped_by_sigterm():
            return _run(pathlib.Path(source), num_lines, journal, config)
    except ModelError as error:
        raise Refusal(f"{config.engine.model} cannot be served: {error}") from error
    except OSError as error:
        raise Refusal(f"cannot read {source}: {error.strerror}") from error
    except BatchRefused as error:
        raise Refusal(str(error)) from error


def _run(source: pathlib.Path, num_lines: int, journal: Journal, config: ServeConfig) -> int:
    print(f"{journal.num_done:,} of {num_lines:,} lines are done.", file=sys.stderr)
    if journal.num_done >= num_lines:
        return 0
    print(f"Starting Ray and loading {config.engine.model} ...", file=sys.stderr)
    from cluster.serve import app  # imports Ray, which takes seconds

    # The same batch, started again on a cluster, finds the engines that it left there when it was killed.
    journal_digest = hashlib.blake2b(str(journal.path.resolve()).encode(), digest_size=4).hexdigest()
    name = app.engines_name(f"batch-{journal_digest}", config)
    try:
        engine, host = app.start_engines(config, name)
        with Counter(journal, num_lines) as counter:
            asyncio.run(_answer_all(engine, host, source, journal, config, counter))
    except app.StartFailed as error:
        raise NotStarted(str(error)) from error
    finally:
        app.stop(name)
    print(counter.summary(), file=sys.stderr)
    return 0


async def _answer_all(
    engine: Any, host: str, source: pathlib.Path, journal: Journal, config: ServeConfig, counter: Counter
) -> None:
    async with application_before(engine, host, config) as application:
        with source.open("rb") as lines:
            places = asyncio.Semaphore(num_in_flight(config))
            await run(Job(application, journal, places, config.max_body_bytes, counter.add), lines)


def num_in_flight(config: ServeConfig) -> int:
    return IN_FLIGHT_PER_PLACE * config.max_engines * config.engine.max_num_sequences


@contextlib.asynccontextmanager
async def application_before(engine: Any, host: str, config: ServeConfig) -> AsyncIterator[Application]:
    """The HTTP application, in this process and without HTTP, before what `app.start_engines` returned."""
    from cluster.batch.engine_client import BatchEngineClient
    from cluster.http.app import HttpApp
    from cluster.http.metrics import Metrics
    from cluster.text.tokenizer import Tokenizer
    from workers.checkpoints.model_config import resolve_model_folder

    tokenizer = Tokenizer(config.engine.tokenizer or str(resolve_model_folder(config.engine.model)))
    metrics = Metrics(config.model_name)
    client = BatchEngineClient(engine, tokenizer, host, metrics)
    # Whoever may start a batch may ask; and a line each in a log would be the output again.
    config = msgspec.structs.replace(config, api_keys=None, priority_clients=("*",), log_requests=False)
    application: Application = HttpApp(config, tokenizer, client, metrics)
    try:
        yield application
    finally:
        await client.close()
        await engine.shutdown_async()


class Counter:
    """A progress bar with tokens a second and the time left, and a sentence at the end."""

    def __init__(self, journal: Journal, num_lines: int) -> None:
        self._journal = journal
        self._num_failed = 0
        self._num_tokens = 0
        self._bar = tqdm(
            total=num_lines,
            initial=journal.num_done,
            unit="line",
            mininterval=SHOWN_EVERY_S[not sys.stderr.isatty()],
            file=sys.stderr,
        )

    def add(self, progress: Progress) -> None:
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
        return f"{self._journal.num_done} lines are answered in {self._journal.path}{failed}."
