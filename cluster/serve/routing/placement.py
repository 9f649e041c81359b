"""Placement of prompts: each goes to the replica where it costs least, with cached blocks and held adapters weighed
against load.

`Placement` makes the whole decision and holds everything that one ingress knows for it. That is the cached blocks,
adapters and load that engines report (`reports.py`), the ingress's own requests, and the last replica of each session.
Serve's router calls it (`request_router.py`), and so does a simulation of many replicas in the tests.
Imports neither torch nor ray. All of it may be called from several threads.

Costs are prompt tokens to compute, as in the routers of Dynamo and llm-d. Among replicas that hold equally much of a
prompt the least busy one is best, so only that one is compared.
"""

from __future__ import annotations

import collections
import itertools
import math
import random
import threading
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from manta.cluster.serve.routing.adapter_holders import AdapterHolders
from manta.cluster.serve.routing.prefix_index import PrefixIndex, bit_of, lowest_slot, slots_of
from manta.cluster.serve.routing.reports import Report, unpacked

SEQUENCE_TOKENS = 192
"""Cost of a running or waiting choice, in prompt tokens: it slows a replica's steps as long as it lasts."""
IMBALANCE_TOLERANCE = 1.1
"""A replica may run this multiple of the mean number of sequences before it is penalised."""
IMBALANCE_TOKENS = 384
"""Penalty for each sequence above the tolerance, in prompt tokens for each sequence of the mean. In a nearly idle
cluster the mean is small, and one or two sequences more cost little.
"""
MAX_MEAN_SEQUENCES = 8
"""Largest mean number of sequences that counts in the penalty."""
COPY_WEIGHT = 2
"""Extra cost, in tokens, of each token that a replica would compute although another one has it cached. It is divided
by the square of the number of replicas that hold the token: a block that many hold is in demand, so one more copy pays.
"""
NO_ROOM_WEIGHT = 8
"""Extra cost of a token for which the KV cache has no room, because it waits until another sequence ends."""
SESSION_TOKENS = 4096
"""A session stays at its last replica until that one costs this many prompt tokens more than another."""
ADAPTER_TOKENS = 1024
"""Extra cost, in tokens, of a replica that has to read the prompt's adapter, while another one holds it: it reads,
checks and converts some MB, and another adapter may have to leave. Beyond some five sequences more, a second replica
takes a popular adapter too.
"""
MAX_SESSIONS = 65_536
"""Sessions that an ingress remembers, at about 300 bytes each. Beyond that it forgets those that were silent for
longest.
"""
NUM_LENGTHS = 2
"""Number of cached prefix lengths that are compared, longest first; all replicas that hold less are compared as one
group.
"""
CLASSES_PER_DOUBLING = 8
"""Load classes per doubling of the load, so that loads within one class differ by less than a tenth."""


class Prompt(msgspec.Struct, kw_only=True, gc=False):
    """A prompt to be placed."""

    request_id: str
    keys: Sequence[int]
    """Keys of its blocks without the last token; see `block_keys`."""
    num_tokens: int
    block_size: int
    num_sequences: int = 1
    """Choices of the prompt."""
    client: str = ""
    """Client of the prompt; in an engine clients take turns (`cluster/engine/turns.py`)."""
    session: str = ""
    """Name of a conversation of the client; empty if there is none."""
    adapter: int = 0
    """Key of its adapter (`adapter_holders.py`); 0 for the model alone."""

    def num_new_tokens(self, num_blocks: int) -> int:
        """Returns the number of tokens to compute on a replica that holds `num_blocks` leading blocks; at least 1."""
        return max(1, self.num_tokens - num_blocks * self.block_size)


