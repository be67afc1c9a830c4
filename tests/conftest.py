"""What all tests share: poisoned memory, and the demo model for those that are marked with `demo_model`."""

from __future__ import annotations

import os

# One thread for matrix products, set before NumPy is loaded: several that spin for the same core make each other ten
# times slower, and tests share their machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import re
import signal
import zlib
from functools import cache
from pathlib import Path

import pytest

from pyllm import hub

# A shell starts what runs in the background with SIGINT ignored, and so would be the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Fresh and freed buffers hold NaN patterns, in this process and those that tests start.
os.environ["PYLLM_POISON"] = "1"


@cache
def _demo_model() -> Path | None:
    """The demo model, fetched if need be; None without it and without a network."""
    offline = os.environ.get("PYLLM_OFFLINE", "0") not in ("", "0")
    return hub.find_model("demo") if offline else hub.pull("demo")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("demo_model") and _demo_model() is None:
        pytest.skip("the demo model is not here, and PYLLM_OFFLINE forbids fetching it")


@pytest.fixture
def demo_model() -> Path:
    """The demo model's file; for tests marked with `demo_model`."""
    path = _demo_model()
    assert path is not None
    return path


_RARE_TYPE = re.compile(r"\b(?:IQ\w+|TQ\w+|MXFP4|NVFP4|Q[23]_K|Q5_[01])\b")
_LIFE = re.compile(r"emulated-(?:32-wmma|32|64)(?=[-\]])")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the kinds of emulated GPUs each case runs on one, chosen by its name; all of them with PYLLM_ALL_LIVES=1.

    Together the cases meet all kinds. All kinds for each case take an hour on two cores. Cases of rare block types run
    one in three, apart from those that do nothing but decode.
    """
    if os.environ.get("PYLLM_ALL_LIVES", "0") not in ("", "0"):
        return
    lives: dict[str, list[pytest.Item]] = {}
    for item in items:
        if _LIFE.search(item.nodeid):
            lives.setdefault(_LIFE.sub("", item.nodeid, count=1), []).append(item)
    left_out = set()
    for name, kinds in lives.items():
        number = zlib.crc32(name.encode())
        rare = _RARE_TYPE.search(name) and "test_decode" not in name and number // 3 % 3
        left_out.update(item for index, item in enumerate(kinds) if rare or index != number % len(kinds))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
