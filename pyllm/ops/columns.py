"""Columns of a wider array, as arguments of ops: what a layer projects lies side by side in one array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyllm.ops.check import check_array, require


@dataclass(frozen=True)
class Columns:
    """Neighbouring columns of an array. Kernels get the array and where they lie.

    Attributes:
        array: [num_rows, row_size].
        start: first of them.
        width: how many.
    """

    array: Any
    start: int
    width: int

    @property
    def view(self) -> Any:
        """[num_rows, width], for references."""
        return self.array[:, self.start : self.start + self.width]

    @property
    def row_size(self) -> int:
        """Elements from a row to the next."""
        return int(self.array.shape[1])

    @classmethod
    def side_by_side(cls, array: Any, widths: list[int]) -> list[Columns]:
        """All columns of an array, cut into parts."""
        starts = [sum(widths[:index]) for index in range(len(widths))]
        return [cls(array, start, width) for start, width in zip(starts, widths, strict=True)]


def check_columns(op: str, name: str, columns: Columns, num_rows: int | None, width: int) -> None:
    """Check columns of float32.

    Raises:
        ShapeError: naming the op, the argument, what it is and what it must be.
    """
    check_array(op, name, columns.array, (num_rows, None), ("float32",))
    require(columns.width == width, op, f"{name} has {columns.width} columns, expected {width}")
    inside = 0 <= columns.start <= columns.row_size - columns.width
    require(inside, op, f"{name} lies outside its array of {columns.row_size} columns")
