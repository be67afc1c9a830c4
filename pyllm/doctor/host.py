"""Checks of everything but the GPU."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyllm
from pyllm.doctor.finding import FAIL, OK, WARN, Check, Finding

_LITTLE_MEMORY = 4 << 30
_LITTLE_DISK = 2 << 30
_REQUIREMENT = re.compile(r"^([\w.-]+)\s*(?:>=\s*([\d.]+))?")
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


def python() -> Iterator[Finding]:
    """The interpreter."""
    found = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, pyllm {pyllm.__version__}"
    yield Finding("python", OK, found)


def packages() -> Iterator[Finding]:
    """What pyllm depends on."""
    try:
        requirements = importlib.metadata.requires("pyllm") or []
    except importlib.metadata.PackageNotFoundError:  # run from a folder, not installed
        requirements = ["numpy>=2.0", "gguf>=0.17", "click>=8.1", "tqdm>=4.66", "jinja2>=3.1.5", "tokenizers>=0.21"]
    found, problems = [], []
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match is None or "extra ==" in requirement:
            continue
        name, wanted = match[1], match[2] or "0"
        version = installed_version(name)
        if version is None:
            problems.append(f"{name} is missing")
        elif _numbers(version) < _numbers(wanted):
            problems.append(f"{name} {version} is older than {wanted}")
        else:
            found.append(f"{name} {version}")
    if problems:
        yield Finding("packages", FAIL, ", ".join(problems), "pip install --upgrade pyllm (or `pip install .`)")
    else:
        yield Finding("packages", OK, ", ".join(found))


def installed_version(name: str) -> str | None:
    """The version of a distribution; None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def kernel_sources() -> Iterator[Finding]:
    """The kernels' sources, which come with the package."""
    from pyllm.device.kernel_source import kernel_folder, kernel_names

    yield Finding("kernel sources", OK, f"{len(kernel_names())} in {kernel_folder()}")


def cpu() -> Iterator[Finding]:
    """The CPU, and how many threads a matrix product takes."""
    from pyllm.bench.machine import processor_name

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = next(((name, os.environ[name]) for name in THREAD_VARIABLES if os.environ.get(name)), None)
    threads = f"{given[0]}={given[1]}" if given else "threads of a matrix product: all cores"
    found = f"{processor_name()}, {usable} cores, {threads}"
    if given and given[1].isdigit() and int(given[1]) > usable:
        yield Finding("cpu", WARN, found, f"more threads than cores wait for each other; set {given[0]}={usable}")
    else:
        yield Finding("cpu", OK, found)


def memory() -> Iterator[Finding]:
    """The machine's memory."""
    from pyllm.bench.machine import memory_size

    available = _available_memory()
    found = f"{memory_size() / 1e9:.1f} GB" + ("" if available is None else f", {available / 1e9:.1f} GB available")
    if available is not None and available < _LITTLE_MEMORY:
        yield Finding("memory", WARN, found, "end other programs, or run small models only")
    else:
        yield Finding("memory", OK, found)


def _available_memory() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) << 10 if match else None


def disks() -> Iterator[Finding]:
    """The folders in which pyllm and CuPy keep things."""
    from pyllm import hub
    from pyllm.device.kernel_source import cache_folder

    cupy_folder = Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()
    for what, folder in (("models", hub.models_dir()), ("kernels", cache_folder()), ("CuPy's kernels", cupy_folder)):
        yield _disk(what, Path(folder))


def _disk(what: str, folder: Path) -> Finding:
    check = f"disk, {what}"
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    found = f"{folder}: {free / 1e9:.1f} GB free"
    if not os.access(existing, os.W_OK):
        return Finding(check, WARN, f"{folder} cannot be written", "change its permissions, or set another folder")
    if free < _LITTLE_DISK:
        return Finding(check, WARN, found, "make room: models take gigabytes")
    return Finding(check, OK, found)


def settings() -> Iterator[Finding]:
    """Environment variables that change what pyllm does."""
    names = sorted(name for name in os.environ if name.startswith("PYLLM_"))
    shown = ", ".join(f"{name}={os.environ[name]}" for name in names)
    if os.environ.get("PYLLM_POISON", "0") not in ("", "0"):
        yield Finding("settings", WARN, shown, "PYLLM_POISON is for tests and slows everything down; unset it")
    else:
        yield Finding("settings", OK, shown or "no PYLLM_ variables are set")


def cpu_device() -> Iterator[Finding]:
    """Whether the CPU computes."""
    from pyllm.device.host import HostDevice
    from pyllm.doctor.trial import sum_is_right

    device = HostDevice(poison=False)
    try:
        right = sum_is_right(device)
    finally:
        device.close()
    yield Finding("device cpu", OK if right else FAIL, "computes" if right else "a sum came out wrong")


def emulated_device() -> Iterator[Finding]:
    """Whether kernels can be tried without a GPU."""
    from pyllm.device.emulated import EmulatedDevice
    from pyllm.device.emulation.compiler import host_compiler
    from pyllm.doctor.trial import sum_is_right
    from pyllm.errors import DeviceError

    try:
        compiler = host_compiler()
    except DeviceError as error:
        yield Finding("device emulated", WARN, str(error), "install g++ if you work on kernels; nothing else needs it")
        return
    device = EmulatedDevice()
    try:
        right = sum_is_right(device)
    finally:
        device.close()
    found = f"a kernel was compiled by {compiler.path} and " + ("ran" if right else "gave a wrong sum")
    yield Finding("device emulated", OK if right else FAIL, found)


CHECKS = (
    Check("python", python),
    Check("packages", packages),
    Check("kernel sources", kernel_sources),
    Check("settings", settings),
    Check("cpu", cpu),
    Check("memory", memory),
    Check("disk", disks),
    Check("device cpu", cpu_device),
    Check("device emulated", emulated_device),
)
