"""Traces of K/V rows: what was in a sequence's rows when they were given up, as hashes in a file of JSON lines.

Two runs that should compute the same leave the same traces, so the first line at which two traces part names the row
that went wrong first. One line per row:

    {"step": 12, "sequence": 3, "layer": 0, "page": 5, "row": 10, "position": 330, "own": true, "k": "...", "v": "..."}

step        ubatches submitted when the row was hashed
sequence    what fault records call it
page, row   the physical page, and the row inside it
own         whether the row carries its page's epoch as tag; attention would refuse it otherwise
k, v        64-bit FNV-1a of the row's bytes as stored, 16 hexadecimal digits

The lines of one sequence are in order of position, then of layer. Before them stands one line that says what follows.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyllm.errors import DeviceError, UsageError
from pyllm.fnv import fnv1a
from pyllm.kv_cache import KVCache, SequenceKV

VERSION = 1
DEFAULT_EVERY = 16  # positions; a page of 64 rows then has four lines per layer

_log = logging.getLogger("pyllm")


@dataclass(frozen=True)
class TracedRows:
    """Hashes of a sequence's rows. n = rows times layers, in order of position, then of layer.

    Attributes:
        layers, pages, rows, positions: [n] int64.
        own: [n] bool, whether the tag is the page's epoch.
        k, v: [n] uint64.
    """

    layers: np.ndarray
    pages: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    own: np.ndarray
    k: np.ndarray
    v: np.ndarray


def hash_rows(cache: KVCache, seq: SequenceKV, positions: np.ndarray) -> TracedRows:
    """Hash K and V rows of a sequence, in all layers. Waits for all queued work.

    Args:
        positions: [m] int64, ascending, each below seq.length.

    Raises:
        DeviceError: the device has failed.
    """
    num_layers, size = len(cache.layers), cache.page_size
    index, rows = np.divmod(positions, size)
    k, v, tags = (
        np.stack([_rows_of_layer(cache, array, seq, positions) for array in arrays], axis=1)
        for arrays in (
            [layer.k for layer in cache.layers],
            [layer.v for layer in cache.layers],
            [layer.tags for layer in cache.layers],
        )
    )
    epochs = np.asarray(seq.epochs, np.uint32)[index]
    return TracedRows(
        layers=np.tile(np.arange(num_layers), len(positions)),
        pages=np.repeat(np.asarray(seq.pages, np.int64)[index], num_layers),
        rows=np.repeat(rows, num_layers),
        positions=np.repeat(positions, num_layers),
        own=(tags == epochs[:, None]).reshape(-1),
        k=fnv1a(k.reshape(len(positions) * num_layers, -1)),
        v=fnv1a(v.reshape(len(positions) * num_layers, -1)),
    )


def _rows_of_layer(cache: KVCache, array: Any, seq: SequenceKV, positions: np.ndarray) -> np.ndarray:
    """[m, ...] rows of one of a layer's arrays. Page by page: a device downloads contiguous memory only."""
    index, rows = np.divmod(positions, cache.page_size)
    found = []
    for page in np.unique(index):
        inside = rows[index == page]
        first = seq.pages[page] * cache.page_size + int(inside[0])
        piece = cache.device.download(array[first : first + int(inside[-1] - inside[0]) + 1])
        found.append(piece[inside - inside[0]])
    return np.concatenate(found)


class KVTrace:
    """Writes a trace. Attached to a cache, it is told of every removal of rows.

    Args:
        path: the file; written anew.
        cache: whose rows.
        step: tells how many ubatches have been submitted.
        every: hash the rows of each so-manieth position, and the last one.

    Raises:
        UsageError: the file cannot be written, or `every` is below 1.
    """

    def __init__(self, path: str | os.PathLike[str], cache: KVCache, step: Callable[[], int], every: int) -> None:
        if every < 1:
            raise UsageError(f"kv_trace_every is {every}; it must be at least 1")
        self._path, self._cache, self._step, self._every = path, cache, step, every
        try:
            self._file = open(path, "w", encoding="ascii")  # noqa: SIM115  closed by `close`
        except OSError as error:
            raise UsageError(f"the K/V trace {os.fspath(path)} cannot be written: {error.strerror}") from None
        self._write(
            [
                {
                    "kv_trace": VERSION,
                    "every": every,
                    "layers": len(cache.layers),
                    "kv_type": cache.kv_type.name,
                    "page_size": cache.page_size,
                }
            ]
        )

    def note(self, seq: SequenceKV) -> None:
        """Add lines for the rows that a sequence holds. Does nothing on a device that has failed."""
        if self._file.closed or not seq.length:
            return
        positions = np.unique(np.append(np.arange(0, seq.length, self._every), seq.length - 1))
        with suppress(DeviceError):
            self._write(self._lines(seq.seq_id, hash_rows(self._cache, seq, positions)))

    def close(self) -> None:
        """End the trace. Calling it twice is harmless."""
        with suppress(OSError):
            self._file.close()

    def _lines(self, seq_id: int, traced: TracedRows) -> Iterator[dict[str, Any]]:
        step = self._step()
        places = zip(traced.layers.tolist(), traced.pages.tolist(), traced.rows.tolist(), strict=True)
        values = zip(traced.positions.tolist(), traced.own.tolist(), traced.k.tolist(), traced.v.tolist(), strict=True)
        for (layer, page, row), (position, own, k, v) in zip(places, values, strict=True):
            yield {
                "step": step,
                "sequence": seq_id,
                "layer": layer,
                "page": page,
                "row": row,
                "position": position,
                "own": own,
                "k": f"{k:016x}",
                "v": f"{v:016x}",
            }

    def _write(self, lines: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> None:
        try:
            self._file.writelines(json.dumps(line) + "\n" for line in lines)
            self._file.flush()
        except OSError as error:  # a full disk must not end the answers that it is to explain
            _log.warning("the K/V trace %s ends here: %s", os.fspath(self._path), error.strerror)
            self.close()
