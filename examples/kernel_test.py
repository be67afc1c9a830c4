#!/usr/bin/env python3
"""Test a kernel of one's own on every device of this machine that runs kernels: emulated ones, and the GPU.

python examples/kernel_test.py
"""

from pathlib import Path

import numpy as np

from pyllm.kernel_check import Case, check_case, kernel_devices
from pyllm.ops.op import KernelLaunch, Op, Target

SOURCE = str(Path(__file__).parent / "scale_add.cu")


def scale_add_ref(x: np.ndarray, y: np.ndarray, scale: float, out: np.ndarray) -> None:
    np.add(scale * x, y, out=out)


def plan_scale_add(target: Target, x, y, scale: float, out) -> list[KernelLaunch]:
    args = (x, y, out, np.float32(scale), np.int32(x.size))  # scalars of exactly the kernel's types
    return [KernelLaunch(SOURCE, "scale_add", grid=(-(-x.size // 256),), block=(256,), args=args)]


def case(n: int) -> Case:
    def arguments(rng: np.random.Generator):
        x, y = rng.standard_normal((2, n), np.float32)
        return x, y, 0.5, np.full(n, np.nan, np.float32)

    return Case(Op("scale_add", scale_add_ref, plan_scale_add), f"n = {n}", arguments, outputs=(3,))


for name, open_device in kernel_devices()[0].items():
    device = open_device()
    for n in (1, 31, 257):
        verdict = check_case(device, case(n), repeats=20)
        assert verdict.passed, f"{name}, n = {n}: {verdict}"
        print(f"{name}, n = {n}: error {verdict.error:.1e}, limit {verdict.limit:.1e}")
    device.close()
