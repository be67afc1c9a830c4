"""Machine code for exactly one architecture of NVIDIA GPUs, such as sm_90a.

CuPy compiles for the plain architecture of the present GPU and takes no other. So this module calls NVRTC itself, and
keeps what it built where compiled kernels are kept.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

from pyllm.device.kernel_source import cache_folder, digest
from pyllm.errors import DeviceError

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CubinKernel:
    """A kernel of a loaded module; what `GpuFunction` needs of CuPy's RawKernel.

    Attributes:
        kernel: the function.
    """

    def __init__(self, cupy: Any, cubin: bytes, entry: str) -> None:
        self._cupy = cupy
        self._module = cupy.cuda.function.Module()  # is unloaded with this object
        self._module.load(cubin)
        self.kernel = self._module.get_function(entry)

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """Dynamic shared memory that a launch may ask for."""
        return int(self._cupy.cuda.driver.funcGetAttribute(_MAX_DYNAMIC_SHARED, self.kernel.ptr))

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, num_bytes: int) -> None:
        self._cupy.cuda.driver.funcSetAttribute(self.kernel.ptr, _MAX_DYNAMIC_SHARED, num_bytes)


def load_kernel(cupy: Any, text: str, arch: str, options: tuple[str, ...], entry: str) -> CubinKernel:
    """Compile a complete source for `arch`, or take what was built before.

    Raises:
        DeviceError: it does not compile; the message has the compiler's first error.
    """
    options = (*options, "-ftz=true", f"--gpu-architecture={arch}")  # as CuPy compiles all others
    version = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    path = cache_folder() / f"{digest(text, version, *options)}.cubin"
    try:
        cubin = path.read_bytes()
    except OSError:
        cubin = _compile(cupy, text, arch, options, entry)
        _keep(path, cubin)
    return CubinKernel(cupy, cubin, entry)


def _compile(cupy: Any, text: str, arch: str, options: tuple[str, ...], entry: str) -> bytes:
    nvrtc = cupy.cuda.nvrtc
    program = nvrtc.createProgram(text, f"{entry}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        first = next((line for line in log.splitlines() if "error" in line), str(error))
        raise DeviceError(f"kernel {entry} does not compile for {arch}: {first}") from error
    finally:
        nvrtc.destroyProgram(program)


def _keep(path: Path, cubin: bytes) -> None:
    """Other processes find the whole file or none. Without room for it, it is compiled again next time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        os.replace(name, path)
