"""Addresses of clients: which of them count as one client."""

from __future__ import annotations

import functools
import ipaddress

MAX_NAME_CHARACTERS = 64
"""A proxy may report something that is no IP address; a longer name is cut."""


@functools.lru_cache(4096)
def network_of(address: str) -> str:
    """Returns the part of an address that a client cannot choose.

    A client that has one IPv6 address has the 2**64 beside it, so those are one client. An IPv4 address that reached an
    IPv6 socket is itself. Text that is no address stands for itself.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:MAX_NAME_CHARACTERS]
    if found.version == 4:
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))
