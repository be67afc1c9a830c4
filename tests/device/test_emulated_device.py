"""The emulated device: what it refuses, what it watches, what it compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyllm.device import open_device
from pyllm.device.emulated import EmulatedDevice
from pyllm.device.emulation import compiler
from pyllm.errors import DeviceError, UsageError
from pyllm.ops.op import KernelLaunch, Op
from pyllm.ops.rms_norm import RMS_NORM
from pyllm.quants import QuantType
from tests.device.throwaway import Throwaway

COPY = "KERNEL(64) probe(const float* x, float* out, i32 first) { (out + first)[threadIdx.x] = x[threadIdx.x]; }"


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice()
    yield device
    device.close()


@pytest.fixture
def copier(device: EmulatedDevice, tmp_path: Path) -> Throwaway:
    return Throwaway(tmp_path, device)


def test_open_device_knows_it() -> None:
    device = open_device("emulated")
    assert device.name == "emulated"
    device.close()


def test_it_runs_a_kernel_of_an_op() -> None:
    device = EmulatedDevice(64)
    x = np.random.default_rng(0).standard_normal((5, 97)).astype(np.float32)
    weight = np.linspace(0.5, 2, 97, dtype=np.float32)
    out = device.empty(x.shape, np.float32)
    device.launch(RMS_NORM, device.upload(x), device.upload(weight), 1e-5, out, False)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(device.download(out), expected, rtol=1e-6)
    device.close()


def test_an_op_without_a_kernel_is_refused(device: EmulatedDevice) -> None:
    with pytest.raises(DeviceError, match="op double has no kernel"):
        device.launch(Op("double", lambda x: None), device.empty((3,), np.float32))


def test_weights_stay_packed(device: EmulatedDevice) -> None:
    rows = np.arange(2 * 18, dtype=np.uint8).reshape(2, 18)
    array, qtype = device.upload_weight(rows, QuantType.Q4_0, (2, 32))
    assert (device.download(array) == rows).all() and qtype == QuantType.Q4_0
    floats = np.ones((2, 3), np.float32)
    array, qtype = device.upload_weight(floats.view(np.uint8), QuantType.F32, (2, 3))
    assert (device.download(array) == floats).all() and qtype == QuantType.F32


def test_scalars_are_values_of_the_launch_and_buffers_are_not(copier: Throwaway) -> None:
    device = copier.device
    x, out = device.upload(np.zeros(64, np.float32)), device.upload(np.zeros(64, np.float32))
    first = np.zeros(1, np.int32)
    gate = device.stream.gate()
    copier.launch(COPY, x, out, first[0], block=(64,))
    first[0], x[:] = 1000, 7
    gate.open()
    assert (device.download(out) == 7).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda x: (x, x), "has 3 parameters; it was launched with 2"),
        (lambda x: (x, x, 0), "argument 3 .* is a int; expected a NumPy scalar, int32"),
        (lambda x: (x, x, np.int64(0)), "argument 3 .* is int64; the kernel takes int32"),
        (lambda x: (x, x, np.uint32(0)), "argument 3 .* is uint32; the kernel takes int32"),
        (lambda x: (x, None, np.int32(0)), "argument 2 .* is a NoneType; expected an array"),
        (lambda x: (x.view(np.int32), x, np.int32(0)), "argument 1 .* array of int32; the kernel takes float32"),
        (lambda x: (x[::2], x, np.int32(0)), "argument 1 .* not C-contiguous"),
        (lambda x: (x, np.broadcast_to(x[:1], 1), np.int32(0)), "argument 2 .* read-only"),
    ],
)
def test_arguments_that_do_not_fit(copier: Throwaway, arguments, message: str) -> None:
    x = copier.device.upload(np.zeros(128, np.float32))
    with pytest.raises(DeviceError, match=message):
        copier.launch(COPY, *arguments(x), block=(64,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": (65,)}, "65 threads a block; it allows 1 to 64"),
        ({"grid": (1, 70000)}, "grid of"),
        ({"shared_bytes": 65537}, "65537 bytes of shared memory"),
    ],
)
def test_extents_that_no_gpu_allows(copier: Throwaway, options, message: str) -> None:
    x = copier.device.upload(np.zeros(128, np.float32))
    with pytest.raises(DeviceError, match=message):
        copier.launch(COPY, x, x, np.int32(0), **options)


@pytest.mark.parametrize(("first", "where"), [(40, "0 bytes behind the end"), (-5, "20 bytes before the start")])
def test_a_write_outside_an_array_is_reported(copier: Throwaway, first: int, where: str) -> None:
    device = copier.device
    x = device.upload(np.zeros(64, np.float32))
    out = device.upload(np.zeros(100, np.float32))
    copier.launch(COPY, x, out, np.int32(first), block=(64,))
    with pytest.raises(DeviceError, match=rf"kernel probe wrote outside its arrays: {where} of an allocation of 400"):
        device.synchronize()


def test_without_checks_after_launches_the_download_finds_it(tmp_path: Path) -> None:
    device = EmulatedDevice(check_guards=False)
    out = device.upload(np.zeros(64, np.float32))
    Throwaway(tmp_path, device).launch(COPY, out, out, np.int32(1), block=(64,))
    device.synchronize()
    with pytest.raises(DeviceError, match="wrote outside its arrays"):
        device.download(out)
    device.close()


def test_closing_finds_it_too(tmp_path: Path) -> None:
    device = EmulatedDevice(check_guards=False)
    out = device.upload(np.zeros(64, np.float32))
    Throwaway(tmp_path, device).launch(COPY, out, out, np.int32(1), block=(64,))
    device.synchronize()
    with pytest.raises(DeviceError, match="wrote outside its arrays"):
        device.close()
    device.close()


def test_memory_is_reused_behind_work_and_guarded_again(copier: Throwaway) -> None:
    device = copier.device
    for _ in range(3):
        x, out = device.upload(np.ones(64, np.float32)), device.empty((64,), np.float32)
        copier.launch(COPY, x, out, np.int32(0), block=(64,))
        device.release(x)
        assert (device.download(out) == 1).all()
        device.release(out)
    device.synchronize()
    assert device.memory.high_water <= 6 * 1024


def test_compile_errors_name_file_and_line(copier: Throwaway) -> None:
    with pytest.raises(
        DeviceError, match=r"kernel probe does not compile for the host: .*probe0.cu:3:\d+: error: .*oops"
    ):
        copier.launch("KERNEL(32) probe(i32* out) {\n oops;\n}", np.zeros(1, np.int32))


def test_an_error_in_a_header_names_the_header(copier: Throwaway) -> None:
    (copier.folder / "own.cuh").write_text("\n#error nothing here\n")
    with pytest.raises(DeviceError, match=r"own.cuh:2:\d+: error: .*nothing here"):
        copier.launch('#include "own.cuh"\nKERNEL(32) probe(i32* out) {}', np.zeros(1, np.int32))


def test_unknown_sources_entries_and_headers(device: EmulatedDevice, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"kernel source .*no_such.cu cannot be read"):
        device.launch_kernel(KernelLaunch("no_such", "no_such", (1,), (1,), ()))
    with pytest.raises(DeviceError, match=r"rawkernels/rms_norm.cu defines no kernel other"):
        device.launch_kernel(KernelLaunch("rms_norm", "other", (1,), (1,), ()))
    (tmp_path / "a.cu").write_text('#include "b.cuh"\n')
    (tmp_path / "b.cuh").write_text('#include "b.cuh"\n')
    with pytest.raises(DeviceError, match=r"include each other in a circle: .*a.cu includes .*b.cuh includes .*b.cuh"):
        device.launch_kernel(KernelLaunch(str(tmp_path / "a.cu"), "a", (1,), (1,), ()))


def test_an_edited_header_is_compiled_again(tmp_path: Path) -> None:
    header = tmp_path / "value.cuh"
    path = tmp_path / "probe.cu"
    path.write_text('#include "common/platform.cuh"\n#include "value.cuh"\nKERNEL(1) probe(i32* out) { *out = VALUE; }')
    for value in (1, 2):
        header.write_text(f"#define VALUE {value}\n")
        device = EmulatedDevice()
        out = device.upload(np.zeros(1, np.int32))
        device.launch_kernel(KernelLaunch(str(path), "probe", (1,), (1,), (out,)))
        assert device.download(out)[0] == value
        device.close()


def test_kernels_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = compiler.host_compiler().library("some", "int some;")
    before = built.stat()
    assert built.is_relative_to(tmp_path / "pyllm" / "kernels")
    assert compiler.host_compiler().library("some", "int some;") == built
    assert built.stat().st_mtime_ns == before.st_mtime_ns
    assert compiler.host_compiler().library("some", "int other;") != built
    assert not list(built.parent.glob(".*"))


def test_a_cache_that_cannot_be_written_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyllm").write_text("a file, where a folder is wanted: root may write to any folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = compiler.host_compiler().library("some", "int some;")
    assert built.is_file() and not built.is_relative_to(tmp_path)


def test_no_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.host_compiler.cache_clear()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(DeviceError, match=r"neither g\+\+ nor clang\+\+ is on the PATH; install g\+\+"):
        compiler.host_compiler()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DeviceError, match="CXX=no-such-compiler cannot be run"):
        compiler.host_compiler()


@pytest.mark.parametrize(("warp_size", "tiles"), [(64, "mma"), (32, "mfma"), (16, None), (32, "other")])
def test_gpus_that_do_not_exist(warp_size: int, tiles: str | None) -> None:
    with pytest.raises(UsageError, match="no GPU has tiles"):
        EmulatedDevice(warp_size, tiles)


def test_the_seed_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYLLM_EMULATION_SEED", "many")
    with pytest.raises(UsageError, match="PYLLM_EMULATION_SEED is 'many'"):
        EmulatedDevice()


def test_two_processes_build_the_same_kernel_at_once(tmp_path: Path) -> None:
    program = (
        "from pyllm.device.emulated import EmulatedDevice; from pyllm.ops.op import KernelLaunch; import numpy as np;"
        "d = EmulatedDevice(); x = d.upload(np.ones(8, np.float32));"
        "d.launch_kernel(KernelLaunch('add', 'add', (1,), (256,), (x, x, x, *np.int64([8, 8]))));"
        "print(d.download(x)); d.close()"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    options = {"env": environment, "stdout": subprocess.PIPE, "text": True, "cwd": Path(__file__).parents[2]}
    running = [subprocess.Popen([sys.executable, "-c", program], **options) for _ in range(3)]
    assert {process.communicate()[0] for process in running} == {"[2. 2. 2. 2. 2. 2. 2. 2.]\n"}
