"""`manta serve`: checks what can be checked at once, starts the Serve application, reports it in plain words and waits.

When the command ends, by Ctrl-C, SIGTERM or a failure, it stops everything that it started and nothing else.
`cluster/serve/app.py` builds the application itself.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pathlib
import re
import signal
import sys
from typing import Any

from manta.cluster import process_tree
from manta.cluster.cli.check import check_machine, check_quickly
from manta.cluster.cli.interruption import (
    Interrupted,
    abandoned_when_interrupted,
    handle_signals,
    note_start,
    raise_interrupted,
)
from manta.cluster.cli.invocation import program, ray_to_use, under_make
from manta.cluster.cli.pooling_check import pooling_message
from manta.cluster.cli.refusal import NotStarted, Refusal
from manta.cluster.cli.request_lines import RequestLog
from manta.cluster.config import EngineConfig, ServeConfig, load_config, ray_address
from manta.cluster.http.access.keys import VARIABLE, openness, with_api_keys
from manta.cluster.http.exchange.example import curl
from manta.cluster.models_folder import with_models_dir
from manta.cluster.serve.listening.port import bound
from manta.cluster.storage.storage import check_storage, with_storage
from manta.cluster.telemetry import exporting as telemetry
from manta.cluster.text.tokenizer_files import has_chat_template, resolve_folder
from manta.cluster.text.tokenizer_trial import TokenizerTrial
from manta.structured.visible_text import say, say_lines, visible
from manta.workers.cache_folder import UntrustedCache, cache_entry
from manta.workers.checkpoints.model_folder import resolve_model_folder
from manta.workers.model_info import ModelInfo
from manta.workers.models.model_config import ModelError
from manta.workers.pooling_info import PoolingInfo

ORPHANS_S = 5.0
"""Seconds after which Ray's agents are killed. They usually notice within seconds that Ray has ended."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""Form of names that Serve's actors, log files and metrics can carry."""


def run_serve(
    config_path: str | None,
    overrides: dict[str, Any],
    quiet: bool = False,
    name: str | None = None,
    replace: bool = False,
) -> int:
    """Serves until Ctrl-C or SIGTERM and returns 0. Prints a line for each request unless `quiet`. A signal during the
    start ends the process with 128 plus the signal's number.

    The application is called `name`, by default `manta`. With `replace` it is updated if it already runs on the cluster
    that `RAY_ADDRESS` names. Raises `Refusal` before Ray is started for errors that the user can fix.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with abandoned_when_interrupted():
        config = _checked_config(config_path, overrides, name, replace)
        return _serve_until_signal(config, quiet, name, replace) or 0


def _checked_config(config_path: str | None, overrides: dict[str, Any], name: str | None, replace: bool) -> ServeConfig:
    if name is not None and not _NAME.fullmatch(name):
        raise Refusal(f"--name {name!r} is not 1 to 64 letters, digits, _, . or -, the first a letter or a digit")
    if replace and ray_address() is None:
        raise Refusal(
            "--replace replaces an application on a running Ray cluster, and RAY_ADDRESS names none; set RAY_ADDRESS, "
            "or leave --replace out"
        )
    if "api_keys" in overrides:
        message = "--set api_keys shows the keys to whoever lists this machine's processes; put them into"
        raise Refusal(f"{message} {VARIABLE}, or into a file that api_keys_file names")
    try:
        config = with_models_dir(load_config(config_path, overrides))
        config.check_default_model()
        config = with_storage(with_api_keys(config))
    except ValueError as error:
        raise Refusal(str(error)) from error
    if ray_address() is None:  # a cluster's Serve may hold the port already, and accepts this application too
        _check_port(config.host, config.port)
        _check_storage(config.batch_storage)
    if (warning := openness(config)) is not None:
        say("manta: warning: {}", warning, file=sys.stderr, flush=True)
    if (warning := telemetry.missing()) is not None:
        say("manta: warning: {}", warning, file=sys.stderr, flush=True)
    engines = [each.engine for each in config.of_each_model_at_start]
    for number, engine in enumerate(engines):
        try:
            check_quickly(engine)
            if ray_address() is None:
                check_machine(engine, engines[:number])
        except ModelError as error:
            raise Refusal(f"{engine.model} cannot be served: {error}") from error
    return config


