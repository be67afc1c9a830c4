"""Typed access to the key-value pairs of a model file, and how messages show text that came from one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from pyllm.errors import ModelFileError

REQUIRED: Any = object()
"""Default of the typed getters: a missing key is an error."""

FETCH_AGAIN = "the download may be cut short or damaged: fetch it again"

_SHOWN = 100  # characters

D = TypeVar("D")


def printable(text: object, limit: int = 80) -> str:
    """Text from a file, fit for one line of an error message."""
    shown = (text if isinstance(text, str) else str(text))[: limit + 1]  # cut first: a file's text may be long
    escaped = shown if shown.isprintable() else shown.encode("unicode_escape").decode("ascii")
    return escaped if len(escaped) <= limit else escaped[: limit - 3] + "..."


class TypedMetadata:
    """Getters that give a metadata value of the promised type and range, or say what is wrong.

    Their arguments: `key`, the full key (see `arch_key`); `default`, returned as it is when the key is missing, unless
    it is REQUIRED. They raise ModelFileError when the key is missing, or its value has another type, length or range.

    Attributes:
        path: of the file, for messages.
        metadata: key-value pairs, of the types that `Metadata` gives.
    """

    path: Path
    metadata: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """The value of `general.architecture`, which is also the prefix of the architecture's own keys."""
        return self.get_str("general.architecture")

    def arch_key(self, suffix: str) -> str:
        """The full key of an architecture's setting: "block_count" becomes "llama.block_count"."""
        return f"{self.architecture}.{suffix}"

    def get_int(
        self, key: str, default: D = REQUIRED, *, minimum: int | None = None, maximum: int | None = None
    ) -> int | D:
        """An integer of any stored width, within [minimum, maximum]."""
        if key not in self.metadata:
            return self._missing(key, default, "an integer")
        value = self.metadata[key]
        if type(value) is not int:
            self._refuse(key, value, "an integer")
        self._check_range(key, value, minimum, maximum)
        return value

    def get_float(
        self, key: str, default: D = REQUIRED, *, minimum: float | None = None, maximum: float | None = None
    ) -> float | D:
        """A finite number within [minimum, maximum]; integers are accepted."""
        if key not in self.metadata:
            return self._missing(key, default, "a number")
        value = self.metadata[key]
        if type(value) not in (int, float) or not math.isfinite(value):
            self._refuse(key, value, "a finite number")
        self._check_range(key, value, minimum, maximum)
        return float(value)

    def get_bool(self, key: str, default: D = REQUIRED) -> bool | D:
        """A truth value; some writers store it as an integer 0 or 1."""
        if key not in self.metadata:
            return self._missing(key, default, "a truth value")
        value = self.metadata[key]
        if type(value) not in (int, bool) or value not in (0, 1):
            self._refuse(key, value, "a truth value (true or false)")
        return bool(value)

    def get_str(self, key: str, default: D = REQUIRED) -> str | D:
        """A string."""
        if key not in self.metadata:
            return self._missing(key, default, "a string")
        value = self.metadata[key]
        if not isinstance(value, str):
            self._refuse(key, value, "a string")
        return value

    def get_strs(self, key: str, default: D = REQUIRED, *, length: int | None = None) -> list[str] | D:
        """An array of strings: the list that `metadata` keeps, not to be changed."""
        if key not in self.metadata:
            return self._missing(key, default, "an array of strings")
        value = self.metadata[key]
        if isinstance(value, np.ndarray) and value.size == 0:
            value = []  # writers give an empty array any element type
        if not isinstance(value, list) or (value and not isinstance(value[0], str)):
            self._refuse(key, value, "an array of strings")
        self._check_length(key, value, length)
        return value

    def get_array(
        self, key: str, dtype: type[np.generic], default: D = REQUIRED, *, length: int | None = None
    ) -> np.ndarray | D:
        """An array of numbers as `dtype` [length]. Integers and truth values go into any dtype that holds them all,
        floats into floating dtypes only.
        """
        expected = f"an array of numbers that fit into {np.dtype(dtype).name}"
        if key not in self.metadata:
            return self._missing(key, default, expected)
        value = self.metadata[key]
        if isinstance(value, list) and not value:
            value = np.empty(0, dtype)
        if not isinstance(value, np.ndarray) or not _fits(value, np.dtype(dtype)):
            self._refuse(key, value, expected)
        self._check_length(key, value, length)
        with np.errstate(all="ignore"):  # a NaN of the kind that traps is a value like any other, and callers check
            return value.astype(dtype, copy=False)

    def get_ints(
        self,
        key: str,
        length: int,
        default: D = REQUIRED,
        *,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> tuple[int, ...] | D:
        """One integer per layer: an array of `length`, or a single value that stands for all of them. Truth values
        count as 0 and 1.
        """
        if key not in self.metadata:
            return self._missing(key, default, "an integer or an array of integers")
        value = self.metadata[key]
        if type(value) in (int, bool):
            values: tuple[int, ...] = (int(value),) * length
        elif isinstance(value, np.ndarray) and value.dtype.kind in "iub":
            self._check_length(key, value, length)
            values = tuple(int(item) for item in value)
        else:
            self._refuse(key, value, "an integer or an array of integers")
        for item in values:
            self._check_range(key, item, minimum, maximum)
        return values

    def _missing(self, key: str, default: D, expected: str) -> D:
        if default is REQUIRED:
            raise ModelFileError(
                f"{printable(self.path, 4096)}: {printable(key)} is missing, expected {expected}; "
                "the file is not a whole model: fetch or convert it again"
            )
        return default

    def _refuse(self, key: str, value: object, expected: str) -> NoReturn:
        raise ModelFileError(
            f"{printable(self.path, 4096)}: {printable(key)} is {described(value)}, expected {expected}; "
            "the file is damaged or was converted wrongly: fetch or convert it again"
        )

    def _check_range(self, key: str, value: float, minimum: float | None, maximum: float | None) -> None:
        if minimum is not None and value < minimum:
            self._refuse(key, value, f"at least {minimum}")
        if maximum is not None and value > maximum:
            self._refuse(key, value, f"at most {maximum}")

    def _check_length(self, key: str, value: list[Any] | np.ndarray, length: int | None) -> None:
        if length is not None and len(value) != length:
            self._refuse(key, value, f"{length} values")


def described(value: object) -> str:
    """A metadata value, fit for one line of an error message: arrays by their length and type."""
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype.name} values"
    if isinstance(value, list):
        return f"an array of {len(value)} {'strings' if value and isinstance(value[0], str) else 'arrays'}"
    return printable(repr(value[:_SHOWN] if isinstance(value, str) else value))


def _fits(values: np.ndarray, dtype: np.dtype) -> bool:
    if values.dtype.kind == "f" or dtype.kind == "f":
        return dtype.kind == "f"
    if values.size == 0 or values.dtype.kind == "b":
        return True
    limits = np.iinfo(dtype)
    return limits.min <= int(values.min()) and int(values.max()) <= limits.max
