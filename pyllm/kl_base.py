"""Files of log-probabilities: what a base run predicted at every scored position, for other runs to be compared with.

A file is an uncompressed .npz; `numpy.load` reads it without pickle.

    header           text: JSON with format, version, model, vocabulary, window, windows, scored, vocab_size
    tokens           int32 [windows, window]
    steps            float32 [windows, scored]
    codes_00000 ...  uint16 [scored, vocab_size], one for each window: -code * step is a logit of the row

Rounding: a step is a row's range divided by 65,535, about 0.0005 for a range of 32 nats. A code is off by half a step
at most, a log-probability by one: rows are normalised when they are read, so that errors enter the divergence squared,
about 1e-8 nats for a run compared with itself, and perplexities as their mean, about 1e-5 of the value.

Files may come from anybody: sizes are checked before anything of that size is read, checksums when an array has been
read to its end. A file appears under its name only when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

import numpy as np

from pyllm.errors import PyllmError
from pyllm.perplexity import log_softmax, num_scored

FORMAT, VERSION = "pyllm log-probabilities", 1

_LEVELS = np.iinfo(np.uint16).max
_MAX_HEADER_BYTES = 1 << 16
_MAX_NPY_HEADER_BYTES = 4096
_READ_ERRORS = (zipfile.BadZipFile, EOFError, OSError, ValueError, KeyError, NotImplementedError, RuntimeError)


class PieceSource(Protocol):
    """What `vocabulary_hash` needs of a tokeniser."""

    vocab_size: int

    def token_bytes(self, token_id: int, skip_special: bool = False) -> bytes: ...


def vocabulary_hash(tokenizer: PieceSource) -> str:
    """SHA-256 of all tokens in order."""
    digest = hashlib.sha256()
    for token_id in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token_id)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()


def model_fingerprint(path: Path) -> dict[str, Any]:
    """Name and size of a model file (of a split model, its first part), and SHA-256 of its first and last mebibyte."""
    mebibyte = 1 << 20
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(file.read(mebibyte))
        file.seek(max(0, size - mebibyte))
        digest.update(file.read(mebibyte))
    return {"name": path.name, "bytes": size, "sha256_of_ends": digest.hexdigest()}


class BaseWriter:
    """Writes a file, block by block. A context manager; leaving it with an exception keeps nothing.

    Args:
        windows: int32 [windows, window].

    Raises:
        PyllmError: the disk has no room.
        OSError: the file cannot be written.
    """

    def __init__(
        self, path: Path, model: Mapping[str, Any], vocabulary: str, windows: np.ndarray, vocab_size: int
    ) -> None:
        self._path, self._part = path, path.with_name(f"{path.name}.{os.getpid()}.part")
        self._windows, self._scored, self._vocab_size = windows, num_scored(windows.shape[1]), vocab_size
        self._header = {
            "format": FORMAT,
            "version": VERSION,
            "model": dict(model),
            "vocabulary": vocabulary,
            "window": windows.shape[1],
            "windows": len(windows),
            "scored": self._scored,
            "vocab_size": vocab_size,
        }
        self._steps = np.zeros((len(windows), self._scored), np.float32)
        self._num_rows = 0
        self._codes: IO[bytes] | None = None
        self._check_room()
        self._archive = zipfile.ZipFile(self._part, "w", zipfile.ZIP_STORED)

    def _check_room(self) -> None:
        needed = 2 * len(self._windows) * self._scored * self._vocab_size
        free = shutil.disk_usage(self._path.parent).free
        if needed > free:
            raise PyllmError(
                f"{self._path} would take {needed / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free; "
                "score fewer windows, or use another disk"
            )

    def _write(self, name: str, array: np.ndarray) -> None:
        with self._archive.open(f"{name}.npy", "w") as file:
            np.lib.format.write_array(file, array, allow_pickle=False)

    def add(self, logprobs: np.ndarray) -> None:
        """The next scored positions, all of one window: float64 [positions, vocab_size]."""
        window, row = divmod(self._num_rows, self._scored)
        if row == 0:
            self._codes = self._open_codes(window)
        assert self._codes is not None
        codes, self._steps[window, row : row + len(logprobs)] = encode(logprobs)
        self._codes.write(codes.tobytes())
        self._num_rows += len(logprobs)
        if self._num_rows % self._scored == 0:
            self._close_codes()

    def _open_codes(self, window: int) -> IO[bytes]:
        file = self._archive.open(f"codes_{window:05}.npy", "w", force_zip64=True)
        shape = {"descr": "<u2", "fortran_order": False, "shape": (self._scored, self._vocab_size)}
        np.lib.format.write_array_header_1_0(file, shape)
        return file

    def _close_codes(self) -> None:
        if self._codes is not None:
            self._codes.close()
            self._codes = None

    def __enter__(self) -> BaseWriter:
        return self

    def __exit__(self, kind: object, *exc_info: object) -> None:
        try:
            self._close_codes()
            if kind is None:
                assert self._num_rows == len(self._windows) * self._scored, "windows are missing"
                self._write("header", np.array(json.dumps(self._header)))
                self._write("tokens", self._windows.astype("<i4"))
                self._write("steps", self._steps.astype("<f4"))
            self._archive.close()
            if kind is None:
                os.replace(self._part, self._path)
        finally:
            self._part.unlink(missing_ok=True)


def encode(logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint16 [rows, vocab_size] and steps float32 [rows] of float64 log-probabilities."""
    below = logprobs.max(axis=1, keepdims=True) - logprobs
    steps = np.maximum(below.max(axis=1) / _LEVELS, np.finfo(np.float32).tiny).astype(np.float32)
    codes = np.rint(below / steps[:, None].astype(np.float64))
    return np.minimum(codes, _LEVELS).astype("<u2"), steps


