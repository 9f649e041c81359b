"""A running server as other commands reach it: its address, and the message if nobody answers there."""

from __future__ import annotations

import ssl

import httpx

from manta.cluster.cli.invocation import program
from manta.cluster.cli.refusal import Refusal


def connect(url: str, api_key: str | None = None, read_timeout_s: float | None = None) -> tuple[httpx.Client, str]:
    """Returns a client of the server at `url`, with or without its scheme and `/v1`, and its address.

    Sends no request. Certificates are checked against the system's authorities and those of SSL_CERT_FILE. Raises
    `Refusal` if `url` is no URL.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    timeout = httpx.Timeout(10.0, read=read_timeout_s)
    try:
        context = ssl.create_default_context()
        return httpx.Client(base_url=base, headers=headers, timeout=timeout, trust_env=False, verify=context), base
    except (httpx.InvalidURL, ValueError) as error:
        raise Refusal(f"--url {url!r} is not a URL: {error}") from error


class ServerRefusal(Refusal):
    """A refusal of the server, in its own words."""

    def __init__(self, response: httpx.Response) -> None:
        try:
            error = response.json()["error"]
            message, code = error["message"], error.get("code")
        except (ValueError, KeyError, TypeError):
            message, code = response.text[:200].strip(), None
        super().__init__(f"the server answered {response.status_code}: {message}")
        self.status = response.status_code
        self.code = code
        """OpenAI's short name of the refusal; None if there is none."""


def no_server(base: str, error: Exception) -> Refusal:
    """Returns the refusal of a command whose server does not answer, or shows an untrusted certificate."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        reason = str(error).rpartition("certificate verify failed: ")[2].partition(" (_ssl")[0]
        return Refusal(
            f"the certificate of {base} is not trusted ({reason}); name its authority's file in SSL_CERT_FILE, or ask "
            "for the server by the name that its certificate has"
        )
    return Refusal(
        f"no server answers at {base} ({error or type(error).__name__}); start one with '{program()} serve', or "
        "say where it listens with --url or --port"
    )
