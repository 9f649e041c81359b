"""Every form of the CPU kernels that this processor runs, so that one machine tests them all.

`in_form` switches this process; `MANTA_CPU_FORM=avx2 make test` runs the whole suite in one. A model made before keeps
the kernels that it was made with. `make test` compiles the forms that this processor would not choose with few
optimisations, and `make prove` as they are for users: compilers may not change a result, because no flag allows it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shlex
from collections.abc import Iterator

import pytest
import torch

from manta.structured import host
from manta.workers.kernels import (
    build,
    cpu,
    cpu_adapters,
    cpu_all_reduce,
    cpu_decoder,
    cpu_exact,
    cpu_experts,
    cpu_gates,
    cpu_linear,
    cpu_products,
    cpu_quantized_linear,
    cpu_recurrence,
    cpu_sampler,
    processor,
    rounding,
    shared_weights,
)
from tests.conftest import PROVE
from tests.workers import emulated

QUANTIZED = [form.name for form in processor.lower_forms(processor.best_form())]
"""Every form that differs for quantised linears."""
_TWIN = "avx512" if "avx512_vnni" in QUANTIZED else "avx512_vnni"
"""One of two forms that only `quantized_dot.h` tells apart. Each form takes half a minute to compile."""
_LEFT_OUT = {"avx512_vnni"} if "avx512_bf16" in QUANTIZED and not PROVE else set()
"""A form that `make test` leaves out: the one above it differs by nothing but its conversions of bfloat16."""
COMPILED = [name for name in QUANTIZED if name not in (_TWIN, "avx_vnni", "neon_dot", *_LEFT_OUT)]
"""Every form that differs for all other kernels."""
QUANTIZED_CASES = [
    pytest.param(name, marks=pytest.mark.prove) if name in (_TWIN, *_LEFT_OUT) else name for name in QUANTIZED
]
"""`QUANTIZED` as parameters. `make test` runs one form of AVX-512 with VNNI, where the processor has it."""
_OWN = os.environ.get(processor.VARIABLE) or processor.best_form().name
"""The form that this process has without `in_form`."""
_QUICKLY = str(pathlib.Path(__file__).parent / "compile_quickly.sh")
TORCH = "torch"
"""No compiler: torch alone."""
FORMS = [*COMPILED, TORCH]
EMULATED = [pytest.param(name, marks=pytest.mark.prove) for name in emulated.FORMS if name not in QUANTIZED]
"""Forms of other processors: kernels only, no decoder in one call and no sampler."""
_WITH_LIBRARIES = (
    cpu,
    cpu_adapters,
    cpu_all_reduce,
    cpu_decoder,
    cpu_exact,
    cpu_experts,
    cpu_gates,
    cpu_linear,
    cpu_products,
    cpu_quantized_linear,
    cpu_recurrence,
    cpu_sampler,
    rounding,
    shared_weights,
)


def environment_of(form: str) -> dict[str, str]:
    """Returns the variables with which a process has the kernels of a form."""
    compiler = build.find_compiler()
    if PROVE or compiler is None or form == _OWN or _QUICKLY in compiler:
        return {processor.VARIABLE: form}
    return {processor.VARIABLE: form, "CXX": shlex.join(["sh", _QUICKLY, *compiler])}


def forget_libraries() -> None:
    """What has been loaded is looked for anew."""
    build._load.cache_clear()
    for module in _WITH_LIBRARIES:
        module._library.cache_clear()


@contextlib.contextmanager
def in_form(name: str) -> Iterator[None]:
    """This process's kernels are of the form `name`; skips if there is no compiler for it."""
    if name in emulated.FORMS and name not in QUANTIZED:
        with emulated.emulated(name) as library, pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "load_library", lambda: library)
            forget_libraries()
            try:
                yield
            finally:
                patch.undo()
                forget_libraries()
        return
    if name != TORCH and build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        if name == TORCH:
            patch.setenv("MANTA_NO_KERNELS", "1")
            patch.setattr(host, "num_cores", lambda: 1)  # torch's threads wait for each other on a busy machine
        else:
            patch.delenv("MANTA_NO_KERNELS", raising=False)
            for variable, value in environment_of(name).items():
                patch.setenv(variable, value)
        forget_libraries()
        try:
            assert build.form_in_use() == name
            yield
        finally:
            patch.undo()
            forget_libraries()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """The kernels run on so many."""
    library = build.load_library()
    assert library is not None
    library.manta_set_num_threads(count)
    try:
        yield
    finally:
        library.manta_set_num_threads(torch.get_num_threads())
