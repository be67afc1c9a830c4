"""load_state: bring a checkpoint of a recurrent state back from pinned memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device
    from pyllm.recurrent_cache import StateRows


def load_state_ref(
    values: np.ndarray, marks: np.ndarray, source_epoch: int, position: int, rows: StateRows, row: int, epoch: int
) -> None:
    own = (marks == np.array([source_epoch, position], np.uint32)).all(axis=-1)
    rows.values[row] = values
    rows.marks[row] = np.where(own[:, None], np.array([epoch, position], np.uint32), np.uint32(0))
    rows.marks[row ^ 1] = 0


def plan_load_state(
    target: Target, values: Any, marks: Any, source_epoch: int, position: int, rows: StateRows, row: int, epoch: int
) -> list[KernelLaunch]:
    row_size, num_layers = rows.values.shape[1], rows.marks.shape[1]
    args = (
        *(values, marks, rows.values, rows.marks),
        *map(np.uint32, (source_epoch, position, epoch)),
        *map(np.int32, (0, row, row_size, num_layers)),
    )
    return [KernelLaunch("copy_state", "copy_state", (-(-row_size // 1024),), (256,), args)]


LOAD_STATE = Op("load_state", load_state_ref, plan_load_state)


def load_state(
    device: Device, values: Any, marks: Any, source_epoch: int, position: int, rows: StateRows, row: int, epoch: int
) -> None:
    """Write a saved row over another and give it a new epoch. A layer whose saved mark is not (source_epoch, position)
    becomes nobody's; so does the row's other copy.

    Args:
        values: [row_size] float32 in pinned memory; read when the op runs.
        marks: [num_layers, 2] uint32, likewise.
        rows: all states; changed.
        epoch: not 0.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    num_rows, row_size = rows.values.shape
    require(0 <= row < num_rows, "load_state", f"row {row} of {num_rows}")
    check_array("load_state", "values", values, (row_size,), ("float32",))
    check_array("load_state", "marks", marks, tuple(rows.marks.shape[1:]), ("uint32",))
    device.launch(LOAD_STATE, values, marks, source_epoch, position, rows, row, epoch)
