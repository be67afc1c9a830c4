"""Kernels that may start early wait for what came before: the rule in the sources, and on a GPU the result."""

from __future__ import annotations

import numpy as np
import pytest

from pyllm.device.dependent_launch import waits_itself
from pyllm.device.kernel_header import entry_points
from pyllm.device.kernel_source import kernel_names, source_text
from pyllm.ops.add import ADD
from tests.ops.lives import LIVES


@pytest.mark.parametrize("name", kernel_names())
def test_every_kernel_waits(name: str) -> None:
    text = source_text(name, {"QTYPE": 1})
    entries = entry_points(name)
    assert entries
    assert all(waits_itself(text, entry) for entry in entries)


def test_a_kernel_that_some_threads_leave_before_is_found() -> None:
    text = "KERNEL(1) f(int* p) {\n    if (p) return;\n    GRID_DEPENDENCY();\n}\n"
    text += "KERNEL(1) g() {\n    int i = 0;\n    GRID_DEPENDENCY();\n}\nKERNEL(1) h() {\n}\n"
    assert [waits_itself(text, entry) for entry in "fgh"] == [False, True, False]


@pytest.mark.skipif("gpu" not in LIVES, reason="for a GPU")
def test_a_chain_of_kernels_in_a_graph_runs_in_order_on_gpu() -> None:
    """Each link reads what the one before wrote; sizes differ: late blocks of one meet early ones of the next."""
    device = LIVES["gpu"]()
    try:
        sizes = [1 << 22, 257, 1 << 16, 1 << 22, 1]
        one = device.upload(np.ones(max(sizes), np.float32))
        total = device.upload(np.zeros(max(sizes), np.float32))

        def chain() -> None:
            for _ in range(40):
                for size in sizes:
                    device.launch(ADD, total[:size], one[:size], total[:size])

        chain()
        graph = device.capture(chain, overlap=True)
        for _ in range(5):
            graph.replay()
        found = device.download(total)
        index = np.arange(max(sizes))
        expected = 6 * 40 * sum((index < size).astype(np.float32) for size in sizes)
        assert (found == expected).all()
    finally:
        device.close()
