"""Small kernels that exist in a test only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyllm.device import Device
from pyllm.ops.op import KernelLaunch, Op, Target

WAVES = ((32, "mma"), (32, "wmma"), (64, "mfma"))


@dataclass(frozen=True)
class Throwaway:
    """Writes a kernel source to a test's folder and launches it.

    Attributes:
        folder: for the sources.
        device: where they run.
    """

    folder: Path
    device: Device

    @property
    def target(self) -> Target:
        assert self.device.target is not None
        return self.device.target

    @property
    def wave(self) -> int:
        return self.target.warp_size

    def launch(
        self,
        definition: str,
        *args: Any,
        grid: tuple[int, ...] = (1,),
        block: tuple[int, ...] = (32,),
        defines: Mapping[str, int] | None = None,
        shared_bytes: int = 0,
    ) -> None:
        """Launch the kernel `probe` of a source that gets the platform's and the tiles' headers."""
        path = self.folder / f"probe{len(list(self.folder.iterdir()))}.cu"  # a device compiles a path once
        path.write_text('#include "common/tile.cuh"\n' + definition)
        launch = KernelLaunch(str(path), "probe", grid, block, args, defines or {}, shared_bytes)
        self.device.launch(Op("probe", _no_reference, lambda target: [launch]))

    def result(self, definition: str, *args: Any, out: np.ndarray, **options: Any) -> np.ndarray:
        """Launch a kernel whose last parameter is `out`, and return that."""
        array = self.device.upload(out)
        self.launch(definition, *args, array, **options)
        return self.device.download(array)


def _no_reference() -> None:
    raise AssertionError("a throw-away kernel was run in its NumPy form")
