"""Devices: where arrays live and ops run. `open_device` chooses one by name."""

from __future__ import annotations

import importlib.util
import logging

from pyllm.device.base import Device, Event, PinnedBuffer
from pyllm.errors import DeviceError, UsageError

__all__ = ["DEVICE_NAMES", "Device", "Event", "PinnedBuffer", "open_device"]

DEVICE_NAMES = ("auto", "gpu", "cpu", "emulated")

log = logging.getLogger(__name__)


def open_device(name: str, graphs: bool = True) -> Device:
    """Open a device.

    Args:
        name: "cpu", "gpu", "emulated" (the GPU's kernels on the CPU: for tests, slow), or "auto": the best one that
            pyllm can use on this machine. Where CuPy is installed and the GPU cannot be used all the same, a logged
            warning says why.
        graphs: allow the device to record launches and replay them.

    Raises:
        UsageError: no such name.
        DeviceError: the device is not there, or pyllm cannot drive it.
    """
    if name not in DEVICE_NAMES:
        raise UsageError(f"device {name!r} is unknown; choose one of {', '.join(DEVICE_NAMES)}")
    if name in ("gpu", "auto"):
        from pyllm.device.gpu import GpuDevice

        try:
            return GpuDevice(graphs=graphs)
        except DeviceError as error:
            if name == "gpu":
                raise
            if importlib.util.find_spec("cupy"):
                log.warning("%s", error)
    from pyllm.device.emulated import EmulatedDevice
    from pyllm.device.host import HostDevice

    device = EmulatedDevice() if name == "emulated" else HostDevice()
    device.graphs = graphs
    return device
