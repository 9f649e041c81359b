"""`manta serve`: checks what can be checked at once, starts the Serve application, says so in plain words and waits.

Everything that it started is stopped when it ends, by Ctrl-C, SIGTERM or a failure. The application itself is
`cluster/serve/app.py`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
from typing import Any

from cluster.cli.check import check_quickly
from cluster.cli.refusal import NotStarted, Refusal
from cluster.config import ServeConfig, load_config, ray_address
from cluster.http.access.keys import VARIABLE, openness, with_api_keys
from cluster.serve.listener import bound
from workers.checkpoints.model_config import ModelError
from workers.model_info import ModelInfo


def run_serve(config_path: str | None, overrides: dict[str, Any]) -> int:
    """Serves until Ctrl-C or SIGTERM. Raises `Refusal` for what the user can mend, before Ray is started."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "api_keys" in overrides:
        message = "--set api_keys shows the keys to whoever lists this machine's processes; put them into"
        raise Refusal(f"{message} {VARIABLE}, or into a file that api_keys_file names")
    try:
        config = with_api_keys(load_config(config_path, overrides))
    except ValueError as error:
        raise Refusal(str(error)) from error
    if ray_address() is None:  # a cluster's Serve may hold the port already, and takes this application too
        _check_port(config.host, config.port)
    if (warning := openness(config)) is not None:
        print(f"manta: warning: {warning}", file=sys.stderr, flush=True)
    try:
        check_quickly(config.engine)
    except ModelError as error:
        raise Refusal(f"{config.engine.model} cannot be served: {error}") from error
    with stopped_by_sigterm():
        try:
            _serve_until_signal(config)
        except (KeyboardInterrupt, SystemExit):
            return 0  # stopped while starting
    return 0


def _serve_until_signal(config: ServeConfig) -> None:
    print(f"Starting Ray and loading {config.engine.model} ...", flush=True)
    from cluster.serve import app  # imports Ray, which takes seconds

    # Ray protects the cluster that it starts by a token and says so at length; the endpoint works without knowing it.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    try:
        model = app.start(config)
        # Ray puts a handler of its own in place while it starts.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        print(f"{model_message(model)}\n{ready_message(config)}", flush=True)
        while True:
            signal.pause()
    except app.StartFailed as error:
        raise NotStarted(str(error)) from error
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("Stopping ...", flush=True)
        # Ray's threads print what they miss of each other while they end.
        with contextlib.redirect_stdout(io.StringIO()):
            app.stop()
        print("Stopped.", flush=True)


@contextlib.contextmanager
def stopped_by_sigterm() -> Any:
    """SIGTERM ends the command the way Ctrl-C does; the handlers are put back afterwards."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _check_port(host: str, port: int) -> None:
    try:
        bound(host, port).close()
    except OSError as error:
        raise Refusal(error.strerror) from error


def model_message(model: ModelInfo) -> str:
    """What was loaded, how much it holds at a time, and what would make it faster."""
    text = (
        f"Loaded in {model.load_seconds:.1f} s as {model.dtype} on {model.platform} (kernels: {model.kernels}). The KV "
        f"cache takes up to {model.kv_cache_bytes / 2**30:.2f} GiB ({model.num_blocks * model.block_size:,} tokens) as "
        "it fills; --set engine.kv_cache_bytes=... changes that. "
        f"The longest sequence is {model.max_model_len:,} tokens."
    )
    return f"{text}\n\nSlower than need be: {model.advice}" if model.advice else text


def ready_message(config: ServeConfig) -> str:
    """What a newcomer reads when the server is up: two things to paste and how to stop."""
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{config.port}"
    name = config.model_name
    key = config.api_keys[0] if config.api_keys else None
    authorization = " -H 'Authorization: Bearer YOUR-KEY'" if key else ""
    chat_flags = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
    return f"""
Manta is ready: {name} at {url}

Ask it something:

  curl {url}/v1/chat/completions{authorization} -H 'Content-Type: application/json' \\
    -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "What is Manta?"}}], "max_tokens": 100}}'

or in Python (pip install openai):

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{"YOUR-KEY" if key else "none"}")
  reply = client.chat.completions.create(
      model="{name}", messages=[{{"role": "user", "content": "What is Manta?"}}], max_tokens=100
  )
  print(reply.choices[0].message.content)

or in another terminal: manta chat{chat_flags}

Ctrl-C stops it.
"""
