"""The ranks of one model replica as a group that computes together."""

from __future__ import annotations

from torch import distributed


def open_store(address: str) -> tuple[distributed.TCPStore, str]:
    """A store in this process and the "host:port" under which all ranks find it, `address` being this host's.

    The system chooses the port when the store begins to listen, so nobody can take it in between. Rank 0's process
    keeps the store as long as the group lives.
    """
    store = distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    return store, f"{address}:{store.port}"
