"""What there is to know about the kernels without running them."""

from __future__ import annotations

from dataclasses import dataclass

from pyllm.device.compile_check import variants
from pyllm.device.gpu import MFMA_ARCHS, OLDEST_CUDA, WMMA_ARCHS
from pyllm.device.kernel_header import entry_points
from pyllm.device.kernel_source import kernel_names
from pyllm.errors import UsageError
from pyllm.kernel_cases import all_cases, ops_of_kernels
from pyllm.kernel_check import Case
from pyllm.quants import QuantType


@dataclass(frozen=True)
class KernelFacts:
    """One source of rawkernels/.

    Attributes:
        entries: the functions that can be launched.
        ops: what launches them.
        block_types: of weights that it reads packed.
    """

    name: str
    entries: list[str]
    ops: list[str]
    block_types: list[str]


def kernel_facts() -> list[KernelFacts]:
    """All kernels, by name."""
    ops = ops_of_kernels()
    facts = []
    for name in kernel_names():
        types = sorted({variant["QTYPE"] for variant in variants(name) if "QTYPE" in variant})
        names = [QuantType(qtype).name for qtype in types]
        facts.append(KernelFacts(name, entry_points(name), sorted(ops.get(name, ())), names))
    return facts


def targets() -> list[str]:
    """The GPUs for which every kernel is written."""
    return [f"sm_{OLDEST_CUDA} and newer", *WMMA_ARCHS, *MFMA_ARCHS]


def cases_named(name: str | None) -> list[Case]:
    """The cases of a kernel or an op; all of them for None.

    Raises:
        UsageError: there is no such kernel or op.
    """
    cases = all_cases()
    if name is None:
        return list(cases)
    ops = ops_of_kernels()
    wanted = {name, *ops.get(name, ())}
    found = [case for case in cases if case.op.name in wanted]
    if not found:
        known = sorted({*ops, *(case.op.name for case in cases)})
        raise UsageError(f"there is no kernel or op {name!r} with test cases; choose one of {', '.join(known)}")
    return found
