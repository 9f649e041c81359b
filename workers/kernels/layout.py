"""The agreement of C++ and Python: structures in ctypes, and the sizes and constants that a library exports."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_void_p
from typing import Any

import torch


def structure(name: str, pointers: str, integers: str = "", floats: str = "") -> type[Any]:
    """A ctypes structure of pointers, then ints, then floats. Each argument lists its fields' names, in order."""
    fields: list[tuple[str, Any]] = [(field, c_void_p) for field in pointers.split()]
    fields += [(field, c_int) for field in integers.split()]
    fields += [(field, c_float) for field in floats.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def check(source: str, exported: Callable[[int], int], here: dict[str, int]) -> None:
    """Compares `exported(0)`, `exported(1)`, ... of a C++ source with the values that Python uses, in that order.

    Raises `RuntimeError` naming the first value that differs.
    """
    for which, (name, value) in enumerate(here.items()):
        there = exported(which)
        if there != value:
            raise RuntimeError(f"{name} is {there} in {source} and {value} in Python")


def address_of(tensor: torch.Tensor | None) -> int | None:
    """Returns the address of a tensor's first element; None for none, which C++ sees as a null pointer."""
    return None if tensor is None else tensor.data_ptr()
