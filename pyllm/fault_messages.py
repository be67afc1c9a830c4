"""What a fault means: the pages that are not to be trusted any more, and what a caller is told."""

from __future__ import annotations

from collections.abc import Sequence

from pyllm.errors import DeviceError, PyllmError
from pyllm.executor import Segment
from pyllm.faults import CAPACITY, Fault, FaultKind
from pyllm.kv_cache import SequenceKV


def hits_whole_step(found: Sequence[Fault]) -> bool:
    """Whether all sequences of a step are hit: it did not have its inputs, or more was found than a record holds."""
    return len(found) >= CAPACITY or any(fault.kind == FaultKind.SERIAL for fault in found)


def suspect_pages(found: Sequence[Fault], segments: Sequence[Segment], page_size: int) -> set[int]:
    """The pages that faults name; of a step without its inputs those that it was to write; where more was found than a
    record holds, all that its sequences have."""
    pages = {fault.page for fault in found if fault.page >= 0}
    for segment in segments if hits_whole_step(found) else ():
        pages.update(segment.seq.pages if len(found) >= CAPACITY else _written_pages(segment, page_size))
    return pages


def _written_pages(segment: Segment, page_size: int) -> list[int]:
    last = segment.start + len(segment.token_ids) - 1
    return segment.seq.pages[segment.start // page_size : last // page_size + 1]


def what_hit(kv: SequenceKV, found: Sequence[Fault], segments: Sequence[Segment], page_size: int) -> str:
    """The fault that concerns a sequence most; of a step as a whole, with the rows that it was to write of it, or the
    pages that it shares with those."""
    own = [fault for fault in found if fault.seq_id == kv.seq_id] or [
        fault for fault in found if fault.page in kv.pages
    ]
    if own:
        return str(own[0])
    where = (
        f": sequence {kv.seq_id}, positions {segment.start} to {segment.start + len(segment.token_ids) - 1}, "
        f"all layers, pages {_written_pages(segment, page_size)}"
        for segment in segments
        if segment.seq is kv
    )
    shared = sorted(suspect_pages(found, segments, page_size) & set(kv.pages))
    return f"{found[0]}{next(where, f': sequence {kv.seq_id} shares pages {shared} with one of it')}"


def as_pyllm_error(error: Exception) -> PyllmError:
    """What a caller is told about a failure that only concerns its request."""
    if isinstance(error, PyllmError):
        return error
    if isinstance(error, MemoryError):
        return DeviceError("not enough memory for this step; try a smaller ubatch (-ub) or context (-c)")
    return PyllmError(f"{type(error).__name__}: {error}")
