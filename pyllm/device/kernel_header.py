"""The comment that a kernel source begins with, as far as tools read it: which variants to compile, for which GPUs, and
what they may use. docs/kernels.md says how it is written.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path

from pyllm.device.kernel_source import kernel_folder
from pyllm.errors import DeviceError

_FIELD = re.compile(r"^// (\w+) {2,}(.*)$")
_ENTRY = re.compile(r"^KERNEL\([^)]+\) *(\w+)\(", re.MULTILINE)
_NUMBERS = re.compile(r"-?\d+(,-?\d+)*")
_ARCH = re.compile(r"(sm_|gfx)\w+")


@dataclass(frozen=True)
class Variant:
    """One set of defines of a source.

    Attributes:
        archs: the GPUs that it is for; empty: all.
    """

    defines: dict[str, int]
    archs: tuple[str, ...] = ()

    def is_for(self, arch: str) -> bool:
        """Whether it is to be compiled for a GPU. What is for all of them is not compiled for sm_90a and its kin,
        which are sm_90 with more instructions."""
        return arch in self.archs if self.archs else not arch.endswith("a") or arch.startswith("gfx")


@dataclass(frozen=True)
class KernelHeader:
    """What the header of one source says.

    Attributes:
        variants: see the field `Compile`.
        shared_limits: architecture to bytes of shared memory per block, where more than usual is meant (`SharedLimit`).
        scratch_limits: architecture to bytes of local memory per thread that are accepted (`Scratch`).
    """

    variants: tuple[Variant, ...]
    shared_limits: dict[str, int] = field(default_factory=dict)
    scratch_limits: dict[str, int] = field(default_factory=dict)


def read_header(name: str, folder: Path | None = None) -> KernelHeader:
    """The header of rawkernels/<name>.cu.

    Raises:
        DeviceError: a field cannot be read, or there are `Defines` without `Compile`.
    """
    fields = _fields((folder or kernel_folder()) / f"{name}.cu")
    if "Defines" in fields and "Compile" not in fields:
        raise DeviceError(f"rawkernels/{name}.cu has Defines in its header but no Compile; see docs/kernels.md")
    archs = tuple(fields.get("Arch", "").split())
    for arch in archs:
        _check_arch(name, "Arch", arch)
    found = []
    for text in fields.get("Compile", "").split(";"):
        found += _variants(name, text, archs)
    return KernelHeader(tuple(found), _limits(name, fields, "SharedLimit"), _limits(name, fields, "Scratch"))


def entry_points(name: str) -> list[str]:
    """The functions of a source that can be launched."""
    return _ENTRY.findall((kernel_folder() / f"{name}.cu").read_text(encoding="utf-8"))


def _variants(name: str, text: str, archs: tuple[str, ...]) -> list[Variant]:
    """What one part of `Compile` stands for: "A=1,2 B=3 @sm_90a"."""
    choices = []
    for word in text.split():
        if word.startswith("@"):
            _check_arch(name, "Compile", word[1:])
            archs = (*archs, word[1:])
            continue
        macro, _, values = word.partition("=")
        if not _NUMBERS.fullmatch(values):
            raise DeviceError(f"rawkernels/{name}.cu: Compile has {word!r}; expected MACRO=1 or MACRO=1,2,3")
        choices.append([(macro, int(value)) for value in values.split(",")])
    return [Variant(dict(combination), archs) for combination in itertools.product(*choices)]


def _limits(name: str, fields: dict[str, str], title: str) -> dict[str, int]:
    limits = {}
    for word in fields.get(title, "").replace(",", " ").split():
        arch, _, value = word.partition("=")
        _check_arch(name, title, arch)
        if not value.isdigit():
            raise DeviceError(f"rawkernels/{name}.cu: {title} has {word!r}; expected bytes such as sm_90=232448")
        limits[arch] = int(value)
    return limits


def _check_arch(name: str, title: str, arch: str) -> None:
    if not _ARCH.fullmatch(arch):
        raise DeviceError(f"rawkernels/{name}.cu: {title} has {arch!r}; expected a GPU such as sm_90a or gfx942")


def _fields(path: Path) -> dict[str, str]:
    """By title; indented lines continue a field."""
    fields: dict[str, str] = {}
    last = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("//"):
            break
        if found := _FIELD.match(line):
            last = found[1]
            fields[last] = found[2]
        elif last:
            fields[last] += " " + line.removeprefix("//").strip()
    return fields
