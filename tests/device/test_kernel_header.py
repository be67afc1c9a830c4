"""What tools read from the comment at the head of a kernel source."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllm.device.kernel_header import KernelHeader, Variant, read_header
from pyllm.device.kernel_source import kernel_names
from pyllm.errors import DeviceError


def header_of(folder: Path, text: str) -> KernelHeader:
    (folder / "x.cu").write_text(text)
    return read_header("x", folder)


@pytest.mark.parametrize("name", kernel_names())
def test_every_header_can_be_read(name: str) -> None:
    assert read_header(name).variants


def test_variants(tmp_path: Path) -> None:
    text = (
        "// x: what it does\n//\n// Defines   A, B, C\n// Compile   A=1,2 B=3,-4;\n//           C=5\n"
        "// Numerics  none\nint A=9;\n"
    )
    combined = [Variant({"A": a, "B": b}) for a in (1, 2) for b in (3, -4)]
    assert header_of(tmp_path, text).variants == (*combined, Variant({"C": 5}))
    assert header_of(tmp_path, "// x: what it does\n").variants == (Variant({}),)


def test_variants_for_one_gpu(tmp_path: Path) -> None:
    own, common = header_of(tmp_path, "// Compile   A=1 @sm_90a @gfx942; A=2\n").variants
    assert own == Variant({"A": 1}, ("sm_90a", "gfx942"))
    assert [arch for arch in ("sm_90", "sm_90a", "gfx942", "gfx90a") if own.is_for(arch)] == ["sm_90a", "gfx942"]
    assert [arch for arch in ("sm_90", "sm_90a", "gfx942", "gfx90a") if common.is_for(arch)] == [
        "sm_90",
        "gfx942",
        "gfx90a",
    ]
    assert header_of(tmp_path, "// Arch      sm_90a\n").variants == (Variant({}, ("sm_90a",)),)


def test_limits(tmp_path: Path) -> None:
    header = header_of(tmp_path, "// SharedLimit  sm_90=232448 sm_80=166912\n// Scratch   gfx1151=16, sm_90=32\n")
    assert header.shared_limits == {"sm_90": 232448, "sm_80": 166912}
    assert header.scratch_limits == {"gfx1151": 16, "sm_90": 32}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("// Defines   A\n", "x.cu has Defines in its header but no Compile"),
        ("// Compile   A\n", "x.cu: Compile has 'A'; expected MACRO=1 or MACRO=1,2,3"),
        ("// Compile   A=b\n", "x.cu: Compile has 'A=b'"),
        ("// Compile   A=1 @h100\n", "x.cu: Compile has 'h100'; expected a GPU such as sm_90a or gfx942"),
        ("// Arch      hopper\n", "x.cu: Arch has 'hopper'"),
        ("// SharedLimit  sm_90=much\n", "x.cu: SharedLimit has 'sm_90=much'; expected bytes such as sm_90=232448"),
        ("// Scratch   16\n", "x.cu: Scratch has '16'; expected a GPU"),
    ],
)
def test_headers_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        header_of(tmp_path, text)
