"""One compiled kernel: its parameters, and how it is launched on the host."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pyllm.device.emulation.compiler import host_compiler
from pyllm.device.kernel_source import (
    define_options,
    display_name,
    expand_file,
    max_threads,
    source_text,
    target_defines,
)
from pyllm.errors import DeviceError
from pyllm.ops.op import KernelLaunch, Target

MAX_BLOCK_THREADS = 1024
MAX_STATIC_SHARED = 48 * 1024  # bytes: what NVIDIA gives static arrays
MAX_SHARED = 64 * 1024  # bytes, static and dynamic: a block's share on AMD
MAX_SHARED_LARGE = 227 * 1024  # on large NVIDIA GPUs: for targets that say that they are one (sm_90)
MAX_GRID = (2**31 - 1, 65535, 65535)

# The numbers and names of `enum EmulatedFault` in rawkernels/common/emulation.cuh.
_BARRIER, _EXCHANGE, _MISALIGNED, _MEMORY, _STACK, _SHARED, _ARITHMETIC, _RESOURCES = range(1, 9)

_DTYPE_LETTERS = {"i": "i", "u": "u", "f": "f", "b": "u"}
_one_at_a_time = threading.Lock()  # the runtime and a library's SHARED variables have one instance in a process


class _LaunchRequest(ctypes.Structure):
    _fields_ = (
        ("run", ctypes.c_void_p),
        ("bind", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("static_shared", ctypes.c_void_p),
        ("static_bytes", ctypes.c_size_t),
        ("dynamic_bytes", ctypes.c_size_t),
        ("seed", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("warp_size", ctypes.c_int32),
    )


class _LaunchReport(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("at_barrier", ctypes.c_uint32),
        ("at_exchange", ctypes.c_uint32),
        ("ended", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class _Parameter:
    """A parameter of the kernel, as the compiler saw it.

    Attributes:
        access: "C" pointer to const, "P" pointer, "V" value.
        letter: "i", "u", "f", "h" (f16) or "x" (a struct or void).
        size: bytes of the value or of what is pointed to; 0 for void.
    """

    access: str
    letter: str
    size: int

    def takes(self, dtype: np.dtype) -> bool:
        """Whether a value, or the elements behind a pointer, may have this dtype. Bytes and structs overlay anything,
        unsigned words anything of their size."""
        if self.access != "V" and (self.letter == "x" or self.size == 1):
            return True
        if dtype.itemsize != self.size:
            return False
        if self.letter == "h":
            return dtype == np.float16
        if self.access != "V" and self.letter == "u":
            return True
        return self.letter == _DTYPE_LETTERS.get(dtype.kind) and dtype != np.float16

    def __str__(self) -> str:
        names = {"i": f"int{8 * self.size}", "u": f"uint{8 * self.size}", "f": f"float{8 * self.size}", "h": "float16"}
        return names.get(self.letter, "a struct")


class EmulatedKernel:
    """A kernel compiled for the host.

    Args:
        launch: the first launch of this variant; says source, entry and defines.
        target: wave size and kind of tiles.

    Raises:
        DeviceError: no compiler, or the source does not compile.
    """

    def __init__(self, launch: KernelLaunch, target: Target) -> None:
        self.name = launch.entry
        text = source_text(launch.source, launch.defines)
        limit = max_threads(launch.source, text, launch.entry)
        # A namespace without a name makes everything local to the library, SHARED variables of inline functions too.
        whole = (
            "namespace {\n"
            + text
            + expand_file("common/emulated_entry.cuh")
            + "}\n"
            + f'#line 1 "{display_name(launch.source)}: KERNEL({limit}) {launch.entry}"\n'
            + f"PYLLM_EMULATED_ENTRY({launch.entry}, {limit})\n"
        )
        options = tuple(define_options(target_defines(target, launch.defines)))
        self._library = ctypes.CDLL(str(host_compiler().library(launch.entry, whole, options)))
        self._library.pyllm_signature.restype = ctypes.c_char_p
        signature = self._library.pyllm_signature().decode()
        self._parameters = [_Parameter(a, b, int(c)) for a, b, c in zip(*[iter(signature)] * 3, strict=True)]
        self._max_threads = self._library.pyllm_max_threads()
        begin, end = ctypes.c_void_p(), ctypes.c_void_p()
        self._library.pyllm_shared_range(ctypes.byref(begin), ctypes.byref(end))
        self._static_shared = begin.value or 0
        self._static_bytes = (end.value or 0) - self._static_shared
        self._warp_size = target.warp_size
        self._max_shared = MAX_SHARED_LARGE if target.arch.startswith("sm_") else MAX_SHARED

    def check(self, launch: KernelLaunch) -> None:
        """Refuse what a GPU would refuse, or would take and read wrongly.

        Raises:
            DeviceError: extents, shared memory, or an argument do not fit the kernel.
        """
        self._check_extents(launch)
        found, expected = len(launch.args), len(self._parameters)
        if found != expected:
            raise DeviceError(f"kernel {self.name} has {expected} parameters; it was launched with {found} arguments")
        for number, (value, parameter) in enumerate(zip(launch.args, self._parameters, strict=True), 1):
            if complaint := _misfit(value, parameter):
                raise DeviceError(f"argument {number} of kernel {self.name} {complaint}")

    def run(self, launch: KernelLaunch, seed: int) -> None:
        """Run a launch that `check` has seen, and return when it is done.

        Raises:
            DeviceError: threads did not meet at a barrier, a bad access, a full stack, ...
        """
        values = [_argument(value) for value in launch.args]
        request = _LaunchRequest(
            run=ctypes.cast(self._library.pyllm_run, ctypes.c_void_p),
            bind=ctypes.cast(self._library.pyllm_bind, ctypes.c_void_p),
            arguments=ctypes.cast(
                (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values)), ctypes.c_void_p
            ),
            static_shared=self._static_shared,
            static_bytes=self._static_bytes,
            dynamic_bytes=launch.shared_bytes,
            seed=seed,
            grid=_extents(launch.grid),
            block=_extents(launch.block),
            warp_size=self._warp_size,
        )
        report = _LaunchReport()
        with _one_at_a_time:
            fault = runtime().emulation_launch(ctypes.byref(request), ctypes.byref(report))
        if fault:
            raise DeviceError(self._describe(fault, report, launch))

    def _check_extents(self, launch: KernelLaunch) -> None:
        where = f"kernel {self.name} was launched with"
        block, grid = _extents(launch.block), _extents(launch.grid)
        threads = block[0] * block[1] * block[2]
        if not 1 <= threads <= min(self._max_threads, MAX_BLOCK_THREADS):
            raise DeviceError(f"{where} {threads} threads a block; it allows 1 to {self._max_threads}")
        if not all(1 <= extent <= limit for extent, limit in zip(grid, MAX_GRID, strict=True)):
            raise DeviceError(f"{where} a grid of {tuple(grid)}; GPUs allow 1 to {MAX_GRID}")
        if self._static_bytes > MAX_STATIC_SHARED:
            raise DeviceError(f"{where} {self._static_bytes} bytes of static shared memory; {MAX_STATIC_SHARED} fit")
        total = self._static_bytes + launch.shared_bytes
        if total > self._max_shared:
            raise DeviceError(f"{where} {total} bytes of shared memory; {self._max_shared} fit on all GPUs")

    def _describe(self, fault: int, report: _LaunchReport, launch: KernelLaunch) -> str:
        thread = f"thread {tuple(report.thread)} of block {tuple(report.block)}"
        if fault == _BARRIER:
            total = int(np.prod(launch.block))
            running = total - report.at_barrier - report.at_exchange - report.ended
            rest = f", {running} could run" if running else ""
            return (
                f"kernel {self.name}, block {tuple(report.block)}: divergent barrier: of {total} threads "
                f"{report.at_barrier} wait at a barrier, {report.at_exchange} at a warp exchange, "
                f"{report.ended} have ended{rest}"
            )
        what = {
            _EXCHANGE: "divergent warp exchange: lanes of its warp are at another kind of exchange, or have ended",
            _MISALIGNED: "a 16-byte access to an address that is no multiple of 16",
            _MEMORY: f"an access to {report.address:#x}, where there is no memory of its own",
            _STACK: "its stack is full",
            _SHARED: f"something was written behind the {launch.shared_bytes} bytes of dynamic shared memory",
            _ARITHMETIC: "an integer division by zero",
            _RESOURCES: "the host has no memory for the stacks of its threads",
        }[fault]
        return f"kernel {self.name}, {thread}: {what}"


@cache
def runtime() -> ctypes.CDLL:
    """The library that runs kernels, built on first use.

    Raises:
        DeviceError: no compiler.
    """
    text = expand_file(Path(__file__).with_name("runtime.cpp"))
    library = ctypes.CDLL(str(host_compiler().library("runtime", text, ("-pthread",))))
    library.emulation_first_damaged.restype = ctypes.c_int64
    return library


def variant_key(launch: KernelLaunch) -> tuple[str, str, tuple[tuple[str, int], ...]]:
    """The same for launches of the same compiled kernel."""
    return launch.source, launch.entry, tuple(sorted(launch.defines.items()))


def _extents(values: Sequence[int]) -> Any:
    return (ctypes.c_uint32 * 3)(*(*values, 1, 1)[:3])


def _misfit(value: Any, parameter: _Parameter) -> str:
    """What is wrong with an argument, or nothing."""
    if parameter.access == "V":
        if not isinstance(value, np.generic):
            return f"is a {type(value).__name__}; expected a NumPy scalar, {parameter}"
        return "" if parameter.takes(value.dtype) else f"is {value.dtype}; the kernel takes {parameter}"
    if not isinstance(value, np.ndarray):
        return f"is a {type(value).__name__}; expected an array"
    if not value.flags.c_contiguous:
        return f"is an array of shape {value.shape} that is not C-contiguous; kernels ignore strides"
    if parameter.access == "P" and not value.flags.writeable:
        return "is a read-only array; the kernel may write it"
    if value.dtype == np.uint8 and value.ctypes.data % max(1, min(parameter.size, 8)) == 0:
        return ""  # raw bytes that the kernel reads as something wider
    return "" if parameter.takes(value.dtype) else f"is an array of {value.dtype}; the kernel takes {parameter}"


def _argument(value: Any) -> Any:
    """The memory whose address the kernel's caller reads the argument from."""
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    return (ctypes.c_char * value.dtype.itemsize).from_buffer_copy(value.tobytes())
