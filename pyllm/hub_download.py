"""One large file of the hub, into the cache of huggingface_hub, so that a download that was cut goes on.

The package keeps nothing of a download that its process did not finish (since it gives each process a file of its own).
Models are large: here the part that is there stays, under one name, and the next run asks for the rest. What is whole
and has the right SHA-256 gets the name under which the package looks for it. The package is asked for addresses, tokens
and folders; it need not know.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO, Any, BinaryIO
from urllib.parse import urlsplit

from pyllm.errors import DownloadError

_CHUNK_BYTES = 1 << 20
_TRIES = 5  # without a byte that is new
_TIMEOUT = 60  # seconds without a byte
_PART = ".pyllm-part"
_WRONG_RANGE = 416

Progress = Callable[[int, int], None]


def blob_path(package: Any, repo: str, sha256: str) -> Path:
    """Where the package's cache keeps a large file: the layout is documented, and the same for all its programs."""
    return Path(package.constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs" / sha256


def fetch_blob(
    package: Any, repo: str, name: str, commit: str, sha256: str, progress: Progress, waits: Callable[[], None]
) -> bool:
    """Fetch a file into the cache, unless it is there.

    Args:
        progress: called with (bytes that are there, bytes in all).
        waits: called before waiting for another process that fetches the same file.

    Returns:
        False when the hub calls the file by another name than its SHA-256: the package is to fetch it.

    Raises:
        DownloadError: it cannot be fetched now; what came is kept.
        OSError: it cannot be stored.
    """
    blob = blob_path(package, repo, sha256)
    url = package.hf_hub_url(repo, name, revision=commit)
    if package.get_hf_file_metadata(url).etag != sha256:
        return False
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = blob.with_name(blob.name + _PART)
    with _locked(part, waits) as file:
        if not blob.exists():
            _fill(file, package, url, progress)
            if _sha256(part) != sha256:
                part.unlink()
                raise DownloadError(f"{name} is not the file that the hub names (SHA-256); try again")
            os.replace(part, blob)
        else:
            part.unlink(missing_ok=True)
    return True


@contextmanager
def _locked(path: Path, waits: Callable[[], None]) -> Iterator[BinaryIO]:
    """The file, open for appending, and no other process's until this one is done or dead."""
    import fcntl

    while True:
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):  # it was not moved away meanwhile
                    yield file
                    return


def _fill(file: BinaryIO, package: Any, url: str, progress: Progress) -> None:
    """Fetch what is missing, again where the connection breaks, as long as that brings something."""
    tries = 0
    while True:
        before = file.seek(0, os.SEEK_END)
        try:
            about = package.get_hf_file_metadata(url)  # anew each time: addresses of large files expire
            if before < about.size:
                _fetch_rest(file, package, url, about, progress)
            if file.tell() == about.size:
                file.flush()
                os.fsync(file.fileno())
                return
            if file.tell() > about.size:
                file.truncate(0)  # of another program
            error: Exception = HTTPException("it ended early")
        except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as broken:
            error = broken
        tries = 0 if file.tell() > before else tries + 1
        if tries >= _TRIES or (isinstance(error, urllib.error.HTTPError) and error.code in (401, 403, 404)):
            raise DownloadError(f"the connection broke ({error}); the next run goes on") from None


def _fetch_rest(file: BinaryIO, package: Any, url: str, about: Any, progress: Progress) -> None:
    request = urllib.request.Request(about.location)
    if urlsplit(about.location).netloc == urlsplit(url).netloc:
        for name, value in package.utils.build_hf_headers().items():
            request.add_header(name, value)
    done = file.tell()
    if done:
        request.add_header("Range", f"bytes={done}-")
    try:
        response = _opener().open(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != _WRONG_RANGE:
            raise
        file.truncate(0)
        return
    with response:
        if done and not (response.headers.get("Content-Range") or "").startswith(f"bytes {done}-"):
            file.truncate(0)  # all of it is sent
            done = file.seek(0)
        while chunk := response.read(_CHUNK_BYTES):
            file.write(chunk)
            done += len(chunk)
            progress(min(done, about.size), about.size)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to other hosts without the token."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            request.remove_header("Authorization")
        return request


def _opener() -> urllib.request.OpenerDirector:
    context = ssl.create_default_context()
    with suppress(ImportError):
        import certifi

        context.load_verify_locations(certifi.where())
    return urllib.request.build_opener(_Redirects, urllib.request.HTTPSHandler(context=context))


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
