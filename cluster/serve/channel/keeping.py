"""Messages between an ingress and the keepers of its recordings (`keeper.py`), which travel over the token channel.

Of two copies of one stream, the one with the higher epoch counts. Each change of the owner raises the epoch.

During an update, ingresses and engines may be of different versions. Those whose `stream_format` differs exchange none
of these messages.
"""

from __future__ import annotations

import functools
import secrets
from typing import Literal

import msgspec

from manta.cluster.handshake import format_of
from manta.cluster.http.exchange.recordings import STORED

_RANDOM_BITS = 32
"""Lowest bits of an epoch. They are random, so that keepers that each grant a claim to an equal copy of one stream make
different epochs.
"""


def next_epoch(epoch: int) -> int:
    """Returns a higher epoch, which nobody else has."""
    num_owners = (epoch >> _RANDOM_BITS) + 1
    return (num_owners << _RANDOM_BITS) | secrets.randbits(_RANDOM_BITS)


class Join(msgspec.Struct, array_like=True, tag="join"):
    """Says that the sender is there and may be offered orphans. It is the first message on a connection."""


class Write(msgspec.Struct, array_like=True):
    """New entries of one recording."""

    stream_id: str
    epoch: int
    first: int
    """Number of the first of `entries`; 0 replaces the whole copy."""
    entries: list[bytes]
    opening: bytes = b""
    """The encoded `Opening`; with `first` 0 only."""
    keep_s: float = 0.0
    """Seconds for which an orphan is kept that nobody claims; with `first` 0 only."""
    is_ended: bool = False
    age_s: float = 0.0
    """Seconds since the stream began; with `first` 0 only."""


class Keep(msgspec.Struct, array_like=True, tag="keep"):
    """Asks a keeper to store `writes`. It answers with a `Kept` of the same number."""

    number: int
    writes: list[Write]


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """Asks a keeper about one stream. It answers with a `Copy` of the same number.

    - `read`: returns the entries from `first` on, and tells the owner that somebody reads.
    - `peek`: returns the opening and the number of entries, without the entries.
    - `claim`: makes the sender its owner if it is an orphan, and returns all of it.
    - `cancel`: asks its owner to end it.
    - `drop`: removes the copy, if it is no newer than `epoch` and no other ingress owns it with that epoch. There is no
      answer, but if two ingresses own the stream, the one with the lower epoch gets the notice `taken`.
    """

    number: int
    stream_id: str
    what: Literal["read", "peek", "claim", "cancel", "drop"]
    first: int = 0
    epoch: int = 0


class Look(msgspec.Struct, array_like=True, tag="look"):
    """Asks a keeper for news of streams that somebody reads, and tells their owners so. It answers with `News`."""

    stream_ids: list[str]
    num_known: list[int]
    """Number of entries of each stream that the sender has."""


class Kept(msgspec.Struct, array_like=True, tag="kept"):
    """The writes of one `Keep` are stored, except those of streams that have another owner now."""

    number: int
    refused: list[str] = []


class Copy(msgspec.Struct, array_like=True, tag="copy"):
    """One stream as a keeper has it; `epoch` is -1 if it has none."""

    number: int
    stream_id: str
    epoch: int = -1
    num_entries: int = 0
    entries: list[bytes] = []
    """Entries from the number on that was asked for."""
    opening: bytes = b""
    is_ended: bool = False
    is_owned: bool = False
    """Whether some ingress runs it, or has claimed it."""
    is_yours: bool = False
    age_s: float = 0.0
    """Seconds since the stream began. They are told, and not the time, because machines disagree about that."""


class News(msgspec.Struct, array_like=True, tag="news"):
    """The answer to a `Look`."""

    copies: list[Copy]
    """Streams with further entries, or that have ended, without their openings."""
    unknown: list[str]
    """Streams that the keeper does not have."""


class Notice(msgspec.Struct, array_like=True, tag="notice"):
    """Tells an ingress something that it did not ask for.

    - `orphan`: the stream has no owner.
    - `read`: another ingress has a reader of the stream. The owner answers with a `Join`.
    - `cancel`: another ingress was asked to end the stream.
    - `taken`: another ingress owns the stream, with `epoch`.
    """

    stream_id: str
    what: Literal["orphan", "read", "cancel", "taken"]
    epoch: int = 0


ToKeeper = Join | Keep | Ask | Look
FromKeeper = Kept | Copy | News | Notice


@functools.cache
def stream_format() -> str:
    """Returns a hash of the fields, their types and bounds, of all messages and of what they carry in encoded form.
    Two processes with equal hashes can keep streams for each other.
    """
    return format_of(ToKeeper, FromKeeper, *STORED)
