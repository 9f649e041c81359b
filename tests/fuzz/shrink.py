"""Makes a failing case small: fewer requests, then fewer faults and events, then fewer features, as long as it fails.

Greedy delta debugging: a change that keeps the failure stays, and rounds go on until none does or the time is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from manta.workers.sampling_params import SamplingParams
from tests.fuzz.cases import Case, Request, Settings, default_of

SHORTEST = 2
"""Tokens of a prompt or an output that are not cut further."""


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float) -> Case:
    """A case that still fails, with nothing in it that this could take away within about `seconds`."""
    deadline = time.monotonic() + seconds
    has_changed = True
    while has_changed:
        has_changed = False
        for candidates in _STEPS:
            # Each success changes what there is to try next, so the candidates are made anew.
            while (smaller := _first_that_fails(case, candidates(case), fails, deadline)) is not None:
                case, has_changed = smaller, True
        if time.monotonic() > deadline:
            break
    return case


def _first_that_fails(
    case: Case, candidates: Iterator[Case], fails: Callable[[Case], bool], deadline: float
) -> Case | None:
    for candidate in candidates:
        if time.monotonic() > deadline:
            return None
        if candidate != case and fails(candidate):
            return candidate
    return None


def _fewer_requests(case: Case) -> Iterator[Case]:
    """Without a half, a quarter, ... of the requests, down to one."""
    for requests in _without_pieces(case.requests):
        if requests:
            yield msgspec.structs.replace(case, requests=requests)


def _fewer_faults(case: Case) -> Iterator[Case]:
    for faults in _without_pieces(case.faults):
        yield msgspec.structs.replace(case, faults=faults)


def _without_pieces(items: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    size = len(items)
    while size:
        for first in range(0, len(items), size):
            yield items[:first] + items[first + size :]
        size //= 2


def _fewer_events(case: Case) -> Iterator[Case]:
    for index, request in enumerate(case.requests):
        for name in ("abort", "deadline", "priority", "step"):
            default = default_of(Request, name)
            if getattr(request, name) != default:
                yield _with_request(case, index, **{name: default})


def _plainer_settings(case: Case) -> Iterator[Case]:
    if case.settings.proposers:
        plain = msgspec.structs.replace(case.settings, proposers=(), draft_family=None)
        yield msgspec.structs.replace(case, settings=plain)
    for name in Settings.__struct_fields__:
        default = default_of(Settings, name)
        if name not in ("proposers", "draft_family") and getattr(case.settings, name) != default:
            yield msgspec.structs.replace(case, settings=msgspec.structs.replace(case.settings, **{name: default}))


def _all_plainer(case: Case) -> Iterator[Case]:
    """Every request without a feature at once: where a failure needs many requests, one by one takes too long."""
    for name in ("abort", "deadline"):
        yield _everywhere(case, lambda request, name=name: msgspec.structs.replace(request, **{name: None}))
    for name in SamplingParams.__struct_fields__:
        if name not in ("seed", "max_tokens"):
            changes = {name: default_of(SamplingParams, name)}
            yield _everywhere(case, lambda request, changes=changes: _changed_params(request, **changes))
    first = case.requests[0]
    yield _everywhere(case, lambda request: msgspec.structs.replace(request, prompt=first.prompt))
    yield _everywhere(case, lambda request: _changed_params(request, constraint=first.params.constraint))


def _everywhere(case: Case, change: Callable[[Request], Request]) -> Case:
    return msgspec.structs.replace(case, requests=tuple(map(change, case.requests)))


def _changed_params(request: Request, **changes: Any) -> Request:
    return msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, **changes))


def _plainer_requests(case: Case) -> Iterator[Case]:
    for index, request in enumerate(case.requests):
        params = request.params
        for name in SamplingParams.__struct_fields__:
            default = default_of(SamplingParams, name)
            if name not in ("seed", "max_tokens") and getattr(params, name) != default:
                yield _with_params(case, index, **{name: default})
        if params.max_tokens is not None and params.max_tokens > SHORTEST:
            for fewer in (params.max_tokens // 2, params.max_tokens - 1):
                yield _with_params(case, index, max_tokens=fewer, min_tokens=min(params.min_tokens, fewer))
        half = len(request.prompt) // 2
        if half >= SHORTEST:
            yield _with_request(case, index, prompt=request.prompt[:half])
            yield _with_request(case, index, prompt=request.prompt[:-1])


def _with_request(case: Case, index: int, **changes: Any) -> Case:
    requests = list(case.requests)
    requests[index] = msgspec.structs.replace(requests[index], **changes)
    return msgspec.structs.replace(case, requests=tuple(requests))


def _with_params(case: Case, index: int, **changes: Any) -> Case:
    return _with_request(case, index, params=_changed_params(case.requests[index], **changes).params)


_STEPS = (_fewer_requests, _all_plainer, _fewer_faults, _fewer_events, _plainer_settings, _plainer_requests)
"""Reductions, the largest first."""
