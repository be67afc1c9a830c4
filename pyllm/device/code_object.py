"""What compiled kernels use of a GPU, read from the machine code: shared memory, local memory, registers.

NVIDIA: a cubin, an ELF file with one section .text.KERNEL per kernel, .nv.shared.KERNEL as large as its static shared
memory, and .nv.info, a list of attributes. AMD: an ELF file with a note whose text is MessagePack. Only what is needed
of these formats is read here.

Sources: the System V ABI (ELF); the cubin attributes as `cuobjdump -elf` prints them; LLVM's AMDGPU usage guide, "Code
Object V3 and above Metadata"; the MessagePack specification.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pyllm.errors import DeviceError

_REGCOUNT, _FRAME_SIZE = 0x2F, 0x11  # attributes of .nv.info: pairs of symbol and value
_SIZED_VALUE = 4  # the attribute format that carries a length
_AMD_METADATA = 32  # type of the note
_NOBITS = 8
_SYSTEM_SHARED = 1 << 10
_BUNDLE_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"


@dataclass(frozen=True)
class KernelResources:
    """What one kernel uses.

    Attributes:
        shared_bytes: static shared memory of a block.
        scratch_bytes: local memory of a thread: arrays that are not in registers, and spilled registers.
        registers: of a thread.
    """

    name: str
    shared_bytes: int
    scratch_bytes: int
    registers: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_resources(code: bytes) -> list[KernelResources]:
    """The kernels in a cubin or an AMD code object, by name.

    Raises:
        DeviceError: it is neither.
    """
    try:
        elf = _Elf(_unbundled(code))
        kernels = list(_nvidia(elf) if elf.machine == _Elf.CUDA else _amd(elf))
    except (struct.error, IndexError, KeyError, ValueError) as error:
        raise DeviceError(f"the compiled kernel cannot be read: {type(error).__name__}: {error}") from error
    return sorted(kernels, key=lambda kernel: kernel.name)


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    size: int
    data: bytes


class _Elf:
    """The sections of a 64-bit little-endian ELF file."""

    CUDA = 190

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("no 64-bit ELF file")
        (self.machine,) = struct.unpack_from("<H", data, 18)
        (table,) = struct.unpack_from("<Q", data, 40)
        entry_size, count, names_index = struct.unpack_from("<HHH", data, 58)
        rows = [struct.unpack_from("<IIQQQQ", data, table + index * entry_size) for index in range(count)]
        names = data[rows[names_index][4] :]
        self.sections = []
        for name, kind, _, _, offset, size in rows:
            text = names[name : names.index(b"\0", name)].decode()
            self.sections.append(_Section(text, kind, size, b"" if kind == _NOBITS else data[offset : offset + size]))

    def section(self, name: str) -> _Section:
        return next(section for section in self.sections if section.name == name)


def _unbundled(code: bytes) -> bytes:
    """The device's part of a bundle; anything else as it is."""
    if not code.startswith(_BUNDLE_MAGIC):
        return code
    position = len(_BUNDLE_MAGIC) + 8
    (count,) = struct.unpack_from("<Q", code, len(_BUNDLE_MAGIC))
    for _ in range(count):
        offset, size, length = struct.unpack_from("<QQQ", code, position)
        triple = code[position + 24 : position + 24 + length]
        if b"amdgcn" in triple:
            return code[offset : offset + size]
        position += 24 + length
    raise ValueError("a bundle without code for a GPU")


# NVIDIA


def _nvidia(elf: _Elf) -> Iterator[KernelResources]:
    symbols = elf.section(".symtab").data
    names = elf.section(".strtab").data
    frames: dict[str, int] = {}
    registers: dict[str, int] = {}
    for attribute, values in _attributes(elf.section(".nv.info").data):
        if attribute in (_FRAME_SIZE, _REGCOUNT):
            index, value = struct.unpack_from("<II", values)
            (start,) = struct.unpack_from("<I", symbols, 24 * index)
            name = names[start : names.index(b"\0", start)].decode()
            (frames if attribute == _FRAME_SIZE else registers)[name] = value
    shared = {section.name.removeprefix(".nv.shared."): section.size for section in elf.sections}
    # From sm_90 on the system's own part comes first, which is not taken from the 227 KiB that a block can have.
    reserved = _SYSTEM_SHARED if "reserved.0" in shared else 0
    for section in elf.sections:
        if section.name.startswith(".text."):
            name = section.name.removeprefix(".text.")
            yield KernelResources(
                name, max(0, shared.get(name, 0) - reserved), frames.get(name, 0), registers.get(name, 0)
            )


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, position)
        position += 4
        if form == _SIZED_VALUE:
            yield attribute, data[position : position + size]
            position += size


# AMD


def _amd(elf: _Elf) -> Iterator[KernelResources]:
    for note in _notes(elf):
        for kernel in note["amdhsa.kernels"]:
            yield KernelResources(
                kernel[".name"],
                kernel[".group_segment_fixed_size"],
                kernel[".private_segment_fixed_size"],
                kernel[".vgpr_count"],
            )


def _notes(elf: _Elf) -> Iterator[Any]:
    found = False
    for section in elf.sections:
        position = 0
        while section.name == ".note" and position < section.size:
            name_size, size, kind = struct.unpack_from("<III", section.data, position)
            position += 12 + -(-name_size // 4) * 4
            if kind == _AMD_METADATA:
                found = True
                yield _Message(section.data[position : position + size]).value()
            position += -(-size // 4) * 4
    if not found:
        raise ValueError("no metadata of kernels")


_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
_NUMBERS |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_LENGTHS = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}  # of bytes, then of texts
_COUNTS = {0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}  # of arrays, then of maps
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


class _Message:
    """Reads MessagePack."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def value(self) -> Any:
        tag = self._number(">B")
        if tag < 0x80:
            return tag
        if tag >= 0xE0:
            return tag - 0x100
        if tag < 0x90 or tag in (0xDE, 0xDF):
            count = tag & 0x0F if tag < 0x90 else self._number(_COUNTS[tag])
            return {self.value(): self.value() for _ in range(count)}
        if tag < 0xA0 or tag in (0xDC, 0xDD):
            count = tag & 0x0F if tag < 0xA0 else self._number(_COUNTS[tag])
            return [self.value() for _ in range(count)]
        if tag < 0xC0:
            return self._bytes(tag & 0x1F).decode()
        if tag in _LENGTHS:
            content = self._bytes(self._number(_LENGTHS[tag]))
            return content if tag < 0xC7 else content.decode()
        return self._number(_NUMBERS[tag]) if tag in _NUMBERS else _CONSTANTS[tag]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _bytes(self, count: int) -> bytes:
        start, self._position = self._position, self._position + count
        if self._position > len(self._data):
            raise ValueError("the metadata ends too early")
        return self._data[start : self._position]
