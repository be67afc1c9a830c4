"""copy_inputs: the first op of every ubatch. Slot to block, serial check, step counter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm import faults
from pyllm.input_block import InputLayout
from pyllm.ops.check import check_array
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device


def copy_inputs_ref(
    slot: np.ndarray,
    layout: InputLayout,
    enforce: bool,
    block: np.ndarray,
    step_counter: np.ndarray,
    kept: np.ndarray,
    record: np.ndarray,
    in_place: bool = False,
) -> None:
    record[...] = 0
    step_counter += 1
    start, stop = layout.in_place_span() if in_place else (0, 0)
    block[:start] = slot[:start]
    block[stop:] = slot[stop:]
    inputs = layout.views(block)
    head, tail, expected = int(inputs.head_serial[0]), int(inputs.tail_serial[0]), int(step_counter[0])
    if head == tail == expected:
        fed = inputs.token_ids < 0
        inputs.token_ids[fed] = kept[np.minimum(-1 - inputs.token_ids[fed], len(kept) - 1)]
        return
    found = head if head != expected else tail
    entry = [faults.FaultKind.SERIAL, -1, -1, -1, -1, -1, expected & 0x7FFFFFFF, found & 0x7FFFFFFF]
    faults.report(record, np.array([entry], np.int32))
    if enforce:
        block[...] = 0
        inputs.row_ids[...] = inputs.out_places[...] = -1  # neither a row nor a kept token is written
        inputs.status[...] = 1


def plan_copy_inputs(
    target: Target,
    slot: Any,
    layout: InputLayout,
    enforce: bool,
    block: Any,
    step_counter: Any,
    kept: Any,
    record: Any,
    in_place: bool = False,
) -> list[KernelLaunch]:
    word = {name: start // 8 for name, (start, _) in layout.spans().items()}
    sizes = (layout.num_bytes // 8, record.size, word["head_serial"], word["tail_serial"], word["status"])
    rows = (word["row_ids"], word["token_ids"], word["out_places"], layout.max_tokens, kept.shape[0], enforce)
    left = (start // 8 for start in (layout.in_place_span() if in_place else (0, 0)))
    args = (slot, block, step_counter, kept, record, *map(np.int32, (*sizes, *rows, *left)))
    return [KernelLaunch("copy_inputs", "copy_inputs", (1,), (1024,), args)]


COPY_INPUTS = Op("copy_inputs", copy_inputs_ref, plan_copy_inputs)


def copy_inputs(
    device: Device,
    slot: Any,
    layout: InputLayout,
    enforce: bool,
    block: Any,
    step_counter: Any,
    kept: Any,
    record: Any,
    in_place: bool = False,
) -> None:
    """Copy a slot into the input block and check that it is the ubatch whose turn it is.

    The step counter lives on the device and advances here and nowhere else, by one. Head and tail serial of the slot
    must both equal it. If they do not, the slot was overwritten before it was read: a SERIAL fault is recorded and the
    block becomes empty (no tokens, no sequences, row ids and places of kept tokens -1, status 1), so that the ubatch's
    other ops write no K/V row and read none. A token id of -1 - i stands for the token that an earlier step left at
    kept[i].

    Args:
        slot: [layout.num_bytes] uint8, pinned.
        enforce: False is a test hook: record the fault, but run on with what was copied.
        block: like slot; output.
        step_counter: [1] int64; advanced.
        kept: [num_places] int32, from `keep_tokens`.
        record: fault record (pyllm.faults), int32; cleared, then written.
        in_place: leave out what the ubatch's ops read in the slot itself (`input_block.IN_PLACE`).

    Raises:
        ShapeError: an array does not fit the layout.
    """
    for name, array in (("slot", slot), ("block", block)):
        check_array("copy_inputs", name, array, (layout.num_bytes,), ("uint8",))
    check_array("copy_inputs", "step_counter", step_counter, (1,), ("int64",))
    check_array("copy_inputs", "kept", kept, (None,), ("int32",))
    check_array("copy_inputs", "record", record, faults.record_shape(), ("int32",))
    device.launch(COPY_INPUTS, slot, layout, enforce, block, step_counter, kept, record, in_place)
