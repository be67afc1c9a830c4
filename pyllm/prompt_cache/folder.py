"""Where session files with a name lie: pyllm/sessions in the user's cache folder, which only the user can read."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from pathlib import Path

from pyllm.errors import SessionError, UsageError
from pyllm.hub import models_dir

SUFFIX = ".session"
PARTIAL = ".partial"  # how names of files that are being written end
LOCK = ".lock"  # in a folder that several processes share
_PARTIAL_NAME = re.compile(rf"\..+\.(\d+)-[0-9a-f]{{8}}\{PARTIAL}")  # with the process that writes it
_BEGINNING = b'{"__metadata__": {"format": "pyllm session"'  # of a file's header, which comes behind its length
_LENGTH_BYTES = 8
_NAME = re.compile(r"[\w][\w .+@-]{0,99}")


def sessions_dir() -> Path:
    """The folder. May not exist yet."""
    return models_dir().parent / "sessions"


def session_path(name: str) -> Path:
    """The file that a user means: a path (with a slash, or ending in .session), else a name in the folder.

    Raises:
        UsageError: neither.
    """
    if ("/" in name or name.endswith(SUFFIX)) and "\0" not in name:
        return Path(name)
    if _NAME.fullmatch(name) is None:
        shown = f"{name[:100]!r} is no name for a session"
        raise UsageError(f"{shown}; use letters, digits, spaces and . + @ - _, or a path")
    return sessions_dir() / f"{name}{SUFFIX}"


def ready_path(name: str) -> Path:
    """`session_path`, with the folder made where a name is meant.

    Raises:
        UsageError: no name for a session.
        SessionError: the folder cannot be made.
    """
    path = session_path(name)
    if path.parent == sessions_dir():
        make_private(path.parent)
    return path


def make_private(folder: Path) -> None:
    """Make a folder that only the user can read. One that is there becomes so, unless it holds files of other programs:
    others may need those.

    Raises:
        SessionError: it cannot be made, or others can read it and it holds other files.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not folder.stat().st_mode & 0o077:
            return
        foreign = next((path.name for path in folder.iterdir() if not _is_ours(path)), None)
        if foreign is not None:
            raise SessionError(
                f"{folder}: others can read this folder, and it holds other files ({foreign[:100]!r}); choose another "
                "one for sessions, or make it private (chmod 700)"
            )
        os.chmod(folder, 0o700)
    except OSError as error:
        raise SessionError(f"{folder}: the folder cannot be made: {error.strerror}") from error


def _is_ours(path: Path) -> bool:
    return path.suffix in (SUFFIX, PARTIAL) or path.name == LOCK


def remove_partial(folder: Path) -> int:
    """Remove what processes left behind that were killed while they wrote; returns how many files."""
    return sum(_is_left(path, remove=True) for path in _of_ended(folder))


def left_behind(folder: Path) -> list[Path]:
    """Session files that were not finished and never will be: with the name of one that is being written, nothing but
    the beginning of one in it, no lock on it (`session_file` holds one while it writes) and no such process here."""
    return [path for path in _of_ended(folder) if _is_left(path)]


def _of_ended(folder: Path) -> list[Path]:
    """Files with the name of one that is being written, by a process that is not there."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return []
    found = [(name, match[1]) for name in names if (match := _PARTIAL_NAME.fullmatch(name))]
    return [folder / name for name, pid in found if not os.path.exists(f"/proc/{pid}")]


def _is_left(path: Path, remove: bool = False) -> bool:
    """Whether nobody will finish a file. It is removed under its lock: a writer that gets that then sees it."""
    handle = _opened(path)
    if handle is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_left = _begins_as_session(handle)
        if is_left and remove:
            path.unlink()
        return is_left
    except OSError:  # somebody has the lock, or may not be asked; or it is gone by now
        return False
    finally:
        os.close(handle)


def begins_as_session(path: Path) -> bool:
    """Whether a file begins as session files do, whatever is behind that; no for one that cannot be read."""
    handle = _opened(path)
    if handle is None:
        return False
    try:
        return _begins_as_session(handle)
    except OSError:
        return False
    finally:
        os.close(handle)


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None


def _begins_as_session(handle: int) -> bool:
    start = os.pread(handle, len(_BEGINNING), _LENGTH_BYTES)
    return stat.S_ISREG(os.fstat(handle).st_mode) and _BEGINNING.startswith(start)


def session_files(folder: Path) -> list[Path]:
    """All session files in a folder, by name; none where there is no folder."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX and not path.name.startswith("."))
    except OSError:
        return []
