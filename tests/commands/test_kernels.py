"""`pyllm kernels list` and `pyllm kernels test`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from pyllm import kernel_check
from pyllm.commands import main
from pyllm.device.base import Device
from pyllm.device.emulated import EmulatedDevice
from pyllm.device.kernel_source import kernel_names
from pyllm.errors import DeviceError
from pyllm.kernel_check import Case, Verdict


def kernels(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["kernels", *arguments])


def no_gpu() -> None:
    raise DeviceError("there is no GPU")


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_check, "_gpu_devices", no_gpu)


def test_list() -> None:
    shown = kernels("list").stdout.splitlines()
    assert [line.split()[0] for line in shown[1:-2]] == kernel_names()
    (mul_mat,) = (line for line in shown if line.startswith("mul_mat "))
    assert "mul_mat_tile" in mul_mat and "Q4_K" in mul_mat
    assert "gfx1151" in shown[-1]


def test_list_for_programs() -> None:
    shown = json.loads(kernels("list", "--json").stdout)
    by_name = {kernel["name"]: kernel for kernel in shown["kernels"]}
    assert sorted(by_name) == kernel_names()
    assert by_name["rope"] == {
        "name": "rope",
        "entries": ["rope_table", "rope"],
        "ops": ["rope", "rope_table"],
        "block_types": [],
    }
    assert all(kernel["entries"] and kernel["ops"] for kernel in shown["kernels"])
    assert "gfx942" in shown["targets"]


@pytest.mark.usefixtures("without_gpu")
def test_test_says_what_it_ran_on() -> None:
    result = kernels("test", "rope_table", "--seed", "3")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) == 1 + 3 * 2 and all(line.endswith("yes") for line in lines[1:])
    assert result.stderr.splitlines() == [
        "Left out: there is no GPU",
        "6 passed, 0 failed; ran on emulated GPU (waves of 32, mma), emulated GPU (waves of 32, wmma), "
        "emulated GPU (waves of 64, mfma)",
    ]


@pytest.mark.usefixtures("without_gpu")
def test_a_kernel_stands_for_all_its_ops() -> None:
    assert {line.split()[1] for line in kernels("test", "rope").stdout.splitlines()[1:]} == {"rope", "rope_table"}


def test_kernels_of_hopper_name_all_their_ops() -> None:
    ops = {kernel["name"]: kernel["ops"] for kernel in json.loads(kernels("list", "--json").stdout)["kernels"]}
    for name in ("arrange_x", "mul_mat_wgmma", "mul_mat_wgmma_direct"):
        assert ops[name] == ["linear", "mul_mat"]
    assert ops["mul_mat_id_wgmma"] == ["gated_mul_mat_id", "mul_mat_id"]


@pytest.mark.parametrize("name", ["arrange_x", "mul_mat_wgmma_direct"])
def test_kernels_of_hopper_are_emulated_as_that(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On the other emulated GPUs no case would launch them."""
    launched = set()

    def check(device: Device, case: Case, seed: int) -> Verdict:
        assert isinstance(device, EmulatedDevice) and case.op.plan is not None
        launched.update(launch.source for launch in case.op.plan(device.target, *case.draw(seed)))
        return Verdict(0.0, 1.0)

    monkeypatch.setattr(kernel_check, "check_case", check)
    result = kernels("test", name, "--device", "emulated")
    assert result.exit_code == 0 and "ran on emulated GPU (Hopper)" in result.stderr
    assert name in launched


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("verdict", [Verdict(2.0, 1.0), Verdict(0.0, 1.0, "it broke")])
def test_failures(monkeypatch: pytest.MonkeyPatch, verdict: Verdict) -> None:
    monkeypatch.setattr(kernel_check, "check_case", lambda device, case, seed: verdict)
    result = kernels("test", "softcap", "--device", "emulated")
    assert result.exit_code == 1
    assert result.stdout.count("NO\n") == 6
    problem = verdict.problem or "the error is too large"
    assert f"emulated-64: softcap: 3x97: {problem}\n" in result.stderr
    assert "0 passed, 6 failed" in result.stderr


def test_unknown_names_get_the_list() -> None:
    result = kernels("test", "nope")
    assert result.exit_code == 2 and result.stdout == ""
    assert "choose one of add, " in result.stderr and "rope_table" in result.stderr


@pytest.mark.usefixtures("without_gpu")
def test_nothing_to_run_on() -> None:
    result = kernels("test", "add", "--device", "gpu")
    assert result.exit_code == 1 and result.stderr == "Error: there is no GPU\n"
