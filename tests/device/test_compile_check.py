"""The check that kernels compile for real GPUs: what it reads from sources, and that it sees errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllm.device import compile_check, kernel_source
from pyllm.device.kernel_source import kernel_names, source_text, target_defines
from pyllm.errors import DeviceError

BROKEN = '#include "common/platform.cuh"\n\nKERNEL(32) probe(float* out) {\n    *out = missing;\n}\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of rawkernels/."""
    monkeypatch.setattr(compile_check, "kernel_folder", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", kernel_names())
def test_every_kernel_says_its_variants(name: str) -> None:
    assert compile_check.variants(name)


def test_variants(folder: Path) -> None:
    (folder / "x.cu").write_text(
        "// x: what it does\n//\n// Defines   A, B, C\n// Compile   A=1,2 B=3,-4;\n//           C=5\n"
        "// Numerics  none\nint A=9;\n"
    )
    combined = [{"A": a, "B": b} for a in (1, 2) for b in (3, -4)]
    assert compile_check.variants("x") == [*combined, {"C": 5}]
    (folder / "y.cu").write_text("// y: what it does\n")
    assert compile_check.variants("y") == [{}]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("// Defines   A\n", "x.cu has Defines in its header but no Compile"),
        ("// Compile   A\n", "x.cu: Compile has 'A'; expected MACRO=1 or MACRO=1,2,3"),
        ("// Compile   A=b\n", "x.cu: Compile has 'A=b'"),
    ],
)
def test_headers_that_cannot_be_read(folder: Path, header: str, message: str) -> None:
    (folder / "x.cu").write_text(header)
    with pytest.raises(DeviceError, match=message):
        compile_check.variants("x")


def test_targets_get_their_defines() -> None:
    nvidia, rdna, cdna = (target_defines(target, {"A": 1}) for target in compile_check.TARGETS)
    assert nvidia == {"PYLLM_CUDA": "1", "TILE_MMA": "1", "WARP_SIZE": "32", "A": "1"}
    assert rdna == {"PYLLM_HIP": "1", "TILE_WMMA": "1", "WARP_SIZE": "32", "A": "1"}
    assert cdna == {"PYLLM_HIP": "1", "TILE_MFMA": "1", "WARP_SIZE": "64", "A": "1"}


def test_nvidia_compiles_what_is_right_and_names_what_is_wrong(tmp_path: Path) -> None:
    try:
        compiler = compile_check.cuda_compiler()
    except DeviceError as error:
        pytest.skip(str(error))
    target = compile_check.TARGETS[0]
    assert compiler.compile(source_text("add"), target, target_defines(target, {})) == ""
    path = tmp_path / "broken.cu"
    path.write_text(BROKEN)
    errors = compiler.compile(source_text(str(path)), target, target_defines(target, {}))
    assert "broken.cu(4)" in errors and "missing" in errors


def test_includes_become_one_text(tmp_path: Path) -> None:
    (tmp_path / "own.cuh").write_text("#pragma once\nint own;\n")
    path = tmp_path / "x.cu"
    path.write_text('#ifdef A\n#include "own.cuh"\n#else\n#include "own.cuh"\n#endif\nint last;\n')
    lines = source_text(str(path)).splitlines()
    assert lines.count("int own;") == 2  # either branch may be the one that is compiled
    assert not any("#include" in line or "#pragma" in line for line in lines)
    assert lines[lines.index("int last;") - 2 :] == [f'#line 5 "{path}"', "#endif", "int last;"]
    assert kernel_source.digest("ab", "c") != kernel_source.digest("a", "bc")
