"""The host's C++ compiler, and a cache of what it has built.

A shared library is named by a hash of everything that goes into it: the complete text, the options, the compiler with
its version and the processor features that -march=native turned on. It is written under a temporary name and renamed,
so that processes that build the same one at the same time do not meet half a file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pyllm.device.kernel_source import cache_folder, digest
from pyllm.errors import DeviceError

_COMPILERS = ("g++", "clang++")
# -O1: most kernels run a few times, and -O2 takes half as long again to compile them. No contraction: a * b + c has two
# roundings, as written; kernels that want one say fmaf. The stack probe makes a large frame hit the guard page and not
# jump over it.
_OPTIONS = (
    *("-x", "c++", "-std=c++17", "-O1", "-march=native", "-shared", "-fPIC"),
    *("-ffp-contract=off", "-fno-math-errno", "-fstack-clash-protection"),
    *("-Wno-unknown-pragmas", "-Wno-attributes"),
)


@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler.

    Attributes:
        path: the program.
        identity: its predefined macros: they tell version and processor features.
    """

    path: str
    identity: str

    def library(self, name: str, text: str, options: tuple[str, ...] = ()) -> Path:
        """The shared library that `text` compiles to.

        Args:
            name: of the kernel, for file names and messages.
            text: one complete source.
            options: beyond the ones that every library gets.

        Raises:
            DeviceError: it does not compile; the message has the first error, with file and line.
        """
        file_name = f"{name}-{digest(text, *_OPTIONS, *options, self.identity)}.so"
        for folder in (cache_folder(), _own_folder()):
            if (folder / file_name).is_file():
                return folder / file_name
            try:
                return self._build(name, text, options, folder / file_name)
            except OSError:
                continue  # read-only or full
        raise DeviceError(
            f"there is no folder to compile kernel {name} in: tried {cache_folder()} and {_own_folder()}; "
            "set XDG_CACHE_HOME to a folder that can be written"
        )

    def _build(self, name: str, text: str, options: tuple[str, ...], target: Path) -> Path:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(".so", f".{name}-", target.parent)
        os.close(handle)
        try:
            command = [self.path, *_OPTIONS, *options, "-o", temporary, "-"]
            done = subprocess.run(command, input=text, capture_output=True, text=True)
            if done.returncode:
                raise _compile_error(name, done.stderr)
            os.replace(temporary, target)
        finally:
            Path(temporary).unlink(missing_ok=True)
        return target


@cache
def host_compiler() -> HostCompiler:
    """The compiler of this machine: $CXX, else g++, else clang++.

    Raises:
        DeviceError: there is none.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        macros = subprocess.run(
            [path, "-x", "c++", "-march=native", "-dM", "-E", os.devnull], capture_output=True, text=True
        )
        if macros.returncode == 0:
            return HostCompiler(path, path + macros.stdout)
    missing = f"CXX={wanted} cannot be run" if wanted else "neither g++ nor clang++ is on the PATH"
    raise DeviceError(f"the emulated device compiles kernels for the host, but {missing}; install g++ (or clang)")


@cache
def _own_folder() -> Path:
    """For this process alone, where the cache cannot be written: nobody else can have put a library there."""
    return Path(_temporary().name)


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pyllm-kernels-")


def _compile_error(name: str, messages: str) -> DeviceError:
    lines = messages.strip().splitlines()
    first = next((line for line in lines if re.search(r"\b(fatal )?error:", line)), lines[0] if lines else "no message")
    error = DeviceError(f"kernel {name} does not compile for the host: {first}")
    error.add_note(messages)
    return error
