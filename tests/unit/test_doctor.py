"""The checks of `pyllm doctor`: trials on devices that are here, and on stubs that are wrong; a stub of CuPy."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyllm.device.emulated import EmulatedDevice
from pyllm.device.host import HostDevice
from pyllm.doctor import gpu, host, trial
from pyllm.doctor.finding import Check, Finding, guarded


@pytest.fixture(params=[HostDevice, EmulatedDevice], ids=["cpu", "emulated"])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = request.param()
    yield made
    made.close()


def test_trials_pass_on_devices_that_work(device: Any) -> None:
    assert trial.sum_is_right(device)
    assert trial.reads_pinned_memory(device)
    assert trial.copies_asynchronously(device) == ""
    assert trial.replays_graphs(device)


class WrongSums(HostDevice):
    def download(self, array: np.ndarray) -> np.ndarray:
        found = super().download(array)
        found.flat[-1] = np.nan
        return found


class EagerCopies(HostDevice):
    """Copies at once, whatever is queued before."""

    def copy_to_pinned(self, source: np.ndarray, target: np.ndarray) -> None:
        ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)


class WrongCopies(HostDevice):
    def copy_to_pinned(self, source: np.ndarray, target: np.ndarray) -> None:
        super().copy_to_pinned(source + 1, target)


def on(made: HostDevice, run: Callable[[Any], Any]) -> Any:
    try:
        return run(made)
    finally:
        made.close()


def test_trials_see_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYLLM_CHECK", "0")  # these devices copy what is not theirs: assertions would see it first
    for run in (trial.sum_is_right, trial.reads_pinned_memory, trial.replays_graphs):
        assert on(WrongSums(), run) is False
    assert "did not wait" in on(EagerCopies(), trial.copies_asynchronously)
    assert "other bytes" in on(WrongCopies(), trial.copies_asynchronously)


def test_a_check_that_raises_is_a_finding() -> None:
    def broken() -> Iterator[Finding]:
        yield Finding("a", "ok", "first")
        raise RuntimeError("second\nwith more lines")

    first, second = guarded(Check("a", broken))
    assert first.status == "ok" and second.status == "fail"
    assert second.found == "RuntimeError: second" and second.advice


def findings(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    return list(guarded(Check("x", check)))


def test_packages_that_are_old_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["numpy>=2.0", "gguf >=99", "nothing-like-this", 'ruff>=0.8; extra == "dev"']
    monkeypatch.setattr(host.importlib.metadata, "requires", lambda name: wanted)
    (finding,) = findings(host.packages)
    assert finding.status == "fail" and "nothing-like-this is missing" in finding.found
    assert "is older than 99" in finding.found and "ruff" not in finding.found and finding.advice


def test_little_memory_and_little_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "_available_memory", lambda: 1 << 30)
    (memory,) = findings(host.memory)
    assert memory.status == "warn" and "1.1 GB available" in memory.found
    monkeypatch.setattr(host.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    assert all(finding.status == "warn" and finding.advice for finding in findings(host.disks))
    assert host._disk("x", tmp_path / "not" / "yet" / "there").check == "disk, x"


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4096")
    (finding,) = findings(host.cpu)
    assert finding.status == "warn" and "OPENBLAS_NUM_THREADS=4096" in finding.found


def test_poison_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYLLM_POISON", "1")
    (finding,) = findings(host.settings)
    assert finding.status == "warn" and "PYLLM_POISON=1" in finding.found


# a stub of CuPy


def stub_cupy(count: Callable[[], int], is_hip: bool = False) -> Any:
    runtime = SimpleNamespace(is_hip=is_hip, getDeviceCount=count, runtimeGetVersion=lambda: 13000)
    nvrtc = SimpleNamespace(getVersion=lambda: (13, 0))
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, nvrtc=nvrtc, get_cuda_path=lambda: None))


@pytest.fixture
def no_drivers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("_NVIDIA_DRIVER", "_AMD_DRIVER"):
        monkeypatch.setattr(gpu, name, tmp_path / name)
    return tmp_path


def test_cupy_is_missing(monkeypatch: pytest.MonkeyPatch, no_drivers: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(gpu, "_cupy_builds", lambda: iter(()))
    (finding,) = findings(gpu.cupy_packages)
    assert finding.status == "warn" and "pip install" in finding.advice
    assert findings(gpu.compilers) == [] and findings(gpu.gpus) == []


def test_cupy_twice_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_cupy_builds", lambda: iter(("cupy-cuda12x 14.2", "cupy-cuda13x 14.2")))
    (finding,) = findings(gpu.cupy_packages)
    assert finding.status == "fail" and "uninstall all of them but one" in finding.advice
    monkeypatch.setattr(gpu, "_cupy_builds", lambda: iter(("cupy-cuda12x 14.2",)))
    monkeypatch.setitem(sys.modules, "cupy", None)
    (finding,) = findings(gpu.cupy_packages)
    assert finding.status == "fail" and "cannot be loaded" in finding.found


def test_cupy_says_what_it_is_for(monkeypatch: pytest.MonkeyPatch, no_drivers: Path) -> None:
    monkeypatch.setattr(gpu, "_cupy_builds", lambda: iter(("cupy-cuda13x 14.2",)))
    monkeypatch.setitem(sys.modules, "cupy", stub_cupy(lambda: 1))
    (finding,) = findings(gpu.cupy_packages)
    assert finding.status == "ok" and finding.found == "cupy-cuda13x 14.2, for CUDA 13.0"
    (compiler,) = findings(gpu.compilers)
    assert compiler.found == "NVRTC 13.0, no CUDA toolkit (none is needed)"


def test_hipcc_is_missing(monkeypatch: pytest.MonkeyPatch, no_drivers: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", stub_cupy(lambda: 1, is_hip=True))
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    (finding,) = findings(gpu.compilers)
    assert finding.check == "hipcc" and finding.status == "fail" and "/opt/rocm/bin" in finding.advice


def no_driver() -> int:
    raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, no_drivers: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", stub_cupy(no_driver))
    (finding,) = findings(gpu.gpus)
    assert finding.status == "warn" and "cudaErrorNoDevice" in finding.found
    (no_drivers / "_NVIDIA_DRIVER").touch()
    (finding,) = findings(gpu.gpus)
    assert finding.status == "fail"


def test_a_gpu_that_breaks_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(cupy: Any, index: int) -> Iterator[Finding]:
        yield Finding(f"gpu {index}", "ok", "a GPU")
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setitem(sys.modules, "cupy", stub_cupy(lambda: 2))
    monkeypatch.setattr(gpu, "_gpu", breaks)
    assert [(finding.check, finding.status) for finding in findings(gpu.gpus)] == [
        ("gpu 0", "ok"),
        ("gpu 0", "fail"),
        ("gpu 1", "ok"),
        ("gpu 1", "fail"),
    ]


def test_gpus_that_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES", raising=False)
    (finding,) = findings(gpu.visible_devices)
    assert finding.status == "warn" and "unset it" in finding.advice
