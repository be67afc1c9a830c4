"""Argument checks that ops share. They run once per launch on the host, so they only look at shapes and dtypes."""

from __future__ import annotations

from typing import Any

from pyllm.errors import ShapeError


def require(condition: bool, op: str, message: str) -> None:
    """Raise ShapeError with the op's name unless the condition holds."""
    if not condition:
        raise ShapeError(f"{op}: {message}")


def check_array(op: str, name: str, array: Any, shape: tuple[int | None, ...], dtypes: tuple[str, ...]) -> None:
    """Check one array.

    Args:
        shape: expected extents; None accepts any.
        dtypes: accepted dtype names.

    Raises:
        ShapeError: naming the op, the argument, what it is and what it must be.
    """
    fits = len(array.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ShapeError(f"{op}: {name} has shape {tuple(array.shape)}, expected ({wanted})")
    if array.dtype.name not in dtypes:
        raise ShapeError(f"{op}: {name} is {array.dtype.name}, expected {' or '.join(dtypes)}")
    if not array.flags.c_contiguous:
        raise ShapeError(f"{op}: {name} is not C-contiguous")
