"""Compiles kernels for real GPUs on machines without one: `make compile` and `make compile-all`.

    python -m pyllm.device.compile_check [--all] [--fresh] [KERNEL...]

For each kernel source and each target, one compilation per variant; variants are written in the source's header
(`kernel_header`). --all takes all targets and reads from the machine code what each kernel uses: it fails on more
shared memory than a block can have and on local memory, unless the header allows it. Dynamic shared memory is what the
plans of the ops ask for; their launches at sizes of real models are compiled, too.

What compiled is remembered in the user's cache by text, options and compiler, so a second run is fast; --fresh forgets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pyllm.device.code_object import KernelResources, read_resources
from pyllm.device.gpu_compilers import GpuCompiler, cuda_compiler, hip_compiler
from pyllm.device.kernel_header import KernelHeader, read_header
from pyllm.device.kernel_source import cache_folder, digest, kernel_names, source_text, target_defines
from pyllm.errors import DeviceError
from pyllm.ops.op import KernelLaunch, Target
from pyllm.quants import QuantType

TARGETS = (
    Target("cuda", "sm_90", 32, "mma"),
    Target("hip", "gfx1151", 32, "wmma"),
    Target("hip", "gfx942", 64, "mfma"),
    Target("cuda", "sm_90a", 32, "mma"),  # for what a header names it for
)
DECODING_SOURCE = "decode_rows"
ESSENTIAL_TYPES = (QuantType.F16, QuantType.Q8_0, QuantType.Q4_K)

ALL_TARGETS = (
    Target("cuda", "sm_80", 32, "mma"),
    Target("cuda", "sm_90", 32, "mma"),
    Target("cuda", "sm_90a", 32, "mma"),  # for what a header names it for
    Target("hip", "gfx1151", 32, "wmma"),
    Target("hip", "gfx1100", 32, "wmma"),
    Target("hip", "gfx942", 64, "mfma"),
    Target("hip", "gfx90a", 64, "mfma"),
)
SHARED_LIMIT = 64 << 10  # of a block: all that AMD's GPUs have, and what leaves room for a second block on NVIDIA's


@dataclass(frozen=True)
class Job:
    """One compilation.

    Attributes:
        dynamic: entry point to dynamic shared memory that plans ask for, in bytes.
    """

    name: str
    target: Target
    defines: Mapping[str, int]
    dynamic: Mapping[str, int]

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{macro}={value}" for macro, value in self.defines.items())])


@dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Attributes:
        resources: of its kernels; None where the compiler makes no machine code.
    """

    errors: str = ""
    resources: list[KernelResources] | None = None


def variants(name: str) -> list[dict[str, int]]:
    """The defines with which a kernel source is compiled, from its header.

    Raises:
        DeviceError: the header cannot be read.
    """
    return [variant.defines for variant in read_header(name).variants]


def jobs_of(
    names: Iterable[str], targets: Sequence[Target], planned: Mapping[Target, Iterable[KernelLaunch]]
) -> list[Job]:
    """All compilations: the variants of the headers and, where given, what plans launch."""
    names, jobs = list(names), []
    for target in targets:
        wanted: dict[tuple[str, tuple[tuple[str, int], ...]], dict[str, int]] = {}
        for name in names:
            for variant in read_header(name).variants:
                if variant.is_for(target.arch):
                    wanted[name, tuple(sorted(variant.defines.items()))] = {}
        for launch in planned.get(target, ()):
            if launch.source in names and launch.arch in ("", target.arch):
                dynamic = wanted.setdefault((launch.source, tuple(sorted(launch.defines.items()))), {})
                dynamic[launch.entry] = max(launch.shared_bytes, dynamic.get(launch.entry, 0))
        jobs += [Job(name, target, dict(defines), dynamic) for (name, defines), dynamic in wanted.items()]
    return jobs


def essential(jobs: Iterable[Job], few_for_amd: bool = False) -> list[Job]:
    """A part of the jobs that takes minutes, not an hour: each value of each macro in some variant of its source, and
    all block types in the source that does nothing but decode them, for NVIDIA.

    Args:
        few_for_amd: only the first variant of each source for AMD's targets, whose compiler takes ten times as long.
    """
    seen: dict[tuple[str, str], set[tuple[str, int]]] = {}
    kept = []
    for job in jobs:
        qtype = job.defines.get("QTYPE")
        # AMD's compiler takes ten times as long.
        all_types = job.name == DECODING_SOURCE and job.target.vendor == "cuda"
        if qtype is not None and qtype not in ESSENTIAL_TYPES and not all_types:
            continue
        values = seen.setdefault((job.target.arch, job.name), set())
        if not job.defines or not set(job.defines.items()) <= values:
            values.update(job.defines.items())
            kept.append(job)
    return _with_few_for_amd(kept) if few_for_amd else kept


def _with_few_for_amd(jobs: Iterable[Job]) -> list[Job]:
    seen: set[tuple[str, str]] = set()
    kept = []
    for job in jobs:
        place = job.target.arch, job.name
        if job.target.vendor != "hip" or place not in seen:
            kept.append(job)
        seen.add(place)
    return kept


def planned_launches(target: Target) -> list[KernelLaunch]:
    """What the ops launch on a GPU at sizes of real models."""
    from pyllm.device.emulated import EmulatedDevice
    from pyllm.kernel_bench import planned
    from pyllm.kernel_bench_cases import bench_cases

    device = EmulatedDevice(target.warp_size, target.tiles)
    device.target = target
    try:
        return planned(device, bench_cases(tuple(device.weight_types)))
    finally:
        device.close()


