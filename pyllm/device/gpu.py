"""The GPU device: CuPy on CUDA or ROCm, with kernels from rawkernels/ compiled at run time.

All device and pinned memory comes from arenas of this device, not from CuPy's pools: those hand memory out again as
soon as the Python object dies, whatever queued work still reads it.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pyllm.device.arena import ALIGNMENT, POISON, Arena
from pyllm.device.base import CopyStream, Device, Event, Graph, NotCapturable, PinnedBuffer
from pyllm.device.cubin import load_kernel
from pyllm.device.dependent_launch import OLDEST, DependentLauncher, waits_itself
from pyllm.device.host import check_copy
from pyllm.device.host_stream import Gate
from pyllm.device.kernel_source import define_options, source_text, target_defines
from pyllm.device.memory_check import LaunchCheck, assert_done, enabled
from pyllm.errors import DeviceError
from pyllm.ops.op import GemmLaunch, KernelLaunch, Op, Target
from pyllm.quants import GPU_TYPES, QuantType

STAGING_BYTES = 32 << 20  # of each pinned buffer through which uploads go
STAGING_BUFFERS = 2
DEFAULT_SHARED = 32 << 10  # dynamic shared memory that every kernel may have, whatever it has besides
COHERENT = (
    0x40000000  # hipHostMallocCoherent: without it a GPU of AMD sees what the host wrote at synchronisations only
)
INSTALL = "pip install 'pyllm[cuda12]', 'pyllm[cuda13]' or 'pyllm[rocm7]'"
WMMA_ARCHS = ("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151")
MFMA_ARCHS = ("gfx90a", "gfx942")
OLDEST_CUDA = 80  # the first with asynchronous copies and the m16n8k16 products of the tiles


def import_cupy() -> Any:
    """CuPy, with a GPU that it can use.

    Raises:
        DeviceError: CuPy or a GPU is missing; says which, and what to do.
    """
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"CuPy cannot be loaded ({error}); install it with {INSTALL}, or use --device cpu") from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise DeviceError(f"CuPy finds no GPU driver ({error}); check the driver, or use --device cpu") from None
    if not count:
        raise DeviceError("CuPy finds no GPU; use --device cpu")
    return cupy


def find_target(properties: dict[str, Any], is_hip: bool) -> Target:
    """What kernels must be compiled for.

    Raises:
        DeviceError: kernels do not support this GPU.
    """
    if not is_hip:
        version = 10 * properties["major"] + properties["minor"]
        if version < OLDEST_CUDA:
            raise DeviceError(f"this GPU is sm_{version}; pyllm needs sm_{OLDEST_CUDA} or newer: use --device cpu")
        return Target("cuda", f"sm_{version}", 32, "mma", properties.get("multiProcessorCount", Target.multiprocessors))
    if shutil.which("hipcc") is None:
        raise DeviceError(
            "hipcc is not on PATH, which CuPy needs to compile kernels; install ROCm's, or use --device cpu"
        )
    arch = properties["gcnArchName"].decode().split(":")[0]
    for known, tiles, warp_size in ((WMMA_ARCHS, "wmma", 32), (MFMA_ARCHS, "mfma", 64)):
        if arch in known:
            return Target("hip", arch, warp_size, tiles)
    supported = ", ".join((*WMMA_ARCHS, *MFMA_ARCHS))
    raise DeviceError(f"this GPU is {arch}; pyllm has kernels for {supported}: use --device cpu")


class GpuFunction:
    """A compiled kernel.

    Attributes:
        launch: launch(grid, block, args, shared_bytes, stream).
        waits: it waits for earlier kernels by itself (GRID_DEPENDENCY).
        shared_limit: dynamic shared memory that it may be given, in bytes.
    """

    def __init__(self, kernel: Any, waits: bool) -> None:
        self._kernel = kernel
        self.launch = kernel.kernel
        self.waits = waits
        self.shared_limit = DEFAULT_SHARED

    @property
    def handle(self) -> int:
        """The driver's."""
        return int(self.launch.ptr)

    def raise_limit(self, num_bytes: int, target: Target) -> None:
        """Allow so much dynamic shared memory; on AMD there is nothing to raise."""
        if target.vendor == "cuda":
            self._kernel.max_dynamic_shared_size_bytes = num_bytes
        self.shared_limit = num_bytes


class GpuEvent(Event):
    """An event of a stream; `raw` is CuPy's."""

    def __init__(self, stream: Any, cupy: Any) -> None:
        with device_errors():
            self.raw = cupy.cuda.Event(disable_timing=True)
            self.raw.record(stream)

    def query(self) -> bool:
        try:
            return bool(self.raw.done)
        except Exception:
            return True  # the stream has failed; synchronize says how

    def synchronize(self) -> None:
        with device_errors():
            self.raw.synchronize()


