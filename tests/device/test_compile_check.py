"""The check that kernels compile for real GPUs: what it compiles, what it refuses, what it remembers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllm.device import compile_check, kernel_source
from pyllm.device.code_object import KernelResources
from pyllm.device.compile_check import ALL_TARGETS, TARGETS, Checker, Job, jobs_of, problems
from pyllm.device.gpu_compilers import Compiled, GpuCompiler
from pyllm.device.kernel_header import KernelHeader
from pyllm.device.kernel_source import kernel_names, source_text, target_defines
from pyllm.errors import DeviceError
from pyllm.ops.op import KernelLaunch, Target
from tests.device.cubin_maker import cubin

BROKEN = '#include "common/platform.cuh"\n\nKERNEL(32) probe(float* out) {\n    *out = missing;\n}\n'


@pytest.mark.parametrize("name", kernel_names())
def test_every_kernel_says_its_variants(name: str) -> None:
    assert compile_check.variants(name)


def test_targets_get_their_defines() -> None:
    nvidia, rdna, cdna = (target_defines(target, {"A": 1}) for target in compile_check.TARGETS[:3])
    assert nvidia == {"PYLLM_CUDA": "1", "TILE_MMA": "1", "WARP_SIZE": "32", "A": "1"}
    assert rdna == {"PYLLM_HIP": "1", "TILE_WMMA": "1", "WARP_SIZE": "32", "A": "1"}
    assert cdna == {"PYLLM_HIP": "1", "TILE_MFMA": "1", "WARP_SIZE": "64", "A": "1"}


def test_nvidia_compiles_what_is_right_and_names_what_is_wrong(tmp_path: Path) -> None:
    try:
        compiler = compile_check.cuda_compiler()
    except DeviceError as error:
        pytest.skip(str(error))
    target = compile_check.TARGETS[0]
    compiled = compiler.compile(source_text("add"), target, target_defines(target, {}))
    assert not compiled.errors and compiled.code
    path = tmp_path / "broken.cu"
    path.write_text(BROKEN)
    broken = compiler.compile(source_text(str(path)), target, target_defines(target, {}))
    assert "broken.cu(4)" in broken.errors and "missing" in broken.errors and broken.code is None


def test_includes_become_one_text(tmp_path: Path) -> None:
    (tmp_path / "own.cuh").write_text("#pragma once\nint own;\n")
    path = tmp_path / "x.cu"
    path.write_text('#ifdef A\n#include "own.cuh"\n#else\n#include "own.cuh"\n#endif\nint last;\n')
    lines = source_text(str(path)).splitlines()
    assert lines.count("int own;") == 2  # either branch may be the one that is compiled
    assert not any("#include" in line or "#pragma" in line for line in lines)
    assert lines[lines.index("int last;") - 2 :] == [f'#line 5 "{path}"', "#endif", "int last;"]
    assert kernel_source.digest("ab", "c") != kernel_source.digest("a", "bc")


class StubCompiler(GpuCompiler):
    """Compiles everything but what has "broken" in it, to machine code of another kernel."""

    name = "stub 1.0"

    def __init__(self, code: bytes | None) -> None:
        self.code = code
        self.texts: list[str] = []

    def compile(self, text: str, target: Target, defines: dict[str, str]) -> Compiled:
        self.texts.append(text)
        return Compiled("it is broken") if "broken" in defines else Compiled(code=self.code)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def job(target: Target = TARGETS[0], dynamic: int = 0, **defines: int) -> Job:
    return Job("add", target, defines, {"add": dynamic})


def test_what_compiled_is_remembered(own_cache: Path) -> None:
    stub = StubCompiler(cubin("add", shared=64))
    checker = Checker({"cuda": stub})
    for _ in range(2):
        assert checker.run(job()).resources == [KernelResources("add", 64, 0, 0)]
    assert len(stub.texts) == 1
    checker.run(job(OTHER=1))
    checker.run(job(ALL_TARGETS[0]))
    assert len(stub.texts) == 3
    assert Checker({"cuda": stub}, fresh=True).run(job()).resources and len(stub.texts) == 4
    (stub.texts, stub.name) = ([], "stub 2.0")
    checker.run(job())
    assert len(stub.texts) == 1


def test_what_did_not_compile_is_not_remembered(own_cache: Path) -> None:
    stub = StubCompiler(None)
    for _ in range(2):
        assert Checker({"cuda": stub}).run(job(broken=1)).errors == "it is broken"
    assert len(stub.texts) == 2


def test_a_damaged_memory_is_no_harm(own_cache: Path) -> None:
    stub = StubCompiler(cubin("add"))
    checker = Checker({"cuda": stub})
    checker.run(job())
    for path in own_cache.rglob("*.json"):
        path.write_text('[{"name": 3')
    assert checker.run(job()).resources and len(stub.texts) == 2


@pytest.mark.parametrize(
    ("resources", "dynamic", "header", "expected"),
    [
        (KernelResources("add", 1 << 16, 0, 0), 0, {}, []),
        (KernelResources("add", 1 << 15, 0, 0), (1 << 15) + 1, {}, ["add takes 32768 bytes of static and 32769 of"]),
        (KernelResources("add", 1 << 15, 0, 0), 1 << 16, {"shared_limits": {"sm_90": 98304}}, []),
        (KernelResources("add", 1 << 15, 0, 0), 1 << 16, {"shared_limits": {"sm_80": 98304}}, ["the limit is 65536"]),
        (KernelResources("add", 0, 8, 0), 0, {}, ["add keeps 8 bytes per thread in local memory; the limit is 0"]),
        (KernelResources("add", 0, 8, 0), 0, {"scratch_limits": {"sm_90": 8}}, []),
        (KernelResources("other", 0, 0, 0), 1 << 20, {}, []),
    ],
)
def test_limits(resources: KernelResources, dynamic: int, header: dict, expected: list[str]) -> None:
    found = list(problems(job(dynamic=dynamic), KernelHeader((), **header), [resources]))
    assert len(found) == len(expected)
    assert all(part in text for part, text in zip(expected, found, strict=True))


def test_amd_has_no_more_shared_memory_whatever_a_header_says() -> None:
    header = KernelHeader((), shared_limits={"gfx942": 1 << 20})
    assert list(problems(job(TARGETS[2]), header, [KernelResources("add", (1 << 16) + 1, 0, 0)]))


def test_jobs_are_the_variants_and_what_plans_launch() -> None:
    launches = [
        KernelLaunch("rope", "rope", (1,), (1,), (), {"NEOX": 1}, shared_bytes=100),
        KernelLaunch("rope", "rope", (1,), (1,), (), {"NEOX": 1}, shared_bytes=50),
        KernelLaunch("rope", "rope_table", (1,), (1,), (), {"NEOX": 7}),
        KernelLaunch("softcap", "softcap", (1,), (1,), ()),
    ]
    jobs = jobs_of(["rope"], TARGETS[:2], {TARGETS[0]: launches})
    assert [(one.target.arch, one.defines, one.dynamic) for one in jobs] == [
        ("sm_90", {"NEOX": 0}, {}),
        ("sm_90", {"NEOX": 1}, {"rope": 100}),
        ("sm_90", {"NEOX": 7}, {"rope_table": 0}),
        ("gfx1151", {"NEOX": 0}, {}),
        ("gfx1151", {"NEOX": 1}, {}),
    ]


def test_a_check_reports_and_counts_failures(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = StubCompiler(cubin("add", frame=16))
    monkeypatch.setattr(compile_check, "cuda_compiler", lambda: stub)
    monkeypatch.setattr(compile_check, "hip_compiler", lambda: StubCompiler(None))
    monkeypatch.setattr(compile_check, "planned_launches", lambda target: [])
    assert compile_check.check(["add"]) == 0
    assert "sm_90: 1 kernel sources, 1 variants, stub 1.0" in capsys.readouterr().out
    assert compile_check.check(["add"], everything=True) == 2  # sm_80 and sm_90; nothing is for sm_90a
    shown = capsys.readouterr().out
    assert shown.count("add keeps 16 bytes per thread in local memory") == 2
    assert "4 passed, 2 failed" in shown and "sm_90a" not in shown


def test_a_kernel_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["compile_check", "nothing"])
    assert compile_check.main() == 1
    assert "Error: there is no kernel source 'nothing'; choose of add, " in capsys.readouterr().err


def test_essential_jobs_meet_every_value() -> None:
    jobs = [job(A=a, B=b) for a in (0, 1) for b in (0, 1, 2)] + [job(QTYPE=q) for q in (1, 2, 12)]
    kept = compile_check.essential(jobs)
    assert [one.defines for one in kept] == [
        {"A": 0, "B": 0},
        {"A": 0, "B": 1},
        {"A": 0, "B": 2},
        {"A": 1, "B": 0},
        {"QTYPE": 1},
        {"QTYPE": 12},
    ]


def test_a_slow_compiler_gets_the_first_variant_of_a_source() -> None:
    hip = [compile_check.Target("hip", arch, 64, "mfma") for arch in ("gfx1151", "gfx942")]
    targets = (*hip, compile_check.TARGETS[0])
    jobs = [compile_check.Job(name, target, {"A": a}, {}) for target in targets for name in "kl" for a in range(4)]
    kept = [(one.target.arch, one.name, one.defines["A"]) for one in compile_check.essential(jobs, True)]
    assert kept[:4] == [(arch, name, 0) for arch in ("gfx1151", "gfx942") for name in "kl"]
    assert kept[4:] == [("sm_90", name, a) for name in "kl" for a in range(4)]
