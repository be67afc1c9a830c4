"""Models in several files: opened as one, whichever part or folder the user names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NoReturn

import numpy as np

from pyllm.errors import ModelFileError
from pyllm.gguf_file import GGUFFile, GGUFModel
from pyllm.gguf_metadata import printable

_MAX_PARTS = 65535
_PART_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def open_model(path: str | os.PathLike[str]) -> GGUFModel:
    """Open a model given as its file, any file of a split model, or a folder that holds one model.

    Raises:
        ModelFileError: as GGUFFile and SplitGGUF; or the folder holds no model, or several.
    """
    path = Path(path)
    if os.path.isdir(path):  # unlike Path.is_dir it never raises; the reader says what is wrong with the path
        path = _model_in_folder(path)
    file = GGUFFile(path)
    count = file.get_int("split.count", 1, minimum=0, maximum=_MAX_PARTS)
    if count <= 1:
        return file
    number = file.get_int("split.no", minimum=0, maximum=count - 1) + 1
    file.close()
    match = _PART_NAME.fullmatch(path.name)
    if not match or (int(match["number"]), int(match["count"])) != (number, count):
        raise ModelFileError(
            f"{printable(path, 4096)} is part {number} of {count}, but not named so; "
            f"give all parts their original names (...-{number:05}-of-{count:05}.gguf)"
        )
    return SplitGGUF([path.with_name(f"{match['prefix']}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)])


class SplitGGUF(GGUFModel):
    """A model cut into files `<prefix>-00001-of-00003.gguf` and so on. Metadata comes from the first, tensors from all.

    Args:
        paths: all parts in order.

    Raises:
        ModelFileError: as GGUFFile; a part is missing, in the wrong place, or from another model.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.path = paths[0]
        self._parts = [_open_part(path, index, len(paths)) for index, path in enumerate(paths)]
        self.metadata = self._parts[0].metadata
        self.tensors = {}
        self._owner: dict[str, GGUFFile] = {}
        total = self.get_int("split.tensors.count", None)
        for part in self._parts:
            part_total = part.get_int("split.tensors.count", total)
            if part_total != total:
                _foreign(
                    part, f"is from a model of {part_total} tensors, {printable(self.path.name)} from one of {total}"
                )
            for name, info in part.tensors.items():
                if name in self._owner:
                    _foreign(part, f"holds tensor {printable(name)}, as {printable(self._owner[name].path.name)} does")
                self.tensors[name] = info
                self._owner[name] = part
        if total not in (None, len(self.tensors)):
            raise ModelFileError(
                f"{printable(self.path, 4096)}: its model has {total} tensors, the {len(paths)} parts hold "
                f"{len(self.tensors)}; one of them belongs to another model: fetch all parts again"
            )

    def tensor_data(self, name: str) -> np.ndarray:
        return self._owner.get(name, self._parts[0]).tensor_data(name)

    def close(self) -> None:
        for part in self._parts:
            part.close()


def _model_in_folder(folder: Path) -> Path:
    """The first file of the only model in a folder."""
    try:
        files = sorted(entry for entry in folder.iterdir() if entry.suffix == ".gguf")
    except OSError as error:
        raise ModelFileError(
            f"{printable(folder, 4096)} cannot be read: {error.strerror}; check its permissions"
        ) from None
    models: dict[str, Path] = {}
    for file in files:
        match = _PART_NAME.fullmatch(file.name)
        models.setdefault(f"{match['prefix']}-of-{match['count']}" if match else file.name, file)
    if not models:
        raise ModelFileError(f"{printable(folder, 4096)} is a folder without .gguf files; name a model file")
    if len(models) > 1:
        names = printable(", ".join(file.name for file in models.values()), 300)
        raise ModelFileError(f"{printable(folder, 4096)} is a folder with {len(models)} models; name one of {names}")
    return next(iter(models.values()))


def _open_part(path: Path, index: int, count: int) -> GGUFFile:
    if not os.path.exists(path):
        raise ModelFileError(
            f"{printable(path, 4096)} is missing, part {index + 1} of {count}; fetch it into the same folder"
        )
    part = GGUFFile(path)
    found = part.get_int("split.no") + 1, part.get_int("split.count")
    if found != (index + 1, count):
        _foreign(part, f"is part {found[0]} of {found[1]}, its name says {index + 1} of {count}")
    return part


def _foreign(part: GGUFFile, problem: str) -> NoReturn:
    raise ModelFileError(
        f"{printable(part.path, 4096)} {problem}; it was renamed or belongs to another model: fetch all parts again"
    )
