"""The plain engine: each request alone, without speculation, without a prefix cache and with room for everything.

Choice `i` of a request with n > 1 is a request of its own here, with `child_seed(seed, i)`: no fork is made.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import torch

from manta.cluster.llm import LLM
from manta.structured.constraint import ConstraintSpec, Resolved
from manta.workers.sampling_params import OutputKind, SamplingParams, child_seed
from tests.checkpoints import FAMILIES, checkpoint
from tests.engine_parts import worker_of
from tests.fuzz.cases import MASK_SECONDS, Request, Settings
from tests.fuzz.outcomes import Choice, Outcome
from tests.fuzz.processors import FACTORIES
from tests.workers.test_layer_kinds import folder_of

KV_CACHE_BYTES = 2**24
COMPILE_SECONDS = 60.0
"""Budget of a compilation, for a busy machine."""
ROUNDING = 3e-5
"""Standard deviation of the noise by which a perturbed reference's logits differ: a few times what the order of
additions in float32 makes of these models' logits.
"""
NUM_PERTURBED = 6


MAX_HANGING_THREADS = 8
"""Grammar threads that hang stay for as long as the process. An engine that has so many gives way to another."""


class Plain(NamedTuple):
    """An engine that cases are compared with."""

    family: str = "llama"
    mask_seconds: float = MASK_SECONDS
    exact: bool = False

    @classmethod
    def of(cls, settings: Settings) -> Plain:
        return cls(settings.family, settings.mask_seconds, settings.exact)


_engines: dict[Plain, LLM] = {}


def model_folder(family: str) -> pathlib.Path:
    return checkpoint(family, dtype="float32") if family in FAMILIES else folder_of(family)


def exactness(is_exact: bool) -> dict[str, Any]:
    """Returns fields of `manta.cluster.config.EngineConfig`."""
    return {"exact": True, "weights": "int8"} if is_exact else {}


def plain(kind: Plain) -> LLM:
    llm = _engines.get(kind)
    if llm is None or llm.engine.stats().grammar_pool.num_hanging_workers >= MAX_HANGING_THREADS:
        llm = _engines[kind] = _make_plain(kind)
    return llm


def _make_plain(kind: Plain) -> LLM:
    llm = LLM(
        str(model_folder(kind.family)),
        dtype="float32",
        num_threads=1,
        kv_cache_bytes=KV_CACHE_BYTES,
        enable_prefix_caching=False,
        grammar_pool={"form": "threads", "num_workers": 1, "mask_seconds": kind.mask_seconds},
        constraints={"compile_seconds": COMPILE_SECONDS},
        **exactness(kind.exact),
    )
    for name, factory in FACTORIES.items():
        llm.register_logits_processor(name, factory)
    return llm


@functools.cache
def resolved(spec: ConstraintSpec) -> Resolved:
    """Every family has the same vocabulary."""
    return plain(Plain()).engine.constraints.resolve(spec).result()


def expected(request: Request, settings: Settings) -> Outcome:
    """What the request must come to if nothing hits it. Not to be changed: it is remembered."""
    return _known(msgspec.json.encode(_as_alone(request)), Plain.of(settings), settings.max_length)


def _as_alone(request: Request) -> Request:
    """Without what has no meaning alone, so that a shrunk case finds what is known."""
    params = msgspec.structs.replace(request.params, output_kind=OutputKind.FINAL_ONLY)
    return Request(name="", prompt=request.prompt, params=params, beams=request.beams)


@functools.lru_cache(maxsize=20_000)
def _known(encoded: bytes, kind: Plain, max_length: int) -> Outcome:
    request = msgspec.json.decode(encoded, type=Request)
    return _compute(plain(kind), request, max_length)


def _compute(llm: LLM, request: Request, max_length: int) -> Outcome:
    prompt, params = list(request.prompt), request.params
    if request.beams is not None:
        room = max_length - len(prompt)
        beams = msgspec.structs.replace(request.beams, max_tokens=min(request.beams.max_tokens, room))
        (found,) = llm.beam_search(prompt, beams)
        return Outcome(beams=[(sequence.token_ids, sequence.score) for sequence in found])
    outcome = Outcome()
    for one in _single(params, max_length - len(prompt)):
        (output,) = llm.generate([prompt], one, use_tqdm=False)
        (choice,) = output.outputs
        ending = choice.finish_reason, choice.stop_reason, choice.error
        outcome.choices.append(Choice(choice.token_ids, choice.text, choice.logprobs or [], *ending))
        if output.prompt_logprobs is not None:
            outcome.prompt_logprobs = output.prompt_logprobs
    return outcome


def _single(params: SamplingParams, room: int) -> Iterator[SamplingParams]:
    """A request for each choice; the prompt's log-probabilities belong to the first."""
    assert params.seed is not None
    max_tokens = room if params.max_tokens is None else params.max_tokens
    for index in range(params.n):
        seed = params.seed if params.n == 1 else child_seed(params.seed, index)
        prompt_logprobs = params.prompt_logprobs if index == 0 else None
        yield msgspec.structs.replace(params, n=1, seed=seed, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)


def perturbed(request: Request, settings: Settings) -> Iterator[Outcome]:
    """The same with logits that differ by rounding: where these part from `expected`, tokens were as good as equal."""
    llm = plain(Plain.of(settings))
    for seed in range(NUM_PERTURBED):
        with _noisy_logits(llm, seed):
            yield _compute(llm, _as_alone(request), settings.max_length)


@contextlib.contextmanager
def _noisy_logits(llm: LLM, seed: int) -> Iterator[None]:
    model = worker_of(llm.engine).runner.model
    exact = model.compute_logits
    generator = torch.Generator().manual_seed(seed)

    def noisy(hidden: torch.Tensor) -> torch.Tensor:
        logits = exact(hidden)
        return logits + ROUNDING * torch.randn(logits.shape, generator=generator)

    model.compute_logits = noisy  # type: ignore[method-assign]
    try:
        yield
    finally:
        model.compute_logits = exact  # type: ignore[method-assign]
