"""A case: an engine's settings, the requests that it gets and the faults that it meets, as plain data.

Made from a seed by `tests/fuzz/generate.py`, run by `tests/fuzz/engines.py`, written as JSON for `make fuzz CASE=file`.
Time counts in steps of the engine, so that a case runs alike on every machine as far as threads allow.
"""

from __future__ import annotations

import pathlib
from typing import Any, Literal

import msgspec

from manta.cluster.engine.beam_search import BeamSearchParams
from manta.workers.sampling_params import SamplingParams

RowFault = Literal["raise_in_forward", "raise_after_forward", "raise_after_sample", "nan_block"]
MaskFault = Literal["late_masks", "kill_worker", "no_slots"]

MASK_SECONDS = 60.0
"""Limit for masks that are not made late on purpose. No mask may miss it on a busy machine."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The engine under test. The defaults are those of a roomy engine without speculation."""

    family: str = "llama"
    """One of `tests.checkpoints.FAMILIES`, or of the cases of `tests/workers/test_layer_kinds.py`, with float32
    weights.
    """
    exact: bool = False
    """Whether the engines are exact, with weights of int8. Then nothing differs by rounding."""
    num_blocks: int = 256
    block_size: int = 16
    max_model_len: int = 256
    max_num_batched_tokens: int = 2048
    max_num_sequences: int = 32
    enable_prefix_caching: bool = True
    overlap: Literal["off", "thread", "device"] = "off"
    """Whether each step is launched before the tokens of the one before it are known: behind a thread that waits for
    the device, or as on a device that works by itself, whose tokens the host hears only when it asks.
    """
    cheap_groups: bool = False
    """Small groups of sequences read their shared prefix once too, which does not pay outside of tests."""
    pool_form: Literal["threads", "actors"] = "threads"
    num_grammar_workers: int = 2
    mask_seconds: float = MASK_SECONDS
    proposers: tuple[Literal["forced", "ngram", "draft"], ...] = ()
    """None for no speculation."""
    draft_family: str | None = None
    max_draft_tokens: int = 8
    ngram_min: int = 2
    adaptive: bool = False

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request, and what its caller does to it."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    """Drawn tokens always have a `seed`: the tokens are then a function of the request."""
    step: int = 0
    """Step at which it arrives."""
    priority: int = 0
    deadline: int | None = None
    """Steps after its arrival."""
    abort: int | None = None
    """Steps after its arrival."""
    beams: BeamSearchParams | None = None
    """A beam search; `params` and the fields above, but `step`, mean nothing then. One runs at a time."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Something that goes wrong in the engine, once, in the first step from `step` on in which it can."""

    kind: RowFault | MaskFault
    step: int
    target: int = 0
    """Index of the target among the possible ones, modulo their number."""
    duration: int = 1
    """`no_slots`: requests for a place that are denied; `late_masks`: questions after a mask that hear no."""


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one run of the fuzzer does."""

    seed: int
    """Seed of the generated case. A shrunk case keeps it for the record."""
    settings: Settings = Settings()
    requests: tuple[Request, ...] = ()
    faults: tuple[Fault, ...] = ()


def is_servable(request: Request, settings: Settings) -> bool:
    """Whether the engine must take the request; it must refuse every other one."""
    room = settings.max_length - len(request.prompt)
    if request.beams is not None:
        return room >= 1 and request.beams.beam_width <= settings.max_num_sequences
    max_tokens = request.params.max_tokens
    return request.params.n <= settings.max_num_sequences and room >= (max_tokens or 1)


def default_of(kind: type[msgspec.Struct], name: str) -> Any:
    """Of a field that has one."""
    field = next(field for field in msgspec.structs.fields(kind) if field.name == name)
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def save(case: Case, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(case), indent=1) + b"\n")


def load(path: pathlib.Path) -> Case:
    """Raises `msgspec.ValidationError` naming the field where the file is no case."""
    return msgspec.json.decode(path.read_bytes(), type=Case)
