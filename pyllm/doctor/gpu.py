"""Checks of GPUs: drivers, CuPy, and whether each GPU does what the engine relies on."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pyllm.doctor.finding import FAIL, OK, WARN, Check, Finding, guarded

_NVIDIA_DRIVER, _AMD_DRIVER = Path("/proc/driver/nvidia/version"), Path("/dev/kfd")
_ON_CPU = "without it pyllm runs on the CPU"


def drivers() -> Iterator[Finding]:
    """GPU drivers, found without CuPy."""
    from pyllm.bench.machine import driver_version

    version = driver_version()
    here = [name for name, path in (("NVIDIA", _NVIDIA_DRIVER), ("AMD", _AMD_DRIVER)) if path.exists()]
    if here or version:
        yield Finding(
            "gpu driver", OK, " and ".join(here or ["a driver"]) + (f", version {version}" if version else "")
        )
    else:
        yield Finding("gpu driver", WARN, "none", f"install the driver of your GPU, if there is one; {_ON_CPU}")


def cupy_packages() -> Iterator[Finding]:
    """Which build of CuPy is installed, and whether it can be imported."""
    from pyllm.bench.machine import toolkit_version
    from pyllm.device.gpu import INSTALL

    builds = sorted(_cupy_builds())
    if not builds:
        yield Finding("cupy", WARN, "not installed", f"for a GPU: {INSTALL}; {_ON_CPU}")
        return
    shown = ", ".join(builds)
    if len(builds) > 1:
        yield Finding("cupy", FAIL, shown, "several builds overwrite each other's files: uninstall all of them but one")
        return
    try:
        import cupy
    except ImportError as error:
        yield Finding("cupy", FAIL, f"{shown} cannot be loaded: {_line(error)}", f"install it again: {INSTALL}")
        return
    yield Finding("cupy", OK, f"{shown}, for {toolkit_version(cupy)}")


def _cupy_builds() -> Iterator[str]:
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if re.fullmatch(r"cupy(-(cuda|rocm)[\w-]+)?", name):
            yield f"{name} {distribution.version}"


def compilers() -> Iterator[Finding]:
    """What compiles kernels: hipcc for AMD, NVRTC for NVIDIA."""
    cupy = _loaded_cupy()
    if _AMD_DRIVER.exists() or (cupy is not None and cupy.cuda.runtime.is_hip):
        path = shutil.which("hipcc")
        if path:
            yield Finding("hipcc", OK, path)
        else:
            advice = "install ROCm's hip-dev package, or add /opt/rocm/bin to PATH; CuPy needs it"
            yield Finding("hipcc", WARN if cupy is None else FAIL, "not on PATH", advice)
    if cupy is not None and not cupy.cuda.runtime.is_hip:
        major, minor = cupy.cuda.nvrtc.getVersion()
        toolkit = cupy.cuda.get_cuda_path()
        where = f", CUDA toolkit in {toolkit}" if toolkit else ", no CUDA toolkit (none is needed)"
        yield Finding("nvrtc", OK, f"NVRTC {major}.{minor}{where}")


def gpus() -> Iterator[Finding]:
    """Each GPU, with trials on it."""
    cupy = _loaded_cupy()
    if cupy is None:
        return
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        broken = _NVIDIA_DRIVER.exists() or _AMD_DRIVER.exists()
        advice = "check the driver; in a container, check that the GPU is handed in"
        yield Finding("gpu", FAIL if broken else WARN, _line(error), advice)
        return
    if not count:
        yield Finding("gpu", WARN, "CuPy finds none", f"check the driver and CUDA_VISIBLE_DEVICES; {_ON_CPU}")
    for index in range(count):
        yield from guarded(Check(f"gpu {index}", partial(_gpu, cupy, index)))


def _gpu(cupy: Any, index: int) -> Iterator[Finding]:
    from pyllm.device.gpu import GpuDevice
    from pyllm.errors import DeviceError

    name = f"gpu {index}"
    with cupy.cuda.Device(index):
        yield _properties(cupy, name, index)
        try:
            device = GpuDevice(poison=False)
        except DeviceError as error:
            yield Finding(name, FAIL, str(error), "run on the CPU: --device cpu")
            return
        try:
            for what, trial in _TRIALS.items():
                yield from guarded(Check(f"{name}, {what}", partial(_tried, name, what, trial, device)))
        finally:
            device.close()


def _properties(cupy: Any, name: str, index: int) -> Finding:
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    free, total = cupy.cuda.runtime.memGetInfo()
    kind = "integrated" if properties.get("integrated") else "discrete"
    arch = f"sm_{properties['major']}{properties['minor']}"
    if cupy.cuda.runtime.is_hip:
        arch = properties["gcnArchName"].decode()
    found = f"{properties['name'].decode()}, {arch}, {kind}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    if free < total // 2:
        return Finding(name, WARN, found, "another program uses its memory; end it, or use smaller models and contexts")
    return Finding(name, OK, found)


def _tried(name: str, what: str, trial: Callable[[Any], str], device: Any) -> Iterator[Finding]:
    problem = trial(device)
    advice = "update the driver and CuPy; if that does not help, please report it"
    yield Finding(f"{name}, {what}", FAIL if problem else OK, problem or "works", advice if problem else "")


def _sum(device: Any) -> str:
    from pyllm.doctor.trial import sum_is_right

    return "" if sum_is_right(device) else "a kernel gave a wrong sum"


def _pinned(device: Any) -> str:
    from pyllm.doctor.trial import reads_pinned_memory

    return "" if reads_pinned_memory(device) else "a kernel read other bytes than the host had written"


def _copies(device: Any) -> str:
    from pyllm.doctor.trial import copies_asynchronously

    return copies_asynchronously(device)


def _graphs(device: Any) -> str:
    from pyllm.doctor.trial import replays_graphs

    return "" if replays_graphs(device) else "a replayed graph gave wrong sums; --no-graphs does without"


def _library(device: Any) -> str:
    """The vendor's matrix product, on whole numbers: exact in float16."""
    import cupy
    import numpy as np

    a, b = (np.random.default_rng(seed).integers(-4, 5, (32, 32)).astype(np.float16) for seed in (1, 2))
    found = cupy.asnumpy(cupy.matmul(cupy.asarray(a), cupy.asarray(b)))
    return "" if (found == a @ b).all() else "the library's product is wrong"


_TRIALS: dict[str, Callable[[Any], str]] = {
    "a kernel": _sum,
    "pinned memory read in place": _pinned,
    "asynchronous copies": _copies,
    "recorded graphs": _graphs,
    "the library's product": _library,
}


def _loaded_cupy() -> Any:
    """CuPy, or None where it cannot be imported; `cupy_packages` says why."""
    try:
        import cupy
    except ImportError:
        return None
    return cupy


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" =")]
    return lines[0] if lines else type(error).__name__


def visible_devices() -> Iterator[Finding]:
    """Variables that hide GPUs."""
    names = [
        name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if name in os.environ
    ]
    for name in names:
        value = os.environ[name]
        hidden = value in ("", "-1")
        yield Finding(name, WARN if hidden else OK, repr(value), "it hides all GPUs; unset it" if hidden else "")


CHECKS = (
    Check("gpu driver", drivers),
    Check("visible devices", visible_devices),
    Check("cupy", cupy_packages),
    Check("compilers", compilers),
    Check("gpu", gpus),
)
