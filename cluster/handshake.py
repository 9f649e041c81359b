"""The beginning of a connection between Manta's own processes: an address with a secret, and a hello that shows it.

A rank connects to its engine (`cluster/engine/ranks/rank_channel.py`), and an engine to each ingress
(`cluster/serve/channel/token_channel.py`). Whoever listens reads `MAX_HELLO_BYTES` at most from a stranger, and closes
the oldest of too many strangers. A hello names the version of its sender, for the refusal of what cannot be read; two
processes understand each other if the formats of their messages are equal.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets
import socket
from typing import Any, TypeVar

import msgspec

from manta.cluster.version import version

MAX_HELLO_BYTES = 1024
"""Longest first frame, in bytes, that is read from a connection before it has shown the secret."""

MEANING = 1
"""A number to raise when the same fields of a message, or of what it carries, come to mean something else."""


class Address(msgspec.Struct, frozen=True, array_like=True):
    """The address of a listening process. Every connection must show `secret`, so that nobody else can send."""

    host: str
    port: int
    secret: str
    version: str = ""
    """Version of Manta of the listening process; empty from a version that does not tell it."""


class Hello(msgspec.Struct, array_like=True):
    """The first frame of a connection."""

    secret: str


AnyHello = TypeVar("AnyHello", bound=Hello)


def listen(host: str) -> tuple[socket.socket, Address]:
    """Listens on a free port of `host`, which may be an IPv6 address. Returns the socket, and its address with a new
    secret. Raises `OSError`.
    """
    listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return listening, Address(host, listening.getsockname()[1], secrets.token_hex(16), own_version())


def proven(data: bytes | bytearray, kind: type[AnyHello], secret: str) -> AnyHello:
    """Returns the hello in a connection's first frame. Raises `ValueError` if it is none or shows another secret."""
    hello = msgspec.msgpack.decode(data, type=kind)
    if not hmac.compare_digest(hello.secret.encode(), secret.encode()):
        raise ValueError("another secret")
    return hello


def format_of(*types: Any) -> str:
    """Returns a hash of the fields, their types and bounds, of structs and of what they hold. Two processes with equal
    hashes understand each other's messages, whatever their versions.
    """
    schema = msgspec.json.schema_components(types, ref_template="{name}")
    return hashlib.sha256(msgspec.json.encode((MEANING, _without_prose(schema)), order="sorted")).hexdigest()[:16]


def _without_prose(schema: Any) -> Any:
    """Removes the docstrings from a schema."""
    if isinstance(schema, dict):
        return {name: _without_prose(each) for name, each in schema.items() if name != "description"}
    if isinstance(schema, list | tuple):
        return [_without_prose(each) for each in schema]
    return schema


@functools.cache
def own_version() -> str:
    """Returns the version of Manta that this process tells others."""
    return version()


def versions_beside(theirs: str) -> str:
    """Returns why a process cannot be understood: its version beside this one's."""
    if theirs == own_version():
        return f"both are of Manta {theirs}, but perhaps of different sources"
    return f"it is of Manta {theirs or '?'} and this is Manta {own_version()}; install one version on all nodes"
