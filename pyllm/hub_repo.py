"""Models in repositories of the Hugging Face hub: hf:OWNER/REPO[:QUANT], through the huggingface_hub package.

The package keeps what was fetched in its own cache and honours HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE; see
`hub_download` for what it does not do. Where the hub cannot be reached, what was fetched before is taken. This module
chooses the files and turns the package's errors into one line. It is imported only when such a name is met.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pyllm.errors import DownloadError, UsageError
from pyllm.hub import REPO_PREFIX
from pyllm.hub_download import Progress, fetch_blob

PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16")
"""Block types in the order in which one is taken when the user names none."""

_REFERENCE = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+?))?(?::(?P<quant>[\w.-]+))?")
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class _UnreachableError(DownloadError):
    """The hub does not answer, or must not be asked."""


@dataclass(frozen=True)
class RepoReference:
    """What a name asks for.

    Attributes:
        repo: owner/name.
        revision: branch, tag or commit; None: the default branch.
        quant: block type as in file names, or None.
    """

    repo: str
    revision: str | None
    quant: str | None

    @classmethod
    def parse(cls, name: str) -> RepoReference:
        """Read hf:OWNER/REPO[@REVISION][:QUANT].

        Raises:
            UsageError: it is not of that form.
        """
        match = _REFERENCE.fullmatch(name)
        if match is None:
            raise UsageError(f"{name!r} is not of the form hf:OWNER/REPO[:QUANT], hf:owner/model-GGUF:Q4_K_M say")
        return cls(match["repo"], match["revision"], match["quant"])

    def __str__(self) -> str:
        return REPO_PREFIX + self.repo + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class RepoFile:
    """A file of a repository.

    Attributes:
        name: path in the repository.
        num_bytes: size, None when the hub does not say.
        sha256: of its content, None likewise.
    """

    name: str
    num_bytes: int | None
    sha256: str | None


def fetch_repo(
    name: str, note: Callable[[str], None] = lambda text: None, progress: Progress = lambda done, total: None
) -> Path:
    """Fetch the model that a name asks for, unless it is there.

    Args:
        note: called with what is going to be fetched.
        progress: called with (bytes that are there, bytes in all) of each file.

    Returns:
        The model file; of a split model the first part, beside which the others lie.

    Raises:
        UsageError: the name is malformed, or fits several models of the repository.
        DownloadError: huggingface_hub is missing, or the repository or a file cannot be had, or is damaged.
    """
    reference = RepoReference.parse(name)
    package = _package()
    try:
        with _one_line(reference, package):
            info = package.HfApi().model_info(reference.repo, revision=reference.revision, files_metadata=True)
    except _UnreachableError as error:
        path = _from_cache(reference, package)
        if path is None:
            raise
        note(f"{error}; taking what was fetched before")
        return path
    files = choose_files(reference, [_file(sibling) for sibling in info.siblings or []])
    num_bytes = sum(file.num_bytes or 0 for file in files)
    total = f", {num_bytes / 1e6:,.1f} MB" if num_bytes else ""
    parts = f"{files[0].name} and {len(files) - 1} more" if len(files) > 1 else files[0].name
    note(f"{reference}: {parts}{total}")
    paths = [_fetch_file(reference, package, file, info.sha, progress, note) for file in files]
    return paths[0]


def _from_cache(reference: RepoReference, package: Any) -> Path | None:
    """The model as it was fetched last, with all its parts; None where it was not."""
    try:
        repos = package.scan_cache_dir().repos
    except Exception:  # there is no cache yet
        return None
    revisions = [revision for repo in repos if repo.repo_id == reference.repo for revision in repo.revisions]
    for revision in sorted(revisions, key=lambda revision: -revision.last_modified):
        if reference.revision in (None, revision.commit_hash, *revision.refs):
            folder = revision.snapshot_path
            names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
            if found := _whole_model(reference, names):
                return folder / found
    return None


def _whole_model(reference: RepoReference, names: Iterable[str]) -> str | None:
    """The first file of the model that is asked for, if all its parts are among the names."""
    try:
        files = choose_files(reference, [RepoFile(name, None, None) for name in names])
    except UsageError:
        return None
    shard = _SHARD.fullmatch(files[0].name)
    return files[0].name if shard is None or len(files) == int(shard["count"]) else None


def choose_files(reference: RepoReference, files: Iterable[RepoFile]) -> list[RepoFile]:
    """The files of one model, parts in order.

    Raises:
        UsageError: none fits, or several do.
    """
    models = _models(files)
    if not models:
        raise UsageError(f"{reference} holds no GGUF model; look for a repository whose name ends with -GGUF")
    wanted = [reference.quant] if reference.quant else [*PREFERRED]
    if reference.quant is None and len(models) == 1:
        return next(iter(models.values()))
    for quant in wanted:
        found = [stem for stem in models if _has_quant(stem, quant)]
        if len(found) == 1:
            return models[found[0]]
        if found:
            raise UsageError(f"{reference} holds several models of {quant}: {', '.join(sorted(found))}")
    what = f"no model of {reference.quant}" if reference.quant else "several models"
    raise UsageError(f"{reference} holds {what}; name one behind a colon: {', '.join(sorted(map(_quant_of, models)))}")


def _models(files: Iterable[RepoFile]) -> dict[str, list[RepoFile]]:
    """Models by name without parts and suffix. Projectors of vision models are no models."""
    models: dict[str, list[RepoFile]] = {}
    for file in sorted(files, key=lambda file: file.name):
        base = file.name.rsplit("/", 1)[-1]
        if not base.lower().endswith(".gguf") or base.lower().startswith("mmproj"):
            continue
        shard = _SHARD.fullmatch(file.name)
        models.setdefault(shard["stem"] if shard else file.name[: -len(".gguf")], []).append(file)
    return models


def _has_quant(stem: str, quant: str) -> bool:
    """Whether a name has a block type as a word of its own: Q4_K does not name Q4_K_M."""
    return re.search(rf"(^|[-./]){re.escape(quant)}($|[-./])", stem, re.IGNORECASE) is not None


def _quant_of(stem: str) -> str:
    return re.split(r"[-./]", stem)[-1]


def _file(sibling: Any) -> RepoFile:
    large = sibling.lfs
    sha256 = None if large is None else getattr(large, "sha256", None)
    return RepoFile(sibling.rfilename, sibling.size, sha256)


def _fetch_file(
    reference: RepoReference,
    package: Any,
    file: RepoFile,
    commit: str | None,
    progress: Progress,
    note: Callable[[str], None],
) -> Path:
    """One file from the cache or the hub. What was fetched now is compared with the hub's checksum."""
    revision = commit or reference.revision
    with _one_line(reference, package):
        cached = package.try_to_load_from_cache(reference.repo, file.name, revision=revision)
        if not isinstance(cached, str) and file.sha256 is not None and commit is not None:
            waits = partial(note, "Another pyllm is fetching it; waiting")
            fetch_blob(package, reference.repo, file.name, commit, file.sha256, progress, waits)
        path = Path(package.hf_hub_download(reference.repo, file.name, revision=revision))
    return path


def _package() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise DownloadError("hf: names need huggingface_hub; pip install 'pyllm[hub]'") from None


@contextmanager
def _one_line(reference: RepoReference, package: Any) -> Any:
    """The package's errors as one line that says what to do."""
    errors = importlib.import_module("huggingface_hub.errors")
    try:
        yield
    except errors.GatedRepoError:
        raise DownloadError(
            f"{reference} asks for its terms to be accepted: do so on its page, then set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise DownloadError(f"{reference} was not found; check the name, or set HF_TOKEN for a private one") from None
    except errors.RevisionNotFoundError:
        raise DownloadError(f"{reference}: there is no such revision") from None
    except (errors.LocalEntryNotFoundError, errors.EntryNotFoundError) as error:
        raise DownloadError(f"{reference}: {_first_line(error)}") from None
    except DownloadError as error:
        raise DownloadError(f"{reference}: {error}") from None
    except Exception as error:  # whatever HTTP client is underneath
        raise _UnreachableError(f"{reference} cannot be fetched: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    lines: Sequence[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
