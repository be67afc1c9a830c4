"""Writing a synthetic model, piece by piece: memory holds a few megabytes of it at a time."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np

from pyllm.errors import PyllmError
from pyllm.quants import QuantType, row_bytes
from pyllm.synth.blocks import random_rows, stored_type
from pyllm.synth.shapes import Shape, SynthTensor
from pyllm.synth.vocabulary import CHAT_TEMPLATE, make_vocabulary

ALIGNMENT = 32
MOST_WRITERS = 16
HEADER_BYTES = 16 << 20  # more than the keys of the largest vocabulary take
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12}
_FILE_TYPES |= {"Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32}  # general.file_type
_QUANTIZATION_VERSION = 2


@dataclass(frozen=True)
class Layout:
    """A tensor and the type in which it is stored."""

    tensor: SynthTensor
    qtype: QuantType

    @property
    def num_bytes(self) -> int:
        *stack, row_elements = self.tensor.shape
        return math.prod(stack) * row_bytes(self.qtype, row_elements)


def layouts(shape: Shape, quant: QuantType) -> list[Layout]:
    """All tensors of a model with the types in which they are stored."""

    def stored(tensor: SynthTensor) -> QuantType:
        return QuantType.F32 if tensor.keeps_f32 else stored_type(quant, tensor.shape[-1])

    return [Layout(tensor, stored(tensor)) for tensor in shape.tensors()]


def write_model(
    path: Path,
    shape: Shape,
    quant: QuantType,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Layout]:
    """Write a model with random weights. The file appears under its name when it is complete, and replaces what is
    there; what was written of it is removed when something goes wrong.

    Args:
        quant: one of `blocks.drawable_types`; norms and routers stay F32, and rows that are no whole number of its
            blocks get another type (`blocks.stored_type`).
        seed: the same seed gives the same file.
        progress: called with (bytes written, bytes in all) of the weights.

    Raises:
        PyllmError: the disk has too little room.
        OSError: the file cannot be written.
    """
    plan = layouts(shape, quant)
    total = sum(layout.num_bytes for layout in plan)
    _check_room(path, total + HEADER_BYTES)
    with _part_of(path) as part:
        _write_header(part, shape, quant, plan)
        with open(part, "r+b") as file:
            _write_tensors(file.fileno(), part.stat().st_size, plan, seed, progress)
    return plan


def _write_tensors(file: int, start: int, plan: list[Layout], seed: int, progress: Callable[[int, int], None]) -> None:
    """Draw and write all tensors, several at the same time, each at its place; the first one begins at `start`."""
    total, stop = sum(layout.num_bytes for layout in plan), threading.Event()
    written: SimpleQueue[int] = SimpleQueue()

    def write(index: int, place: int) -> None:
        for piece in _pieces(plan[index], np.random.SeedSequence([seed, index])):
            if stop.is_set():
                return
            left = piece.data.cast("B")
            while left:
                count = os.pwrite(file, left, place)
                left, place = left[count:], place + count
            written.put(piece.nbytes)

    places = list(itertools.accumulate((_padded(layout.num_bytes) for layout in plan), initial=_padded(start)))
    os.ftruncate(file, places[-1])
    with ThreadPoolExecutor(min(MOST_WRITERS, os.cpu_count() or 1)) as pool:
        writers = [pool.submit(write, index, place) for index, place in enumerate(places[:-1])]
        try:
            done = 0
            while done < total:
                with contextlib.suppress(Empty):
                    done += written.get(timeout=0.1)
                    progress(done, total)
                for writer in writers:
                    if writer.done():
                        writer.result()
                writers = [writer for writer in writers if not writer.done()]
        finally:
            stop.set()


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _check_room(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.absolute().parent).free
    if needed > free:
        raise PyllmError(
            f"{path} takes {needed / 1e9:.1f} GB, its disk has {free / 1e9:.1f} GB free; "
            "choose a smaller type (--quant) or another disk"
        )


@contextmanager
def _part_of(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to it in the end; removed if anything goes wrong, Ctrl-C included."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def _write_header(path: Path, shape: Shape, quant: QuantType, plan: list[Layout]) -> None:
    """Keys and the table of tensors, by the `gguf` package."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(None, shape.architecture)
    try:
        writer.add_type("model")
        writer.add_name(shape.title)
        writer.add_description("random weights, for measuring speed; made by pyllm synth")
        writer.add_file_type(_FILE_TYPES.get(quant.name, 0))
        writer.add_quantization_version(_QUANTIZATION_VERSION)
        for key, value in shape.keys().items():
            name = f"{shape.architecture}.{key}"
            if isinstance(value, list):
                writer.add_array(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            else:
                writer.add_uint32(name, value)
        _add_vocabulary(writer, shape)
        for layout in plan:
            writer.add_tensor_info(
                layout.tensor.name,
                layout.tensor.shape,
                np.dtype(np.float32),
                layout.num_bytes,
                GGMLQuantizationType(int(layout.qtype)),
            )
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _add_vocabulary(writer: object, shape: Shape) -> None:
    from gguf import GGUFWriter

    assert isinstance(writer, GGUFWriter)
    vocabulary = make_vocabulary(shape.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape.pre_tokenizer)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.bos_id)
    writer.add_eos_token_id(vocabulary.eos_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _pieces(layout: Layout, seed: np.random.SeedSequence) -> Iterator[np.ndarray]:
    *stack, row_elements = layout.tensor.shape
    rng = np.random.Generator(np.random.SFC64(seed))
    std = row_elements**-0.5 if layout.tensor.std is None else layout.tensor.std
    return random_rows(rng, layout.qtype, math.prod(stack), row_elements, std, layout.tensor.mean)