def problems(job: Job, header: KernelHeader, resources: Iterable[KernelResources]) -> Iterator[str]:
    """What is too much in a job's kernels."""
    arch = job.target.arch
    shared_limit = SHARED_LIMIT
    if job.target.vendor == "cuda":  # AMD's GPUs have no more
        shared_limit = header.shared_limits.get(arch, SHARED_LIMIT)
    scratch_limit = header.scratch_limits.get(arch, 0)
    for kernel in resources:
        shared, dynamic = kernel.shared_bytes, job.dynamic.get(kernel.name, 0)
        if shared + dynamic > shared_limit:
            yield (
                f"{kernel.name} takes {shared} bytes of static and {dynamic} of dynamic shared memory; "
                f"the limit is {shared_limit} (on NVIDIA's GPUs `SharedLimit` in the header raises it)"
            )
        if kernel.scratch_bytes > scratch_limit:
            yield (
                f"{kernel.name} keeps {kernel.scratch_bytes} bytes per thread in local memory; the limit is "
                f"{scratch_limit} (`// Scratch   {arch}={kernel.scratch_bytes}` in the header raises it)"
            )


class Checker:
    """Compiles jobs, each text with the same options once.

    Args:
        fresh: compile again what is known to compile.
    """

    def __init__(self, compilers: Mapping[str, GpuCompiler], fresh: bool = False) -> None:
        self._compilers = compilers
        self._folder = cache_folder() / "checked"
        self._fresh = fresh

    def run(self, job: Job) -> Outcome:
        """Compile one job, or remember that it compiled. Safe in several threads."""
        compiler = self._compilers[job.target.vendor]
        text, defines = source_text(job.name, job.defines), target_defines(job.target, job.defines)
        path = (
            self._folder / f"{digest(compiler.name, job.target.arch, text, json.dumps(defines, sort_keys=True))}.json"
        )
        if not self._fresh and (known := _remembered(path)):
            return known
        compiled = compiler.compile(text, job.target, defines)
        if compiled.errors:
            return Outcome(compiled.errors)
        resources = None if compiled.code is None else read_resources(compiled.code)
        _remember(path, resources)
        return Outcome(resources=resources)


def _remembered(path: Path) -> Outcome | None:
    try:
        kernels = json.loads(path.read_text(encoding="ascii"))
        return Outcome(resources=None if kernels is None else [KernelResources(**kernel) for kernel in kernels])
    except (OSError, ValueError, TypeError):
        return None


def _remember(path: Path, resources: list[KernelResources] | None) -> None:
    with suppress(OSError):  # the next run compiles it again
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.{hash(path) & 0xFFFF}")
        temporary.write_text(
            json.dumps(None if resources is None else [kernel.as_dict() for kernel in resources]), encoding="ascii"
        )
        os.replace(temporary, path)


def check(names: Sequence[str], everything: bool = False, fresh: bool = False, few_for_amd: bool = False) -> int:
    """Compile kernels and print how it went.

    Args:
        everything: all variants, for all targets, with a look at what the kernels use; otherwise `essential` ones.
        few_for_amd: see `essential`.

    Returns:
        The number of failures.
    """
    began = time.monotonic()
    targets = ALL_TARGETS if everything else TARGETS
    compilers = {"cuda": cuda_compiler(), "hip": hip_compiler()}
    planned = {target: planned_launches(target) for target in targets if target.arch != "sm_90a"} if everything else {}
    for target in targets:
        if everything and target.arch == "sm_90a":  # what is planned on sm_90 for its further instructions
            base = next(found for kind, found in planned.items() if kind.arch == "sm_90")
            planned[target] = [launch for launch in base if launch.arch == "sm_90a"]
    jobs = jobs_of(names, targets, planned)
    if not everything:
        jobs = essential(jobs, few_for_amd)
    headers = {name: read_header(name) for name in names}
    checker, failures = Checker(compilers, fresh), 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for count, (job, outcome) in enumerate(zip(jobs, pool.map(checker.run, jobs), strict=True), 1):
            _show_progress(count, len(jobs))
            found = [outcome.errors] if outcome.errors else []
            if everything and outcome.resources is not None:
                found += problems(job, headers[job.name], outcome.resources)
            failures += bool(found)
            for text in found:
                print(f"{job} for {job.target.arch}, {compilers[job.target.vendor].name}:\n{text}\n")
    for target, of_target in itertools.groupby(jobs, key=lambda job: job.target):
        kept = list(of_target)
        sources = len({job.name for job in kept})
        print(f"{target.arch}: {sources} kernel sources, {len(kept)} variants, {compilers[target.vendor].name}")
    print(f"{len(jobs) - failures} passed, {failures} failed, in {time.monotonic() - began:.0f} s")
    return failures


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {total}", end="\r" if done < total else "\r\x1b[K", file=sys.stderr, flush=True)


def main() -> int:
    """Check the kernels named on the command line, or all."""
    parser = argparse.ArgumentParser(prog="compile_check", description="Compile kernels for GPUs, without a GPU.")
    parser.add_argument("names", nargs="*", metavar="KERNEL", help="sources in rawkernels/ [default: all]")
    parser.add_argument("--all", action="store_true", help="for all targets, with limits on what kernels use")
    parser.add_argument("--fresh", action="store_true", help="compile again what is known to compile")
    arguments = parser.parse_args()
    try:
        known = kernel_names()
        if unknown := [name for name in arguments.names if name not in known]:
            raise DeviceError(f"there is no kernel source {unknown[0]!r}; choose of {', '.join(known)}")
        names = arguments.names or known
        return 1 if check(names, arguments.all, arguments.fresh, few_for_amd=not arguments.names) else 0
    except DeviceError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
