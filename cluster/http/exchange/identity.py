"""Ids and time of creation of one answer. An answer that is written again from a recording gets the same ones."""

from __future__ import annotations

import random
import secrets
import time

from manta.cluster.chat.reader import UNPREDICTABLE


class Identity:
    """Draws the ids of one answer. `stream_id` is that of its recording; empty if nothing records it."""

    def __init__(self, stream_id: str = "", created: int | None = None) -> None:
        self.stream_id = stream_id
        self.created = int(time.time()) if created is None else created
        """Time of creation, in seconds since 1970."""
        self.source: random.Random = random.Random(stream_id) if stream_id else UNPREDICTABLE
        """Source of all ids: with a `stream_id`, which is a secret, the same calls draw the same ids."""

    def new_id(self, prefix: str, num_bytes: int = 12) -> str:
        return f"{prefix}{self.source.randbytes(num_bytes).hex()}"


def new_stream_id() -> str:
    """Returns a new id. It begins with the time, so that later ids are greater, and nobody can guess its 96 random
    bits.
    """
    return f"strm_{time.time_ns() // 1000:014x}{secrets.token_hex(12)}"


def response_id(stream_id: str) -> str:
    """Returns the id of a response. It is that of its stream, so that whoever has the one finds the other. A response
    without a stream gets an id of its own.
    """
    return f"resp_{(stream_id or new_stream_id()).removeprefix('strm_')}"
