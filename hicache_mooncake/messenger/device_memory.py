"""Whether an address is memory of a GPU, which no CPU may touch: asks the CUDA driver, where this process has it loaded."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_MEMORY_TYPE = 2
"""CU_POINTER_ATTRIBUTE_MEMORY_TYPE."""
_IS_MANAGED = 8
_DEVICE = 2
"""CU_MEMORYTYPE_DEVICE."""


def driver(maps: str = "/proc/self/maps") -> ctypes.CDLL | None:
    """libcuda, where this process has it loaded. It is not loaded for this: who has no CUDA context has no such memory."""
    for line in Path(maps).read_text().splitlines():
        path = line.split(maxsplit=5)[5] if line.count("/") else ""
        if os.path.basename(path).startswith("libcuda.so"):
            try:
                return ctypes.CDLL(path)
            except OSError:
                return None
    return None


def is_device(address: int, library: ctypes.CDLL | None) -> bool:
    """Memory of a device and of no CPU. Managed memory, which both touch, is none, nor is what the driver does not know."""
    if library is None:
        return False
    kind, managed = ctypes.c_uint(0), ctypes.c_uint(0)
    ask = library.cuPointerGetAttribute
    ask.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_ulonglong]
    if ask(ctypes.byref(kind), _MEMORY_TYPE, address) != 0 or kind.value != _DEVICE:
        return False
    return not (ask(ctypes.byref(managed), _IS_MANAGED, address) == 0 and managed.value)
