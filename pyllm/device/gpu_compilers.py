"""The vendors' compilers, as they work on a machine without a GPU.

NVIDIA: NVRTC, from the wheel nvidia-cuda-nvrtc or a CUDA toolkit, else nvcc. AMD: the hiprtc of an installed ROCm or
the one that tools/get-hiprtc.sh fetches, else clang with tools/hip_prelude.h, which checks the same source against
declarations of our own.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyllm
from pyllm.device.kernel_source import cache_folder, define_options
from pyllm.errors import DeviceError
from pyllm.ops.op import Target

_TOOLS = Path(pyllm.__file__).parent.parent / "tools"


@dataclass(frozen=True)
class Compiled:
    """What came of a compilation.

    Attributes:
        errors: messages; empty when it compiled.
        code: machine code; None when it did not compile, or when the compiler makes none.
    """

    errors: str = ""
    code: bytes | None = None


class GpuCompiler(ABC):
    """A compiler for GPUs of one vendor.

    Attributes:
        name: what reports call it.
    """

    name: str

    @abstractmethod
    def compile(self, text: str, target: Target, defines: dict[str, str]) -> Compiled:
        """Compile a complete source."""


class Nvrtc(GpuCompiler):
    """NVIDIA's run-time compiler; needs no driver."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.name = f"NVRTC {major.value}.{minor.value}"

    def compile(self, text: str, target: Target, defines: dict[str, str]) -> Compiled:
        nvrtc, program = self._library, ctypes.c_void_p()
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
        try:
            options = [f"--gpu-architecture={target.arch}", "-std=c++17", "-ftz=true", *define_options(defines)]
            encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            if nvrtc.nvrtcCompileProgram(program, len(options), encoded):
                log = self._text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
                return Compiled(log.rstrip(b"\0").decode(errors="replace").strip() or "NVRTC failed without a message")
            return Compiled(code=self._text(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN))
        finally:
            nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    @staticmethod
    def _text(program: ctypes.c_void_p, get_size: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer) -> bytes:
        size = ctypes.c_size_t()
        get_size(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        get(program, buffer)
        return buffer.raw


@dataclass(frozen=True)
class CommandCompiler(GpuCompiler):
    """A compiler that is a program.

    Attributes:
        command: up to the source file.
        arch_option: what stands before the target's name.
        output: what stands before the name of the file with machine code, behind the source file; None: it makes none.
        options: behind that.
    """

    name: str
    command: tuple[str, ...]
    arch_option: str
    output: tuple[str, ...] | None = ()
    options: tuple[str, ...] = ("-std=c++17",)

    def compile(self, text: str, target: Target, defines: dict[str, str]) -> Compiled:
        with tempfile.TemporaryDirectory(prefix="pyllm-compile-") as folder:
            source, code = Path(folder, "kernel.cu"), Path(folder, "kernel.code")
            source.write_text(text, encoding="utf-8")
            options = [*self.options, self.arch_option + target.arch, *define_options(defines)]
            output = [] if self.output is None else [*self.output, str(code)]
            command = [*self.command, str(source), *output, *options]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
            if done.returncode:
                return Compiled(done.stderr.strip() or f"exit status {done.returncode}")
            return Compiled(code=code.read_bytes() if output else None)


def cuda_compiler() -> GpuCompiler:
    """NVRTC, else nvcc.

    Raises:
        DeviceError: neither is here.
    """
    for library in nvrtc_libraries():
        try:
            return Nvrtc(library)
        except OSError:
            continue  # for another system
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise DeviceError("there is neither NVRTC nor nvcc; pip install 'pyllm[compile]' brings NVRTC")
    return CommandCompiler("nvcc", (nvcc, "-cubin"), "-arch=", ("-o",))


def hip_compiler() -> GpuCompiler:
    """hiprtc, installed or fetched, else clang.

    Raises:
        DeviceError: none of them can be had.
    """
    installed = next(iter(sorted(Path("/opt/rocm/lib").glob("libhiprtc.so.*"))), None)
    try:
        if installed is not None:
            return CommandCompiler("hiprtc", (_hiprtc_driver(), str(installed)), "--offload-arch=")
        fetched = subprocess.run([_TOOLS / "get-hiprtc.sh"], capture_output=True, text=True)
        if fetched.returncode:
            raise DeviceError(fetched.stderr.strip().splitlines()[-1])
        libraries = f"{fetched.stdout.strip()}/usr/lib/x86_64-linux-gnu"
        loader = (f"{libraries}/ld-linux-x86-64.so.2", "--library-path", libraries)
        return CommandCompiler("hiprtc", (*loader, _hiprtc_driver(), "libhiprtc.so.7"), "--offload-arch=")
    except (OSError, DeviceError) as error:
        return _clang(str(error))


def nvrtc_libraries() -> Iterator[Path]:
    """Where NVRTC may be: the wheels of Python's environment, then CUDA toolkits; the newest first."""
    for folder in sys.path:
        yield from sorted(Path(folder, "nvidia").glob("*/lib/libnvrtc.so.*"), reverse=True)
    toolkits = sorted(Path("/usr/local").glob("cuda*/lib64"), reverse=True)
    for toolkit in (Path(os.environ.get("CUDA_PATH", "/usr/local/cuda"), "lib64"), *toolkits):
        yield from sorted(toolkit.glob("libnvrtc.so.*"))


def _hiprtc_driver() -> str:
    """The program that calls hiprtc, compiled from tools/hiprtc_compile.c on first use."""
    driver = cache_folder() / "hiprtc_compile"
    source = _TOOLS / "hiprtc_compile.c"
    if not driver.exists() or driver.stat().st_mtime < source.stat().st_mtime:
        driver.parent.mkdir(parents=True, exist_ok=True)
        temporary = driver.with_suffix(f".{os.getpid()}")
        done = subprocess.run(["cc", "-O1", "-o", temporary, source, "-ldl"], capture_output=True, text=True)
        if done.returncode:
            raise DeviceError(f"{source.name} does not compile: {done.stderr.strip().splitlines()[0]}")
        os.replace(temporary, driver)
    return str(driver)


def _clang(why: str) -> GpuCompiler:
    for version in range(30, 16, -1):  # 17 is the first that knows gfx1151 and gfx942
        path = shutil.which(f"clang++-{version}")
        if path is not None:
            break
    else:
        raise DeviceError(f"AMD kernels cannot be checked: {why}; clang++-17 or newer would do, and is not here either")
    options = (
        *("-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib", "-S", "-O3"),
        *("-include", str(_TOOLS / "hip_prelude.h"), "-o", os.devnull),
    )
    return CommandCompiler(f"clang {version} instead of hiprtc ({why})", (path, *options), "--offload-arch=", None)
