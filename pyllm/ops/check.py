"""Argument checks that ops share. They run once per launch on the host, so they only look at shapes and dtypes."""

from __future__ import annotations

from functools import cache
from typing import Any

from pyllm.errors import ShapeError


def require(condition: bool, op: str, message: str) -> None:
    """Raise ShapeError with the op's name unless the condition holds."""
    if not condition:
        raise ShapeError(f"{op}: {message}")


def part_of(scratch: Any, size: int) -> Any:
    """The first elements of a scratch array: with a slice that is too short, a kernel would write behind it.

    Raises:
        ShapeError: there are fewer.
    """
    require(scratch is not None and scratch.size >= size, "scratch", f"{size} elements are needed")
    return scratch[:size]


def check_array(op: str, name: str, array: Any, shape: tuple[int | None, ...], dtypes: tuple[str, ...]) -> None:
    """Check one array.

    Args:
        shape: expected extents; None accepts any.
        dtypes: accepted dtype names.

    Raises:
        ShapeError: naming the op, the argument, what it is and what it must be.
    """
    if len(array.shape) != len(shape) or not _fits(array.shape, shape):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ShapeError(f"{op}: {name} has shape {tuple(array.shape)}, expected ({wanted})")
    if _dtype_name(array.dtype) not in dtypes:
        raise ShapeError(f"{op}: {name} is {array.dtype.name}, expected {' or '.join(dtypes)}")
    if not array.flags.c_contiguous:
        raise ShapeError(f"{op}: {name} is not C-contiguous")


def _fits(found: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    # A loop, not all(): this runs for every array of every launch.
    for have, want in zip(found, wanted, strict=True):  # noqa: SIM110
        if want is not None and have != want:
            return False
    return True


@cache
def _dtype_name(dtype: Any) -> str:
    """NumPy puts the name together anew at each access, which takes longer than all the other checks."""
    return dtype.name
