"""flash_attention emulated with the plans that NVIDIA's GPUs get: Hopper's kernel, and large tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pyllm import faults
from pyllm.device.emulated import EmulatedDevice
from pyllm.kernel_attention_cases import attention_case
from pyllm.kernel_check import Case, check_case, expected, run_case
from pyllm.ops.flash_attention import FLASH_ATTENTION, AttentionParams
from pyllm.ops.op import KernelLaunch

WINDOW = AttentionParams(1 / 8, window=24)
CASES = (
    attention_case("f16", (33,), (33,), 4, 2, 64),
    attention_case("f16", (97,), (97,), 2, 1, 64, page_size=32),
    attention_case("f16", (200, 1, 64, 133), (9, 1, 33, 100), 4, 2, 64),
    attention_case("f16", (150,), (31,), 4, 1, 64, WINDOW),
    attention_case("f16", (97,), (41,), 9, 1, 64, WINDOW, dtype=np.float16),
    attention_case("f16", (65, 9), (20, 9), 2, 1, 64, AttentionParams(1.0, softcap=3.0)),
    attention_case("f16", (150, 40), (9, 20), 4, 2, 64, stale=(3,)),
    attention_case("f16", (150,), (70,), 4, 2, 64, WINDOW, stale=(100,)),
    attention_case("f16", (200,), (9,), 2, 2, 64, stale=(199,), dtype=np.float16),
    attention_case("f16", (290,), (40,), 4, 1, 128, stale=(3,)),
    attention_case("f16", (150,), (9,), 2, 1, 192),
    attention_case("f16", (150,), (9,), 2, 1, 256),
    attention_case("f32", (290,), (40,), 4, 1, 128, stale=(3,)),
    attention_case("f32", (150,), (9,), 2, 1, 192),
    attention_case("bf16", (200, 1, 64, 133), (9, 1, 33, 60), 4, 2, 64),
    attention_case("bf16", (150,), (9,), 2, 1, 256),
    attention_case("q8_0", (290, 50), (40, 20), 4, 1, 128, stale=(3,)),
    attention_case("q8_0", (400,), (60,), 4, 2, 64, AttentionParams(1 / 8, window=150), dtype=np.float16),
    attention_case("q8_0", (150,), (9,), 2, 1, 192),
    attention_case("q4_0", (290,), (40,), 4, 1, 128, dtype=np.float16),
    attention_case("q4_0", (97,), (41,), 9, 3, 64, WINDOW, stale=(60,)),
    attention_case("q4_0", (150,), (9,), 2, 1, 256),
)
# Many queries over rows that are converted once for all of them.
GATHERED = (
    attention_case("q8_0", (300, 40, 290, 9), (70, 33, 1, 9), 2, 1, 64, stale=(299,)),
    attention_case("q4_0", (200, 40), (150, 40), 2, 1, 64, WINDOW, stale=(30,), dtype=np.float16),
    attention_case("bf16", (257,), (257,), 1, 1, 128, page_size=32),
    attention_case("f32", (265, 200), (9, 64), 2, 2, 64, stale=(264,)),
)
LARGE_TILES = (
    attention_case("f16", (290,), (40,), 4, 1, 128, stale=(3,)),
    attention_case("q4_0", (150,), (40,), 4, 1, 128),
    attention_case("f16", (150,), (9,), 2, 1, 256),
    attention_case("f16", (600, 9), (1, 1), 4, 1, 128, stale=(3,)),
    attention_case("q8_0", (600,), (1,), 8, 1, 128),
    attention_case("bf16", (300,), (1,), 4, 1, 256),
)
# Few queries over rows that lanes convert to what they supply to products.
DIRECT = (
    attention_case("f32", (300, 9), (1, 1), 4, 1, 64, stale=(3, 290)),
    attention_case("f32", (120,), (1,), 9, 1, 128),
    attention_case("f32", (65,), (3,), 4, 2, 64, WINDOW),
    attention_case("bf16", (300, 1), (1, 1), 8, 2, 64, WINDOW, stale=(290,)),
    attention_case("bf16", (200,), (1,), 2, 1, 192, dtype=np.float16),
    attention_case("bf16", (65, 40), (4, 1), 9, 1, 64),
    attention_case("q8_0", (300, 9), (1, 1), 6, 2, 64, stale=(3, 290)),
    attention_case("q8_0", (150,), (1,), 2, 1, 192),
    attention_case("q8_0", (90,), (6,), 4, 1, 128, AttentionParams(1.0, softcap=3.0)),
    attention_case("q4_0", (300, 9), (1, 1), 6, 2, 64, stale=(3, 290)),
    attention_case("q4_0", (150,), (1,), 2, 1, 256),
    # With more than 2,048 rows slices are longer.
    attention_case("q8_0", (2100, 70), (1, 1), 4, 1, 64, stale=(2090,), page_size=64),
    attention_case("q4_0", (2100,), (1,), 4, 1, 128, page_size=64),
    attention_case("q4_0", (150, 33), (2, 1), 4, 2, 128, stale=(140,)),
)


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(32, "mma")
    device.target = replace(device.target, arch="sm_90")
    yield device
    device.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_hopper(device: EmulatedDevice, case: Case) -> None:
    assert FLASH_ATTENTION.plan is not None
    launch = FLASH_ATTENTION.plan(device.target, *case.draw(0))[-1]
    assert isinstance(launch, KernelLaunch)
    assert (launch.source, launch.arch) == ("flash_attention_wgmma", "sm_90a")
    verdict = check_case(device, case)
    assert verdict.passed, verdict


@pytest.mark.parametrize("case", GATHERED, ids=str)
def test_gathered_rows(device: EmulatedDevice, case: Case) -> None:
    assert FLASH_ATTENTION.plan is not None
    launches = FLASH_ATTENTION.plan(device.target, *case.draw(0))
    sources = [launch.source for launch in launches if isinstance(launch, KernelLaunch)]
    assert sources[-2:] == ["gather_rows", "flash_attention_wgmma"]
    verdict = check_case(device, case)
    assert verdict.passed, verdict


@pytest.mark.parametrize("case", LARGE_TILES, ids=str)
def test_large_tiles(device: EmulatedDevice, case: Case) -> None:
    device.target = replace(device.target, arch="sm_80")
    verdict = check_case(device, case)
    assert verdict.passed, verdict


def test_a_query_that_sees_nothing_gives_zeros(device: EmulatedDevice) -> None:
    case = attention_case("f16", (9,), (9,), 2, 1, 64, stale=range(9), dtype=np.float16)
    record, out = run_case(device, case, case.draw(0))
    assert (out == 0).all()
    assert faults.count(record) == 9


@pytest.mark.parametrize("case", DIRECT, ids=str)
def test_rows_in_other_types_than_f16(device: EmulatedDevice, case: Case) -> None:
    assert FLASH_ATTENTION.plan is not None
    (launch,) = FLASH_ATTENTION.plan(device.target, *case.draw(0))
    assert isinstance(launch, KernelLaunch)
    assert (launch.source, launch.defines["DIRECT"]) == ("flash_attention_split", 1)
    verdict = check_case(device, case)
    assert verdict.passed, verdict


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_queries_in_whole_numbers(device: EmulatedDevice, kv_type: str) -> None:
    """Zeros weigh all rows alike, one element may be a million times as large as the others, and a NaN spoils its head
    alone."""
    case = attention_case(kv_type, (150,), (1,), 4, 1, 64)
    arguments = case.draw(1)
    q: np.ndarray = arguments[0]
    q[0, 0] = 0
    q[0, 1] = np.where(np.arange(64) == 7, 30, 3e-5)
    q[0, 2, 5] = np.nan
    exact, _ = expected(case, arguments)
    _, out = run_case(device, case, arguments)
    assert np.isnan(out[0, 2]).all() and np.isnan(exact[1][0, 2]).all()
    rest = [0, 1, 3]
    assert np.abs(out[0, rest] - exact[1][0, rest]).max() <= 2.0**-11 * np.abs(exact[1][0, rest]).max() * 2


def test_rows_that_are_gathered_give_the_same_bits(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_case("q4_0", (150, 40), (80, 20), 2, 1, 64)
    arguments = case.draw(2)
    _, gathered = run_case(device, case, arguments)
    monkeypatch.setattr("pyllm.ops.flash_attention.GATHER_TOKENS", 81)
    assert FLASH_ATTENTION.plan is not None
    launches = FLASH_ATTENTION.plan(device.target, *arguments)
    assert "gather_rows" not in {launch.source for launch in launches if isinstance(launch, KernelLaunch)}
    _, direct = run_case(device, case, arguments)
    assert gathered.tobytes() == direct.tobytes() and np.isfinite(gathered).all()
