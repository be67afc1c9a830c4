"""Compiling kernels before they are needed, by several threads: a GPU's compiler takes about a second for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyllm.device.gpu import GpuDevice
from pyllm.device.kernel_header import entry_points, read_header
from pyllm.device.kernel_source import kernel_names
from pyllm.errors import DeviceError
from pyllm.ops.op import KernelLaunch

Progress = Callable[[int, int, str], None]


def usual_variants(device: GpuDevice) -> list[KernelLaunch]:
    """One launch of each variant that the kernels' headers list for a GPU, and of each that the ops' plans need at
    sizes of real models. They are only good for compiling."""
    from pyllm.kernel_bench import planned
    from pyllm.kernel_bench_cases import bench_cases

    launches = planned(device, bench_cases(tuple(device.weight_types)))
    arch = device.target.arch
    for name in kernel_names():
        entry, variants = entry_points(name)[0], read_header(name).variants
        for variant in variants:
            if variant.is_for(arch):
                launches.append(KernelLaunch(name, entry, (1,), (1,), (), variant.defines))
            elif variant.is_for(f"{arch}a"):  # sm_90 also runs code for sm_90a
                launches.append(KernelLaunch(name, entry, (1,), (1,), (), variant.defines, arch=f"{arch}a"))
    keys = [(launch.source, launch.arch, tuple(sorted(launch.defines.items()))) for launch in launches]
    return list(dict(zip(keys, launches, strict=True)).values())


def build(device: GpuDevice, launches: Sequence[KernelLaunch], progress: Progress, threads: int | None = None) -> int:
    """Compile the kernels of some launches into CuPy's cache.

    Args:
        progress: called with (done, in all, the kernel that was compiled last).
        threads: default: one for each core.

    Returns:
        How many there are now.

    Raises:
        DeviceError: one of them does not compile.
    """
    import cupy

    number = cupy.cuda.runtime.getDevice()

    def compile_one(launch: KernelLaunch) -> str:
        cupy.cuda.runtime.setDevice(number)  # each thread has a current GPU of its own
        try:
            device._compile(launch)
        except DeviceError:
            raise
        except Exception as error:
            if "NOT_FOUND" not in str(error):  # this variant leaves the file's first kernel out; it is compiled
                raise DeviceError(f"{launch.source}: {_first_line(error)}") from error
        return launch.source

    done = 0
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        try:
            for name in pool.map(compile_one, launches):
                done += 1
                progress(done, len(launches), name)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return done


def _first_line(error: Any) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
