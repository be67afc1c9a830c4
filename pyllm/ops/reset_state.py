"""reset_state: a recurrent state becomes that of a sequence without tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyllm.ops.check import require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device
    from pyllm.recurrent_cache import StateRows


def reset_state_ref(rows: StateRows, row: int, epoch: int) -> None:
    rows.values[row] = 0
    rows.marks[row] = np.uint32(epoch), 0
    rows.marks[row ^ 1] = 0


def plan_reset_state(target: Target, rows: StateRows, row: int, epoch: int) -> list[KernelLaunch]:
    _, row_size = rows.values.shape
    sizes = (row, row_size, rows.marks.shape[1])
    args = (rows.values, rows.marks, np.uint32(epoch), *map(np.int32, sizes))
    return [KernelLaunch("reset_state", "reset_state", (-(-row_size // 1024),), (256,), args)]


RESET_STATE = Op("reset_state", reset_state_ref, plan_reset_state)


def reset_state(device: Device, rows: StateRows, row: int, epoch: int) -> None:
    """Zero one row in all layers and mark it with an epoch and position 0; the other copy becomes nobody's.

    Args:
        rows: all states; changed.
        epoch: not 0.

    Raises:
        ShapeError: there is no such row.
    """
    require(0 <= row < rows.values.shape[0], "reset_state", f"row {row} of {rows.values.shape[0]}")
    device.launch(RESET_STATE, rows, row, epoch)
