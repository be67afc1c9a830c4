"""What the GPU can do at best, measured here and now: the rate of a large copy, and that of a large matrix product."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyllm.device.gpu import device_errors, import_cupy

_COPY_BYTES = 2 << 30
_GEMM_SIZE = 8192
_POOL = (1 << 20) + 7
_RUNS = 7


@dataclass(frozen=True)
class Ceilings:
    """Attributes:
    copy: bytes per second of a device-to-device copy, those read and those written together.
    gemm: floating-point operations per second of the vendor's float16 matrix product; 0 where it was not measured.
    """

    copy: float
    gemm: float = 0.0


def measure_ceilings(with_gemm: bool) -> Ceilings:
    """Measure them on the current GPU; takes well below a second of GPU time.

    Raises:
        DeviceError: there is no GPU, or it has no memory left.
    """
    cupy = import_cupy()
    with device_errors():
        try:
            return Ceilings(_copy_rate(cupy), _gemm_rate(cupy) if with_gemm else 0.0)
        finally:
            cupy.get_default_memory_pool().free_all_blocks()


def _copy_rate(cupy: Any) -> float:
    free, _ = cupy.cuda.runtime.memGetInfo()
    size = min(_COPY_BYTES, free // 8)
    source = _random(cupy, size // 4, np.float32)
    target = cupy.empty_like(source)
    return 2 * source.nbytes / _seconds(cupy, lambda: cupy.copyto(target, source))


def _gemm_rate(cupy: Any) -> float:
    size = _GEMM_SIZE
    a, b = (_random(cupy, size * size, np.float16).reshape(size, size) for _ in range(2))
    out = cupy.empty((size, size), cupy.float16)
    return 2 * size**3 / _seconds(cupy, lambda: cupy.matmul(a, b.T, out=out))


def _random(cupy: Any, count: int, dtype: type) -> Any:
    """Random numbers, a pool of odd length repeated: zeros move and multiply faster than what models hold."""
    pool = cupy.asarray(np.random.default_rng().standard_normal(_POOL, np.float32).astype(dtype))
    return cupy.tile(pool, -(-count // _POOL))[:count]


def _seconds(cupy: Any, work: Any) -> float:
    """The median of several runs behind two that are not counted, by events."""
    times = []
    for run in range(2 + _RUNS):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        work()
        end.record()
        end.synchronize()
        if run >= 2:
            times.append(cupy.cuda.get_elapsed_time(start, end) / 1000)
    return statistics.median(times)
