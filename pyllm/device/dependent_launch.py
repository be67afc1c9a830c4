"""Launches whose blocks may start before the kernel before them has ended (programmatic dependent launch, sm_90 on).

A kernel that begins with GRID_DEPENDENCY() waits there for all earlier work of the stream, so what it reads is
complete; only its start-up, and reads of weights put before that line, overlap with the end of the kernel before it.
CuPy has no such launch, so this module calls the driver. It takes longer on the host: for graphs, which record a launch
once.

Source: CUDA Driver API, cuLaunchKernelEx; CUDA C++ Programming Guide, "Programmatic Dependent Launch and
Synchronization".
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from pyllm.errors import DeviceError

OLDEST = 90  # compute capability, tens and ones
_ALLOWED = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def waits_itself(text: str, entry: str) -> bool:
    """Whether all threads of a kernel of a source come to GRID_DEPENDENCY()."""
    begin = re.search(rf"\b{entry}\([^{{;]*\) \{{\n", text)
    if begin is None:
        return False
    before, found, _ = text[begin.end() :].partition("    GRID_DEPENDENCY();\n")
    return bool(found) and "return" not in before and "KERNEL(" not in before


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("unused", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class DependentLauncher:
    """The driver's extended launch.

    Raises:
        OSError, AttributeError: the driver is not there, or older than CUDA 11.8.
    """

    def __init__(self) -> None:
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        self._launch.argtypes = (
            ctypes.POINTER(_Config),
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_void_p,
        )
        self._attribute = _Attribute(_ALLOWED, 0, 1)

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[Any],
        shared_bytes: int,
        stream: int,
    ) -> None:
        """Launch a kernel that begins with GRID_DEPENDENCY().

        Args:
            function: the driver's handle.
            args: device arrays and NumPy scalars.
            stream: the driver's handle.

        Raises:
            DeviceError: the driver refuses.
        """
        values = [np.uint64(arg.data.ptr) if hasattr(arg, "__cuda_array_interface__") else arg for arg in args]
        cells = [np.array(value) for value in values]  # the driver copies them while it launches
        pointers = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
        extents = ctypes.c_uint * 3
        attributes = ctypes.pointer(self._attribute)
        config = _Config(extents(*grid), extents(*block), shared_bytes, stream, attributes, 1)
        if error := self._launch(ctypes.byref(config), function, pointers, None):
            raise DeviceError(f"the GPU's driver refuses to launch a kernel (error {error})")
