"""The fault record: how kernels report inputs or K/V rows that are not what they must be.

A record is int32 [1 + CAPACITY, WIDTH] in device memory. Row 0 holds the number of faults found; the rows after it
hold the first CAPACITY of them, in no particular order. `copy_inputs` clears it at the start of every ubatch; it comes
back to the host with the ubatch's outputs, and nothing of a step is shown or shared before its record was read clean.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

CAPACITY = 127  # entries; with the counter row the record is 4 KiB
WIDTH = 8  # int32 per row


class FaultKind(IntEnum):
    """What was found."""

    SERIAL = 1  # the slot did not hold the ubatch that was to run: expected, head and tail serial (low 31 bits)
    ROW_ID = 2  # a K/V row to be written is not the one that page table and position give
    TAG = 3  # a K/V row to be read does not carry its page's epoch
    STATE = 4  # a recurrent state to go on from is another sequence's, or stands at another position


@dataclass(frozen=True)
class Fault:
    """One entry of a record.

    Attributes:
        seq_id, layer, page, row: where; -1 when it does not apply. `row` counts inside the page, or recurrent states.
        position: position in the sequence.
        expected, found: serials, rows or tags; of a state epochs, or positions where the epochs agree.
    """

    kind: FaultKind
    seq_id: int
    layer: int
    page: int
    row: int
    position: int
    expected: int
    found: int

    def __str__(self) -> str:
        if self.kind == FaultKind.SERIAL:
            return f"the inputs of ubatch {self.expected} were overwritten by those of ubatch {self.found}"
        if self.kind == FaultKind.STATE:
            return (
                f"a recurrent state is not where this sequence left it: sequence {self.seq_id}, position "
                f"{self.position}, layer {self.layer}, row {self.row} (expected {self.expected}, found {self.found})"
            )
        what = {FaultKind.ROW_ID: "a row id is wrong", FaultKind.TAG: "a K/V row is not this sequence's own"}
        return (
            f"{what[self.kind]}: sequence {self.seq_id}, position {self.position}, layer {self.layer}, "
            f"page {self.page}, row {self.row} (expected {self.expected}, found {self.found})"
        )


def record_shape() -> tuple[int, int]:
    """Shape of a record."""
    return (1 + CAPACITY, WIDTH)


def count(record: np.ndarray) -> int:
    """How many faults a record reports; may exceed CAPACITY."""
    return int(record[0, 0])


def entries(record: np.ndarray) -> list[Fault]:
    """The faults that a record holds, at most CAPACITY of them."""
    rows = record[1 : 1 + min(count(record), CAPACITY)].tolist()
    return [Fault(FaultKind(kind), *rest) for kind, *rest in rows]


def report(record: np.ndarray, faults: np.ndarray) -> None:
    """Append faults to a record: what the kernels' atomic counter does, for the NumPy references.

    Args:
        record: int32 [1 + CAPACITY, WIDTH], changed in place.
        faults: int32 [n, WIDTH], columns as in `Fault`.
    """
    found = count(record)
    room = max(0, CAPACITY - found)
    kept = faults[:room]
    record[1 + found : 1 + found + len(kept)] = kept
    record[0, 0] = found + len(faults)
