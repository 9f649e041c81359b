"""A running server as the commands that ask one see it: where it is, and what to say if nobody answers there."""

from __future__ import annotations

import httpx

from cluster.cli.invocation import program
from cluster.cli.refusal import Refusal


def connect(url: str, api_key: str | None = None, read_timeout_s: float | None = None) -> tuple[httpx.Client, str]:
    """A client of the server at `url`, with or without its scheme and `/v1`, and its address. Nothing is asked yet.
    Raises `Refusal` if `url` is none.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    timeout = httpx.Timeout(10.0, read=read_timeout_s)
    try:
        return httpx.Client(base_url=base, headers=headers, timeout=timeout, trust_env=False), base
    except (httpx.InvalidURL, ValueError) as error:
        raise Refusal(f"--url {url!r} is not a URL: {error}") from error


def no_server(base: str, error: Exception) -> Refusal:
    """That nothing answers there."""
    return Refusal(
        f"no server answers at {base} ({error or type(error).__name__}); start one with '{program()} serve', or "
        "say where it listens with --url or --port"
    )
