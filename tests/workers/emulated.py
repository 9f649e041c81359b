"""The kernels of another processor, cross-compiled and run under user-mode emulation, in the place of the library.

Debian's `g++-aarch64-linux-gnu` and `qemu-user`. The emulated process has memory of its own: each call sends the
storage of every tensor that it was given the address of, and takes it back. A frame is the function's name, those
storages, and the arguments as (kind, storage, value), each number in 8 bytes.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from manta.workers.kernels import build, processor
from tests.patience import PATIENCE_S

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FORMS = [form.name for form in processor.FORMS if form.machine == "aarch64"]
_INTEGER, _FLOAT, _POINTER, _NOTHING = range(4)


class EmulatedLibrary:
    """Has the functions that tests call; structures with addresses in them cannot pass."""

    def __init__(self, program: pathlib.Path) -> None:
        self._name = str(program)
        self._process = subprocess.Popen(
            [EMULATOR, "-cpu", "max", str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._seen: dict[int, torch.Tensor] = {}
        self._functions: dict[str, Callable[..., int]] = {}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)

    def note(self, tensor: torch.Tensor, address: int) -> None:
        """Somebody asked for the address of this tensor."""
        self._seen[address] = tensor

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("manta_"):
            raise AttributeError(name)
        if name not in self._functions:

            def function(*arguments: Any) -> int:
                return self._call(name, arguments, function.argtypes)  # type: ignore[attr-defined]

            function.argtypes = None  # type: ignore[attr-defined]
            self._functions[name] = function
        return self._functions[name]

    def _call(self, name: str, arguments: tuple[Any, ...], types: list[Any] | None) -> int:
        storages: list[Any] = []
        encoded: list[bytes] = []
        for argument, kind in zip(arguments, types or [ctypes.c_int] * len(arguments), strict=True):
            if kind is ctypes.c_float:
                encoded.append(struct.pack("<QQd", _FLOAT, 0, argument))
            elif kind is not ctypes.c_void_p:
                encoded.append(struct.pack("<QQq", _INTEGER, 0, int(argument)))
            elif argument is None:
                encoded.append(struct.pack("<QQQ", _NOTHING, 0, 0))
            else:
                storage = self._seen[argument].untyped_storage()
                first = _address_of(storage)
                index = next((i for i, each in enumerate(storages) if _address_of(each) == first), len(storages))
                if index == len(storages):
                    storages.append(storage)
                encoded.append(struct.pack("<QQQ", _POINTER, index, argument - first))
        frame = [struct.pack("<Q", len(name)), name.encode(), struct.pack("<Q", len(storages))]
        for storage in storages:
            frame += [struct.pack("<Q", storage.nbytes()), ctypes.string_at(_address_of(storage), storage.nbytes())]
        self._write(b"".join([*frame, struct.pack("<Q", len(encoded)), *encoded]))
        (result,) = struct.unpack("<q", self._read(8))
        for storage in storages:
            ctypes.memmove(_address_of(storage), self._read(storage.nbytes()), storage.nbytes())
        self._seen.clear()
        return result

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _read(self, count: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(count)
        assert len(data) == count, f"the emulated process ended with status {self._process.wait(PATIENCE_S)}"
        return data


def _address_of(storage: Any) -> int:
    return storage.data_ptr()


@functools.cache
def _program(name: str) -> pathlib.Path:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="manta-emulated-"))
    form = next(form for form in processor.FORMS if form.name == name)
    sources = [*build.SOURCES.glob("*.cpp"), pathlib.Path(__file__).with_name("emulated_kernels.cpp")]
    command = [COMPILER, *build.FLAGS, *form.flags, "-static", *map(str, sources)]
    subprocess.run([*command, "-o", str(folder / name)], check=True)
    return folder / name


@contextmanager
def emulated(name: str) -> Iterator[EmulatedLibrary]:
    """A library of the form `name`; skips if the tools are not installed."""
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (g++-aarch64-linux-gnu, qemu-user)")
    library = EmulatedLibrary(_program(name))
    data_ptr = torch.Tensor.data_ptr

    def noted(tensor: torch.Tensor) -> int:
        address = data_ptr(tensor)
        library.note(tensor, address)
        return address

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "data_ptr", noted)
        try:
            yield library
        finally:
            library.close()
