"""Kernel sources: where they lie, as one complete text, and what a target adds to it.

A compiler gets one text in which every `#include "..."` has been replaced by that file, so that a hash of the text says
all about what is compiled: CuPy's cache, for one, leaves included headers out of its key. `#line` directives keep
messages at the real file and line. An `#include "generated/..."` is replaced by text made here, from what the package
knows and from the variant's defines. This module compiles nothing; each device does that in its own way.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

import pyllm
from pyllm.errors import DeviceError
from pyllm.ops.op import Target
from pyllm.quants import QuantType
from pyllm.quants.grids import GRID_TYPES, SELECTOR_TYPES, grid_selectors, grid_words

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')
_PRAGMA_ONCE = re.compile(r"^\s*#\s*pragma\s+once\b")
_VENDOR_DEFINES = {"cuda": "PYLLM_CUDA", "hip": "PYLLM_HIP", "host": "PYLLM_EMULATED"}
_TILE_DEFINES = {"mma": "TILE_MMA", "wmma": "TILE_WMMA", "mfma": "TILE_MFMA"}


@cache
def kernel_folder() -> Path:
    """The folder of the kernel sources: installed inside the package, or beside it in a checkout.

    Raises:
        DeviceError: neither is there.
    """
    package = Path(pyllm.__file__).parent
    for folder in (package / "rawkernels", package.parent / "rawkernels"):
        if (folder / "common" / "platform.cuh").is_file():
            return folder
    raise DeviceError(f"the kernel sources (rawkernels/) are neither in {package} nor beside it; install pyllm again")


def kernel_names() -> list[str]:
    """Names of all kernel sources, sorted."""
    return sorted(path.stem for path in kernel_folder().glob("*.cu"))


def source_text(source: str, defines: Mapping[str, int] | None = None) -> str:
    """The complete text of a kernel source.

    Args:
        source: a name, for rawkernels/<name>.cu, or the path of a .cu file of one's own. Its includes are looked for
            in rawkernels/ ("common/platform.cuh"), then beside the including file.
        defines: the variant's own, which say what generated includes hold; without them those are empty.

    Raises:
        DeviceError: a file is missing, or files include each other in a circle.
    """
    return expand_file(source if source.endswith(".cu") else f"{source}.cu", defines)


def expand_file(name: str | Path, defines: Mapping[str, int] | None = None) -> str:
    """A file with its includes in place; a relative name is looked for in rawkernels/ first.

    Raises:
        DeviceError: as `source_text`.
    """
    path = kernel_folder() / name
    return "\n".join(_expand(path if path.is_file() else Path(name), (), defines or {})) + "\n"


def target_defines(target: Target, defines: Mapping[str, int]) -> dict[str, str]:
    """All macros of one variant: the target's and its own."""
    own = {name: str(value) for name, value in sorted(defines.items())}
    return {
        _VENDOR_DEFINES[target.vendor]: "1",
        _TILE_DEFINES[target.tiles]: "1",
        "WARP_SIZE": str(target.warp_size),
        **own,
    }


def define_options(defines: Mapping[str, str]) -> list[str]:
    """Macros as options that all compilers take."""
    return [f"-D{name}={value}" for name, value in defines.items()]


def max_threads(source: str, text: str, entry: str) -> str:
    """What a kernel's definition gives as KERNEL(max_threads): an expression of the preprocessor.

    Raises:
        DeviceError: `text`, that of `source`, defines no such kernel.
    """
    for match in re.finditer(r"^\s*KERNEL\(", text, re.MULTILINE):
        limit, rest = _balanced(text[match.end() :])
        if re.match(rf"\s*{re.escape(entry)}\s*\(", rest):
            return limit
    raise DeviceError(f"{display_name(source)} defines no kernel {entry}; expected a line KERNEL(threads) {entry}(...)")


def display_name(source: str) -> str:
    """What messages call a source."""
    return source if source.endswith(".cu") else f"rawkernels/{source}.cu"


def cache_folder() -> Path:
    """Where compiled kernels are kept: pyllm/kernels in the user's cache folder. May not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / "pyllm" / "kernels"


def digest(*parts: str) -> str:
    """A hash of texts, fit for a file name."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode()
        whole.update(len(data).to_bytes(8, "little"))
        whole.update(data)
    return whole.hexdigest()[:32]


def _quant_grid(defines: Mapping[str, int]) -> list[str]:
    """The codebook of the block format QTYPE, for rawkernels/quants/grid.cuh."""
    qtype = defines.get("QTYPE")
    if qtype not in GRID_TYPES:
        return []
    return _table("quant_grid", grid_words(QuantType(qtype)))


def _quant_selectors(defines: Mapping[str, int]) -> list[str]:
    """The same as numbers of levels, for rawkernels/quants/whole.cuh."""
    qtype = defines.get("QTYPE")
    if qtype not in SELECTOR_TYPES:
        return []
    selectors, levels = grid_selectors(QuantType(qtype))
    return [f"#define QUANT_LEVELS 0x{levels:08X}u", *_table("quant_selectors", selectors)]


def _table(name: str, table: np.ndarray) -> list[str]:
    words = [f"0x{word:08X}u" for word in table]
    rows = [", ".join(words[first : first + 8]) + "," for first in range(0, len(words), 8)]
    return [f"DEVICE_TABLE u32 {name}[{len(words)}] = {{", *rows, "};"]


_GENERATED = {"generated/quant_grid.cuh": _quant_grid, "generated/quant_selectors.cuh": _quant_selectors}


def _expand(path: Path, including: tuple[Path, ...], defines: Mapping[str, int]) -> list[str]:
    """Lines of a file with its includes in place. Each is guarded by a macro instead of being dropped the second time,
    since the first may stand in a branch that is not compiled."""
    if path in including:
        circle = " includes ".join(_shown(file) for file in (*including, path))
        raise DeviceError(f"kernel headers include each other in a circle: {circle}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        by = f", included by {_shown(including[-1])}" if including else ""
        raise DeviceError(f"kernel source {_shown(path)}{by} cannot be read: {error.strerror}") from error
    lines = [f'#line 1 "{_shown(path)}"']
    for number, line in enumerate(text.splitlines(), 1):
        if include := _INCLUDE.match(line):
            guard = "PYLLM_INCLUDED_" + re.sub(r"\W", "_", include[1])
            lines += [f"#ifndef {guard}", f"#define {guard}"]
            if include[1] in _GENERATED:
                lines += [f'#line 1 "{include[1]}"', *_GENERATED[include[1]](defines)]
            else:
                lines += _expand(_find(include[1], path), (*including, path), defines)
            lines += ["#endif", f'#line {number + 1} "{_shown(path)}"']
        else:
            lines.append("" if _PRAGMA_ONCE.match(line) else line)
    return lines


def _find(name: str, including: Path) -> Path:
    path = kernel_folder() / name
    return path if path.is_file() else including.parent / name


def _shown(path: Path) -> str:
    """The path as messages show it: kernels of pyllm without the folder in which it is installed."""
    if path.is_relative_to(kernel_folder()):
        return "rawkernels/" + path.relative_to(kernel_folder()).as_posix()
    return path.as_posix()


def _balanced(text: str) -> tuple[str, str]:
    """What stands before the parenthesis that closes, and what stands behind it."""
    depth = 1
    for position, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return text[:position].strip(), text[position + 1 :]
    return text, ""
