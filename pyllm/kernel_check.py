"""How a kernel is checked: a case has arguments and says what comes out; its op's reference is the oracle.

The reference runs on the host with all float32 and float16 arrays widened to float64, which gives the exact result, and
once more as the plain implementation: in float32, its operands rounded as the kernel rounds them. A kernel's error may
be twice that of the plain implementation, plus a small floor. What is only moved, compared, counted or rounded once has
to be exact.
This module knows no op; `kernel_cases` lists the cases.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pyllm.device.base import Device
from pyllm.errors import DeviceError, PyllmError
from pyllm.ops.op import Op

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One call of one op.

    Attributes:
        op: what is called.
        name: what differs from the op's other cases.
        arguments: arguments(rng): those of the op's reference, in its order. Arrays are NumPy arrays; dataclasses may
            hold more of them.
        outputs: positions of the arguments that are compared afterwards.
        floor: accepted error beside that of the plain implementation, relative to the largest value, or to `unit` where
            that is larger; None: the result has to be exact.
        rounded: rounded(arguments): the same arguments with the roundings that the kernel makes; None: it makes none.
        large: a size of real models, too slow to be emulated.
    """

    op: Op
    name: str
    arguments: Callable[[np.random.Generator], Arguments]
    outputs: tuple[int, ...]
    floor: float | None = 1e-6
    unit: float = 1.0
    rounded: Callable[[Arguments], Arguments] | None = None
    large: bool = False

    def __str__(self) -> str:
        return f"{self.op.name}: {self.name}"

    def draw(self, seed: int) -> Arguments:
        """The arguments that belong to a seed."""
        return self.arguments(np.random.default_rng(seed))


