"""The experts of a layer on the CPU, in one call of `experts.cpp`, whatever the precision of their weights.

`fuse` returns None where there are no kernels, and `looped_experts.py` runs them one by one. With router and shared
expert they are a `NativeLinear` for the layers in one call (`cpu_decoder.py`). Nothing is compiled at import.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int, c_void_p
from typing import Any

import torch

from manta.workers.kernels import build, cpu_recurrence, expert_choice
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.cpu_exact import ExactLinear
from manta.workers.kernels.cpu_linear import DTYPES, HasNative, LinearCall, NativeLinear
from manta.workers.kernels.layout import check, structure
from manta.workers.kernels.weights import ExpertsWeights, GatedMlpWeights, Linear
from manta.workers.models.model_config import LEAST_SUM, ExpertsConfig

SCORES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}
"""The numbers by which `routing.h` knows the names of `ExpertsConfig.scores`."""
_ExpertLinear = structure("_ExpertLinear", "run state parts")


class _Expert(ctypes.Structure):
    _fields_ = [("gated", _ExpertLinear), ("down", _ExpertLinear)]


_Routing = structure(
    "_Routing",
    "choice_bias",
    "scores num_scores num_chosen num_groups num_chosen_groups ranks_groups_by normalises",
    "scale least_sum",
)


class _Mixture(ctypes.Structure):
    _fields_ = [
        ("shared_gated", LinearCall),
        ("shared_down", LinearCall),
        *[(name, c_void_p) for name in ("experts", "router", "router_bias", "shared_gate", "share_scales")],
        ("routing", _Routing),
        *[(name, c_int) for name in ("router_dtype", "shared_gate_dtype", "dtype", "num_experts", "hidden", "inner")],
        *[(name, c_int) for name in ("shared_inner", "scales_inputs")],
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is not None:
        sizes = {f"the size of {each.__name__[1:]}": ctypes.sizeof(each) for each in (_Expert, _Routing, _Mixture)}
        check("experts.cpp", library.manta_experts_layout, sizes)
        library.manta_experts.argtypes = [c_int, c_void_p, c_int, *[c_void_p] * 4, *[c_int] * 5]
        library.manta_route.argtypes = [*[c_void_p] * 4, c_int]
        library.manta_run_mixture.argtypes = [*[c_void_p] * 3, c_int]
        for name in ("experts", "route", "run_mixture"):
            getattr(library, f"manta_{name}").restype = None
    return library


def _routing(config: ExpertsConfig, num_scores: int, choice_bias: torch.Tensor | None) -> Any:
    return _Routing(
        None if choice_bias is None else choice_bias.data_ptr(),
        SCORES[config.scores],
        num_scores,
        config.num_chosen,
        config.num_groups,
        config.num_chosen_groups,
        config.ranks_groups_by,
        config.normalises,
        config.scale,
        LEAST_SUM,
    )


def route(
    logits: torch.Tensor,
    choice_bias: torch.Tensor | None,
    config: ExpertsConfig,
    step: AttentionMetadata | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights of the chosen experts and their indices, as `expert_choice.route` does. Of equal scores the
    first is chosen. The results have the same bits in every form of the kernels.
    """
    library = _library()
    if library is None:
        return expert_choice.route(logits, choice_bias, config, step)
    if config.scores_others_zero:  # then many scores are 0, and transformers leaves the choice among them to torch
        assert config.scores == "sigmoid"
        return expert_choice.choose(cpu_recurrence.sigmoid(logits), choice_bias, config)
    logits = logits.contiguous()
    num_rows, num_scores = logits.shape
    assert config.num_chosen <= num_scores
    shares = torch.empty(num_rows, config.num_chosen)
    chosen = torch.empty(num_rows, config.num_chosen, dtype=torch.int64)
    routing = _routing(config, num_scores, choice_bias)
    addresses = logits.data_ptr(), shares.data_ptr(), chosen.data_ptr()
    library.manta_route(ctypes.addressof(routing), *addresses, num_rows)
    return shares, chosen


