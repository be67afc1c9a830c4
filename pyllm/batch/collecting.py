"""How often Python looks for objects that nothing but each other refers to, while a batch runs.

Such a look holds all lines up, for milliseconds where hundreds of them end together. A batch makes next to none of
these objects, so a look in some hundred lines will do.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS = 50_000  # that were made, between two looks; a line makes some dozens


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Around a batch. What is there before, the model above all, is looked through no more."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
