"""The abilities of this machine's processor. This module alone chooses the form of the CPU kernels and its build flags.

A form is a set of instructions. All forms are compiled from the same source, whose macros use what the form's flags
allow. The environment variable `MANTA_CPU_FORM` names a lower form than the processor's best, for tests and
comparisons.
"""

from __future__ import annotations

import os
import platform
from typing import NamedTuple

import torch

VARIABLE = "MANTA_CPU_FORM"


class Form(NamedTuple):
    """Flags are GCC's and Clang's; `needs` are names of `torch.cpu.get_capabilities`."""

    name: str
    machine: str | None
    """`platform.machine()`; None for any."""
    needs: frozenset[str]
    flags: tuple[str, ...]
    has_bfloat16: bool = False
    """Whether the processor has instructions that multiply bfloat16, for these kernels and for torch. Without them,
    torch's bfloat16 products take 3 to 6 times as long as its float32 products.
    """

    def below(self, other: Form) -> bool:
        """Whether it is no better than the form `other`, on the same kind of processor."""
        return FORMS.index(self) >= FORMS.index(other) and self.machine in (None, other.machine)


_AVX2 = ("-mavx2", "-mfma", "-mf16c")  # every processor with AVX2 has F16C
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_VNNI = (*_AVX512, "-mavx512vnni")
_AVX2_NEEDS = frozenset({"avx2", "fma3"})
_AVX512_NEEDS = _AVX2_NEEDS | {"avx512_f", "avx512_bw", "avx512_vl", "avx512_dq"}
_VNNI_NEEDS = _AVX512_NEEDS | {"avx512_vnni"}
_BF16_NEEDS = _VNNI_NEEDS | {"avx512_bf16"}
_AMX_NEEDS = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
"""Every processor with AMX has int8 and bfloat16, from the first one (Sapphire Rapids) on."""
_X86, _ARM = "x86_64", "aarch64"

FORMS = (
    Form(
        "amx",
        _X86,
        _BF16_NEEDS | _AMX_NEEDS,
        (*_VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        has_bfloat16=True,
    ),
    Form("avx512_bf16", _X86, _BF16_NEEDS, (*_VNNI, "-mavx512bf16"), has_bfloat16=True),
    Form("avx512_vnni", _X86, _VNNI_NEEDS, _VNNI),
    Form("avx512", _X86, _AVX512_NEEDS, _AVX512),
    Form("avx_vnni", _X86, _AVX2_NEEDS | {"avx_vnni"}, (*_AVX2, "-mavxvnni")),
    Form("avx2", _X86, _AVX2_NEEDS, _AVX2),
    Form("neon_bf16", _ARM, frozenset({"bf16", "dot"}), ("-march=armv8.2-a+bf16+dotprod",), has_bfloat16=True),
    Form("neon_dot", _ARM, frozenset({"dot"}), ("-march=armv8.2-a+dotprod",)),
    Form("neon", _ARM, frozenset(), ()),
    Form("plain", None, frozenset(), ()),
)
"""Best first. `plain` uses only what every processor of the architecture has, such as SSE2 on x86-64."""

_BY_NAME = {form.name: form for form in FORMS}


def capabilities() -> frozenset[str]:
    """Returns the abilities of the processor, by torch's names."""
    get = getattr(torch.cpu, "get_capabilities", None)
    if get is not None:
        return frozenset(name for name, value in get().items() if value is True)
    found: set[str] = set()  # torch before 2.12
    for needs, ask in (
        (_AVX2_NEEDS, "_is_avx2_supported"),
        (_AVX512_NEEDS, "_is_avx512_supported"),
        (_BF16_NEEDS, "_is_avx512_bf16_supported"),
        (_AMX_NEEDS, "_is_amx_tile_supported"),
    ):
        if getattr(torch.cpu, ask, lambda: False)():
            found |= needs
    return frozenset(found)


def best_form() -> Form:
    """The best form that this processor runs, whatever `MANTA_CPU_FORM` says."""
    machine = {"AMD64": _X86, "arm64": _ARM}.get(platform.machine(), platform.machine())
    able = capabilities()
    return next(form for form in FORMS if form.machine in (None, machine) and form.needs <= able)


def form() -> Form:
    """The form in use. Raises `ValueError` if `MANTA_CPU_FORM` names one that this processor cannot run."""
    best = best_form()
    name = os.environ.get(VARIABLE)
    if not name:
        return best
    possible = lower_forms(best)
    if _BY_NAME.get(name) not in possible:
        names = ", ".join(each.name for each in possible)
        raise ValueError(f"{VARIABLE}={name} is not a form that this processor runs; take one of {names}")
    return _BY_NAME[name]


def lower_forms(than: Form) -> list[Form]:
    """All forms that this processor, of the form `than`, can run: from that form down."""
    able = capabilities() | than.needs
    return [each for each in FORMS if each.below(than) and each.needs <= able]