class GpuCopyStream(CopyStream):
    """A CUDA or HIP stream of its own, which the copy engines work for."""

    def __init__(self, cupy: Any, check: LaunchCheck | None) -> None:
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._check = check
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def wait(self, event: Event) -> None:
        assert isinstance(event, GpuEvent)
        with device_errors():
            self.stream.wait_event(event.raw)

    def copy(self, source: Any, target: Any) -> None:
        check_copy(source, target)
        if self._check is not None:
            self._check.launch("a copy", (source, target))
        if not source.nbytes:
            return
        self.num_bytes += source.nbytes
        to_host = isinstance(target, np.ndarray)
        kind = self._runtime.memcpyDeviceToHost if to_host else self._runtime.memcpyHostToDevice
        addresses = _address(target), _address(source)
        with device_errors():
            if source.flags.c_contiguous and target.flags.c_contiguous:
                self._runtime.memcpyAsync(*addresses, source.nbytes, kind, self.stream.ptr)
            else:
                pitches = target.strides[0], source.strides[0]
                row = source.nbytes // len(source)
                self._runtime.memcpy2DAsync(
                    *(addresses[0], pitches[0], addresses[1], pitches[1]),
                    *(row, len(source), kind, self.stream.ptr),
                )

    def record(self) -> GpuEvent:
        return GpuEvent(self.stream, self._cupy)


def _address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


class GpuGraph(Graph):
    """A captured graph, the device whose stream it runs on, and with checks the arrays that it uses."""

    def __init__(self, graph: Any, device: GpuDevice, uses: list[tuple[str, Any]]) -> None:
        self._graph = graph
        self._device = device
        self._uses = uses

    def replay(self) -> None:
        self._device._check_open()
        if self._device.checks:
            self._device._launch_check.replay(self._uses)
        with device_errors():
            self._graph.launch(self._device.stream)
        self._device.num_launches += 1


@contextmanager
def device_errors() -> Iterator[None]:
    """Turn the errors of the GPU's runtime into DeviceError."""
    try:
        yield
    except (MemoryError, DeviceError, NotCapturable):
        raise
    except RuntimeError as error:  # CuPy's CUDARuntimeError, CUDADriverError and CompileException
        raise as_device_error(error) from error


def as_device_error(error: RuntimeError) -> DeviceError:
    """What the GPU's runtime says, as one line."""
    text = str(error).strip().splitlines()
    return DeviceError(f"the GPU stopped: {text[-1] if text else type(error).__name__}")


