"""How fast a kernel is, next to what the GPU can do, and whether it was right in the same run.

A case is one op at the size of a real model. Its time is the median by the GPU's own events; launches are recorded in a
graph, so that the host does not count, and take turns with several sets of arguments, so that no set is still in the
cache when it comes round again. Before that the first set, its outputs filled with 0xFF, is run once and compared with
a float64 computation of a sample of the outputs. This module knows no op; `kernel_bench_cases` lists the cases.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pyllm.bench.ceilings import Ceilings
from pyllm.device import Device
from pyllm.device.base import NotCapturable
from pyllm.errors import DeviceError, PyllmError
from pyllm.kernel_samples import random_weight
from pyllm.ops.op import GemmLaunch, KernelLaunch, Op
from pyllm.quants import FORMATS, QuantType, row_bytes
from pyllm.synth.blocks import drawable_types, random_rows
from pyllm.weight import Weight

POISON = 0xFF
RUNS = 7  # timed; the median counts
LAUNCHES = 8  # of one timed run, at least
CACHE_FACTOR = 3  # what is needed of all sets of arguments is at least so many times as large as the cache
MAX_SETS = 32
MAX_SET_BYTES = 8 << 30  # of all sets together
_POOL = (1 << 20) + 7  # random numbers that are drawn; arrays repeat them
_DIFFERENT_BLOCKS = 1 << 14
_SLOW_BLOCKS = 1 << 8  # of formats whose blocks have to be drawn until they are of a usual size

Arguments = tuple[Any, ...]
Pairs = Sequence[tuple[np.ndarray, np.ndarray]]
Sample = Callable[[], Pairs]


class Source:
    """Makes arguments on a device, cheaply: a pool of random numbers is drawn once and repeated.

    Attributes:
        rng: for small arrays.
    """

    def __init__(self, device: Device, seed: int = 0) -> None:
        self.device = device
        self.rng = np.random.default_rng(seed)
        self._numbers = self._upload(self.rng.standard_normal(_POOL, np.float32))
        self._weight: tuple[tuple[Any, ...], Weight] | None = None

    @property
    def _on_gpu(self) -> bool:
        return self.device.name == "gpu"

    def _upload(self, array: np.ndarray) -> Any:
        """Where `_place` expects things that arrays are made of: the GPU's memory, or the host's."""
        if not self._on_gpu:
            return array
        import cupy

        return cupy.asarray(array)

    def _place(self, array: Any) -> Any:
        return array if self._on_gpu else self.device.upload(array)

    @property
    def _xp(self) -> Any:
        if not self._on_gpu:
            return np
        import cupy

        return cupy

    def array(self, host: np.ndarray) -> Any:
        """A host array on the device."""
        return self.device.upload(host)

    def copy(self, array: Any) -> Any:
        """The same elsewhere; nothing may be queued that still changes the array."""
        return self._place(array.copy())

    def normal(self, *shape: int, scale: float = 1.0, dtype: type = np.float32) -> Any:
        """Random numbers."""
        count = math.prod(shape)
        repeated = self._xp.tile(self._numbers, 1 + -(-count // _POOL))
        start = int(self.rng.integers(0, _POOL))
        values = repeated[start : start + count] * np.float32(scale)
        return self._place(values.astype(dtype).reshape(shape))

    def unwritten(self, *shape: int, dtype: type = np.float32) -> Any:
        """An output before the op ran: all bytes 0xFF, a NaN in every float type."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return self._place(self._xp.full(size, POISON, np.uint8).view(dtype).reshape(shape))

    def repeated(self, rows: np.ndarray, count: int) -> Any:
        """[count, ...], each row one of `rows`."""
        index = self._xp.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        chosen = (index >> np.uint64(40)) % np.uint64(len(rows))
        return self._place(self._upload(rows)[chosen.astype(np.int64)])

    def weight(self, qtype: QuantType, *shape: int) -> Weight:
        """Random blocks; the one made last is kept, since several cases in a row use it."""
        if self._weight is None or self._weight[0] != (qtype, shape):
            self._weight = (qtype, shape), self._new_weight(qtype, shape)
        return self._weight[1]

    def _new_weight(self, qtype: QuantType, shape: tuple[int, ...]) -> Weight:
        *stack, row_elements = shape
        if qtype == QuantType.F32:
            return Weight("random", shape, qtype, self.normal(*shape, scale=row_elements**-0.5))
        form = FORMATS[qtype]
        blocks = self.repeated(self._different_blocks(qtype, row_elements**-0.5), math.prod(shape) // form.block_size)
        return Weight("random", shape, qtype, blocks.reshape(*stack, row_bytes(qtype, row_elements)))

    def _different_blocks(self, qtype: QuantType, std: float) -> np.ndarray:
        """[n, block_bytes] uint8; values of the given size where the format allows to draw them so."""
        form = FORMATS[qtype]
        if qtype.name in drawable_types():
            rows = random_rows(self.rng, qtype, 1, _DIFFERENT_BLOCKS * form.block_size, std)
            return np.concatenate(list(rows)).reshape(-1, form.block_bytes)
        return random_weight(self.rng, qtype, 1, _SLOW_BLOCKS * form.block_size).array.reshape(-1, form.block_bytes)


class ShapeSource(Source):
    """Makes arguments that have shapes and types only, to plan launches with: their memory is never touched."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)

    def array(self, host: np.ndarray) -> Any:
        return host

    def normal(self, *shape: int, scale: float = 1.0, dtype: type = np.float32) -> Any:
        return np.empty(shape, dtype)

    def unwritten(self, *shape: int, dtype: type = np.float32) -> Any:
        return np.empty(shape, dtype)

    def repeated(self, rows: np.ndarray, count: int) -> Any:
        return np.empty((count, *rows.shape[1:]), rows.dtype)

    def _different_blocks(self, qtype: QuantType, std: float) -> np.ndarray:
        return np.empty((1, FORMATS[qtype].block_bytes), np.uint8)


def planned(device: Device, cases: Sequence[BenchCase]) -> list[KernelLaunch]:
    """One launch of each kernel variant that the cases need: the one with most dynamic shared memory."""
    source = ShapeSource(device)
    found: dict[tuple[Any, ...], KernelLaunch] = {}
    for case in cases:
        launches = case.op.plan(device.target, *case.arguments(source)) if case.op.plan else []
        for launch in launches:
            if isinstance(launch, KernelLaunch):
                key = launch.source, launch.entry, launch.arch, tuple(sorted(launch.defines.items()))
                if key not in found or launch.shared_bytes > found[key].shared_bytes:
                    found[key] = launch
    return list(found.values())


@dataclass(frozen=True)
class BenchCase:
    """One op at one size.

    Attributes:
        op: what is launched.
        name: the size, and what else differs from the op's other cases.
        arguments: arguments(source): those of the op, on the device; outputs are unwritten.
        sample: sample(read, arguments) is called before the first launch and returns a function that is called after
            it: pairs of what a part of the outputs is and what it ought to be, in float64. `read(array, rows)` brings
            rows of a device array to the host.
        traffic: traffic(arguments): bytes of inputs that the op needs, each once, and of outputs.
        flops: floating-point operations of the products in it.
        limit: accepted error; 0: every bit has to be right.
    """

    op: Op
    name: str
    arguments: Callable[[Source], Arguments]
    sample: Callable[[Callable[..., np.ndarray], Arguments], Sample]
    traffic: Callable[[Arguments], float]
    flops: float = 0.0
    limit: float = 0.0

    def __str__(self) -> str:
        return f"{self.op.name}: {self.name}"


@dataclass(frozen=True)
class Measured:
    """A case and how it went.

    Attributes:
        kernels: entry points that it launched, "library" for a vendor's product.
        seconds: of one call.
        traffic: bytes.
        error: ‖found - exact‖ / ‖exact‖ of the sample, the worst of all outputs; infinite for NaN.
        problem: why there are no numbers; empty when there are.
        recorded: launches were replayed; otherwise the host queued them one by one, and may be what took the time.
    """

    case: BenchCase
    kernels: tuple[str, ...] = ()
    seconds: float = math.nan
    traffic: float = 0.0
    error: float = math.inf
    problem: str = ""
    recorded: bool = True

    @property
    def passed(self) -> bool:
        """Whether the kernel ran and was right."""
        return not self.problem and self.error <= self.case.limit

    @property
    def bytes_per_second(self) -> float:
        return self.traffic / self.seconds

    @property
    def flops_per_second(self) -> float:
        return self.case.flops / self.seconds

    def bound(self, ceilings: Ceilings) -> str:
        """What limits the case on this GPU, "memory" or "math": the one that takes longer."""
        return "math" if self._math_seconds(ceilings) > self.traffic / ceilings.copy else "memory"

    def share(self, ceilings: Ceilings) -> float:
        """The least time that this limit allows, over the time taken."""
        return max(self.traffic / ceilings.copy, self._math_seconds(ceilings)) / self.seconds

    def _math_seconds(self, ceilings: Ceilings) -> float:
        return self.case.flops / ceilings.gemm if ceilings.gemm else 0.0


class Timer(Protocol):
    """Times queued work."""

    cache_bytes: int

    def seconds(self, launch: Callable[[], Any], capture: bool) -> float:
        """The median time of what `launch` queues.

        Args:
            capture: record it first, and time replays.
        """


class GpuTimer:
    """Times by the events of a GPU's compute stream.

    Args:
        early: recorded launches may start while the one before them ends, on GPUs that can do that.

    Attributes:
        cache_bytes: size of the L2 cache.
    """

    def __init__(self, device: Any, early: bool = False) -> None:
        import cupy

        self._cupy = cupy
        self._device = device
        self._early = early
        self.cache_bytes = int(cupy.cuda.Device().attributes.get("L2CacheSize", 0)) or 64 << 20

    def seconds(self, launch: Callable[[], Any], capture: bool) -> float:
        run = self._device.capture(launch, overlap=self._early).replay if capture else launch
        run()  # the first replay is slower
        times = []
        for _ in range(RUNS):
            start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
            start.record(self._device.stream)
            run()
            end.record(self._device.stream)
            end.synchronize()
            times.append(self._cupy.cuda.get_elapsed_time(start, end) / 1000)
        return statistics.median(times)


def measure(device: Device, timer: Timer, source: Source, case: BenchCase) -> Measured:
    """Check a case and time it. What goes wrong with the case is in the result."""
    try:
        return _measure(device, timer, source, case)
    except (PyllmError, MemoryError) as error:
        return Measured(case, problem=str(error) or "not enough memory")


def _measure(device: Device, timer: Timer, source: Source, case: BenchCase) -> Measured:
    arguments = case.arguments(source)
    launches = case.op.plan(device.target, *arguments) if case.op.plan else []

    def read(array: Any, rows: Any = None) -> np.ndarray:
        device.synchronize()  # rows are taken on another stream than the one that wrote them
        wanted = array if rows is None else array[source._upload(np.asarray(rows))]
        return np.array(device.download(wanted))

    _settle(device)
    sample = case.sample(read, arguments)
    device.launch(case.op, *arguments)
    error = max(relative_error(*pair) for pair in sample())
    kernels = tuple(dict.fromkeys(x.entry if isinstance(x, KernelLaunch) else "library" for x in launches))
    traffic = case.traffic(arguments)
    num_sets = _num_sets(arguments, traffic, timer.cache_bytes)
    sets = [arguments, *(_copied(source, arguments) for _ in range(num_sets - 1))]
    _settle(device)
    rounds = -(-LAUNCHES // len(sets))

    def launch() -> None:
        for each in sets * rounds:
            device.launch(case.op, *each)

    seconds, recorded = _timed(device, timer, launch, any(isinstance(x, GemmLaunch) for x in launches))
    device.synchronize()  # only now may the arguments go away
    return Measured(case, kernels, seconds / (rounds * len(sets)), traffic, error, recorded=recorded)


def _timed(device: Device, timer: Timer, launch: Callable[[], None], uses_library: bool) -> tuple[float, bool]:
    """Seconds, and whether a recording was timed. A library may do what cannot be recorded, such as allocating."""
    if not device.captures:
        return timer.seconds(launch, False), False
    try:
        return timer.seconds(launch, True), True
    except (DeviceError, NotCapturable):
        if not uses_library:
            raise
        return timer.seconds(launch, False), False


def _settle(device: Device) -> None:
    """Arguments are made on CuPy's stream, which the device's own does not wait for."""
    if device.name == "gpu":
        import cupy

        cupy.cuda.runtime.deviceSynchronize()


def relative_error(found: np.ndarray, exact: np.ndarray) -> float:
    """‖found - exact‖ / ‖exact‖ in float64; infinite where a NaN or an infinity is in either."""
    a, b = found.astype(np.float64).ravel(), exact.astype(np.float64).ravel()
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    difference, size = float(np.linalg.norm(a - b)), float(np.linalg.norm(b))
    return difference / size if size else (math.inf if difference else 0.0)


def arrays_in(value: Any) -> Iterator[Any]:
    """All arrays in arguments, each once."""
    seen: set[int] = set()

    def note(array: Any) -> Any:
        seen.add(id(array))
        found.append(array)
        return array

    found: list[Any] = []
    _convert(value, note)
    unique = {id(array): array for array in found}
    return iter(unique.values())


def _num_sets(arguments: Arguments, traffic: float, cache_bytes: int) -> int:
    """Of arguments of which only a part may be needed."""
    size = max(1, sum(array.nbytes for array in arrays_in(arguments)))
    needed = max(1, min(size, int(traffic)))
    wanted = max(2, -(-CACHE_FACTOR * cache_bytes // needed))
    return max(1, min(wanted, MAX_SETS, MAX_SET_BYTES // size))


def _copied(source: Source, arguments: Arguments) -> Arguments:
    made: dict[int, Any] = {}

    def copy(array: Any) -> Any:
        if id(array) not in made:
            made[id(array)] = source.copy(array)
        return made[id(array)]

    return _convert(arguments, copy)


def _convert(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to all arrays, of NumPy or CuPy."""
    if hasattr(value, "nbytes") and not isinstance(value, (type, np.generic)):
        return function(value)
    if isinstance(value, tuple):
        return tuple(_convert(item, function) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: _convert(item, function) for name, item in fields.items()})
    return value
