"""Writes machine code files, as far as pyllm reads them: ELF sections, a cubin's attributes, AMD's metadata note."""

from __future__ import annotations

import struct
from typing import Any

CUDA, AMDGPU = 190, 224
PROGBITS, SYMTAB, STRTAB, NOTE, NOBITS = 1, 2, 3, 7, 8


def elf(machine: int, sections: list[tuple[str, int, bytes | int]]) -> bytes:
    """A file of sections (name, type, content); the content of NOBITS sections is their size."""
    sections = [("", 0, b""), *sections, (".shstrtab", STRTAB, b"")]
    names = b"\0".join(name.encode() for name, _, _ in sections) + b"\0"
    sections[-1] = (".shstrtab", STRTAB, names)
    header_size, data, rows = 64, b"", b""
    for name, kind, content in sections:
        size = content if isinstance(content, int) else len(content)
        start = names.index(name.encode() + b"\0") if name else 0
        rows += struct.pack("<IIQQQQIIQQ", start, kind, 0, 0, header_size + len(data), size, 0, 0, 1, 0)
        data += b"" if isinstance(content, int) else content
    head = b"\x7fELF\x02\x01" + bytes(10) + struct.pack("<HHIQQQ", 2, machine, 1, 0, 0, header_size + len(data))
    head += struct.pack("<IHHHHHH", 0, header_size, 0, 0, 64, len(sections), len(sections) - 1)
    return head + data + rows


def cubin(name: str, shared: int = 0, frame: int = 0, registers: int = 0) -> bytes:
    """One NVIDIA kernel."""
    symbols = struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0) + struct.pack("<IBBHQQ", 1, 0, 0, 0, 0, 0)
    info = struct.pack("<BBHII", 4, 0x2F, 8, 1, registers) + struct.pack("<BBHII", 4, 0x11, 8, 1, frame)
    info = struct.pack("<BBH", 3, 0x1B, 255) + info  # an attribute without a length before them
    sections: list[tuple[str, int, bytes | int]] = [
        (".strtab", STRTAB, b"\0" + name.encode() + b"\0"),
        (".symtab", SYMTAB, symbols),
        (".nv.info", PROGBITS, info),
        (f".text.{name}", PROGBITS, bytes(128)),
    ]
    if shared:
        sections.append((f".nv.shared.{name}", NOBITS, shared))
    return elf(CUDA, sections)


def amd_code(kernels: list[dict[str, Any]]) -> bytes:
    """AMD kernels with these metadata."""
    text = message({"amdhsa.version": [1, 2], "amdhsa.kernels": kernels})
    note = struct.pack("<III", 7, len(text), 32) + b"AMDGPU\0\0" + text + bytes(-len(text) % 4)
    return elf(AMDGPU, [(".note", NOTE, note), (".text", PROGBITS, bytes(16))])


def bundle(code: bytes) -> bytes:
    """An offload bundle whose second entry is the code."""
    entries = [(b"host-x86_64-unknown-linux--", b""), (b"hipv4-amdgcn-amd-amdhsa--gfx942", code)]
    size = 32 + sum(24 + len(triple) for triple, _ in entries)
    table, data = b"", b""
    for triple, content in entries:
        table += struct.pack("<QQQ", size + len(data), len(content), len(triple)) + triple
        data += content
    return b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(entries)) + table + data


def message(value: Any) -> bytes:
    """MessagePack, in the longest form that the format has for a value where there are several."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        if -32 <= value < 128:
            return struct.pack("b", value)
        return b"\xce" + struct.pack(">I", value) if value > 0 else b"\xd2" + struct.pack(">i", value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        raw = value.encode()
        return (bytes([0xA0 | len(raw)]) if len(raw) < 32 else b"\xd9" + bytes([len(raw)])) + raw
    if isinstance(value, bytes):
        return b"\xc4" + bytes([len(value)]) + value
    if isinstance(value, list):
        head = bytes([0x90 | len(value)]) if len(value) < 16 else b"\xdc" + struct.pack(">H", len(value))
        return head + b"".join(map(message, value))
    head = bytes([0x80 | len(value)]) if len(value) < 16 else b"\xde" + struct.pack(">H", len(value))
    return head + b"".join(message(key) + message(item) for key, item in value.items())
