"""Engines for tests, on a device that the test opened itself."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from pyllm.device.host import HostDevice
from pyllm.llm import LLM, Chunk, EngineOptions
from pyllm.sampling import SamplingParams


def open_engine(path: Path, device: HostDevice | None = None, **options: Any) -> LLM:
    """An engine with poisoned memory; float32 K/V rows unless said otherwise."""
    options.setdefault("kv_type", "f32")
    return LLM.with_options(path, device or HostDevice(poison=True), EngineOptions(**options))


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of some module returns where nothing has run before: a process of its own, not forked."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def greedy(max_tokens: int) -> SamplingParams:
    """Arg-max, not stopped by end tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def tokens(chunks: Iterator[Chunk]) -> list[int]:
    """The token ids of a generation."""
    return [chunk.token for chunk in chunks if chunk.token is not None]


def interleaved(streams: Sequence[Iterator[Chunk]]) -> list[list[int]]:
    """Take one chunk of each stream in turn, until all have ended."""
    collected: list[list[int]] = [[] for _ in streams]
    open_streams = dict(enumerate(streams))
    while open_streams:
        for index in list(open_streams):
            chunk = next(open_streams[index], None)
            if chunk is None:
                del open_streams[index]
            elif chunk.token is not None:
                collected[index].append(chunk.token)
    return collected
