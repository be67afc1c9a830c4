"""What a caller is told when its request met a fault or an error."""

from __future__ import annotations

from collections.abc import Sequence

from pyllm.errors import DeviceError, PyllmError
from pyllm.executor import Segment
from pyllm.faults import Fault
from pyllm.kv_cache import SequenceKV


def what_hit(kv: SequenceKV, found: Sequence[Fault], segments: Sequence[Segment]) -> str:
    """The fault that concerns a sequence most; of a step as a whole, with the rows that it was to write of it."""
    own = [fault for fault in found if fault.seq_id == kv.seq_id] or [
        fault for fault in found if fault.page in kv.pages
    ]
    if own:
        return str(own[0])
    where = (
        f": sequence {kv.seq_id}, positions {segment.start} to {segment.start + len(segment.token_ids) - 1}, "
        f"all layers, pages {kv.pages}"
        for segment in segments
        if segment.seq is kv
    )
    return f"{found[0]}{next(where, '')}"


def as_pyllm_error(error: Exception) -> PyllmError:
    """What a caller is told about a failure that only concerns its request."""
    if isinstance(error, PyllmError):
        return error
    if isinstance(error, MemoryError):
        return DeviceError("not enough memory for this step; try a smaller ubatch (-ub) or context (-c)")
    return PyllmError(f"{type(error).__name__}: {error}")
