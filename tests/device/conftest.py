"""Throw-away kernels on emulated devices of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyllm.device.emulated import EmulatedDevice
from tests.device.throwaway import WAVES, Throwaway


@pytest.fixture(params=WAVES, ids=lambda wave: f"{wave[1]}-{wave[0]}")
def throwaway(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Throwaway]:
    device = EmulatedDevice(*request.param)
    yield Throwaway(tmp_path, device)
    device.close()
