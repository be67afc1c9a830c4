"""What a measurement was made on: the GPU, its driver, CuPy, the processor, this version of pyllm."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyllm


def pyllm_version() -> str:
    """The version, and in a checkout the commit, with "-dirty" when files differ from it."""
    folder = Path(pyllm.__file__).parent.parent
    # Installed, the package may lie inside of some other repository.
    commit = _output("git", "-C", str(folder), "describe", "--always", "--dirty") if (folder / ".git").exists() else ""
    return f"pyllm {pyllm.__version__}" + (f", commit {commit}" if commit else "")


def file_hash(path: Path) -> str:
    """The first 8 digits of a file's SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:8]


def processor_name() -> str:
    """The CPU's model, as the system calls it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_size() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cupy_version() -> str:
    """CuPy, with the version of CUDA or ROCm that it runs on."""
    import cupy

    return f"CuPy {cupy.__version__} ({toolkit_version(cupy)})"


def toolkit_version(cupy: Any) -> str:
    """What CuPy runs on: "CUDA 13.0" or "ROCm 7.0"."""
    runtime = cupy.cuda.runtime
    version = runtime.runtimeGetVersion()
    if runtime.is_hip:
        return f"ROCm {version // 10_000_000}.{version // 100_000 % 100}"
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def driver_version() -> str | None:
    """The GPU driver's version; None where it cannot be found out."""
    with suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0:
            found = nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0
            nvml.nvmlShutdown()
            if found:
                return text.value.decode(errors="replace")
    for path in ("/sys/module/nvidia/version", "/sys/module/amdgpu/version", "/opt/rocm/.info/version"):
        with suppress(OSError):
            return Path(path).read_text(encoding="ascii", errors="replace").strip()
    return None


def describe_machine(device_name: str, description: str) -> str:
    """One line: the device and the software below pyllm.

    Args:
        device_name: "gpu", "cpu" or "emulated".
        description: the device's own.
    """
    if device_name == "gpu":
        driver = driver_version()
        return ", ".join([description, *([f"driver {driver}"] if driver else []), cupy_version(), platform.system()])
    import numpy as np

    cpu = f"{processor_name()}, {os.cpu_count()} cores, {memory_size() / 1e9:.0f} GB"
    shown = cpu if description == "cpu" else f"{description} on {cpu}"
    return f"{shown}, NumPy {np.__version__}, {platform.system()}"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
