"""What a run must have in common with the one before it on the same output, kept in a file beside that.

Speed is free to change: how many run side by side, batch sizes, threads, the device.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pyllm.errors import PyllmError, UsageError

VERSION = 1
_SHOWN = 60  # characters of a value in a message
_ENDS = 1 << 20  # bytes of a model file's start and end that are looked at


def settings_path(output: Path) -> Path:
    """Where the settings of an output are kept."""
    return output.with_name(output.name + ".settings.json")


def model_identity(path: Path) -> dict[str, Any]:
    """By which a model file is known again wherever it lies: name, size, SHA-256 of its first and last megabyte."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(_ENDS))
        file.seek(max(0, size - _ENDS))
        digest.update(file.read())
    return {"name": path.name, "bytes": size, "ends": digest.hexdigest()}


def read_settings(output: Path) -> dict[str, Any] | None:
    """The settings with which an output was begun; None when there are none.

    Raises:
        PyllmError: they cannot be read.
    """
    path = settings_path(output)
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict) or value.get("version") != VERSION or not isinstance(value.get("input"), dict):
            raise ValueError
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PyllmError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise PyllmError(
            f"{path} is damaged, or of another version of pyllm; choose another -o, or --overwrite"
        ) from None
    return value


def write_settings(output: Path, settings: Mapping[str, Any]) -> None:
    """Keep settings: the old ones or the new ones are there whenever the program ends."""
    path = settings_path(output)
    fresh = path.with_name(f".{path.name}.new")  # hidden: no text of a folder that is read
    try:
        with fresh.open("w", encoding="ascii") as file:
            json.dump({"version": VERSION, **settings}, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        raise PyllmError(f"{path} cannot be written: {error.strerror}") from None


def check_same(output: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to mix answers of different settings in one file.

    Raises:
        UsageError: they differ; the message says in what.
    """
    found = list(_differences(then, json.loads(json.dumps(now))))
    if found:
        raise UsageError(
            f"{output} was begun with other settings: {'; '.join(found)}; use the same, another -o, or --overwrite"
        )


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in sorted(then.keys() | now.keys()):
        if name in ("version", "input"):
            continue
        before, after = then.get(name), now.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{name} ")
        elif before != after:
            yield f"{prefix}{name} was {_value(before)}, is {_value(after)}"


def _value(value: Any) -> str:
    text = "none" if value is None else json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
