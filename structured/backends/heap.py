"""The memory that this process has allocated, in any language. The difference before and after an object is made is
the object's size.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _MallInfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


@functools.cache
def _mallinfo2() -> Callable[[], _MallInfo2] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # another C library, or a glibc before 2.33
        return None
    function.restype = _MallInfo2
    return function


def heap_bytes() -> int | None:
    """Bytes that all threads have allocated and not freed; None if the C library does not tell."""
    mallinfo2 = _mallinfo2()
    if mallinfo2 is None:
        return None
    info = mallinfo2()
    return info.uordblks + info.hblkhd
