"""How many CPU threads a matrix product takes: what `-t` tells the library below NumPy."""

from __future__ import annotations

import os
import sys

import click

from pyllm.commands.console import warn

VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


def set_threads(ctx: click.Context, param: click.Parameter, count: int | None) -> None:
    """The library reads its variables once, when NumPy is imported. Options come first: commands import the engine when
    they need it.
    """
    if count is None:
        return
    os.environ.update(dict.fromkeys(VARIABLES, str(count)))
    if "numpy" not in sys.modules:
        return
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        warn(f"-t {count} has no effect: NumPy was loaded before; set {VARIABLES[0]}={count} in the environment")
    else:
        threadpool_limits(count)
