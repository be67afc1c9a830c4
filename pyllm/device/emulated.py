"""The emulated device: the GPU's kernels, compiled for the host and run behind the host device's stream.

It is for tests of kernels and of the engine on machines without a GPU, at both wave sizes and with each vendor's matrix
instruction. It is slow, and strict where a GPU is silent: argument types, contiguity, bounds of every allocation,
barriers that not all threads reach. An op without a kernel is refused; it never runs in its NumPy form here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from pyllm.device.base import Event, PinnedBuffer
from pyllm.device.emulation.guards import GuardedArena
from pyllm.device.emulation.kernel import EmulatedKernel, variant_key
from pyllm.device.host import HostDevice
from pyllm.errors import DeviceError, UsageError
from pyllm.ops.op import GemmLaunch, KernelLaunch, Op, Target
from pyllm.quants import GPU_TYPES, QuantType

_DEFAULT_SEED = 1
_WARP_SIZES = {"mma": (32,), "wmma": (32,), "mfma": (64,)}


class EmulatedDevice(HostDevice):
    """A GPU that does not exist.

    Args:
        warp_size: 32 or 64.
        tiles: "mma", "wmma" (both for 32) or "mfma" (64); default: mma or mfma.
        seed: draws the order of threads and blocks, anew for each launch; default: the environment's
            PYLLM_EMULATION_SEED, else a fixed one.
        poison: fill fresh and freed memory with NaN patterns.
        check_guards: compare the bytes around all allocations after each launch, not only at downloads and the end.

    Raises:
        UsageError: no GPU has this wave size with these tiles, or PYLLM_EMULATION_SEED is no number.
    """

    name = "emulated"
    default_ubatch_size = 64
    activation_dtype = np.float16
    wants_candidates = True  # as a GPU
    shares_memory = False  # as a GPU with memory of its own

    def __init__(
        self,
        warp_size: int = 32,
        tiles: str | None = None,
        seed: int | None = None,
        poison: bool = True,
        check_guards: bool = True,
    ) -> None:
        tiles = tiles or ("mfma" if warp_size == 64 else "mma")
        if warp_size not in _WARP_SIZES.get(tiles, ()):
            raise UsageError(f"no GPU has tiles {tiles!r} in waves of {warp_size}; choose of {_WARP_SIZES}")
        self._seed = _environment_seed() if seed is None else seed
        super().__init__(poison)
        self.target: Target = Target("host", "host", warp_size, tiles)
        self.description = f"emulated GPU (waves of {warp_size}, {tiles})"
        self.weight_types = GPU_TYPES
        self.memory = self._memory = GuardedArena(poison)
        self.pinned_memory = self._pinned_memory = GuardedArena(poison)
        self._check_guards = check_guards
        self._damaged = False  # has been reported
        self._kernels: dict[tuple[Any, ...], EmulatedKernel] = {}
        self._launches = 0

    def release(self, array: np.ndarray) -> None:
        self._unwatch(self._memory, array.ctypes.data)
        super().release(array)

    def release_pinned(self, buffer: PinnedBuffer, after: Event | None = None) -> None:
        if after is not None:  # guards are watched by the stream: its point of release must come last
            with contextlib.suppress(DeviceError):
                self.stream.wait(after)
        self._unwatch(self._pinned_memory, buffer.array.ctypes.data)
        super().release_pinned(buffer)

    def download(self, array: np.ndarray) -> np.ndarray:
        host = super().download(array)
        self._check("a kernel")
        return host

    def upload_weight(self, data: np.ndarray, qtype: QuantType, shape: Sequence[int]) -> tuple[np.ndarray, QuantType]:
        packed = self.upload(data)
        return (packed.view(np.float32) if qtype == QuantType.F32 else packed), qtype

    def launch(self, op: Op, *args: Any) -> None:
        if op.plan is None:
            raise DeviceError(f"op {op.name} has no kernel; the emulated device cannot run it")
        if self.checks:
            self._launch_check.launch(op.name, args)
        for launch in op.plan(self.target, *args):
            if isinstance(launch, GemmLaunch):
                raise DeviceError(f"op {op.name} plans a library's product, which is not emulated")
            self.launch_kernel(launch)

    def launch_kernel(self, launch: KernelLaunch) -> None:
        """Queue one kernel.

        Raises:
            DeviceError: it does not compile, or its arguments do not fit.
        """
        key = variant_key(launch)
        if key not in self._kernels:
            self._kernels[key] = EmulatedKernel(launch, self.target)
        kernel = self._kernels[key]
        kernel.check(launch)
        self._launches += 1
        seed = (self._seed << 32) + self._launches & (1 << 64) - 1
        self.stream.enqueue(partial(self._run, kernel, launch, seed))

    def close(self) -> None:
        if self._closed:
            return
        try:
            self.abandon()
            self._check("a kernel")
        finally:
            super().close()

    def _run(self, kernel: EmulatedKernel, launch: KernelLaunch, seed: int) -> None:
        kernel.run(launch, seed)
        if self._check_guards:
            self._check(f"kernel {kernel.name}")

    def _check(self, culprit: str) -> None:
        if self._damaged:
            return
        try:
            self._memory.check(culprit)
            self._pinned_memory.check(culprit)
        except DeviceError:
            self._damaged = True
            raise

    def _unwatch(self, arena: GuardedArena, address: int) -> None:
        with contextlib.suppress(DeviceError):  # the stream has failed: nothing runs any more
            self.stream.enqueue(partial(arena.unwatch, address))


def _environment_seed() -> int:
    text = os.environ.get("PYLLM_EMULATION_SEED", "")
    try:
        return int(text) if text else _DEFAULT_SEED
    except ValueError:
        raise UsageError(f"PYLLM_EMULATION_SEED is {text!r}; expected a whole number") from None
