"""What an op is: one mathematical step with one name, and the forms in which devices can run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Op:
    """One mathematical step.

    Attributes:
        name: the name of its module, its kernel source, its test and its kernel symbol.
        reference: the NumPy definition. It gets the same arguments as the launch, in the same order, and writes into
            the arrays that are marked as outputs; it returns nothing.
    """

    name: str
    reference: Callable[..., Any]

    def __repr__(self) -> str:
        return f"Op({self.name})"
