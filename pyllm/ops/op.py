"""What an op is: one mathematical step with one name, and the forms in which devices can run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Target:
    """What a kernel is compiled for.

    Attributes:
        vendor: "cuda", "hip" or "host" (emulated).
        arch: "sm_90", "gfx1151", ...; "host" when emulated.
        warp_size: threads that run in step, 32 or 64.
        tiles: which matrix instructions: "mma" (NVIDIA), "wmma" (RDNA) or "mfma" (CDNA).
        multiprocessors: how many there are; for plans whose blocks take turns.
        batch_invariant: what is computed of a token must not depend on how many tokens or sequences there are: plans
            choose by the shapes of weights alone.
    """

    vendor: str
    arch: str
    warp_size: int
    tiles: str
    multiprocessors: int = 132
    batch_invariant: bool = False


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of one kernel.

    Attributes:
        source: file rawkernels/<source>.cu.
        entry: the extern "C" function.
        grid, block: extents, up to three.
        args: device arrays and NumPy scalars, in the order of the kernel's parameters; the types must fit exactly.
        defines: compile-time constants; the same source is compiled once for each set of them.
        shared_bytes: dynamic shared memory.
        arch: compile for exactly this architecture, whose code runs on no other ("sm_90a"); "": for the target's.
    """

    source: str
    entry: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Any, ...]
    defines: Mapping[str, int] = field(default_factory=dict)
    shared_bytes: int = 0
    arch: str = ""


@dataclass(frozen=True)
class GemmLaunch:
    """One product by the vendor's library: out[:, first_column : first_column + rows of b] = a @ b.T, or += it.

    Attributes:
        a: [m, k] float16.
        b: [n, k] float16.
        out: [m, columns] float32 or float16; sums in float32.
        accumulate: add to out.
    """

    a: Any
    b: Any
    out: Any
    first_column: int
    accumulate: bool = False


@dataclass(frozen=True)
class Op:
    """One mathematical step.

    Attributes:
        name: the name of its module, its kernel source, its test and its kernel symbol.
        reference: the NumPy definition. It gets the same arguments as the launch, in the same order, and writes into
            the arrays that are marked as outputs; it returns nothing.
        plan: plan(target, *args) lists the kernel launches that do the same; None while the op has no kernel.
    """

    name: str
    reference: Callable[..., Any]
    plan: Callable[..., Sequence[KernelLaunch | GemmLaunch]] | None = None

    def __repr__(self) -> str:
        return f"Op({self.name})"
