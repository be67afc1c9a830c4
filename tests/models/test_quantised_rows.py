"""Models with quantised K/V rows: near the same model with float32 rows, on the CPU and on kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.device.emulated import EmulatedDevice
from pyllm.device.host import HostDevice
from pyllm.errors import UnsupportedError
from tests.engine import greedy, open_engine, tokens
from tests.refdata import model_path

HEADS_OF_32 = model_path("llama-c-spm-bf16")
HEADS_OF_16 = model_path("llama-a-f32")
DEVICES: dict[str, Callable[[], Device]] = {
    "cpu": lambda: HostDevice(poison=True),
    "emulated": lambda: EmulatedDevice(32, "mma"),
}
IDS = list(range(5, 45))


def logits(device: Device, kv_type: str, **options: int) -> np.ndarray:
    with open_engine(HEADS_OF_32, device, kv_type=kv_type, **options) as llm:
        return llm.logits(IDS)


@pytest.mark.parametrize(("kv_type", "limit"), [("q8_0", 0.02), ("q4_0", 0.3)])
def test_logits_are_near_those_of_float32_rows(kv_type: str, limit: float) -> None:
    exact = logits(HostDevice(poison=True), "f32")
    found = logits(HostDevice(poison=True), kv_type)
    error = np.abs(found - exact).mean() / exact.std()
    assert 0 < error < limit


@pytest.mark.parametrize(("kv_type", "limit"), [("q8_0", 0.01), ("q4_0", 0.05)])
def test_kernels_agree_with_the_cpu(kv_type: str, limit: float) -> None:
    expected = logits(HostDevice(poison=True), kv_type, ubatch_size=16)
    found = logits(EmulatedDevice(32, "mma"), kv_type, ubatch_size=16)
    # What was computed a little differently may be rounded to the next code: a 127th or an 8th of the largest value.
    assert np.abs(found - expected).mean() / expected.std() < limit


@pytest.mark.parametrize("device", DEVICES)
def test_results_do_not_depend_on_pages(device: str) -> None:
    results = []
    for page_size in (8, 64):
        with open_engine(HEADS_OF_32, DEVICES[device](), kv_type="q8_0", page_size=page_size) as llm:
            results.append(tokens(llm.generate(IDS, greedy(8))))
    assert len(results[0]) == 8
    assert results[0] == results[1]


def test_heads_that_cut_blocks_are_refused() -> None:
    with pytest.raises(UnsupportedError) as raised:
        open_engine(HEADS_OF_16, kv_type="q8_0")
    message = str(raised.value)
    for word in (str(HEADS_OF_16), "heads of 16", "q8_0", "blocks of 32", "--kv-type", "f16"):
        assert word in message
    assert "\n" not in message
