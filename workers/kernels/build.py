"""Compiles the CPU kernels at first use and caches the shared library; calls go through ctypes, so no torch headers.

The library is keyed by source, compiler, flags and processor, so that an upgrade or another machine rebuilds it.
Without a C++ compiler `load_library` returns None and callers use their torch reference.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import shutil
import subprocess
import tempfile

logger = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-fopenmp", "-fPIC", "-shared")
# Not -ffast-math: infinities mark masked logits and NaN marks a failed row, and linking with it would flush denormals


def cache_folder() -> pathlib.Path:
    """`$MANTA_CACHE`, else the user's cache folder."""
    root = os.environ.get("MANTA_CACHE")
    if root:
        return pathlib.Path(root)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "manta"


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line for line in lines if line.startswith(("flags", "Features"))), "unknown")


@functools.cache
def load_library(name: str) -> ctypes.CDLL | None:
    """Loads `workers/kernels/<name>.cpp`, compiled for this processor; None where there is no compiler or it fails.

    torch must be imported first: its OpenMP runtime then serves the library too, so both share one thread pool.
    """
    if os.environ.get("MANTA_NO_KERNELS") == "1":
        return None
    source = pathlib.Path(__file__).with_name(f"{name}.cpp")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        logger.warning("no C++ compiler found: %s runs on its slower torch reference; install g++ for full speed", name)
        return None
    headers = b"".join(path.read_bytes() for path in sorted(source.parent.glob("*.h")))
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    key = hashlib.sha256(
        b"\0".join([source.read_bytes(), headers, version, " ".join(FLAGS).encode(), _processor().encode()])
    )
    library = cache_folder() / "kernels" / f"{name}-{key.hexdigest()[:16]}.so"
    if not library.exists():
        try:
            _compile(compiler, source, library)
        except (OSError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", None) or error
            logger.warning("compiling %s failed, its slower torch reference is used: %s", source.name, detail)
            return None
    return ctypes.CDLL(str(library))


def _compile(compiler: str, source: pathlib.Path, library: pathlib.Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=library.parent, suffix=".so")
    os.close(descriptor)
    try:
        subprocess.run([compiler, *FLAGS, str(source), "-o", partial], check=True, capture_output=True, text=True)
        os.chmod(partial, 0o755)
        os.replace(partial, library)  # atomic: several ranks may compile at once
    finally:
        pathlib.Path(partial).unlink(missing_ok=True)
