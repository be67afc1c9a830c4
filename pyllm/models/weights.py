"""From a file's tensors to weights on a device, in two passes: everything is checked before anything large is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyllm.device import Device
from pyllm.errors import ModelFileError, UnsupportedError
from pyllm.gguf_file import GGUFModel, TensorInfo
from pyllm.gguf_metadata import printable
from pyllm.quants import dequantize
from pyllm.weight import Weight

_OF_BLOCK = re.compile(r"blk\.([0-9]+)\.")


@dataclass(frozen=True)
class StoredRows:
    """Where a weight lies in a file that has it under another name, or inside a larger tensor.

    Attributes:
        name: of the file's tensor.
        num_rows: rows that it has (of each matrix, in a stack of them); 0: as many as the weight.
        rows: which of them make the weight, in order; None: all.
    """

    name: str
    num_rows: int = 0
    rows: slice | np.ndarray | None = None


@dataclass(frozen=True)
class TensorSpec:
    """One weight that an architecture uses.

    Attributes:
        name: as in the file, unless `stored` says otherwise.
        shape: rows first, row elements last. A file may have a vector as a matrix of one row.
        optional: may be missing.
        stored: where else it lies.
        exact: hold it as float32 on every device, although it is a matrix.
    """

    name: str
    shape: tuple[int, ...]
    optional: bool = False
    stored: StoredRows | None = None
    exact: bool = False

    @property
    def tensor(self) -> str:
        """Name of the file's tensor."""
        return self.stored.name if self.stored else self.name

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the file's tensor."""
        num_rows = self.stored.num_rows if self.stored else 0
        return (*self.shape[:-2], num_rows, self.shape[-1]) if num_rows else self.shape

    def select(self, data: np.ndarray) -> np.ndarray:
        """The weight's part of its tensor's rows [..., rows, row_bytes]."""
        if self.stored is None or self.stored.rows is None:
            return data
        return data[..., self.stored.rows, :]

    @property
    def is_vector(self) -> bool:
        """Vectors (norms, biases) are always held as float32; matrices as the device likes them."""
        return self.exact or len(self.shape) == 1


class Weights:
    """The weights of a model by name.

    Raises (on access):
        KeyError: a name that the architecture did not list.
    """

    def __init__(self, matrices: dict[str, Weight], vectors: dict[str, Any]) -> None:
        self._matrices = matrices
        self._vectors = vectors

    def matrix(self, name: str) -> Weight:
        return self._matrices[name]

    def vector(self, name: str) -> Any:
        """Float32 device array: of a vector [size], of an exact matrix [rows, row elements]."""
        return self._vectors[name]

    def optional_vector(self, name: str) -> Any | None:
        """Like `vector`; None when the file does not have it."""
        return self._vectors.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._matrices or name in self._vectors

    @property
    def matrices(self) -> list[Weight]:
        """All matrices, in the order of the file."""
        return list(self._matrices.values())

    @property
    def num_bytes(self) -> int:
        """Device memory of all weights."""
        arrays = [weight.array for weight in self._matrices.values()] + list(self._vectors.values())
        return int(sum(array.nbytes for array in arrays))


Tensors = list[tuple[TensorSpec, TensorInfo]]


def check_tensors(gguf: GGUFModel, device: Device, specs: Iterable[TensorSpec]) -> Tensors:
    """Find the tensors of a model in its file.

    Raises:
        ModelFileError: a tensor is missing or has another shape; or the file has more blocks than it says.
        UnsupportedError: a block type that the device cannot hold.
    """
    specs = list(specs)
    _check_blocks(gguf, {spec.tensor for spec in specs})
    return [(spec, info) for spec in specs if (info := _check(gguf, device, spec)) is not None]


def upload_weights(
    gguf: GGUFModel, device: Device, tensors: Tensors, progress: Callable[[int, int], None] | None = None
) -> Weights:
    """Bring checked tensors to the device.

    Args:
        progress: called with (bytes read, bytes in all) after each tensor.

    Raises:
        MemoryError: the device is full.
    """
    total, done = sum(_nbytes(spec, info) for spec, info in tensors), 0
    matrices, vectors = {}, {}
    for spec, info in tensors:
        data = spec.select(gguf.tensor_data(spec.tensor))
        if spec.is_vector:
            vectors[spec.name] = device.upload(dequantize(data, info.qtype).reshape(spec.shape))
        else:
            array, qtype = device.upload_weight(data, info.qtype, spec.shape)
            matrices[spec.name] = Weight(spec.name, spec.shape, qtype, array)
        done += _nbytes(spec, info)
        if progress is not None:
            progress(done, total)
    return Weights(matrices, vectors)


def _check_blocks(gguf: GGUFModel, known: Collection[str]) -> None:
    """Refuse tensors of blocks behind the last one. Left out silently, they would leave a model that talks nonsense."""
    key = gguf.arch_key("block_count")
    num_blocks = gguf.get_int(key)
    for name in gguf.tensors:
        block = _OF_BLOCK.match(name)
        if block and int(block[1]) >= num_blocks and name not in known:
            raise ModelFileError(
                f"{gguf.path}: there is a tensor {printable(name)}, but {key} is {num_blocks}; "
                "the file is damaged or was converted wrongly: fetch or convert it again"
            )


def _check(gguf: GGUFModel, device: Device, spec: TensorSpec) -> TensorInfo | None:
    info = gguf.tensors.get(spec.tensor)
    if info is None:
        if spec.optional:
            return None
        raise ModelFileError(f"{gguf.path}: tensor {spec.tensor} is missing; the file is incomplete or of another kind")
    if info.shape != spec.stored_shape and not (len(spec.shape) == 1 and info.shape == (1, *spec.shape)):
        raise ModelFileError(
            f"{gguf.path}: {spec.tensor} has shape {_dims(info.shape)}, the metadata asks for "
            f"{_dims(spec.stored_shape)}; "
            "the file is damaged"
        )
    if info.qtype not in device.weight_types:
        known = ", ".join(qtype.name for qtype in sorted(device.weight_types))
        raise UnsupportedError(f"{gguf.path}: {spec.tensor} is {info.qtype.name}; pyllm on {device.name} reads {known}")
    return info


def _nbytes(spec: TensorSpec, info: TensorInfo) -> int:
    """Bytes of the file that make a weight."""
    return info.nbytes * math.prod(spec.shape) // math.prod(info.shape)


def _dims(shape: tuple[int, ...]) -> str:
    return " x ".join(str(extent) for extent in shape)
