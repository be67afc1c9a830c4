"""`pyllm kernels bench`: how fast the kernels are, next to what this GPU can do."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from pyllm.commands import INTERRUPTED
from pyllm.commands.console import note, one_line, progress_bar
from pyllm.commands.table import markdown_table

if TYPE_CHECKING:
    from pyllm.bench.ceilings import Ceilings
    from pyllm.kernel_bench import BenchCase, Measured

_HEADER = ("op", "case", "kernel", "time", "GB/s", "of copy", "TFLOP/s", "of product", "bound", "of bound", "error")


@click.command("bench")
@click.argument("name", required=False)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Draws the inputs.")
@click.option("--early", is_flag=True, help="Let each launch start while the one before it ends, as in decode steps.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, name: str | None, seed: int, early: bool, as_json: bool) -> None:
    """Measure the op NAME, or all of them, at sizes of real models. Needs a GPU.

    Times are medians by the GPU's events, without the host's part; several sets of inputs take turns, so that none is
    in the cache. GB/s counts each input once and each output once. Rates are shown next to those of a large copy and of
    a large float16 product of the vendor's library, measured in the same run. "bound" says which of the two a perfect
    kernel would run into; "of bound" how near it is. "error" is the distance of a sample of the outputs from a float64
    computation, relative to its length; the status is 1 when one is too large. "queued": launched one by one instead
    of recorded, so the host may be what takes the time.

    \b
    pyllm kernels bench
    pyllm kernels bench mul_mat --json
    pyllm kernels bench gated_delta_rule --early
    """
    ctx.exit(run(name, seed, as_json, early))


def run(name: str | None, seed: int, as_json: bool, early: bool = False) -> int:
    """Measure, print; returns the exit status."""
    from pyllm.bench.ceilings import measure_ceilings
    from pyllm.device.gpu import GpuDevice
    from pyllm.kernel_bench import GpuTimer, Source, measure, planned
    from pyllm.kernel_bench_cases import bench_cases
    from pyllm.kernel_build import build

    device = GpuDevice(poison=False)
    results: list[Measured] = []
    status = 0
    try:
        cases = chosen([case for case in bench_cases(tuple(device.weight_types)) if device.runs(case.op)], name)
        with progress_bar("compiling", "kernel") as progress:
            began = time.monotonic()
            count = build(device, planned(device, cases), progress)
        note(f"{count} kernels compiled in {time.monotonic() - began:.0f} s")
        ceilings = measure_ceilings(with_gemm=True)
        timer, source = GpuTimer(device, early), Source(device, seed)
        with progress_bar("measuring", "case") as progress:
            for index, case in enumerate(cases):
                progress(index, len(cases), str(case))
                results.append(measure(device, timer, source, case))
                if results[-1].problem.startswith("the GPU stopped"):
                    break  # it answers nothing any more
    except KeyboardInterrupt:
        note("Interrupted")
        status = INTERRUPTED
    finally:
        description = device.description
        _close(device)
    if results:
        show = as_object if as_json else as_table
        click.echo(show(description, ceilings, results))
    return status or report_failures(results)


def _close(device: Any) -> None:
    from contextlib import suppress

    from pyllm.errors import DeviceError

    with suppress(DeviceError):  # it has been reported
        device.close()


def chosen(cases: Sequence[BenchCase], name: str | None) -> list[BenchCase]:
    """The cases of an op; all for None.

    Raises:
        UsageError: there is no such op.
    """
    from pyllm.errors import UsageError

    found = [case for case in cases if name in (None, case.op.name)]
    if not found:
        known = ", ".join(sorted({case.op.name for case in cases}))
        raise UsageError(f"there is no op {name!r} to measure; choose one of {known}")
    return found


def report_failures(results: Sequence[Measured]) -> int:
    """A line for each case that failed; returns the exit status."""
    wrong = [measured for measured in results if not measured.passed]
    for measured in wrong:
        limit = measured.case.limit
        note(f"{measured.case}: {measured.problem or f'the error is {measured.error:.2g}, accepted is {limit:.2g}'}")
    note(f"{len(results) - len(wrong)} cases right, {len(wrong)} wrong")
    return 1 if wrong else 0


def as_table(description: str, ceilings: Ceilings, results: Sequence[Measured]) -> str:
    """The table for people."""
    from pyllm.bench.machine import describe_machine, pyllm_version

    copy, product = f"{ceilings.copy / 1e9:,.0f} GB/s", f"{ceilings.gemm / 1e12:,.0f} TFLOP/s"
    rows = [_HEADER, *(_row(measured, ceilings) for measured in results)]
    lines = [
        one_line(f"- machine: {describe_machine('gpu', description)}"),
        f"- version: {pyllm_version()}",
        f"- copy: {copy}, read and written; float16 product: {product}",
        "",
        *markdown_table(rows, right=range(3, 11)),
    ]
    return "\n".join(lines)


def _row(measured: Measured, ceilings: Ceilings) -> tuple[str, ...]:
    case, kernels = measured.case, " ".join(measured.kernels) + ("" if measured.recorded else " (queued)")
    if measured.problem:
        return (case.op.name, case.name, kernels, *["-"] * 7, "FAILED")
    math_rate = ("-", "-")
    if case.flops:
        rate = measured.flops_per_second
        math_rate = f"{rate / 1e12:,.1f}", f"{rate / ceilings.gemm:.1%}"
    return (
        case.op.name,
        case.name,
        kernels,
        _time(measured.seconds),
        f"{measured.bytes_per_second / 1e9:,.0f}",
        f"{measured.bytes_per_second / ceilings.copy:.1%}",
        *math_rate,
        measured.bound(ceilings),
        f"{measured.share(ceilings):.1%}",
        f"{measured.error:.1e}" + ("" if measured.passed else " WRONG"),
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"


def as_object(description: str, ceilings: Ceilings, results: Sequence[Measured]) -> str:
    """The JSON object for programs."""
    from pyllm.bench.machine import describe_machine, pyllm_version

    shown = {
        "machine": describe_machine("gpu", description),
        "version": pyllm_version(),
        "copy_bytes_per_second": ceilings.copy,
        "product_flops_per_second": ceilings.gemm,
        "cases": [_case_object(measured, ceilings) for measured in results],
    }
    return json.dumps(shown)


def _case_object(measured: Measured, ceilings: Ceilings) -> dict[str, Any]:
    case = measured.case
    return {
        "op": case.op.name,
        "case": case.name,
        "kernels": list(measured.kernels),
        "passed": measured.passed,
        "problem": measured.problem or None,
        "seconds": _finite(measured.seconds),
        "recorded": measured.recorded,
        "bytes": measured.traffic,
        "flops": case.flops,
        "bound": measured.bound(ceilings),
        "share": _finite(measured.share(ceilings)),
        "error": _finite(measured.error),
        "error_limit": case.limit,
    }


def _finite(value: float) -> float | None:
    """JSON has neither infinities nor NaN: null stands for them."""
    return value if math.isfinite(value) else None
