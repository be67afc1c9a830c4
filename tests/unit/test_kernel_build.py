"""Which kernels `pyllm kernels build` compiles for a GPU."""

from __future__ import annotations

import pytest

from pyllm import kernel_bench, kernel_build
from pyllm.device.emulated import EmulatedDevice
from pyllm.device.kernel_header import KernelHeader, Variant
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
