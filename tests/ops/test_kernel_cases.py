"""The cases of `pyllm kernels test`, on every device that runs kernels."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import pyllm.ops
from pyllm.device import Device
from pyllm.device.emulated import EmulatedDevice
from pyllm.kernel_cases import all_cases, planned_kernels
from pyllm.kernel_check import Case, check_case, convert, expected
from pyllm.ops.add import ADD
from pyllm.ops.op import KernelLaunch, Op
from tests.ops.lives import LIVES

SMALL = [case for case in all_cases() if not case.large]
LARGE = [case for case in all_cases() if case.large]
REPEATS = 20


@pytest.fixture(params=[life for life in LIVES if life != "cpu"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = LIVES[request.param]()
    yield device
    device.close()


def first_of_each_kernel() -> set[Case]:
    found: dict[str, Case] = {}
    for case in SMALL:
        for _, entry in planned_kernels(case):
            found.setdefault(entry, case)
    return set(found.values())


FIRST = first_of_each_kernel()


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_case(device: Device, case: Case) -> None:
    """Right, and 20 runs give the same bits; when emulated, one case of each kernel is repeated so often."""
    often = device.name == "gpu" or case in FIRST
    verdict = check_case(device, case, repeats=REPEATS if often else 1)
    assert verdict.passed, verdict


@pytest.mark.skipif("gpu" not in LIVES, reason="sizes of real models are for a GPU (make test-gpu)")
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_case_on_gpu(case: Case) -> None:
    device = LIVES["gpu"]()
    verdict = check_case(device, case, repeats=REPEATS)
    device.close()
    assert verdict.passed, verdict


def test_every_op_with_a_kernel_has_cases() -> None:
    modules = [import_module(f"pyllm.ops.{path.stem}") for path in Path(pyllm.ops.__file__).parent.glob("*.py")]
    ops = {value for module in modules for value in vars(module).values() if isinstance(value, Op) and value.plan}
    counts = {op.name: sum(case.op is op for case in all_cases()) for op in ops}
    assert len(counts) > 10 and min(counts.values()) >= 2, counts


def test_the_same_seed_draws_the_same_arguments() -> None:
    for case in SMALL:
        drawn: list[list[bytes]] = [[], []]
        for taken, seed in zip(drawn, (3, 3), strict=True):
            convert(case.draw(seed), lambda array, taken=taken: taken.append(array.tobytes()))
        assert drawn[0] == drawn[1]


def wrong_add(line: str, folder: Path) -> Case:
    """An addition with something wrong in it."""
    source = folder / "wrong.cu"
    source.write_text(
        '#include "common/platform.cuh"\n'
        "KERNEL(64) wrong(const float* x, const float* y, float* out, u32* state, i32 n) {\n"
        f"    const int i = threadIdx.x;\n    {line}\n}}\n"
    )
    state = np.zeros(1, np.uint32)
    memory: list[object] = []

    def plan(target: object, x: object, y: object, out: object) -> list[KernelLaunch]:
        args = (x, y, out, memory[0], np.int32(33))
        return [KernelLaunch(str(source), "wrong", (1,), (64,), args)]

    def arguments(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        return tuple(rng.standard_normal((3, 33), np.float32))

    case = Case(Op("wrong", ADD.reference, plan), "wrong", arguments, (2,), floor=None)
    memory.append(state)
    return case


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("if (i < n) out[i] = x[i] + y[i];", None),
        ("if (i < n) out[i] = x[i] + y[i] + 1e-6f;", ""),
        ("if (i < n - 1) out[i] = x[i] + y[i]; else if (i < n) out[i] = NAN_F;", ""),
        ("if (i < n) out[i] = x[i] + y[i] + state[0]; BARRIER(); if (i == 0) state[0]++;", "run 2 gave other bits"),
        ("if (i < n + 1) out[i] = i < n ? x[i] + y[i] : 0;", "outside its arrays"),
        ("if (i < n) out[i] = x[i] +;", "wrong.cu"),
    ],
)
def test_what_is_wrong_is_found(line: str, problem: str | None, tmp_path: Path) -> None:
    device = EmulatedDevice()
    case = wrong_add(line, tmp_path)
    verdict = check_case(device, case)
    assert verdict.passed == (problem is None)
    assert (problem or "") in verdict.problem and bool(problem) == bool(verdict.problem)
    if not verdict.problem:
        device.close()


def test_limits_are_small() -> None:
    """A limit that a wrong kernel could meet would be of no use."""
    for case in SMALL:
        exact, limit = expected(case, case.draw(0))
        largest = max(
            np.abs(array.astype(np.float64)).max() for array in exact if array.dtype.kind == "f" or limit == 0
        )
        assert limit <= 2e-3 * max(1.0, largest), (str(case), limit, largest)