def _serve_until_signal(config: ServeConfig, quiet: bool, name: str | None, replace: bool) -> int:
    engines = [each.engine for each in config.of_each_model_at_start]
    loading = f" and loading {', '.join(engine.model for engine in engines)}" if engines else ""
    say("{}{} ...", ray_to_use(), loading, flush=True)
    trials = [
        (engine.model, TokenizerTrial(resolve_folder(engine.tokenizer or resolve_model_folder(engine.model))))
        for engine in engines
    ]
    on_cpus = any(engine.device in ("auto", "cpu") for engine in engines)
    if ray_address() is None and on_cpus and not _has_kernels():
        say("The CPU kernels are compiled now, once, which takes up to half a minute.", flush=True)
    from manta.cluster.serve import app  # imports Ray, which takes seconds
    from manta.cluster.serve.starting import start_failure

    name = name or app.APP_NAME
    requests: list[RequestLog] = []
    serving = False
    if ray_address() is None:
        note_start()
    else:  # an application on a cluster must be deleted there
        handle_signals(raise_interrupted)

    def begin_log() -> None:
        if ray_address() is not None:
            handle_signals(raise_interrupted)  # Ray has replaced them
        logs = start_failure.logs_folder()
        if logs is not None:
            requests.append(RequestLog(logs, name))
        for model, trial in trials:
            try:
                trial.wait()  # it ran while Ray started, and nothing has read the tokenizer yet
            except ModelError as error:
                raise app.StartFailed(f"{model} cannot be served: {error}") from error

    try:
        models = app.start(config, name, replace=replace, on_connected=begin_log)
        handle_signals(raise_interrupted)
        logs = start_failure.logs_folder()
        for model_name, model in models.items():
            message = model_message(model)
            say_lines((f"{model_name}: {message}" if config.models else message).split("\n"))
        if on_demand := [visible(each.model_name) for each in config.models if each.on_demand]:
            limit = config.max_loaded_models
            say_lines([f"Loaded when a request names them, {limit} at a time: {', '.join(on_demand)}"])
        say_lines(["", f"Logs: {logs or 'on the nodes of the cluster'}"])
        serving = True  # the reader of the next lines may send a signal at once
        first = models.get(config.of_each_model_at_start[0].model_name) if engines else None
        has_chat = _has_chat(engines[0]) if engines else True
        ready = ready_message(config, has_chat, None if first is None else first.pooling)
        say_lines(ready.split("\n"), flush=True)
        process_tree.adopt_orphans(False)
        if requests and not quiet:
            _print_requests(requests[0])
        while True:
            signal.pause()
    except app.StartFailed as error:
        raise NotStarted(str(error)) from error
    except Interrupted as error:
        return 0 if serving else error.exit_code
    except SystemExit:  # Ray's own handler of SIGTERM raises it while a cluster is joined
        return 128 + signal.SIGTERM
    finally:
        handle_signals(signal.SIG_IGN)
        say("Stopping ...", flush=True)
        process_tree.adopt_orphans(ray_address() is None)
        # Ray's threads complain about each other while they end.
        with contextlib.redirect_stdout(io.StringIO()):
            app.stop()
        if ray_address() is None:
            process_tree.end_below(ORPHANS_S)
        say("Stopped.", flush=True)


def _has_kernels() -> bool:
    """Returns whether an earlier start has left compiled kernels, or none can be compiled."""
    with contextlib.suppress(OSError, UntrustedCache):
        if any(cache_entry("kernels").glob("*.so")):
            return True
    from manta.workers.kernels.build import find_compiler  # imports torch, only at a first start

    return find_compiler() is None


