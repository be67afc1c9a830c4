"""check_inputs: the last op of a ubatch that read its slot in place: did the slot hold it all the time?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm import faults
from pyllm.input_block import InputLayout
from pyllm.ops.check import check_array
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device


def check_inputs_ref(
    slot: np.ndarray, layout: InputLayout, block: np.ndarray, step_counter: np.ndarray, record: np.ndarray
) -> None:
    expected = int(step_counter[0])
    first, last = (
        (int(views.head_serial[0]), int(views.tail_serial[0])) for views in (layout.views(block), layout.views(slot))
    )
    if first != (expected, expected) or last == (expected, expected):
        return
    found = last[0] if last[0] != expected else last[1]
    entry = [faults.FaultKind.SERIAL, -1, -1, -1, -1, -1, expected & 0x7FFFFFFF, found & 0x7FFFFFFF]
    faults.report(record, np.array([entry], np.int32))


def plan_check_inputs(
    target: Target, slot: Any, layout: InputLayout, block: Any, step_counter: Any, record: Any
) -> list[KernelLaunch]:
    spans = layout.spans()
    words = (spans[name][0] // 8 for name in ("head_serial", "tail_serial"))
    args = (slot, block, step_counter, record, *map(np.int32, words))
    return [KernelLaunch("check_inputs", "check_inputs", (1,), (32,), args)]


CHECK_INPUTS = Op("check_inputs", check_inputs_ref, plan_check_inputs)


def check_inputs(device: Device, slot: Any, layout: InputLayout, block: Any, step_counter: Any, record: Any) -> None:
    """Record a SERIAL fault when a slot that was sound at the start of its ubatch no longer is.

    The host writes both serials before anything else, so a slot that still has them now was not begun to be overwritten
    while the ubatch's ops read it. What `copy_inputs` reported already is not reported again.

    Args:
        slot: [layout.num_bytes] uint8, pinned.
        block: what `copy_inputs` made of it.
        step_counter: [1] int64, the ubatch's serial.
        record: fault record (pyllm.faults), int32; appended to.

    Raises:
        ShapeError: an array does not fit the layout.
    """
    for name, array in (("slot", slot), ("block", block)):
        check_array("check_inputs", name, array, (layout.num_bytes,), ("uint8",))
    check_array("check_inputs", "step_counter", step_counter, (1,), ("int64",))
    check_array("check_inputs", "record", record, faults.record_shape(), ("int32",))
    device.launch(CHECK_INPUTS, slot, layout, block, step_counter, record)
