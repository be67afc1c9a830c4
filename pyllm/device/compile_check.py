"""Compiles kernels for real GPUs on machines without one: `make compile`, or `python -m pyllm.device.compile_check`.

For each kernel source and each target of `TARGETS`, one compilation per variant. Variants are written in the source's
header, beside its `Defines`:

    // Compile   QTYPE=0,12 TOKENS=1,8; QTYPE=12 BM=64 BN=64

Variants are separated by semicolons; of several values each is combined with each. A source without `Compile` has one
variant without defines.

NVIDIA: NVRTC, from the wheel nvidia-cuda-nvrtc or a CUDA toolkit, else nvcc. AMD: the hiprtc of an installed ROCm or
the one that tools/get-hiprtc.sh fetches, else clang with tools/hip_prelude.h, which checks the same source against
declarations of our own.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyllm
from pyllm.device.kernel_source import (
    cache_folder,
    define_options,
    kernel_folder,
    kernel_names,
    source_text,
    target_defines,
)
from pyllm.errors import DeviceError
from pyllm.ops.op import Target

TARGETS = (
    Target("cuda", "sm_90", 32, "mma"),
    Target("hip", "gfx1151", 32, "wmma"),
    Target("hip", "gfx942", 64, "mfma"),
)
_HEADER_FIELD = re.compile(r"^// (\w+) {2,}(.*)$")
_TOOLS = Path(pyllm.__file__).parent.parent / "tools"


class GpuCompiler(ABC):
    """A compiler for GPUs of one vendor.

    Attributes:
        name: what reports call it.
    """

    name: str

    @abstractmethod
    def compile(self, text: str, target: Target, defines: dict[str, str]) -> str:
        """Compile a complete source; the result is dropped. Returns the error messages, empty when it compiled."""


class Nvrtc(GpuCompiler):
    """NVIDIA's run-time compiler; needs no driver."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.name = f"NVRTC {major.value}.{minor.value}"

    def compile(self, text: str, target: Target, defines: dict[str, str]) -> str:
        nvrtc, program, size = self._library, ctypes.c_void_p(), ctypes.c_size_t()
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
        options = [f"--gpu-architecture={target.arch}", "-std=c++17", "-ftz=true", *define_options(defines)]
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value + 1)
        nvrtc.nvrtcGetProgramLog(program, log)
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        return (log.value.decode(errors="replace").strip() or "NVRTC failed without a message") if failed else ""


@dataclass(frozen=True)
class CommandCompiler(GpuCompiler):
    """A compiler that is a program.

    Attributes:
        command: up to the source file.
        arch_option: what stands before the target's name.
        options: behind the source file.
    """

    name: str
    command: tuple[str, ...]
    arch_option: str
    options: tuple[str, ...] = ("-std=c++17",)

    def compile(self, text: str, target: Target, defines: dict[str, str]) -> str:
        with tempfile.TemporaryDirectory(prefix="pyllm-compile-") as folder:
            source = Path(folder, "kernel.cu")
            source.write_text(text, encoding="utf-8")
            options = [*self.options, self.arch_option + target.arch, *define_options(defines)]
            command = [*self.command, str(source), *options]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        return (done.stderr.strip() or f"exit status {done.returncode}") if done.returncode else ""


def cuda_compiler() -> GpuCompiler:
    """NVRTC, else nvcc.

    Raises:
        DeviceError: neither is here.
    """
    for library in _nvrtc_libraries():
        try:
            return Nvrtc(library)
        except OSError:
            continue  # for another system
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise DeviceError("there is neither NVRTC nor nvcc; pip install 'pyllm[compile]' brings NVRTC")
    return CommandCompiler("nvcc", (nvcc, "-cubin", "-o", os.devnull), "-arch=")


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


def variants(name: str) -> list[dict[str, int]]:
    """The defines with which a kernel source is compiled, from its header.

    Raises:
        DeviceError: the header has `Defines` but no `Compile`, or that cannot be read.
    """
    header = _header(kernel_folder() / f"{name}.cu")
    if "Compile" not in header:
        if "Defines" in header:
            raise DeviceError(f"rawkernels/{name}.cu has Defines in its header but no Compile; see docs/kernels.md")
        return [{}]
    found = []
    for variant in header["Compile"].split(";"):
        choices = []
        for define in variant.split():
            macro, _, values = define.partition("=")
            if not re.fullmatch(r"-?\d+(,-?\d+)*", values):
                raise DeviceError(f"rawkernels/{name}.cu: Compile has {define!r}; expected MACRO=1 or MACRO=1,2,3")
            choices.append([(macro, int(value)) for value in values.split(",")])
        found += [dict(combination) for combination in itertools.product(*choices)]
    return found


def check(names: list[str]) -> int:
    """Compile kernels for all targets and print how it went. Returns the number of failures."""
    compilers = {"cuda": cuda_compiler(), "hip": hip_compiler()}
    jobs = [(name, target, defines) for target in TARGETS for name in names for defines in variants(name)]
    began = time.monotonic()

    def run(job: tuple[str, Target, dict[str, int]]) -> str:
        name, target, defines = job
        return compilers[target.vendor].compile(source_text(name, defines), target, target_defines(target, defines))

    failures = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (name, target, defines), errors in zip(jobs, pool.map(run, jobs), strict=True):
            if errors:
                failures += 1
                with_what = " ".join(f"{macro}={value}" for macro, value in defines.items())
                print(f"{name} {with_what} for {target.arch}, {compilers[target.vendor].name}:\n{errors}\n")
    for target in TARGETS:
        count = sum(job[1] is target for job in jobs)
        print(f"{target.arch}: {len(names)} kernel sources, {count} variants, {compilers[target.vendor].name}")
    print(f"{len(jobs) - failures} passed, {failures} failed, in {time.monotonic() - began:.0f} s")
    return failures


def main() -> int:
    """Check the kernels named on the command line, or all."""
    try:
        return 1 if check(sys.argv[1:] or kernel_names()) else 0
    except DeviceError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1


def _nvrtc_libraries() -> Iterator[Path]:
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
    return CommandCompiler(f"clang {version} instead of hiprtc ({why})", (path, *options), "--offload-arch=")


def _header(path: Path) -> dict[str, str]:
    """The fields of the comment that a kernel source begins with; indented lines continue a field."""
    fields: dict[str, str] = {}
    last = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("//"):
            break
        if field := _HEADER_FIELD.match(line):
            last = field[1]
            fields[last] = field[2]
        elif last:
            fields[last] += " " + line.removeprefix("//").strip()
    return fields


if __name__ == "__main__":
    sys.exit(main())
