"""Throw-away kernels on emulated devices of every kind, and on a GPU where the tests are asked to use one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyllm.device.emulated import EmulatedDevice
from tests.device.throwaway import WAVES, Throwaway
from tests.ops.lives import LIVES


@pytest.fixture(params=WAVES, ids=lambda wave: f"{wave[1]}-{wave[0]}")
def throwaway(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Throwaway]:
    device = EmulatedDevice(*request.param)
    yield Throwaway(tmp_path, device)
    device.close()


@pytest.fixture(params=[life for life in LIVES if life != "cpu"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Throwaway]:
    """Where every kernel must give the same: emulated, and on a GPU."""
    device = LIVES[request.param]()
    yield Throwaway(tmp_path, device)
    device.close()