class _Replica:
    """One replica's load."""

    __slots__ = (
        "free_tokens",
        "load_class",
        "name",
        "num_own_tokens",
        "other_sequences",
        "other_tokens",
        "own_sequences",
        "own_tokens",
        "slot",
    )

    def __init__(self, name: str, slot: int) -> None:
        self.name = name
        self.slot = slot
        self.own_sequences = 0
        """Choices that this ingress has there."""
        self.own_tokens: dict[str, int] = {}
        """Prompt tokens of this ingress's requests without output, by client."""
        self.num_own_tokens = 0
        """Sum of `own_tokens` over all clients."""
        self.other_tokens = self.other_sequences = 0
        """Load from other ingresses, as last reported."""
        self.free_tokens: int | None = None
        self.load_class = 0
        """Class in which `_LoadOrder` holds it."""

    def wait_for(self, client: str, new_tokens: int) -> None:
        """Adds a client's waiting prompt tokens; a negative number removes them."""
        self.num_own_tokens += new_tokens
        tokens = self.own_tokens.get(client, 0) + new_tokens
        if tokens:
            self.own_tokens[client] = tokens
        else:
            del self.own_tokens[client]

    @property
    def num_sequences(self) -> int:
        return self.own_sequences + self.other_sequences

    @property
    def load(self) -> int:
        """Load in prompt tokens."""
        return self.num_own_tokens + self.other_tokens + SEQUENCE_TOKENS * self.num_sequences

    def cost(self, new_tokens: int, client: str, mean: float) -> float:
        """Returns the cost of a prompt here, in prompt tokens: everything that is computed before its first output
        token, and what else makes it wait. `new_tokens` are the prompt's own; `mean` is the mean number of sequences
        per replica.

        Clients take turns in an engine, so another client's tokens count at most as much as this client's own. A client
        that has filled a replica's queue therefore keeps no other client's conversation away.
        """
        sequences = self.num_sequences
        clients_tokens = self.own_tokens.get(client, 0) + new_tokens
        others_tokens = self.num_own_tokens - self.own_tokens.get(client, 0)
        queued = others_tokens + clients_tokens + self.other_tokens
        if client:
            num_other_clients = len(self.own_tokens.keys() - {client})
            others_tokens = min(others_tokens, num_other_clients * clients_tokens)
        cost: float = others_tokens + clients_tokens + self.other_tokens + SEQUENCE_TOKENS * sequences
        if (num_over := sequences - IMBALANCE_TOLERANCE * mean) > 0:
            cost += IMBALANCE_TOKENS * min(mean, MAX_MEAN_SEQUENCES) * num_over
        if self.free_tokens is not None and queued > self.free_tokens:
            cost += NO_ROOM_WEIGHT * (queued - self.free_tokens)
        return cost


class _LoadOrder:
    """Replicas in classes by load. Each class is a set of bits, so that one `&` per class finds the least busy of any
    set.
    """

    def __init__(self) -> None:
        self._classes = [0]

    def put(self, replica: _Replica) -> None:
        """Puts a new replica in its class, or moves one whose load has changed."""
        load_class = int(CLASSES_PER_DOUBLING * math.log2(1 + replica.load / SEQUENCE_TOKENS))
        if load_class >= len(self._classes):
            self._classes += [0] * (load_class + 1 - len(self._classes))
        bit = bit_of(replica.slot)
        self._classes[replica.load_class] &= ~bit
        self._classes[load_class] |= bit
        replica.load_class = load_class

    def remove(self, replica: _Replica) -> None:
        self._classes[replica.load_class] &= ~bit_of(replica.slot)

    def least(self, bits: int) -> int:
        """Returns the members of the set that are in its lowest class; 0 for an empty set."""
        for members in self._classes:
            if found := members & bits:
                return found
        return 0


class _Placed(msgspec.Struct, gc=False):
    """A prompt that is under way."""

    prompt: Prompt
    replica: _Replica
    expected: Sequence[int]
    """Keys of blocks that its replica will have once it has computed them."""
    new_tokens: int
    awaits_adapter: bool
    """Whether its replica counts as a holder of its adapter because of it."""
    has_output: bool = False


