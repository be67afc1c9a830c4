"""How an engine is set up, checked before anything is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyllm.errors import UsageError
from pyllm.executor import TestHooks
from pyllm.kv_trace import DEFAULT_EVERY
from pyllm.overflow import Overflow

PAGE_SIZE = 64  # K/V rows per page: what a prefix is shared in units of

INPUTS = ("copy", "zero-copy")

MAX_OPTION = 1 << 30  # far above any size that makes sense, far below what would overflow


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is set up; see `LLM`."""

    ctx_size: int = 4096
    batch_size: int | None = None
    ubatch_size: int | None = None
    kv_type: str = "f16"
    n_seqs: int = 1
    inflight: int | None = None
    page_size: int = PAGE_SIZE
    ring_depth: int | None = None
    page_order: Sequence[int] | None = None
    inputs: str = "copy"
    kv_trace: str | os.PathLike[str] | None = None
    kv_trace_every: int = DEFAULT_EVERY
    prefix_cache: bool = False
    cache_ram: int | None = None
    cache_pages: bool | None = None
    cache_dir: str | os.PathLike[str] | None = None
    cache_disk: int | None = None
    overflow: str = "stop"
    keep: int = 0
    batch_invariant: bool = False
    hooks: TestHooks = field(default_factory=TestHooks)

    def __post_init__(self) -> None:
        for name in ("ctx_size", "batch_size", "ubatch_size", "n_seqs", "inflight", "page_size", "kv_trace_every"):
            value = getattr(self, name)
            if value is None and name in ("inflight", "batch_size", "ubatch_size"):
                continue
            if type(value) is not int or not 1 <= value <= MAX_OPTION:
                raise UsageError(f"{name} is {value!r}; it must be a whole number from 1 to {MAX_OPTION}")
        for name in ("cache_ram", "cache_disk"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise UsageError(f"{name} is {value!r}; it must be a number of bytes")
        Overflow(self.overflow, self.keep)  # complains
        if self.cache_dir is not None and not self.prefix_cache:
            raise UsageError("cache_dir needs prefix_cache=True")
        if self.inputs not in INPUTS:
            raise UsageError(f"inputs is {self.inputs!r}; choose one of {', '.join(INPUTS)}")
