"""Small kernels that exist in a test only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyllm.device.emulated import EmulatedDevice
from pyllm.ops.op import KernelLaunch

WAVES = ((32, "mma"), (32, "wmma"), (64, "mfma"))


@dataclass(frozen=True)
class Throwaway:
    """Writes a kernel source to a test's folder and launches it.

    Attributes:
        folder: for the sources.
        device: where they run.
    """

    folder: Path
    device: EmulatedDevice

    @property
    def wave(self) -> int:
        return self.device.target.warp_size

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
        self.device.launch_kernel(KernelLaunch(str(path), "probe", grid, block, args, defines or {}, shared_bytes))
