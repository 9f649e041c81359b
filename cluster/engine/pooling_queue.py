"""The texts that wait for a model that pools, and whose turn it is. Plain Python; imports no torch.

Tokens are shared fairly on two levels: between clients by their weights, and between the requests of a client evenly.
Both use start-time fair queueing (Goyal, Vin and Cheng, 1996) over tokens. A request of one text therefore never waits
for the other texts of a request of a thousand, whoever sent them.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

from manta.cluster.engine.pooling_request import PooledInput, PoolingRequest, PoolingResult
from manta.cluster.errors import refuse

KEPT_CLIENTS = 1024
"""Clients without waiting texts whose use is remembered."""


class FairUse:
    """Virtual time of users who share something: who has used least for its weight is first."""

    def __init__(self) -> None:
        self._now = 0.0
        self._tags: dict[Hashable, float] = {}
        """The use of each user, for its weight, since it came; never less than what others had when it came."""

    def come(self, user: Hashable) -> None:
        """Notes that a user wants something again. What it did not want meanwhile it does not get later."""
        self._tags[user] = max(self._now, self._tags.get(user, 0.0))

    def used(self, user: Hashable, amount: float, weight: float, total_weight: float) -> None:
        """Notes what a user got. `total_weight` is that of all who wanted something."""
        self._tags[user] += amount / weight
        self._now += amount / total_weight

    def of(self, user: Hashable) -> float:
        return self._tags[user]

    def forget(self, user: Hashable) -> None:
        self._tags.pop(user, None)

    def forget_idle(self, wanted: Callable[[Hashable], bool]) -> None:
        """Forgets the users that want nothing and that have used no more than a new one."""
        self._tags = {user: tag for user, tag in self._tags.items() if wanted(user) or tag > self._now}

    def __len__(self) -> int:
        return len(self._tags)


OnEnd = Callable[["PoolingJob", PoolingResult], None]
"""Function that gets the result of a job."""


class PoolingJob:
    """A request in the engine. `on_end` is called once it has ended, in the thread that ends it."""

    def __init__(self, request: PoolingRequest, on_end: OnEnd) -> None:
        self.request = request
        self.on_end = on_end
        self.deadline = None if request.deadline_s is None else time.monotonic() + request.deadline_s
        order = sorted(range(len(request.texts)), key=lambda index: len(request.texts[index].token_ids))
        self.waiting = order
        """Indices of the texts that wait, the longest last. Texts of one length are neighbours, so that a model that
        takes only such texts together gets them together.
        """
        self.num_waiting_tokens = request.num_tokens
        self.rows: list[Any] = [None] * len(request.texts)
        """Numbers of the texts that have run; None for the others."""
        self.num_running = 0
        """Texts in a step that has not ended."""
        self.has_begun = False
        self.has_ended = False

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self.num_running


class Turn(NamedTuple):
    """A text that is to run."""

    job: PoolingJob
    place: int
    """Index of the text in its request."""

    @property
    def text(self) -> PooledInput:
        return self.job.request.texts[self.place]


class PoolingQueue:
    """`max_tokens` are the tokens that may wait. A request that finds fewer is taken, however long it is."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._jobs: dict[str, dict[PoolingJob, None]] = {}
        """Jobs with waiting texts, by client, in order of arrival."""
        self._weights: dict[str, float] = {}
        self._clients = FairUse()
        self._requests: dict[str, FairUse] = {}
        self.num_tokens = 0
        """Tokens of waiting texts."""

    @property
    def num_jobs(self) -> int:
        """Requests of which texts wait."""
        return sum(map(len, self._jobs.values()))

    def jobs(self) -> Iterator[PoolingJob]:
        for jobs in self._jobs.values():
            yield from jobs

    def add(self, job: PoolingJob) -> None:
        """Adds a job. Raises `QueueFull` if too many tokens wait; a client with none of them is refused only when an
        eighth more do.
        """
        client = job.request.client
        limit = self._max_tokens if client in self._jobs else self._max_tokens + self._max_tokens // 8
        if self.num_tokens >= limit:
            remedy = "retry later, or raise engine.max_num_waiting"
            refuse("queue_full", "", self.num_tokens, limit, remedy, unit="tokens of texts wait")
        if client not in self._jobs:
            self._jobs[client] = {}
            self._requests[client] = FairUse()
            self._clients.come(client)
        self._jobs[client][job] = None
        self._weights[client] = job.request.weight
        self._requests[client].come(job)
        self.num_tokens += job.num_waiting_tokens

    def remove(self, job: PoolingJob) -> None:
        """Removes the texts of a job that wait; harmless if there are none."""
        client = job.request.client
        if job in self._jobs.get(client, ()):
            self.num_tokens -= job.num_waiting_tokens
            job.waiting, job.num_waiting_tokens = [], 0
            self._leave(job)

    def overdue(self) -> list[PoolingJob]:
        """Returns the jobs whose deadline has passed."""
        now = time.monotonic()
        return [job for job in self.jobs() if job.deadline is not None and job.deadline < now]

    def take(self, budget: int, max_texts: int, only_whole: bool = False) -> list[Turn]:
        """Takes the texts of the next step in turn, with at most `budget` tokens; a longer text runs alone.

        A short request, which has not begun and fits whole into a step, never shares one with the texts of long
        requests, which would make its step longer. With `only_whole` only short requests are taken; otherwise those of
        the kind of the first request in turn.
        """
        turns: list[Turn] = []
        heap = [(self._order(job), place, job) for place, job in enumerate(self.jobs())]
        heapq.heapify(heap)
        left = budget
        while heap and left > 0 and len(turns) < max_texts:
            _, place, job = heapq.heappop(heap)
            is_short = job.num_waiting_tokens <= budget and len(job.waiting) <= max_texts and not job.has_begun
            if not turns and is_short:
                only_whole = True
            num_tokens = job.num_waiting_tokens if is_short else len(job.request.texts[job.waiting[-1]].token_ids)
            fits = num_tokens <= left or (not turns and not only_whole)
            if is_short == only_whole and fits:
                left -= self._take_from(job, is_short, turns)
                if job.waiting:
                    heapq.heappush(heap, (self._order(job), place, job))
        return turns

    def _order(self, job: PoolingJob) -> tuple[int, float, float]:
        client = job.request.client
        return job.request.priority, self._clients.of(client), self._requests[client].of(job)

    def _take_from(self, job: PoolingJob, all_texts: bool, turns: list[Turn]) -> int:
        """Takes a job's next text, or all of them. Returns their tokens."""
        taken = job.waiting if all_texts else [job.waiting[-1]]
        num_tokens = sum(len(job.request.texts[index].token_ids) for index in taken)
        turns += [Turn(job, index) for index in taken]
        job.waiting = job.waiting[: -len(taken)]
        job.has_begun = True
        job.num_running += len(taken)
        job.num_waiting_tokens -= num_tokens
        self.num_tokens -= num_tokens
        client, weight = job.request.client, job.request.weight
        self._requests[client].used(job, num_tokens, 1.0, len(self._jobs[client]))
        self._clients.used(client, num_tokens, weight, sum(self._weights.values()))
        if not job.waiting:
            self._leave(job)
        return num_tokens

    def _leave(self, job: PoolingJob) -> None:
        client = job.request.client
        del self._jobs[client][job]
        self._requests[client].forget(job)
        if not self._jobs[client]:
            del self._jobs[client], self._requests[client], self._weights[client]
            if len(self._clients) > KEPT_CLIENTS:
                self._clients.forget_idle(self._jobs.__contains__)
