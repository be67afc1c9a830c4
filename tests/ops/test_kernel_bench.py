"""The cases of `pyllm kernels bench`, small, on an emulated GPU: each passes, and one that is wrong does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from pyllm import kernel_bench
from pyllm.bench.ceilings import Ceilings
from pyllm.device.base import NotCapturable
from pyllm.device.emulated import EmulatedDevice
from pyllm.errors import DeviceError
from pyllm.kernel_bench import LAUNCHES, BenchCase, Measured, Source, measure, planned, relative_error
from pyllm.kernel_bench_cases import bench_cases
from pyllm.kernel_bench_samples import SMALL
from pyllm.kernel_cases import all_cases
from pyllm.ops.add import ADD
from pyllm.ops.op import Op
from pyllm.quants import QuantType

TYPES = (QuantType.F16, QuantType.Q4_K)


class StubTimer:
    """A run takes a microsecond, and happens."""

    cache_bytes = 1 << 10

    def __init__(self) -> None:
        self.runs = 0

    def seconds(self, launch: Callable[[], Any], capture: bool) -> float:
        launch()
        self.runs += 1
        return 1e-6


@cache
def device() -> EmulatedDevice:
    return EmulatedDevice()


CASES = bench_cases(TYPES, SMALL)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_case_is_right(case: BenchCase) -> None:
    if not device().runs(case.op):
        pytest.skip(f"{case.op.name} has no kernel")
    timer = StubTimer()
    measured = measure(device(), timer, Source(device(), seed=1), case)
    if measured.problem:
        device.cache_clear()  # after an error it is of no use any more
    assert measured.passed, (measured.problem, measured.error, case.limit)
    assert timer.runs == 1 and measured.kernels and measured.traffic > 0


def test_every_op_with_a_kernel_is_measured() -> None:
    """But those that read pinned memory or count their runs."""
    assert {case.op.name for case in all_cases()} - {case.op.name for case in CASES} <= {"check_inputs", "copy_inputs"}


def test_a_wrong_kernel_is_found() -> None:
    case = next(case for case in CASES if case.op is ADD)

    def off(x: Any, y: Any, out: Any) -> list[Any]:
        assert ADD.plan is not None
        return list(ADD.plan(device().target, x, x, out))

    wrong = replace(case, op=Op("add", ADD.reference, lambda target, *arguments: off(*arguments)))
    measured = measure(device(), StubTimer(), Source(device()), wrong)
    assert not measured.passed and measured.error > 0.1


def test_an_output_that_nobody_wrote_is_found() -> None:
    case = next(case for case in CASES if case.op is ADD)
    nothing = replace(case, op=Op("add", ADD.reference, lambda target, *arguments: []))
    assert not measure(device(), StubTimer(), Source(device()), nothing).passed


def test_a_failure_is_a_problem_of_the_case() -> None:
    def fails(source: Source) -> Any:
        raise DeviceError("the GPU stopped: out of memory")

    case = replace(CASES[0], arguments=fails)
    measured = measure(device(), StubTimer(), Source(device()), case)
    assert not measured.passed and measured.problem == "the GPU stopped: out of memory"


def test_launches_are_planned_without_memory() -> None:
    """At full size, 60 GB of arguments: the variants that are compiled before anything is measured."""
    launches = planned(device(), bench_cases(TYPES))
    assert {"mul_mat", "flash_attention", "set_rows"} <= {launch.source for launch in launches}
    keys = {(launch.source, launch.entry, tuple(sorted(launch.defines.items()))) for launch in launches}
    assert len(keys) == len(launches)


def test_errors() -> None:
    exact = np.array([3.0, 4.0])
    assert relative_error(exact.astype(np.float32), exact) == 0
    assert relative_error(np.array([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert relative_error(np.array([3.0, np.nan]), exact) == math.inf
    assert relative_error(exact, np.array([3.0, np.inf])) == math.inf
    assert relative_error(exact[:1], exact) == math.inf
    assert relative_error(np.zeros(2), np.zeros(2)) == 0 and relative_error(np.ones(2), np.zeros(2)) == math.inf


def test_the_ceiling_is_what_takes_longer() -> None:
    ceilings = Ceilings(copy=1e12, gemm=1e14)
    case = replace(CASES[0], flops=1e9)
    measured = Measured(case, ("k",), seconds=1e-4, traffic=1e7, error=0)
    assert measured.bytes_per_second == 1e11 and measured.flops_per_second == pytest.approx(1e13)
    assert measured.bound(ceilings) == "memory" or measured.bound(ceilings) == "math"
    assert measured.share(ceilings) == pytest.approx(max(1e-5, 1e-5) / 1e-4)
    assert replace(measured, traffic=1e8).bound(ceilings) == "memory"
    assert replace(measured, traffic=1e8).share(ceilings) == pytest.approx(1)
    assert replace(measured, traffic=1e6).bound(ceilings) == "math"


class CannotRecord(StubTimer):
    def seconds(self, launch: Callable[[], Any], capture: bool) -> float:
        if capture:
            raise NotCapturable("a library's product")
        return super().seconds(launch, capture)


def test_a_library_that_cannot_be_recorded_is_queued() -> None:
    launch, timer = (lambda: None), CannotRecord()
    assert kernel_bench._timed(device(), timer, launch, uses_library=True) == (1e-6, False)
    assert kernel_bench._timed(device(), StubTimer(), launch, uses_library=True) == (1e-6, True)
    with pytest.raises(NotCapturable):
        kernel_bench._timed(device(), timer, launch, uses_library=False)


def test_sets_of_arguments_take_turns() -> None:
    seen: list[int] = []
    case = next(case for case in CASES if case.op is ADD)
    assert ADD.plan is not None

    def spy(target: Any, x: Any, y: Any, out: Any) -> list[Any]:
        seen.append(out.ctypes.data)
        return list(ADD.plan(target, x, y, out))  # type: ignore[misc]

    measure(device(), StubTimer(), Source(device()), replace(case, op=Op("add", ADD.reference, spy)))
    timed = seen[2:]  # behind the plan and the checked run
    assert len(set(timed)) >= 2 and len(timed) >= LAUNCHES
    assert all(timed.count(address) == timed.count(timed[0]) for address in timed)
