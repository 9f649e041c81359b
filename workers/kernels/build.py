"""Compiles the CPU kernels at first use and caches the shared library. Calls go through ctypes: no torch headers
needed.

The cache's key is the source, the compiler and the flags, which depend on the processor's form (`processor.py`). So the
library is compiled again after an upgrade or on another machine. Without a C++ compiler `load_library` returns None
and callers use their torch reference.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import hashlib
import importlib.util
import os
import pathlib
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import tempfile

from manta.structured import host
from manta.workers.cache_folder import UntrustedCache, cache_entry, is_own, one_at_a_time
from manta.workers.kernels import processor

FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-std=c++17", "-fPIC", "-pthread", "-w")
# Not -ffast-math: infinities mark masked logits and NaN marks a failed row, and linking with it would flush denormals.
# No contraction: whether a compiler fuses a product with a sum would show in the last bit (`simd.h`).

REMEDY = f"install one: apt install g++, or {shlex.quote(sys.executable)} -m pip install ziglang"
SOURCES = pathlib.Path(__file__).parent / "native"
_LOCK = "compiling.lock"
"""Name of the file that a process locks while it compiles."""


def find_compiler() -> tuple[str, ...] | None:
    """`$CXX`, g++, clang++, or the compiler of the package `ziglang`; None if there is none of them."""
    if os.environ.get("CXX"):
        return tuple(shlex.split(os.environ["CXX"]))
    for name in ("g++", "clang++"):
        if found := shutil.which(name):
            return (found,)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    return None


def load_library() -> ctypes.CDLL | None:
    """All `workers/kernels/native/*.cpp`, compiled for this processor; None without a compiler, or if it fails."""
    return _load()[0]


def why_none() -> str | None:
    """One line: why `load_library` returned None, what that costs, and what to do. None if there is a library."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get("MANTA_NO_KERNELS") == "1":
        return None, "MANTA_NO_KERNELS=1: torch alone serves, several times slower"
    compiler = find_compiler()
    if compiler is None:
        return None, f"no C++ compiler was found, so torch alone serves, several times slower; {REMEDY}"
    failure = ""
    # A compiler that is older than the processor may know only the flags of a lower form.
    for form in processor.lower_forms(processor.form()):
        try:
            return load_checked(library_for(form, compiler)), None
        except UntrustedCache as error:
            return None, f"{error}; until then torch alone serves, several times slower"
        except (OSError, subprocess.CalledProcessError) as error:
            lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
            failure = failure or next((line for line in lines if "error" in line), lines[0])
    return (
        None,
        f"{compiler[0]} does not compile the CPU kernels, so torch alone serves, several times slower: {failure}",
    )


def form_in_use() -> str:
    """The name of the form that the library was compiled for; `torch` without one."""
    return library_name().split("-")[0]


def library_name() -> str:
    """The name of the library in use, which differs with its sources, its compiler and the processor's form; `torch`
    without one.
    """
    library = load_library()
    return "torch" if library is None else pathlib.Path(library._name).name


def library_for(form: processor.Form, compiler: tuple[str, ...], extra: tuple[str, ...] = ()) -> pathlib.Path:
    """The library's file, compiled if it is not in the cache.

    Raises `OSError` or `CalledProcessError` if it does not compile, and `UntrustedCache` if there is no folder to which
    nobody else may write.
    """
    flags = (*FLAGS, *form.flags, *extra)
    sources = sorted(path for pattern in ("*.cpp", "*.h") for path in SOURCES.glob(pattern))
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    parts = [*(path.read_bytes() for path in sources), version, " ".join((*compiler, *flags)).encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    library = cache_entry("kernels") / f"{form.name}-{key}.so"
    if not _is_ours(library):  # missing, or others could have changed it
        with one_at_a_time(library.parent / _LOCK):
            if not _is_ours(library):
                _compile((*compiler, *flags), library)
    return library


def load_checked(library: pathlib.Path) -> ctypes.CDLL:
    """Loads the very file that was checked, whatever stands under its name by then.

    Raises `UntrustedCache` if somebody else could have written it, and `OSError` if it cannot be loaded.
    """
    file = os.open(library, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not _is_trusted(os.fstat(file)):
        os.close(file)
        raise UntrustedCache(f"others could have written {library}; remove it")
    descriptor = pathlib.Path(f"/proc/self/fd/{file}")
    if not descriptor.exists():  # not Linux
        os.close(file)
        return ctypes.CDLL(str(library))
    # The descriptor stays open: the loader knows the library by this name, which no other one may get.
    loaded = ctypes.CDLL(str(descriptor))
    loaded._name = str(library)
    return loaded


def _is_ours(library: pathlib.Path) -> bool:
    """Whether the file is there and whole, and nobody but this user or root could have written it: to load it is to run
    it.
    """
    try:
        return _is_trusted(library.lstat()) and not _is_torn(library)
    except FileNotFoundError:
        return False


def _is_torn(library: pathlib.Path) -> bool:
    """Whether a 64-bit ELF file lacks a part of its section table, which is at its end: to load it may be fatal."""
    with library.open("rb") as file:
        head = file.read(64)
    if not head.strip(b"\0"):
        return True
    if head[:6] != b"\x7fELF\2\1":
        return False
    if len(head) < 64:
        return True
    (table,), (entry_size, num_entries) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
    return bool(library.stat().st_size < table + entry_size * num_entries)


def _is_trusted(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and is_own(status)


def _compile(command: tuple[str, ...], library: pathlib.Path) -> None:
    def run(*arguments: str) -> None:
        subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)

    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        with concurrent.futures.ThreadPoolExecutor(host.num_cores()) as pool:
            jobs = [pool.submit(run, "-c", str(source), "-o", to) for source, to in zip(sources, objects, strict=True)]
            for job in jobs:
                job.result()
        partial = f"{folder}/{library.name}"
        run("-shared", *objects, "-o", partial)
        os.chmod(partial, 0o755)
        with open(partial, "rb") as compiled:
            os.fsync(compiled.fileno())  # so that a power failure leaves no torn library under its name
        os.replace(partial, library)  # atomic: several ranks may compile at once
