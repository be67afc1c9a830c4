"""Conversations on disk: session files that a new process finds again by the tokens that they begin with.

A conversation is written once it has been left alone for a while, and when the engine is closed; a longer one takes the
place of the shorter ones that it goes on from. Several processes share a folder: what is written or removed is so under
a lock on it, and each looks again when the folder has changed. The files of all models count towards the budget, and
those used least recently give way before anything new is written.

A file that is damaged is removed when that is found, with one line, and never used. Whatever goes wrong here costs
speed, not answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pyllm.errors import ContextError, PyllmError, SessionError, UsageError
from pyllm.prompt_cache.fingerprint import difference
from pyllm.prompt_cache.folder import LOCK, SUFFIX, make_private, remove_partial, session_files
from pyllm.prompt_cache.pinned_pool import PinnedMemoryError
from pyllm.prompt_cache.session_file import SessionReader, UnreadableSession
from pyllm.prompt_cache.sessions import Sessions

DEFAULT_BUDGET = 8 << 30
LEAST = 64  # tokens: for less, a file is not worth reading or writing
IDLE = 10.0  # seconds that a conversation is left alone before it is written
_OWN = re.compile("[0-9a-f]{32}")  # names without SUFFIX

_log = logging.getLogger("pyllm")


@dataclass(frozen=True)
class Entry:
    """A file that this engine can use.

    Attributes:
        states: positions of its checkpoints; None where every position will do.
    """

    path: Path
    tokens: np.ndarray
    states: tuple[int, ...] | None

    def usable(self, ids: np.ndarray) -> int:
        """How many tokens of a prompt it saves."""
        shared = _shared(self.tokens, ids)
        return shared if self.states is None else max((p for p in self.states if p <= shared), default=0)

    def covers(self, token_ids: Sequence[int]) -> bool:
        """Whether it has a conversation, but for a little."""
        return _shared(self.tokens, np.array(token_ids, np.int64)) >= len(token_ids) - LEAST


@dataclass
class _Pending:
    """A conversation that is not on disk yet."""

    token_ids: tuple[int, ...]
    since: float = field(default_factory=time.monotonic)


class DiskTier:
    """One engine's view of a folder.

    Args:
        folder: made where it is not there.
        budget: bytes that all files in it may take.

    Raises:
        SessionError: the folder cannot be made or used.
    """

    def __init__(self, folder: Path, budget: int, sessions: Sessions, identity: Mapping[str, str]) -> None:
        make_private(folder)
        self._folder = folder
        self._budget = budget
        self._sessions = sessions
        self._identity = identity
        self._entries: list[Entry] = []
        self._told: set[Path] = set()
        self._seen = -1
        self._pending: list[_Pending] = []
        self._wake = threading.Condition()
        self._closing = False
        self._writer: threading.Thread | None = None
        with self._locked():
            remove_partial(folder)

    # reading

    def bring(self, token_ids: Sequence[int], known: int) -> None:
        """Load the file that knows most of a prompt's beginning, if that is clearly more than is known already."""
        try:
            best = self._best(token_ids, known)
            while best is not None and not self._load(best):
                best = self._best(token_ids, known)
        except (PyllmError, OSError) as error:  # what was kept saves time only: the prompt is computed
            _log.warning("%s", error)

    def _best(self, token_ids: Sequence[int], known: int) -> Entry | None:
        self._look()
        ids = np.array(token_ids[:-1], np.int64)
        found = [(entry.usable(ids), number, entry) for number, entry in enumerate(self._entries)]
        usable, _, entry = max(found, default=(0, 0, None))
        return entry if usable >= known + LEAST else None

    def _load(self, entry: Entry) -> bool:
        """False when the entry is gone now, and another may be tried."""
        seen = _status(entry.path)
        try:
            self._sessions.load(entry.path)
        except (ContextError, PinnedMemoryError) as error:
            _log.debug("%s", error)
            return True  # there is no room for it now
        except UnreadableSession as error:
            self._entries = [other for other in self._entries if other is not entry]
            if entry.path.exists():  # otherwise another process removed it
                _log.warning("%s", error)
            return False
        except SessionError as error:
            self._entries = [other for other in self._entries if other is not entry]
            if self._remove_damaged(entry.path, seen):
                _log.warning("%s; it is removed from the cache", error)
            return False
        with contextlib.suppress(OSError):
            os.utime(entry.path)
        return True

    def _remove_damaged(self, path: Path, seen: os.stat_result | None) -> bool:
        """Remove a file, unless it is not the one any more that was seen: another process may have written it anew."""
        with self._locked():
            now = _status(path)
            if seen is None or now is None or not os.path.samestat(seen, now):
                return False
            path.unlink()
            return True

    def _look(self) -> None:
        """See what is in the folder, where it has changed."""
        try:
            changed = self._folder.stat().st_mtime_ns
        except OSError as error:
            raise SessionError(f"{self._folder}: the cache cannot be read: {error.strerror}") from error
        if changed == self._seen:
            return
        known = {entry.path: entry for entry in self._entries}
        paths = self._own_files()
        found = (known.get(path) or self._read(path) for path in paths)
        self._entries = [entry for entry in found if entry is not None]
        self._seen = changed

    def _read(self, path: Path) -> Entry | None:
        """An entry, unless it is of another engine, or damaged."""
        try:
            with SessionReader(path) as reader:
                if difference(reader.json("fingerprint"), self._identity) is None:
                    states = tuple(int(name[6:]) for name in reader.sections if name.startswith("state."))
                    return Entry(path, reader.tokens, states or None)
        except (SessionError, ValueError) as error:
            if path not in self._told and path.exists():
                self._told.add(path)
                _log.warning("%s", error)
        return None

    # writing

    def note(self, token_ids: Sequence[int]) -> None:
        """A conversation has come so far. It is written later."""
        ids = tuple(token_ids)
        if len(ids) < LEAST:
            return
        with self._wake:
            self._pending = [one for one in self._pending if ids[: len(one.token_ids)] != one.token_ids]
            self._pending.append(_Pending(ids))
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_idle, name="pyllm-cache-disk", daemon=True)
                self._writer.start()
            self._wake.notify()

    def close(self) -> None:
        """Write what is not written yet."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._writer is not None:
            self._writer.join()

    def _write_idle(self) -> None:
        while True:
            with self._wake:
                while not (due := self._due()):
                    if self._closing:
                        return
                    self._wake.wait(self._seconds_left())
                self._pending.remove(due[0])
            try:
                self._write(due[0].token_ids)
            except Exception as error:  # whatever it is, the next conversation may be written
                _log.warning("%s: %s", self._folder, error)

    def _due(self) -> list[_Pending]:
        latest = time.monotonic() - (0 if self._closing else IDLE)
        return [one for one in self._pending if one.since <= latest]

    def _seconds_left(self) -> float | None:
        if not self._pending:
            return None
        return max(0.01, IDLE - (time.monotonic() - min(one.since for one in self._pending)))

    def _write(self, token_ids: tuple[int, ...]) -> None:
        # Reads all weights the first time, so without the lock.
        name = hashlib.sha256(json.dumps([dict(self._identity), token_ids]).encode()).hexdigest()[:32]
        with self._locked():
            self._look()
            known, size = self._sessions.extent(token_ids)  # the rest is not kept any more
            if known < LEAST or any(entry.covers(token_ids[:known]) for entry in self._entries):
                return
            if size > self._budget:
                told = "a conversation of %d bytes is larger than the cache on disk (--cache-disk); not kept"
                _log.warning(told, size)
                return
            self._make_room(size)
            self._save(self._folder / f"{name}{SUFFIX}", token_ids)

    def _save(self, path: Path, token_ids: tuple[int, ...]) -> None:
        try:
            saved = np.array(self._sessions.save(path, token_ids, {}).token_ids, np.int64)
        except UsageError:
            if self._sessions.extent(token_ids)[0]:
                raise
            return  # it gave way meanwhile
        for entry in self._entries:
            goes_on_from = len(entry.tokens) < len(saved) and _shared(entry.tokens, saved) == len(entry.tokens)
            if goes_on_from and entry.path != path:
                entry.path.unlink(missing_ok=True)

    def _own_files(self) -> list[Path]:
        """Those with names that this tier gives: whatever else is in the folder is somebody's."""
        return [path for path in session_files(self._folder) if _OWN.fullmatch(path.name.removesuffix(SUFFIX))]

    def _make_room(self, num_bytes: int) -> None:
        """Remove the files used least recently until a new one fits."""
        used = []
        for path in self._own_files():
            with contextlib.suppress(OSError):
                status = path.stat()
                used.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in used)
        for _, size, path in sorted(used):
            if total + num_bytes <= self._budget:
                return
            path.unlink(missing_ok=True)
            total -= size

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among all processes that write here."""
        try:
            handle = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise SessionError(f"{self._folder}: the cache cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        except OSError as error:
            raise SessionError(f"{self._folder}: the cache cannot be written: {error.strerror}") from error
        finally:
            os.close(handle)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _shared(tokens: np.ndarray, ids: np.ndarray) -> int:
    """Length of the common beginning."""
    count = min(len(tokens), len(ids))
    differing = np.flatnonzero(tokens[:count] != ids[:count])
    return int(differing[0]) if differing.size else count
