"""A GPU that cannot be used is one clear sentence each; no GPU is needed to see them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pyllm.device import gpu, open_device
from pyllm.device.gpu import find_target, import_cupy
from pyllm.errors import DeviceError


def fake_cupy(monkeypatch: pytest.MonkeyPatch, get_device_count: Any) -> None:
    runtime = SimpleNamespace(getDeviceCount=get_device_count)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(DeviceError) as raised:
        call(*args)
    assert "\n" not in str(raised.value)
    assert "--device cpu" in str(raised.value)
    return str(raised.value)


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "pyllm[cuda12]" in refused(import_cupy)
    assert open_device("auto").name == "cpu"


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver: driver version is insufficient")

    fake_cupy(monkeypatch, no_driver)
    assert "insufficient" in refused(import_cupy)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy(monkeypatch, lambda: 0)
    assert "no GPU" in refused(import_cupy)


def test_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.shutil, "which", lambda name: f"/opt/rocm/bin/{name}")
    nvidia = find_target({"major": 9, "minor": 0}, is_hip=False)
    assert (nvidia.vendor, nvidia.arch, nvidia.warp_size, nvidia.tiles) == ("cuda", "sm_90", 32, "mma")
    strix = find_target({"gcnArchName": b"gfx1151"}, is_hip=True)
    assert (strix.vendor, strix.arch, strix.warp_size, strix.tiles) == ("hip", "gfx1151", 32, "wmma")
    instinct = find_target({"gcnArchName": b"gfx942:sramecc+:xnack-"}, is_hip=True)
    assert (instinct.arch, instinct.warp_size, instinct.tiles) == ("gfx942", 64, "mfma")


def test_gpus_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.shutil, "which", lambda name: f"/opt/rocm/bin/{name}")
    assert "sm_75" in refused(find_target, {"major": 7, "minor": 5}, False)
    assert "gfx1030" in refused(find_target, {"gcnArchName": b"gfx1030"}, True)
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    assert "hipcc" in refused(find_target, {"gcnArchName": b"gfx1151"}, True)
