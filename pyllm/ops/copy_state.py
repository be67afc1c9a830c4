"""copy_state: a sequence's recurrent state for another sequence, when one is forked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyllm.ops.check import require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device
    from pyllm.recurrent_cache import StateRows


def copy_state_ref(rows: StateRows, source: int, target: int, source_epoch: int, position: int, epoch: int) -> None:
    own = (rows.marks[source] == np.array([source_epoch, position], np.uint32)).all(axis=-1)
    rows.values[target] = rows.values[source]
    rows.marks[target] = np.where(own[:, None], np.array([epoch, position], np.uint32), np.uint32(0))
    rows.marks[target ^ 1] = 0


def plan_copy_state(
    target_: Target, rows: StateRows, source: int, target: int, source_epoch: int, position: int, epoch: int
) -> list[KernelLaunch]:
    row_size, num_layers = rows.values.shape[1], rows.marks.shape[1]
    args = (
        *(rows.values, rows.marks, rows.values, rows.marks),
        *map(np.uint32, (source_epoch, position, epoch)),
        *map(np.int32, (source, target, row_size, num_layers)),
    )
    return [KernelLaunch("copy_state", "copy_state", (-(-row_size // 1024),), (256,), args)]


COPY_STATE = Op("copy_state", copy_state_ref, plan_copy_state)


def copy_state(
    device: Device, rows: StateRows, source: int, target: int, source_epoch: int, position: int, epoch: int
) -> None:
    """Copy one row to another and give it a new epoch. A layer whose mark is not (source_epoch, position) becomes
    nobody's; so does the target's other copy.

    Args:
        rows: all states; changed.
        source, target: rows of different slots.
        epoch: of the target, not 0.

    Raises:
        ShapeError: there are no such rows, or they are of one slot.
    """
    last = rows.values.shape[0] - 1
    require(0 <= source <= last and 0 <= target <= last, "copy_state", "rows lie outside the memory")
    require(source >> 1 != target >> 1, "copy_state", "source and target are of one slot")
    device.launch(COPY_STATE, rows, source, target, source_epoch, position, epoch)
