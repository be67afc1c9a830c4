"""The ceilings and the timer of kernels, with NumPy and a clock of its own in the place of CuPy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyllm.bench import ceilings
from pyllm.kernel_bench import RUNS, GpuTimer


class Event:
    """A point of a clock that advances by what the clock says."""

    clock: Iterator[float]

    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: object = None) -> None:
        self.at = next(self.clock)

    def synchronize(self) -> None:
        pass


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    runtime = SimpleNamespace(memGetInfo=lambda: (1 << 26, 1 << 27))
    device = SimpleNamespace(attributes={"L2CacheSize": 50 << 20})
    cuda = SimpleNamespace(
        Event=Event,
        Device=lambda: device,
        get_elapsed_time=lambda start, end: 1000 * (end.at - start.at),
        runtime=runtime,
    )
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    names = ("asarray", "tile", "empty", "empty_like", "copyto", "matmul", "float16")
    stub = SimpleNamespace(
        cuda=cuda, get_default_memory_pool=lambda: pool, **{name: getattr(np, name) for name in names}
    )
    monkeypatch.setitem(sys.modules, "cupy", stub)
    monkeypatch.setattr(ceilings, "import_cupy", lambda: stub)
    return stub


def seconds(*lengths: float) -> Iterator[float]:
    """Pairs of times, so far apart."""
    now = 0.0
    for length in lengths:
        yield now
        now += length
        yield now


def test_ceilings_are_medians_of_what_counts(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_GEMM_SIZE", 64)
    copies, products = (9, 9, 1, 2, 3, 4, 5, 6, 7), (9, 9, 2, 2, 2, 2, 2, 2, 8)
    Event.clock = seconds(*copies, *products)
    found = ceilings.measure_ceilings(with_gemm=True)
    assert found.copy == 2 * (1 << 23) / 4  # an eighth of the free memory, read and written
    assert found.gemm == 2 * 64**3 / 2
    Event.clock = seconds(*copies)
    assert ceilings.measure_ceilings(with_gemm=False).gemm == 0


def test_the_timer_counts_behind_a_first_run(cupy: Any) -> None:
    runs: list[str] = []
    graph = SimpleNamespace(replay=lambda: runs.append("replay"))
    timer = GpuTimer(SimpleNamespace(stream=None, capture=lambda launch, overlap: graph))
    assert timer.cache_bytes == 50 << 20
    Event.clock = seconds(5, 1, 1, 1, 1, 1, 5)
    assert timer.seconds(lambda: runs.append("launch"), capture=True) == 1
    assert runs == ["replay"] * (RUNS + 1)
    Event.clock = seconds(*[2] * RUNS)
    assert timer.seconds(lambda: runs.append("launch"), capture=False) == 2
    assert runs[RUNS + 1 :] == ["launch"] * (RUNS + 1)
