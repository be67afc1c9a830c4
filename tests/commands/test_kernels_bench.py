"""`pyllm kernels bench` and `pyllm kernels build`, with an emulated GPU and a stub clock in the place of a real one."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pyllm import kernel_bench, kernel_bench_cases, kernel_build
from pyllm.bench import ceilings, machine
from pyllm.commands import main
from pyllm.device import gpu
from pyllm.device.emulated import EmulatedDevice
from pyllm.device.kernel_header import read_header
from pyllm.device.kernel_source import kernel_names
from pyllm.kernel_bench_samples import SMALL
from pyllm.quants import QuantType


class StubTimer:
    cache_bytes = 0

    def __init__(self, device: object, early: bool = False) -> None:
        pass

    def seconds(self, launch: Callable[[], Any], capture: bool) -> float:
        launch()
        return 1e-5


@pytest.fixture
def stub_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(**options: object) -> EmulatedDevice:
        device = EmulatedDevice()
        device.weight_types = frozenset({QuantType.Q8_0})
        return device

    cases = kernel_bench_cases.bench_cases
    monkeypatch.setattr(gpu, "GpuDevice", opened)
    monkeypatch.setattr(kernel_bench, "GpuTimer", StubTimer)
    monkeypatch.setattr(kernel_bench_cases, "bench_cases", lambda types: cases(types, SMALL))
    monkeypatch.setattr(kernel_build, "build", lambda device, launches, progress, threads=None: len(launches))
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda with_gemm: ceilings.Ceilings(4e12, 7e14))
    monkeypatch.setattr(machine, "describe_machine", lambda name, description: f"stub, {description}")


def kernels(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["kernels", *arguments])


@pytest.mark.usefixtures("stub_gpu")
def test_a_table_for_people() -> None:
    result = kernels("bench", "add")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "- machine: stub, emulated GPU (waves of 32, mma)"
    assert lines[2] == "- copy: 4,000 GB/s, read and written; float16 product: 700 TFLOP/s"
    (first, _) = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| add")]
    assert first[0] == "add" and first[1].endswith("x 256") and first[8] == "memory" and first[10] == "0.0e+00"
    assert result.stderr.splitlines()[-1] == "2 cases right, 0 wrong"


@pytest.mark.usefixtures("stub_gpu")
def test_one_object_for_programs() -> None:
    found = json.loads(kernels("bench", "decode_rows", "--json").stdout)
    assert found["copy_bytes_per_second"] == 4e12 and found["product_flops_per_second"] == 7e14
    (case,) = found["cases"]
    assert case["op"] == "decode_rows" and case["kernels"] == ["decode_rows"] and case["passed"] is True
    assert 0 < case["seconds"] < 1e-5 and case["error"] == 0 and case["problem"] is None


@pytest.mark.usefixtures("stub_gpu")
def test_a_wrong_kernel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "relative_error", lambda found, exact: float("inf"))
    result = kernels("bench", "decode_rows")
    assert result.exit_code == 1 and "inf WRONG" in result.stdout
    _, first, last = result.stderr.splitlines()
    assert first.startswith("decode_rows: Q8_0") and first.endswith("the error is inf, accepted is 0")
    assert last == "0 cases right, 1 wrong"
    assert json.loads(kernels("bench", "decode_rows", "--json").stdout)["cases"][0]["error"] is None


@pytest.mark.usefixtures("stub_gpu")
def test_an_op_that_is_not_there() -> None:
    result = kernels("bench", "nothing")
    assert result.exit_code == 2 and "there is no op 'nothing' to measure; choose one of add, " in result.stderr


@pytest.mark.usefixtures("stub_gpu")
def test_ctrl_c_prints_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = kernel_bench.measure, []

    def measure(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(kernel_bench, "measure", measure)
    result = kernels("bench", "add")
    assert result.exit_code == 130 and result.stdout.count("\n| add |") == 1


def test_without_a_gpu_it_says_so() -> None:
    if importlib.util.find_spec("cupy"):
        pytest.skip("CuPy is installed")
    for command in ("bench", "build"):
        result = kernels(command)
        assert result.exit_code == 1 and result.stdout == ""
        assert result.stderr.startswith("Error: CuPy cannot be loaded") and len(result.stderr.splitlines()) == 1


@pytest.mark.usefixtures("stub_gpu")
def test_build_says_what_it_did() -> None:
    result = kernels("build")
    assert result.exit_code == 0 and result.stdout == "", result.stderr
    listed = sum(variant.is_for("host") for name in kernel_names() for variant in read_header(name).variants)
    count, _, rest = result.stderr.partition(" ")
    assert int(count) >= listed and rest.startswith("kernels for emulated GPU (waves of 32, mma) are compiled, in ")