@dataclass(frozen=True)
class Verdict:
    """How a case went on a device.

    Attributes:
        error: largest difference from the exact result; infinite for a NaN that does not belong there.
        limit: what is accepted.
        problem: what went wrong beside the numbers; empty when nothing did.
    """

    error: float
    limit: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether the kernel is right."""
        return not self.problem and self.error <= self.limit


def check_case(device: Device, case: Case, seed: int = 0, repeats: int = 2) -> Verdict:
    """Run a case on a device.

    Args:
        device: one that has kernels. After an error of the device it is of no use any more.
        repeats: how often to run it; the results must agree in every bit.
    """
    arguments = case.draw(seed)
    exact, limit = expected(case, arguments)
    first: list[np.ndarray] = []
    try:
        for run in range(repeats):
            found = run_case(device, case, arguments)
            if run and any(a.tobytes() != b.tobytes() for a, b in zip(found, first, strict=True)):
                return Verdict(np.inf, limit, f"run {run + 1} gave other bits than the first")
            first = first or found
    except PyllmError as error:
        return Verdict(np.inf, limit, str(error))
    return Verdict(max(_error(*pair) for pair in zip(first, exact, strict=True)), limit)


def run_case(device: Device, case: Case, arguments: Arguments) -> list[np.ndarray]:
    """Launch the op on copies of the arguments; returns all arrays among the outputs.

    Raises:
        DeviceError: the kernel does not compile, or the device reports a fault.
    """
    on_device = convert(arguments, device.upload)
    device.launch(case.op, *on_device)
    found = [device.download(array) for array in outputs_of(case, on_device)]
    for array in {id(array): array for array in _arrays(on_device)}.values():
        device.release(array)
    return found


def expected(case: Case, arguments: Arguments) -> tuple[list[np.ndarray], float]:
    """The exact outputs, and the error that is accepted."""
    if case.floor is None:
        return _reference(case, arguments, np.float32), 0.0
    exact = _reference(case, arguments, np.float64)
    plain = _reference(case, case.rounded(arguments) if case.rounded else arguments, np.float32)
    floats = [(a, b) for a, b in zip(plain, exact, strict=True) if b.dtype.kind == "f"]
    largest = max((float(np.abs(array).max(initial=0)) for _, array in floats), default=0.0)
    return exact, 2 * max((_error(*pair) for pair in floats), default=0.0) + case.floor * max(case.unit, largest)


def outputs_of(case: Case, arguments: Arguments) -> list[Any]:
    """All arrays among the arguments that are outputs."""
    return [array for position in case.outputs for array in _arrays(arguments[position])]


def convert(value: Any, function: Callable[[np.ndarray], Any]) -> Any:
    """A copy of arguments with a function applied to every array in them; what was one array stays one."""
    made: dict[int, Any] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if id(value) not in made:
                made[id(value)] = function(value)
            return made[id(value)]
        if isinstance(value, tuple):
            return tuple(walk(item) for item in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return dataclasses.replace(value, **{name: walk(item) for name, item in fields.items()})
        return value

    return walk(value)


def _reference(case: Case, arguments: Arguments, dtype: type) -> list[np.ndarray]:
    def widened(array: np.ndarray) -> np.ndarray:
        wide = array.dtype == np.float32 or (array.dtype == np.float16 and dtype == np.float64)
        return array.astype(dtype) if wide else array.copy()

    arguments = convert(arguments, widened)
    with np.errstate(all="ignore"):
        case.op.reference(*arguments)
    return outputs_of(case, arguments)


def _arrays(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [array for item in value for array in _arrays(item)]
    if dataclasses.is_dataclass(value):
        return [array for field in dataclasses.fields(value) for array in _arrays(getattr(value, field.name))]
    is_array = hasattr(value, "nbytes") and not isinstance(value, (type, np.generic))  # of NumPy or CuPy
    return [value] if is_array else []


def _error(found: np.ndarray, exact: np.ndarray) -> float:
    """The largest difference; infinite where one is a NaN and the other is not, or where whole numbers differ."""
    a, b = found.astype(np.float64), exact.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    if exact.dtype.kind != "f":
        return np.inf
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0, np.abs(a - b))
    return float(np.inf if np.isnan(difference).any() else difference.max())


EMULATED = {"emulated-32": (32, "mma"), "emulated-32-wmma": (32, "wmma"), "emulated-64": (64, "mfma")}


def kernel_devices(kind: str = "all", hopper: bool = False) -> tuple[dict[str, Callable[[], Device]], list[str]]:
    """The devices of this machine that run kernels.

    Args:
        kind: "emulated", "gpu", or "all": those that are present.
        hopper: emulated is a Hopper, for kernels that no other GPU has.

    Returns:
        By name, functions that open them with poisoned memory; and for "all", why what is missing is missing.

    Raises:
        DeviceError: nothing of this kind is present.
    """
    devices: dict[str, Callable[[], Device]] = {}
    missing = []
    for name, find in (("emulated", _emulated_hopper if hopper else _emulated_devices), ("gpu", _gpu_devices)):
        if kind in (name, "all"):
            try:
                devices |= find()
            except DeviceError as error:
                missing.append(str(error))
    if not devices:
        raise DeviceError("; ".join(missing))
    return devices, missing


def _emulated_devices() -> dict[str, Callable[[], Device]]:
    from pyllm.device.emulated import EmulatedDevice
    from pyllm.device.emulation.compiler import host_compiler

    host_compiler()  # raises when there is none
    return {name: partial(EmulatedDevice, *waves) for name, waves in EMULATED.items()}


def _emulated_hopper() -> dict[str, Callable[[], Device]]:
    from pyllm.device.emulated import EmulatedDevice

    def opened() -> Device:
        device = EmulatedDevice(*EMULATED["emulated-32"])
        device.target = dataclasses.replace(device.target, arch="sm_90")
        device.description = "emulated GPU (Hopper)"
        return device

    _emulated_devices()  # raises when there is no compiler
    return {"emulated-sm_90": opened}


def _gpu_devices() -> dict[str, Callable[[], Device]]:
    from pyllm.device.gpu import GpuDevice

    GpuDevice().close()  # raises when there is none
    # PYLLM_POISON=0 is for compute-sanitizer's initcheck, to which poisoned memory is written memory.
    return {"gpu": partial(GpuDevice, poison=os.environ.get("PYLLM_POISON") != "0")}
