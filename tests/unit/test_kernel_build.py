"""Which kernels `pyllm kernels build` compiles for a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pyllm import kernel_bench, kernel_build
from pyllm.device.emulated import EmulatedDevice
from pyllm.device.kernel_header import KernelHeader, Variant
from pyllm.errors import DeviceError
from pyllm.ops.op import KernelLaunch, Target


def test_variants_of_headers_and_plans_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice()
    device.target = Target("cuda", "sm_90", 32, "mma")
    variants = (Variant({"A": 1}), Variant({"A": 2}, ("sm_90a",)), Variant({"A": 3}, ("gfx942",)))
    monkeypatch.setattr(kernel_build, "kernel_names", lambda: ["rope"])
    monkeypatch.setattr(kernel_build, "read_header", lambda name: KernelHeader(variants))
    launches = [KernelLaunch("rope", "rope", (1,), (1,), (), {"A": value}) for value in (1, 4)]
    monkeypatch.setattr(kernel_bench, "planned", lambda device, cases: launches)
    found = kernel_build.usual_variants(device)  # type: ignore[arg-type]
    assert sorted((launch.defines["A"], launch.arch) for launch in found) == [(1, ""), (2, "sm_90a"), (4, "")]
    device.close()


class StubDevice:
    """Compiles by noting names; some are broken."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def _compile(self, launch: KernelLaunch) -> None:
        self.compiled.append(launch.source)
        if launch.source == "other_entry":
            raise RuntimeError("CUDA_ERROR_NOT_FOUND: named symbol not found")
        if launch.source == "broken":
            raise DeviceError("kernel broken does not compile")
        if launch.source == "crash":
            raise RuntimeError("hipcc fell over\nwith a long story")


def build(monkeypatch: pytest.MonkeyPatch, *sources: str) -> tuple[StubDevice, list[tuple[int, int, str]], int]:
    runtime = SimpleNamespace(getDevice=lambda: 0, setDevice=lambda number: None)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    device, shown = StubDevice(), list[tuple[int, int, str]]()
    launches = [KernelLaunch(source, source, (1,), (1,), ()) for source in sources]
    made: Any = device
    count = kernel_build.build(made, launches, lambda *progress: shown.append(progress), threads=2)
    return device, shown, count


def test_all_are_compiled_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    device, shown, count = build(monkeypatch, "add", "other_entry", "rope")
    assert sorted(device.compiled) == ["add", "other_entry", "rope"] and count == 3
    assert shown == [(1, 3, "add"), (2, 3, "other_entry"), (3, 3, "rope")]


def test_what_does_not_compile_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"^kernel broken does not compile$"):
        build(monkeypatch, "add", "broken")
    with pytest.raises(DeviceError, match=r"^crash: hipcc fell over$"):
        build(monkeypatch, "crash")