class GpuDevice(Device):
    """One GPU, the current one of CuPy.

    Args:
        poison: fill fresh and freed memory with NaN patterns; default: the environment's PYLLM_POISON.
        graphs: allow capturing.

    Attributes:
        integrated: the GPU shares the host's memory.
        num_launches: kernels launched one by one, and graphs replayed, so far.
    """

    name = "gpu"
    default_ubatch_size = 2048
    default_inflight = 4
    wants_candidates = True
    activation_dtype: type = np.float16

    def __init__(self, poison: bool | None = None, graphs: bool = True) -> None:
        self._cupy = cupy = import_cupy()
        if poison is None:
            poison = os.environ.get("PYLLM_POISON", "0") not in ("", "0")
        self.poison = poison
        self.checks = enabled()
        self.weight_types = GPU_TYPES
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        self.target: Target = find_target(properties, cupy.cuda.runtime.is_hip)
        self.description = f"{properties['name'].decode()} ({self.target.arch})"
        self.memory_bytes = int(properties["totalGlobalMem"])
        self.integrated = bool(properties.get("integrated", 0))
        self.graphs = graphs
        self._runtime = cupy.cuda.runtime
        self.shares_memory = self.integrated
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._copies: GpuCopyStream | None = None
        self.memory = Arena(self._allocate, lambda array: array.data.ptr, self._fill_device if poison else None)
        self.pinned_memory = Arena(
            self._allocate_pinned, lambda array: array.ctypes.data, _fill_host if poison else None
        )
        self._dependent = _dependent_launcher(self.target)
        self._launch_check = LaunchCheck([self.memory, self.pinned_memory])
        self._pinned_owners: list[Any] = []
        self._staging: deque[tuple[np.ndarray, GpuEvent | None]] = deque()
        self._functions: dict[tuple[Any, ...], GpuFunction] = {}
        self._capturing = self._overlap = False
        self.num_launches = 0
        self._gates: list[Gate] = []
        self._closed = False

    # memory

    def _allocate(self, size: int) -> Any:
        with device_errors():
            memory = self._cupy.cuda.Memory(size)
        pointer = self._cupy.cuda.MemoryPointer(memory, 0)
        return self._cupy.ndarray((size,), np.uint8, memptr=pointer)

    def _allocate_pinned(self, size: int) -> np.ndarray:
        with device_errors():
            owner = self._cupy.cuda.PinnedMemory(size, COHERENT if self.target.vendor == "hip" else 0)
        self._pinned_owners.append(owner)  # freed at close only: nothing unmaps what a copy may still read
        return np.frombuffer(memoryview((ctypes.c_ubyte * size).from_address(owner.ptr)), np.uint8)

    def _fill_device(self, block: Any) -> None:
        self._runtime.memsetAsync(block.data.ptr, POISON, block.nbytes, self.stream.ptr)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        return self.memory.take(num_bytes)[:num_bytes].view(dtype).reshape(tuple(shape))

    def release(self, array: Any) -> None:
        self.memory.release(array, self.record())

    def pinned(self, num_bytes: int) -> PinnedBuffer:
        return PinnedBuffer(self.pinned_memory.take(num_bytes)[:num_bytes], self.checks)

    def release_pinned(self, buffer: PinnedBuffer, after: Event | None = None) -> None:
        self.pinned_memory.release(buffer.array, after or self.record())

    def mapped(self, buffer: PinnedBuffer) -> Any:
        array = buffer.array
        device = self._cupy.cuda.device.get_device_id()
        memory = self._cupy.cuda.UnownedMemory(array.ctypes.data, array.nbytes, buffer, device)
        return self._cupy.ndarray((array.nbytes,), np.uint8, memptr=self._cupy.cuda.MemoryPointer(memory, 0))

    def upload(self, array: np.ndarray) -> Any:
        """Kernels read whole pieces of 16 bytes: what lies behind the array in its block becomes 0."""
        target = self.empty(array.shape, array.dtype)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, flat.nbytes, STAGING_BYTES):
            self._upload_piece(flat[start : start + STAGING_BYTES], target.data.ptr + start)
        return target

    def _upload_piece(self, piece: np.ndarray, address: int) -> None:
        """Copy through the next staging buffer, once the copy before the last has left it."""
        if len(self._staging) < STAGING_BUFFERS:
            self._staging.append((self.pinned_memory.take(STAGING_BYTES), None))
        buffer, event = self._staging.popleft()
        if event is not None:
            event.synchronize()
        if self.checks:
            assert_done(event, "a staging buffer is written")
        buffer[: piece.nbytes] = piece
        padded = -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
        buffer[piece.nbytes : padded] = 0
        with device_errors():
            to_device = self._runtime.memcpyHostToDevice
            self._runtime.memcpyAsync(address, buffer.ctypes.data, padded, to_device, self.stream.ptr)
        self._staging.append((buffer, self.record()))

    def download(self, array: Any) -> np.ndarray:
        self.synchronize()
        with device_errors():
            return self._cupy.asnumpy(array)

    def upload_weight(self, data: np.ndarray, qtype: QuantType, shape: Sequence[int]) -> tuple[Any, QuantType]:
        array = self.upload(data)
        return (array.view(np.float32) if qtype == QuantType.F32 else array), qtype

    # queued work

    def launch(self, op: Op, *args: Any) -> None:
        self._check_open()
        if op.plan is None:
            raise DeviceError(f"op {op.name} has no kernel")
        if self.checks:
            self._launch_check.launch(op.name, args)
        # This runs for every op of every ubatch: no context managers here, they cost as much as a launch.
        try:
            for launch in op.plan(self.target, *args):
                if isinstance(launch, GemmLaunch):
                    self._launch_gemm(launch)
                else:
                    self._launch_kernel(launch)
        except (MemoryError, DeviceError, NotCapturable):
            raise
        except RuntimeError as error:
            raise as_device_error(error) from error

    def _launch_kernel(self, launch: KernelLaunch) -> None:
        # A plan names its defines in one order, so they need not be sorted.
        key = (launch.source, launch.entry, *launch.defines.items())
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = self._compile(launch)
        if launch.shared_bytes > function.shared_limit:
            function.raise_limit(launch.shared_bytes, self.target)
        args = tuple(self._address(arg) if isinstance(arg, np.ndarray) else arg for arg in launch.args)
        grid, block = _three(launch.grid), _three(launch.block)
        if self._overlap and function.waits and self._dependent is not None:
            self._dependent.launch(function.handle, grid, block, args, launch.shared_bytes, self.stream.ptr)
        else:
            function.launch(grid, block, args, launch.shared_bytes, self.stream)
        self.num_launches += 1

    def _address(self, array: np.ndarray) -> np.uintp:
        """A pinned host array as a kernel argument: the GPU reads it at the same address. No other memory will do."""
        if not self.pinned_memory.covers(array):
            raise DeviceError("a kernel was given host memory that is not pinned")
        return np.uintp(array.ctypes.data)

    def _launch_gemm(self, launch: GemmLaunch) -> None:
        """a @ b.T by cuBLAS. It counts in columns: b is a k x n matrix there, a a k x m one, out n x m."""
        from cupy_backends.cuda.libs import cublas

        if self._capturing:
            raise NotCapturable("a library's product")
        (m, k), (n, _) = launch.a.shape, launch.b.shape
        one, beta = np.array(1, np.float32), np.array(launch.accumulate, np.float32)
        narrow = launch.out.dtype == np.float16
        target = launch.out.data.ptr + launch.out.itemsize * launch.first_column
        with self.stream:  # CuPy gives the library its current stream at every call, whatever stream it had
            cublas.gemmEx(
                self._cupy.cuda.device.get_cublas_handle(),
                cublas.CUBLAS_OP_T,
                cublas.CUBLAS_OP_N,
                n,
                m,
                k,
                one.ctypes.data,
                launch.b.data.ptr,
                self._runtime.CUDA_R_16F,
                k,
                launch.a.data.ptr,
                self._runtime.CUDA_R_16F,
                k,
                beta.ctypes.data,
                target,
                self._runtime.CUDA_R_16F if narrow else self._runtime.CUDA_R_32F,
                launch.out.shape[1],
                cublas.CUBLAS_COMPUTE_32F,
                cublas.CUBLAS_GEMM_DEFAULT,
            )
        self.num_launches += 1

    def _compile(self, launch: KernelLaunch) -> GpuFunction:
        # One text without includes: CuPy's cache of compiled kernels is keyed by text and options, not by headers.
        options = ("-std=c++17", *define_options(target_defines(self.target, launch.defines)))
        text = source_text(launch.source, launch.defines)
        waits = waits_itself(text, launch.entry)
        if launch.arch:
            return GpuFunction(load_kernel(self._cupy, text, launch.arch, options, launch.entry), waits)
        module = self._cupy.RawModule(code=text, options=options, backend="nvrtc")
        try:
            return GpuFunction(module.get_function(launch.entry), waits)
        except self._cupy.cuda.compiler.CompileException as error:
            first = next((line for line in str(error).splitlines() if "error" in line), str(error)[:200])
            raise DeviceError(f"kernel {launch.entry} does not compile for {self.target.arch}: {first}") from error

    def copy_to_pinned(self, source: Any, target: np.ndarray) -> None:
        self._check_open()
        if not source.flags.c_contiguous or source.nbytes != target.nbytes:
            raise DeviceError("copies to pinned memory are between contiguous arrays of one size")
        with device_errors():
            to_host = self._runtime.memcpyDeviceToHost
            self._runtime.memcpyAsync(target.ctypes.data, source.data.ptr, source.nbytes, to_host, self.stream.ptr)

    def record(self) -> GpuEvent:
        return GpuEvent(self.stream, self._cupy)

    @property
    def copies(self) -> GpuCopyStream:
        if self._copies is None:
            self._copies = GpuCopyStream(self._cupy, self._launch_check if self.checks else None)
        return self._copies

    def wait(self, event: Event) -> None:
        assert isinstance(event, GpuEvent)
        with device_errors():
            self.stream.wait_event(event.raw)

    @property
    def captures(self) -> bool:
        return self.graphs

    def capture(self, launches: Callable[[], Any], overlap: bool = False) -> GpuGraph:
        with device_errors(), self.stream, self._launch_check.recording() as uses:
            self.stream.begin_capture()
            self._capturing, self._overlap = True, overlap
            try:
                launches()
            finally:
                self._capturing = self._overlap = False
                graph = self.stream.end_capture()
        return GpuGraph(graph, self, uses)

    def delay(self, seconds: float) -> None:
        self.stream.launch_host_func(lambda _: time.sleep(seconds), None)

    def gate(self) -> Gate:
        """Test hook: hold all later work back until the gate is opened."""
        gate = Gate()
        self._gates.append(gate)
        self.stream.launch_host_func(lambda _: gate.wait(), None)
        return gate

    def synchronize(self) -> None:
        with device_errors():
            self.stream.synchronize()

    def abandon(self) -> None:
        for gate in self._gates:
            gate.open()

    def _check_open(self) -> None:
        """After `close` the memory that work would touch is gone."""
        if self._closed:
            raise DeviceError("the device is closed")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.abandon()
        try:
            self.synchronize()
            if self._copies is not None:
                with device_errors():
                    self._copies.stream.synchronize()
        finally:
            self._staging.clear()
            self.memory.clear()
            self.pinned_memory.clear()
            self._pinned_owners.clear()


def _dependent_launcher(target: Target) -> DependentLauncher | None:
    if target.vendor != "cuda" or int(target.arch.removeprefix("sm_")) < OLDEST:
        return None
    return DependentLauncher()


def _fill_host(block: np.ndarray) -> None:
    block[:] = POISON


def _three(extents: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*extents, 1, 1)[:3]
    return int(x), int(y), int(z)