def decode(codes: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Log-probabilities: float64 [rows, vocab_size]."""
    return log_softmax(codes * -steps[:, None].astype(np.float64))


class BaseReader:
    """Reads a file, block by block, in the order in which it was written. A context manager.

    Args:
        windows: what is going to be scored: the file's windows, or the first of them.

    Attributes:
        model: fingerprint of the model that made it.

    Raises:
        PyllmError: the file is damaged, no such file, or of another text or vocabulary.
    """

    def __init__(self, path: Path, vocabulary: str, windows: np.ndarray, vocab_size: int) -> None:
        self._path = path
        self._codes: IO[bytes] | None = None
        self._num_rows = 0
        try:
            self._archive = zipfile.ZipFile(path)
        except OSError as error:
            raise PyllmError(f"{path} cannot be read: {error.strerror}; check the name after --kl-base") from None
        except _READ_ERRORS as error:
            self._refuse_foreign(error)
        try:
            self._check(vocabulary, windows, vocab_size)
        except BaseException:
            self._archive.close()
            raise

    def _check(self, vocabulary: str, windows: np.ndarray, vocab_size: int) -> None:
        header = self._read_header()
        self.model = header["model"]
        if header["vocabulary"] != vocabulary or header["vocab_size"] != vocab_size:
            self._fail(f"was made with another vocabulary (by {self.model['name']})", "compare models that share one")
        count, size = windows.shape
        if header["window"] != size:
            self._fail(f"has windows of {header['window']} tokens, not {size}", f"use -c {header['window']}")
        if header["windows"] < count:
            self._fail(
                f"has {header['windows']} windows, {count} are to be scored", f"use --windows {header['windows']}"
            )
        self._scored, self._vocab_size = num_scored(size), vocab_size
        try:
            tokens = self._read("tokens", "<i4", (header["windows"], size))
            self._steps = self._read("steps", "<f4", (header["windows"], self._scored))
            if not (np.isfinite(self._steps).all() and (self._steps > 0).all()):
                raise ValueError("steps that no row has")
        except _READ_ERRORS as error:
            self._refuse(error)
        if not np.array_equal(tokens[:count], windows):
            self._fail("was made with another text", "use the text that it was made with")

    def _read_header(self) -> dict[str, Any]:
        try:
            info = self._archive.getinfo("header.npy")
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > _MAX_HEADER_BYTES:
                raise ValueError("no header of ours")
            with self._archive.open(info) as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
            header = json.loads(str(array))
            if header["format"] != FORMAT or type(header["version"]) is not int:
                raise ValueError("another format")
            sizes = [header[name] for name in ("window", "windows", "scored", "vocab_size")]
            if not all(type(number) is int and number > 0 for number in sizes):
                raise ValueError("sizes that are none")
            if not isinstance(header["model"]["name"], str):
                raise ValueError("no name of a model")
        except (*_READ_ERRORS, TypeError) as error:
            self._refuse_foreign(error)
        if header["version"] != VERSION:
            self._fail(f"has version {header['version']} of the format, this pyllm reads {VERSION}", "make it anew")
        return header

    def _open(self, name: str, dtype: str, shape: tuple[int, ...]) -> IO[bytes]:
        """An array's bytes, once its type and size were found to be those expected."""
        info = self._archive.getinfo(f"{name}.npy")
        num_bytes = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
        if info.compress_type != zipfile.ZIP_STORED or not 0 < info.file_size - num_bytes < _MAX_NPY_HEADER_BYTES:
            raise ValueError(f"{name} has {info.file_size} bytes, expected {num_bytes} and a short header")
        file = self._archive.open(info)
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{name} has an unknown version")
        found = np.lib.format.read_array_header_1_0(file)
        if found != (shape, False, np.dtype(dtype)):
            raise ValueError(f"{name} is {found[2]} {found[0]}, expected {dtype} {shape}")
        return file

    def _read(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        with self._open(name, dtype, shape) as file:
            data = file.read()  # to the end: the checksum is compared there
        return np.frombuffer(data, dtype).reshape(shape)

    def take(self, count: int) -> np.ndarray:
        """Log-probabilities of the next `count` scored positions, all of one window: float64 [count, vocab_size].

        Raises:
            PyllmError: the file is damaged.
        """
        window, row = divmod(self._num_rows, self._scored)
        try:
            if row == 0:
                self._close_codes()
                self._codes = self._open(f"codes_{window:05}", "<u2", (self._scored, self._vocab_size))
            assert self._codes is not None
            num_bytes = 2 * count * self._vocab_size
            data = self._codes.read(num_bytes)
            if row + count == self._scored and self._codes.read(1):  # the end, where the checksum is compared
                raise ValueError("more rows than expected")
            codes = np.frombuffer(data, "<u2").reshape(count, self._vocab_size)
        except _READ_ERRORS as error:
            self._refuse(error)
        self._num_rows += count
        return decode(codes, self._steps[window, row : row + count])

    def _refuse_foreign(self, error: Exception) -> NoReturn:
        raise PyllmError(
            f"{self._path} is not a file of log-probabilities that pyllm saved; give the name of one, or of a file "
            "that does not exist yet, to be made; --save replaces it"
        ) from error

    def _refuse(self, error: Exception) -> NoReturn:
        raise PyllmError(f"{self._path} is damaged: {error}; make it anew with --save") from error

    def _fail(self, finding: str, remedy: str) -> NoReturn:
        raise PyllmError(f"{self._path} {finding}; {remedy}")

    def _close_codes(self) -> None:
        if self._codes is not None:
            self._codes.close()
            self._codes = None

    def __enter__(self) -> BaseReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close_codes()
        self._archive.close()
