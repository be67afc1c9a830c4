"""fill_state: fill a recurrent state with a byte pattern. Test runs poison freed states with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyllm.ops.check import require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device
    from pyllm.recurrent_cache import StateRows


def fill_state_ref(rows: StateRows, row: int, byte: int) -> None:
    rows.values[row].view(np.uint8)[...] = byte


def plan_fill_state(target: Target, rows: StateRows, row: int, byte: int) -> list[KernelLaunch]:
    row_size = rows.values.shape[1]
    args = (rows.values, np.int32(row), np.int32(row_size), np.int32(byte))
    return [KernelLaunch("fill_state", "fill_state", (-(-row_size // 1024),), (256,), args)]


FILL_STATE = Op("fill_state", fill_state_ref, plan_fill_state)


def fill_state(device: Device, rows: StateRows, row: int, byte: int) -> None:
    """Set every byte of a row; its mark stays, so that what trusts it wrongly reads the pattern.

    Args:
        rows: all states; changed.
        byte: 0..255.

    Raises:
        ShapeError: there is no such row.
    """
    require(0 <= row < rows.values.shape[0], "fill_state", f"row {row} of {rows.values.shape[0]}")
    device.launch(FILL_STATE, rows, row, byte)
