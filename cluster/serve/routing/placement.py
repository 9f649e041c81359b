"""Which replica gets a prompt: the one that has least to do before the first token, of those that hold most of it.

The whole decision, and all that one ingress knows to make it: who holds which blocks and has how much to do, as engines
report it (`reports.py`), what the ingress itself has under way, and where sessions were last. Serve's router asks it
(`request_router.py`), and so does the simulation of a thousand replicas (`benchmarks/routing.py`). Imports neither
torch nor ray. Everything may be called from several threads.
"""

from __future__ import annotations

import collections
import math
import random
import threading
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from cluster.serve.routing.prefix_index import PrefixIndex
from cluster.serve.routing.reports import Report, unpacked

SEQUENCE_TOKENS = 384
"""A choice that runs or waits slows a replica's steps as long as it lasts: it counts as so many prompt tokens."""
EVEN_SHARE, MAX_OVER_WEIGHT = 1.1, 8
"""A choice beyond so much of the mean of all replicas, and one, counts so many times as much in addition; but no more
times than the mean is: in an idle cluster one or two more are not uneven.
"""
COPY_WEIGHT = 2
"""A token that one replica has cached and that is computed elsewhere costs so much more; if two have it a quarter of
that, if three a ninth: what many have is asked for by many, and one more copy of it pays.
"""
NO_ROOM_WEIGHT = 8
"""A token for which the KV cache has no room waits until another sequence ends: it counts as so many."""
SESSION_TOKENS = 4096
"""A session stays where it was last until so much more waits there than elsewhere."""
MAX_SESSIONS = 65_536
"""That an ingress remembers, about 300 bytes each; beyond them it forgets those that were silent for longest."""
NUM_LEVELS = 3
"""So many lengths of cached prefix are compared, the longest ones, ..."""
NUM_OF_LEVEL = 4
"""... with at most so many replicas of each, taken at random, ..."""
NUM_CHOICES = 2
"""... and so many of all replicas, which is the whole choice for a prompt that nobody knows (Mitzenmacher, 2001)."""


class Prompt(msgspec.Struct, kw_only=True, gc=False):
    """What is to be placed."""

    request_id: str
    keys: Sequence[int]
    """Of its blocks, without the last token; see `block_keys`."""
    num_tokens: int
    block_size: int
    num_sequences: int = 1
    """Its choices."""
    client: str = ""
    """Whose it is: in an engine clients take turns (`cluster/engine/turns.py`)."""
    session: str = ""
    """Names the conversation of a client; empty is none."""

    def num_new_tokens(self, num_blocks: int) -> int:
        """To be computed where so many of its blocks are."""
        return max(1, self.num_tokens - num_blocks * self.block_size)


class _Load:
    """Of one replica."""

    __slots__ = (
        "bit",
        "free_tokens",
        "name",
        "num_own_tokens",
        "other_sequences",
        "other_tokens",
        "own_tokens",
        "sequences",
        "slot",
    )

    def __init__(self, name: str, slot: int) -> None:
        self.name = name
        self.slot = slot
        self.bit = 1 << slot
        self.sequences = 0
        """Choices that this ingress has there."""
        self.own_tokens: dict[str, int] = {}
        """By client: prompt tokens of this ingress's requests that have no output yet."""
        self.num_own_tokens = 0
        """Of all clients."""
        self.other_tokens = self.other_sequences = 0
        """Of other ingresses, as reported last."""
        self.free_tokens: int | None = None

    def begin(self, client: str, new_tokens: int) -> None:
        self.own_tokens[client] = self.own_tokens.get(client, 0) + new_tokens
        self.num_own_tokens += new_tokens

    def finish(self, client: str, new_tokens: int) -> None:
        self.num_own_tokens -= new_tokens
        self.own_tokens[client] -= new_tokens
        if not self.own_tokens[client]:
            del self.own_tokens[client]

    @property
    def num_sequences(self) -> int:
        return self.sequences + self.other_sequences

    def cost(self, new_tokens: int, client: str, mean: float) -> float:
        """Prompt tokens that are computed before the first one of a prompt is drawn, of which `new_tokens` are its own,
        and what else makes it wait, in the same unit. `mean` is the number of sequences at a replica.

        Clients take turns, so of each other client no more counts than of its own: one that has filled a replica's
        queue keeps no other one's conversation away from there.
        """
        own = self.own_tokens.get(client, 0)
        before, mine = self.num_own_tokens - own, own + new_tokens
        queued = before + mine + self.other_tokens
        if client:
            before = min(before, mine * (len(self.own_tokens) - (own > 0)))
        cost: float = before + mine + self.other_tokens + SEQUENCE_TOKENS * self.num_sequences
        if (num_over := self.num_sequences - EVEN_SHARE * mean - 1) > 0:
            cost += min(mean, MAX_OVER_WEIGHT) * SEQUENCE_TOKENS * num_over
        if self.free_tokens is not None and queued > self.free_tokens:
            cost += NO_ROOM_WEIGHT * (queued - self.free_tokens)
        return cost