def _print_requests(requests: RequestLog) -> None:
    """Prints request lines until nobody reads standard output any more."""
    with contextlib.suppress(BrokenPipeError):
        for line in requests.follow():
            say_lines([line], flush=True)


def _check_storage(url: str | None) -> None:
    """Checks the storage, for a Ray of this machine only; a cluster's nodes may reach what this machine cannot."""
    try:
        if url is not None:
            check_storage(url)
    except ValueError as error:
        raise Refusal(str(error)) from error


def _check_port(host: str, port: int) -> None:
    try:
        bound(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE and under_make():
            remedy = f"choose another with PORT=: make serve PORT={port % 65535 + 1}"
            raise Refusal(f"port {port} on {host} is in use by another program; stop it, or {remedy}") from error
        raise Refusal(error.strerror or str(error)) from error


def _has_chat(engine: EngineConfig) -> bool:
    tokenizer = engine.tokenizer
    if tokenizer is not None and pathlib.Path(tokenizer).is_dir():  # it need not hold a model
        return has_chat_template(pathlib.Path(tokenizer))
    return has_chat_template(resolve_model_folder(tokenizer or engine.model))


def model_message(model: ModelInfo) -> str:
    """Returns a paragraph: what was loaded, how much the KV cache holds, and what would make it faster."""
    if model.pooling is not None:
        return pooling_message(model)
    kept = f", weights {model.weights}," if model.weights else ""
    form = f"{model.platform} (kernels: {model.kernels})"
    room = f"{model.kv_cache_bytes / 2**30:.2f} GiB ({model.kv_cache_tokens:,} tokens in {model.kv_cache_dtype})"
    text = (
        f"Loaded in {model.load_seconds:.1f} s as {model.dtype}{kept} on {form}. The "
        f"KV cache takes up to {room} as it fills; --set engine.kv_cache_bytes=... changes that. "
        f"The longest sequence is {model.max_model_len:,} tokens."
    )
    return f"{text}\n\nSlower than need be: {visible(model.advice)}" if model.advice else text


def ready_message(config: ServeConfig, has_chat: bool = True, pooling: PoolingInfo | None = None) -> str:
    """Returns the text for a newcomer when the server is up: commands to paste, and how to stop it. Without a chat
    template, the commands ask for completions; with `pooling`, for what such a model gives.
    """
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    url = f"{config.scheme}://{f'[{host}]' if ':' in host else host}:{config.port}"
    names = [visible(each.model_name) for each in config.of_each_model]
    name = visible((config.of_each_model_at_start or config.of_each_model)[0].model_name)
    key = "YOUR-KEY" if config.api_keys else "none"
    if pooling is not None:
        example = curl(url, name, chats=False, needs_key=bool(config.api_keys), pooling=pooling)
        return f"\nManta is ready: {name} at {url}\n\nAsk it something:\n\n  {example}\n\nCtrl-C stops it.\n"
    chat_flags = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
    if host == "127.0.0.1" and chat_flags and config.scheme == "http":
        chat_flags = f" --port {config.port}"
    chat_key = "MANTA_API_KEY=YOUR-KEY " if config.api_keys else ""
    if has_chat:
        method, text = "chat.completions", "message.content"
        argument = 'messages=[{"role": "user", "content": "What is Manta?"}]'
        chat = f"or in another terminal: {chat_key}{program()} chat{chat_flags}"
    else:
        method, text, argument = "completions", "text", 'prompt="A manta ray is"'
        chat = "The model has no chat template, so it completes texts and does not chat."
    return f"""
Manta is ready: {", ".join(names)} at {url}

Ask it something:

  {curl(url, name, chats=has_chat, needs_key=bool(config.api_keys))}

or in Python (pip install openai):

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{key}")
  reply = client.{method}.create(
      model="{name}", {argument}, max_tokens=100
  )
  print(reply.choices[0].{text})

{chat}

Ctrl-C stops it.
"""