class Placement:
    """The placement of one ingress's prompts on all replicas. A replica is named after its actor; a group holds the
    replicas of one deployment.
    """

    def __init__(self, random_seed: int | None = None) -> None:
        self.index = PrefixIndex()
        self.adapters = AdapterHolders()
        self._random = random.Random(random_seed)
        self._lock = threading.RLock()
        self._replicas: dict[str, _Replica] = {}
        self._by_slot: list[_Replica | None] = []
        self._by_load = _LoadOrder()
        self._groups: dict[str, int] = {}
        """Bits of the replicas of each group."""
        self._placed: dict[str, _Placed] = {}
        self._num_sequences = 0
        """Sequences at all replicas."""
        self._sessions: collections.OrderedDict[tuple[str, str], str] = collections.OrderedDict()

    # ---- who is there --------------------------------------------------------------------------------------------

    def set_running(self, group: str, names: Iterable[str]) -> None:
        """Sets the replicas of a group; replicas that the group no longer has are lost."""
        with self._lock:
            before, now = self._groups.get(group, 0), 0
            for name in names:
                now |= bit_of(self._replica(name).slot)
            self._groups[group] = now
            for slot in slots_of(before & ~now):
                self.lose(self._at(slot).name)

    def _replica(self, name: str) -> _Replica:
        replica = self._replicas.get(name)
        if replica is None:
            replica = self._replicas[name] = _Replica(name, self._free_slot())
            self._by_slot[replica.slot] = replica
            self._by_load.put(replica)
        return replica

    def _free_slot(self) -> int:
        """Returns the first slot without a replica; a new one if each has one."""
        if None not in self._by_slot:
            self._by_slot.append(None)
        return self._by_slot.index(None)

    def _at(self, slot: int) -> _Replica:
        replica = self._by_slot[slot]
        assert replica is not None
        return replica

    def lose(self, name: str) -> None:
        """Forgets a replica's cache and its load from other ingresses. A replica that is in no group is forgotten
        altogether.
        """
        with self._lock:
            replica = self._replicas.get(name)
            if replica is None:
                return
            self.index.remove(replica.slot)
            self.adapters.remove(replica.slot)
            for placed in self._placed.values():
                if placed.replica is replica:
                    self._expect_no_more(placed)
            self._set_others(replica, 0, 0)
            replica.free_tokens = None
            if not any(bits & bit_of(replica.slot) for bits in self._groups.values()):
                del self._replicas[name]
                self._by_slot[replica.slot] = None
                self._by_load.remove(replica)

    def report(self, name: str, report: Report) -> None:
        """Takes a report of a replica. Raises `struct.error` if the report is malformed."""
        added, removed = unpacked(report.added), unpacked(report.removed)
        with self._lock:
            replica = self._replica(name)
            if report.is_whole:
                self.index.remove(replica.slot)
            self.index.discard(replica.slot, removed)
            self.index.add(replica.slot, added)
            self.index.set_borders(replica.slot, report.are_borders)
            if report.adapters is not None:
                self.adapters.report(replica.slot, unpacked(report.adapters))
            self._set_others(replica, report.other_tokens, report.other_sequences)
            replica.free_tokens = report.free_tokens

    def _set_others(self, replica: _Replica, tokens: int, sequences: int) -> None:
        self._num_sequences += sequences - replica.other_sequences
        replica.other_tokens, replica.other_sequences = tokens, sequences
        self._put_in_order(replica)

    def _put_in_order(self, replica: _Replica) -> None:
        """Reorders a replica whose load has changed."""
        if self._by_slot[replica.slot] is replica:  # else it is gone, and its slot may belong to another replica
            self._by_load.put(replica)

    # ---- the decision --------------------------------------------------------------------------------------------

    def place(self, prompt: Prompt, group: str, avoided: Iterable[str] = ()) -> tuple[str, int]:
        """Chooses a replica for a prompt, none of the `avoided` if the group has others. Returns its name and the
        number of prompt tokens that it has to compute. The prompt counts as under way until `end`. Raises `LookupError`
        if the group has no replica.
        """
        with self._lock:
            self._forget(prompt)
            replica, num_blocks = self._choose(prompt, self._among(group, avoided))
            return replica.name, self._put(prompt, replica, num_blocks)

    def follow(self, prompt: Prompt, name: str) -> int:
        """Places a prompt on the replica that `place` has just chosen for another prompt. Returns the number of tokens
        to compute.
        """
        with self._lock:
            self._forget(prompt)
            replica = self._replica(name)
            return self._put(prompt, replica, self._num_leading(prompt.keys, replica))

    def _forget(self, prompt: Prompt) -> None:
        if prompt.request_id in self._placed:  # an earlier attempt reached no replica
            self.end(prompt.request_id)

    def _put(self, prompt: Prompt, replica: _Replica, num_blocks: int) -> int:
        """Records a prompt on a replica that holds `num_blocks` of its leading blocks. Returns the number of tokens to
        compute.
        """
        new_tokens, has_adapter = prompt.num_new_tokens(num_blocks), prompt.adapter != 0
        placed = _Placed(prompt, replica, prompt.keys[num_blocks:], new_tokens, has_adapter)
        self._placed[prompt.request_id] = placed
        if has_adapter:
            self.adapters.expect(replica.slot, prompt.adapter)
        self.index.expect(replica.slot, placed.expected)
        replica.wait_for(prompt.client, placed.new_tokens)
        self._add_sequences(replica, prompt.num_sequences)
        if prompt.session:
            self._remember(prompt, replica)
        return placed.new_tokens

    def pick(self, group: str, avoided: Iterable[str] = ()) -> str:
        """Returns one of the least busy replicas, for a call without a prompt. Raises `LookupError` if the group has
        none.
        """
        with self._lock:
            return self._least_busy(self._among(group, avoided)).name

    def _among(self, group: str, avoided: Iterable[str]) -> int:
        running = self._groups.get(group, 0)
        if not running:
            raise LookupError(f"{group} has no replica")
        among = running
        for name in avoided:
            if name in self._replicas:
                among &= ~bit_of(self._replicas[name].slot)
        return among or running

    def _choose(self, prompt: Prompt, among: int) -> tuple[_Replica, int]:
        """Returns the cheapest replica, and how many leading blocks it holds or is expected to hold."""
        mean = self._num_sequences / among.bit_count()
        last = self._replicas.get(self._sessions.get((prompt.client, prompt.session), "")) if prompt.session else None
        holders = self.adapters.of(prompt.adapter, among) if prompt.adapter else 0
        least, chosen, chosen_blocks = math.inf, None, 0
        for replica, num_blocks, copied in self._candidates(prompt.keys, among, last, holders):
            cost = replica.cost(prompt.num_new_tokens(num_blocks), prompt.client, mean)
            cost += COPY_WEIGHT * prompt.block_size * copied
            if replica is last:
                cost -= SESSION_TOKENS
            if holders and not holders & bit_of(replica.slot):
                cost += ADAPTER_TOKENS
            if cost < least:
                least, chosen, chosen_blocks = cost, replica, num_blocks
        assert chosen is not None
        return chosen, chosen_blocks

    def _candidates(
        self, keys: Sequence[int], among: int, last: _Replica | None, holders: int
    ) -> Iterator[tuple[_Replica, int, float]]:
        """Yields candidates as (replica, leading blocks it holds, copied). `copied` is the number of blocks that it
        lacks and others hold, each divided by the square of its number of holders. Candidates with most blocks come
        first and win ties. Where only some replicas are `holders` of the adapter, the least busy one of them is a
        candidate too.
        """
        rest, longer, copied, num_holders = among, 0, 0.0, 0
        for num_blocks, bits in itertools.islice(self.index.find(keys, among), NUM_LENGTHS):
            if num_holders:
                copied += (longer - num_blocks) / num_holders**2
            for replica in self._compared(bits, holders):
                yield replica, num_blocks, copied
            rest, longer, num_holders = rest & ~bits, num_blocks, num_holders + bits.bit_count()
        for replica in self._compared(rest, holders):
            num_blocks = self._num_leading(keys, replica)
            yield replica, num_blocks, copied + (longer - num_blocks) / num_holders**2
        if last is not None and bit_of(last.slot) & among:
            yield last, self._num_leading(keys, last), 0.0

    def _compared(self, bits: int, holders: int) -> Iterator[_Replica]:
        """Yields the least busy one of some replicas, and the least busy holder if only some of them hold."""
        if bits & holders not in (0, bits):
            yield self._least_busy(bits & holders)
        if bits:
            yield self._least_busy(bits)

    def _num_leading(self, keys: Sequence[int], replica: _Replica) -> int:
        num_blocks, _ = next(self.index.find(keys, bit_of(replica.slot)))
        return num_blocks

    def _least_busy(self, bits: int) -> _Replica:
        """Returns one of the least busy of these replicas, chosen at random within their load class."""
        candidates = self._by_load.least(bits)
        start = int(self._random.random() * len(self._by_slot))
        from_start = candidates >> start << start
        return self._at(lowest_slot(from_start or candidates))

    def _remember(self, prompt: Prompt, replica: _Replica) -> None:
        name = prompt.client, prompt.session
        self._sessions[name] = replica.name
        self._sessions.move_to_end(name)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    # ---- what is under way ---------------------------------------------------------------------------------------

    def has_output(self, request_id: str) -> None:
        """Records that a prompt is computed. Its replica has by now reported the blocks that it holds."""
        with self._lock:
            placed = self._placed.get(request_id)
            if placed is None or placed.has_output:
                return
            placed.has_output = True
            self._expect_no_more(placed)
            placed.replica.wait_for(placed.prompt.client, -placed.new_tokens)
            self._put_in_order(placed.replica)

    def end(self, request_id: str) -> None:
        """Records that a request is no longer under way; harmless if it was not."""
        with self._lock:
            self.has_output(request_id)
            placed = self._placed.pop(request_id, None)
            if placed is not None:
                self._add_sequences(placed.replica, -placed.prompt.num_sequences)

    def _add_sequences(self, replica: _Replica, count: int) -> None:
        replica.own_sequences += count
        self._num_sequences += count
        self._put_in_order(replica)

    def _expect_no_more(self, placed: _Placed) -> None:
        self.index.expect_no_more(placed.replica.slot, placed.expected)
        placed.expected = ()
        if placed.awaits_adapter:
            self.adapters.expect_no_more(placed.replica.slot, placed.prompt.adapter)
            placed.awaits_adapter = False