class FusedExperts:
    """Does the same as `LoopedExperts`, with the same bits."""

    def __init__(
        self,
        library: ctypes.CDLL,
        experts: Sequence[GatedMlpWeights],
        calls: Sequence[tuple[NativeLinear, NativeLinear]],
        scales_inputs: bool,
    ) -> None:
        """`calls` are those of the two linears of each of the `experts`."""
        self.scales_inputs = scales_inputs
        self._run = library.manta_experts
        self.experts = experts
        """They are kept, because C++ has pointers to their memory."""
        self.inner = inner_width(experts[0])
        self.calls = (_Expert * len(experts))()
        """The experts' linears, for C++."""
        for to, (gated, down) in zip(self.calls, calls, strict=True):
            to.gated, to.down = (_ExpertLinear(each.run, each.state, each.parts) for each in (gated, down))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        x, chosen, shares = x.contiguous(), chosen.contiguous(), shares.contiguous()
        y = torch.empty(x.shape, dtype=torch.float32)
        self._run(
            DTYPES[x.dtype],
            ctypes.addressof(self.calls),
            len(self.calls),
            x.data_ptr(),
            chosen.data_ptr(),
            shares.data_ptr(),
            y.data_ptr(),
            *chosen.shape,
            x.shape[1],
            self.inner,
            self.scales_inputs,
        )
        return y


def inner_width(mlp: GatedMlpWeights) -> int:
    """Returns the width of what the gates of an MLP let through, whose second linear is one of the kernels'."""
    width: int = mlp.down.in_features  # type: ignore[attr-defined]
    return width


def _call(linear: Linear) -> NativeLinear | None:
    """Returns the call of a linear that runs without Python, and whose work C++ can share out; None for others."""
    call = linear.native() if isinstance(linear, HasNative) else None
    is_plain = call is not None and call.parts is not None and call.raise_error is None and call.begin is None
    return call if is_plain else None


def _calls(mlp: GatedMlpWeights) -> tuple[NativeLinear, NativeLinear] | None:
    gated, down = _call(mlp.gated), _call(mlp.down)
    return None if gated is None or down is None else (gated, down)


def fuse(experts: Sequence[GatedMlpWeights], scales_inputs: bool = False) -> FusedExperts | None:
    """Returns the experts in one call; `scales_inputs` is that of `LoopedExperts`. Returns None if nothing can be
    compiled, or if a linear is none of the kernels'.
    """
    calls = [call for call in map(_calls, experts) if call is not None]
    library = _library()
    return (
        None if library is None or len(calls) < len(experts) else FusedExperts(library, experts, calls, scales_inputs)
    )


class FusedMixture:
    """The router, the experts and the shared expert of a layer in one call: `run_experts`, with the same bits."""

    def __init__(
        self,
        library: ctypes.CDLL,
        mixture: ExpertsWeights,
        experts: FusedExperts,
        router: ExactLinear,
        shared_calls: tuple[NativeLinear, NativeLinear] | None,
        dtype: torch.dtype,
    ) -> None:
        """`shared_calls` are those of the two linears of the shared expert; None if there is none."""
        self._kept = mixture  # its memory is pointed to
        self._run = library.manta_run_mixture
        weight, bias, gate = router.weight, router.bias, mixture.shared_gate
        self._state = _Mixture(
            *(LinearCall(call.run, call.state) if call else LinearCall() for call in shared_calls or (None, None)),
            ctypes.addressof(experts.calls),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            gate.weight.data_ptr() if isinstance(gate, ExactLinear) else None,
            None if mixture.share_scales is None else mixture.share_scales.data_ptr(),
            _routing(mixture.config, weight.shape[-1], mixture.choice_bias),
            DTYPES[weight.dtype],
            DTYPES[gate.weight.dtype] if isinstance(gate, ExactLinear) else 0,
            DTYPES[dtype],
            len(experts.calls),
            weight.shape[1],
            experts.inner,
            0 if mixture.shared is None else inner_width(mixture.shared),
            experts.scales_inputs,
        )

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        self._run(ctypes.addressof(self._state), x.data_ptr(), y.data_ptr(), len(x))
        return y

    def native(self) -> NativeLinear:
        """The same, for C++ to call."""
        run = ctypes.cast(self._run, c_void_p).value
        assert run is not None
        return NativeLinear(run, ctypes.addressof(self._state))


def fuse_mixture(mixture: ExpertsWeights, dtype: torch.dtype) -> FusedMixture | None:
    """Returns a mixture of rows in `dtype` in one call; None if it has parts that the call does not compute."""
    experts, router, gate, config = mixture.experts, mixture.router, mixture.shared_gate, mixture.config
    if not isinstance(experts, FusedExperts) or not isinstance(router, ExactLinear) or mixture.join is not None:
        return None
    if config.may_skip or config.num_identity or config.scores_others_zero:
        return None
    if mixture.deep_router is not None or mixture.table is not None:
        return None
    shared_calls = None if mixture.shared is None else _calls(mixture.shared)
    if mixture.shared is not None and (shared_calls is None or any(call.begin for call in shared_calls)):
        return None
    if gate is not None and not (isinstance(gate, ExactLinear) and gate.bias is None):
        return None
    library = _library()
    assert library is not None, "fused experts have it"
    return FusedMixture(library, mixture, experts, router, shared_calls, dtype)
