"""Addresses of clients: which of them count as one client."""

from __future__ import annotations

import functools
import ipaddress

MAX_NAME_CHARACTERS = 64
"""Length in characters at which a text that is no IP address is cut; a proxy may report such a text."""


@functools.lru_cache(4096)
def network_of(address: str) -> str:
    """Returns the part of an address that a client cannot choose.

    A client that has one IPv6 address also has the 2**64 addresses of its network, so these count as one client. An
    IPv4 address that reached an IPv6 socket counts as IPv4. Text that is no address stands for itself.
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
