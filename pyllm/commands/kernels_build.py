"""`pyllm kernels build`: compile the kernels for this machine's GPU before they are needed."""

from __future__ import annotations

import time

import click

from pyllm.commands.console import note, progress_bar


@click.command("build")
@click.option("--threads", type=click.IntRange(1), help="Compile so many at the same time. [default: one per core]")
def command(threads: int | None) -> None:
    """Compile the kernels for this machine's GPU into CuPy's cache. Needs a GPU.

    Otherwise each is compiled when it is first launched, which takes about a second. Built are the variants that the
    sources list and those that models of usual sizes need; others (of unusual heads, say) are still compiled on demand.
    CUPY_CACHE_DIR says where the cache is.

    \b
    pyllm kernels build
    """
    from pyllm.device.gpu import GpuDevice
    from pyllm.kernel_build import build, usual_variants

    began = time.monotonic()
    device = GpuDevice(poison=False)
    try:
        with progress_bar("compiling", "kernel") as progress:
            count = build(device, usual_variants(device), progress, threads)
    finally:
        device.close()
    note(f"{count} kernels for {device.description} are compiled, in {time.monotonic() - began:.0f} s")