class _Placed(msgspec.Struct, gc=False):
    """A prompt that is under way."""

    prompt: Prompt
    load: _Load
    expected: Sequence[int]
    """Keys of blocks that its replica will have once it has computed them."""
    new_tokens: int
    has_output: bool = False


class Placement:
    """Of one ingress over all replicas. A replica's name is the one of its actor; a group is those of a deployment."""

    def __init__(self, index: PrefixIndex | None = None, random_seed: int | None = None) -> None:
        self.index = PrefixIndex() if index is None else index
        self._random = random.Random(random_seed)
        self._lock = threading.RLock()
        self._loads: dict[str, _Load] = {}
        self._by_slot: list[_Load | None] = []
        self._groups: dict[str, int] = {}
        """Name to bits of its replicas."""
        self._placed: dict[str, _Placed] = {}
        self._num_sequences = 0
        """At all replicas."""
        self._expected: dict[int, int] = {}
        """By key: who will have a block soon. As good as having it, since who asks for it there waits for it anyway."""
        self._sessions: collections.OrderedDict[tuple[str, str], str] = collections.OrderedDict()

    # ---- who is there --------------------------------------------------------------------------------------------

    def set_running(self, group: str, names: Iterable[str]) -> None:
        """The replicas of a group, whoever else was there before is gone."""
        with self._lock:
            before = self._groups.get(group, 0)
            now = 0
            for name in names:
                now |= self._load(name).bit
            self._groups[group] = now
            for load in list(self._each(before & ~now)):
                self.lose(load.name)

    def _load(self, name: str) -> _Load:
        load = self._loads.get(name)
        if load is None:
            slot = self._by_slot.index(None) if None in self._by_slot else len(self._by_slot)
            load = self._loads[name] = _Load(name, slot)
            self._by_slot[slot : slot + 1] = [load]
        return load

    def lose(self, name: str) -> None:
        """Nothing that is known of a replica's cache and of other ingresses' work holds any more, and one that is in no
        group is forgotten.
        """
        with self._lock:
            load = self._loads.get(name)
            if load is None:
                return
            self.index.remove(load.slot)
            self._num_sequences -= load.other_sequences
            load.other_tokens = load.other_sequences = 0
            load.free_tokens = None
            for placed in self._placed.values():
                if placed.load is load:
                    self._expect_no_more(placed)
            if not any(bits & load.bit for bits in self._groups.values()):
                del self._loads[name]
                self._by_slot[load.slot] = None

    def report(self, name: str, report: Report) -> None:
        """Raises `struct.error` for one that makes no sense."""
        added, removed = unpacked(report.added), unpacked(report.removed)
        with self._lock:
            load = self._load(name)
            if report.is_whole:
                self.index.remove(load.slot)
            self.index.discard(load.slot, removed)
            self.index.add(load.slot, added)
            self._num_sequences += report.other_sequences - load.other_sequences
            load.other_tokens, load.other_sequences = report.other_tokens, report.other_sequences
            load.free_tokens = report.free_tokens

    # ---- the decision --------------------------------------------------------------------------------------------

    def place(self, prompt: Prompt, group: str, avoided: Iterable[str] = ()) -> tuple[str, int]:
        """The replica that gets a prompt, none of the `avoided` if there are others, and how many of its tokens are to
        be computed there. Until `end` they count as under way. Raises `LookupError` if the group has no replica.
        """
        with self._lock:
            if prompt.request_id in self._placed:  # by an attempt that reached no replica
                self.end(prompt.request_id)
            load, num_blocks = self._choose(prompt, self._among(group, avoided))
            new_tokens = prompt.num_new_tokens(num_blocks)
            placed = _Placed(prompt, load, prompt.keys[num_blocks:], new_tokens)
            self._placed[prompt.request_id] = placed
            for key in placed.expected:
                self._expected[key] = self._expected.get(key, 0) | load.bit
            load.begin(prompt.client, new_tokens)
            load.sequences += prompt.num_sequences
            self._num_sequences += prompt.num_sequences
            if prompt.session:
                self._remember(prompt, load)
            return load.name, new_tokens

    def pick(self, group: str, avoided: Iterable[str] = ()) -> str:
        """The less busy of two replicas, for what is no prompt. Raises `LookupError` if the group has none."""
        with self._lock:
            some = self._some_of(self._among(group, avoided), NUM_CHOICES)
            return min(some, key=lambda load: load.cost(0, "", 0.0)).name

    def _among(self, group: str, avoided: Iterable[str]) -> int:
        running = self._groups.get(group, 0)
        if not running:
            raise LookupError(f"{group} has no replica")
        among = running
        for name in avoided:
            if name in self._loads:
                among &= ~self._loads[name].bit
        return among or running

    def _choose(self, prompt: Prompt, among: int) -> tuple[_Load, int]:
        """A replica, and how many leading blocks it holds or will hold."""
        levels = self.index.find(prompt.keys, among, self._expected)
        last = self._loads.get(self._sessions.get((prompt.client, prompt.session), "")) if prompt.session else None
        mean = self._num_sequences / among.bit_count()
        least, chosen, chosen_blocks = math.inf, None, 0
        for load, num_blocks, copied in self._candidates(levels, among, last):
            cost = load.cost(prompt.num_new_tokens(num_blocks), prompt.client, mean)
            cost += COPY_WEIGHT * prompt.block_size * copied
            if load is last:
                cost -= SESSION_TOKENS
            if cost < least:
                least, chosen, chosen_blocks = cost, load, num_blocks
        assert chosen is not None
        return chosen, chosen_blocks

    def _candidates(
        self, levels: list[tuple[int, int]], among: int, last: _Load | None
    ) -> Iterator[tuple[_Load, int, float]]:
        """Each with its number of leading blocks, and with those that others have and it would have to copy, divided by
        the square of how many have them. Those with most blocks come first: they win ties.
        """
        others = list(self._some_of(among, NUM_CHOICES))
        if last is not None and last.bit & among:
            others.append(last)
        copied, num_holders = 0.0, 0
        for number, (num_blocks, bits) in enumerate((*levels, (0, among))):
            if number:
                copied += (levels[number - 1][0] - num_blocks) / num_holders**2
            some = self._some_of(bits, NUM_OF_LEVEL) if number < min(NUM_LEVELS, len(levels)) else ()
            for load in (*some, *(load for load in others if load.bit & bits)):
                yield load, num_blocks, copied
            others = [load for load in others if not load.bit & bits]
            num_holders += bits.bit_count()

    def _some_of(self, bits: int, count: int) -> Iterator[_Load]:
        """So many of them, or all if there are fewer."""
        while bits and count:
            start = int(self._random.random() * len(self._by_slot))
            rest = bits >> start << start or bits  # the first at or after a random place, else the first of all
            bit = rest & -rest
            load = self._by_slot[bit.bit_length() - 1]
            assert load is not None
            yield load
            bits ^= bit
            count -= 1

    def _each(self, bits: int) -> Iterator[_Load]:
        return self._some_of(bits, bits.bit_count())

    def _remember(self, prompt: Prompt, load: _Load) -> None:
        name = prompt.client, prompt.session
        self._sessions[name] = load.name
        self._sessions.move_to_end(name)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    # ---- what is under way ---------------------------------------------------------------------------------------

    def has_output(self, request_id: str) -> None:
        """Its prompt is computed: what its replica now holds was reported."""
        with self._lock:
            placed = self._placed.get(request_id)
            if placed is None or placed.has_output:
                return
            placed.has_output = True
            self._expect_no_more(placed)
            placed.load.finish(placed.prompt.client, placed.new_tokens)

    def end(self, request_id: str) -> None:
        """It is no longer under way; harmless if it was not."""
        with self._lock:
            self.has_output(request_id)
            placed = self._placed.pop(request_id, None)
            if placed is not None:
                placed.load.sequences -= placed.prompt.num_sequences
                self._num_sequences -= placed.prompt.num_sequences

    def _expect_no_more(self, placed: _Placed) -> None:
        bit = placed.load.bit
        for key in placed.expected:
            bits = self._expected.get(key, 0)
            if bits & bit:
                if bits == bit:
                    del self._expected[key]
                else:
                    self._expected[key] = bits ^ bit
        placed.expected = ()
