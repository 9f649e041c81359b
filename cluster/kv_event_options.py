"""Options of KV events: `manta.cluster.config.EngineConfig.kv_events`. Plain data; imports no ZeroMQ."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from manta.workers.model_options import Count

PLACEHOLDERS = ("ip", "model", "engine")
"""Words in braces that a topic may have."""
_ADDRESS = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[\w.-]+):(\d{1,5})")


class ZmqAddress(NamedTuple):
    """An address of ZeroMQ."""

    host: str
    """A name, an IPv4 address, an IPv6 address in brackets, or `*` for every interface."""
    port: int

    @property
    def listens(self) -> bool:
        """Whether the engine listens at it. Otherwise the subscriber listens, and the engine connects."""
        return self.host in ("*", "[::]")

    def plus(self, offset: int) -> str:
        """Returns the address in ZeroMQ's form, with a port that is `offset` higher."""
        return f"tcp://{self.host}:{self.port + offset}"


def read_address(option: str, text: str) -> ZmqAddress:
    """Reads an address. Raises `ValueError`, which names the option, if it is none."""
    found = _ADDRESS.fullmatch(text)
    if found is None or not 1 <= int(found[2]) <= 65535:
        raise ValueError(
            f"kv_events.{option}: {text!r} is no address; write tcp://*:PORT to listen, or tcp://HOST:PORT for a "
            "subscriber that listens, with a port from 1 to 65535"
        )
    return ZmqAddress(found[1], int(found[2]))


class KVEventOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Events about an engine's prefix cache, in the format of vLLM, for gateways that choose servers by the prefixes in
    their caches. They contain the tokens of all prompts and answers, and everyone who reaches the address reads them.
    """

    endpoint: str = "tcp://*:5557"
    """Address of the events, `tcp://HOST:PORT`. With the host `*` the engine listens, at the first free one of 64 ports
    from this one on. With another host the engine connects to a subscriber that listens there.
    """
    topic: str = "kv@{ip}@{model}"
    """Topic of the events. `{ip}` stands for the address of the engine's node, `{model}` for the model's name in the
    API, and `{engine}` for an id that each start of an engine draws.
    """
    replay_endpoint: str | None = None
    """Address at which the engine listens for subscribers that ask for earlier events, `tcp://*:PORT`. It moves up with
    the port of `endpoint`. None keeps no earlier events.
    """
    replay_batches: Count = 10_000
    """Steps whose events are kept for `replay_endpoint`, each at about 4 bytes for each token that it cached."""

    def __post_init__(self) -> None:
        endpoint = read_address("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            replays = read_address("replay_endpoint", self.replay_endpoint)
            if not replays.listens or (endpoint.listens and endpoint.port == replays.port):
                raise ValueError(
                    f"kv_events.replay_endpoint: the engine cannot listen at {self.replay_endpoint!r}; write "
                    "tcp://*:PORT with another port than that of endpoint"
                )
        for name in re.findall(r"\{(\w*)\}", self.topic):
            if name not in PLACEHOLDERS:
                known = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
                raise ValueError(f"kv_events.topic: {{{name}}} in {self.topic!r} stands for nothing; write {known}")

    def topic_with(self, **values: str) -> str:
        """Returns the topic with values in place of the placeholders that they are named after."""
        topic = self.topic
        for name, value in values.items():
            topic = topic.replace(f"{{{name}}}", value)
        return topic

    def for_model(self, name: str) -> KVEventOptions:
        """Returns the options with a model's name in the topic."""
        return msgspec.structs.replace(self, topic=self.topic_with(model=name))
