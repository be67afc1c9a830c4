"""`pyllm cache`: what session files there are, and what is in them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyllm.commands.completing import FOLDER
from pyllm.commands.console import note, one_line, size_text, warn, without_controls
from pyllm.commands.options import byte_size
from pyllm.errors import SessionError, UsageError

if TYPE_CHECKING:
    from pyllm.prompt_cache.session_file import SessionReader

DAY = 24 * 3600

folder_option = click.option(
    "--dir",
    "folder",
    type=FOLDER,
    metavar="DIR",
    help="The folder; --cache-dir has others. [default: that of sessions with a name]",
)


@click.group("cache")
def command() -> None:
    """Look after session files: saved conversations, and what --cache-dir keeps.

    \b
    pyllm cache list
    pyllm cache show work
    pyllm cache verify --dir ~/.cache/pyllm/prompts
    pyllm cache prune --max-size 20G --older-than 30
    """


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    used: float

    @property
    def name(self) -> str:
        from pyllm.prompt_cache.folder import SUFFIX

        return self.path.name.removesuffix(SUFFIX)


@command.command("list")
@folder_option
def list_files(folder: str | None) -> None:
    """List the files, the one used last first.

    \b
    pyllm cache list
    pyllm cache list --dir ~/.cache/pyllm/prompts
    """
    from pyllm.prompt_cache.folder import left_behind

    found = sorted(_files(folder), key=lambda file: -file.used)
    for file in found:
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.used))
        click.echo(one_line(f"{file.name:<34}{size_text(file.size):>10}  {day}  {_summary(file.path)}"))
    note(f"{len(found)} files, {size_text(sum(file.size for file in found))}, in {_folder(folder)}")
    unfinished = len(left_behind(_folder(folder)))
    if unfinished:
        note(f"{unfinished} more were not finished; pyllm cache prune removes them")


@command.command("show")
@click.argument("name")
@folder_option
def show(name: str, folder: str | None) -> None:
    """Show what a session holds, and what was said in it.

    \b
    pyllm cache show work
    """
    from pyllm.conversation import Conversation

    path = _path(name, folder)
    with _reader(path) as reader:
        about, chat = reader.json("fingerprint"), reader.json("chat")
        states = [name[6:] for name in reader.sections if name.startswith("state.")]
        click.echo(one_line(f"{path}: {size_text(path.stat().st_size)}, {len(reader.tokens)} tokens"))
        model = about.get("name") or "without a name"
        click.echo(one_line(f"model: {model} ({about.get('architecture')}, {about.get('types')})"))
        click.echo(one_line(f"rows: {about.get('kv_type')}, {about.get('page_size')} to a page"))
        if reader.json("rows").get("shifted") is True:
            click.echo("behind them rows were shifted, when the context was full: computed anew")
        if states:
            click.echo(one_line(f"states at tokens {', '.join(states)}"))
    try:
        conversation = Conversation.from_json(chat)
    except ValueError:
        return
    for message in conversation.messages():
        click.echo(without_controls(f"\n{message['role']}: {message['content']}"))


@command.command("verify")
@click.argument("names", nargs=-1)
@folder_option
def verify(names: tuple[str, ...], folder: str | None) -> None:
    """Read files whole and compare all checksums; all of a folder without NAMES. Status 1 when one is damaged.

    \b
    pyllm cache verify
    pyllm cache verify work --dir ~/.cache/pyllm/prompts
    """
    damaged = 0
    for path in [_path(name, folder) for name in names] or [file.path for file in _files(folder)]:
        try:
            _verify(path)
            click.echo(one_line(f"{path}: in order"))
        except SessionError as error:
            click.echo(one_line(str(error)))
            damaged += 1
    click.get_current_context().exit(int(damaged > 0))


@command.command("remove")
@click.argument("names", nargs=-1, required=True)
@folder_option
def remove(names: tuple[str, ...], folder: str | None) -> None:
    """Remove sessions.

    \b
    pyllm cache remove work
    """
    for path in [_path(name, folder) for name in names]:
        size = path.stat().st_size
        path.unlink()
        note(f"Removed {path} ({size_text(size)})")


@command.command("prune")
@folder_option
@click.option("--max-size", metavar="SIZE", callback=byte_size, help="Keep the files used last, up to SIZE in all.")
@click.option("--older-than", metavar="DAYS", type=click.FloatRange(0), help="Remove what was not used for DAYS.")
def prune(folder: str | None, max_size: int | None, older_than: float | None) -> None:
    """Remove files that are damaged or were not finished, and those that the options say. What does not begin as a
    session does, or cannot be read, stays.

    \b
    pyllm cache prune --max-size 20G --older-than 30
    """
    from pyllm.prompt_cache.folder import begins_as_session, remove_partial

    place, kept, removed = _folder(folder), 0, 0
    removed += remove_partial(place)
    for file in sorted(_files(folder), key=lambda file: -file.used):
        if not begins_as_session(file.path):
            note(f"Left alone: {file.name}, no session, or not readable")
            continue
        reason = _why_not(file, kept, max_size, older_than)
        if reason is None:
            kept += file.size
        else:
            file.path.unlink(missing_ok=True)
            removed += 1
            note(f"Removed {file.name} ({size_text(file.size)}): {reason}")
    note(f"{removed} files removed, {size_text(kept)} left in {place}")


def _why_not(file: _File, kept: int, max_size: int | None, older_than: float | None) -> str | None:
    """Why a file is to go; None when it may stay."""
    if older_than is not None and time.time() - file.used > older_than * DAY:
        return f"not used for {older_than:g} days"
    if max_size is not None and kept + file.size > max_size:
        return "beyond --max-size"
    from pyllm.prompt_cache.session_file import UnreadableSession

    try:
        with _reader(file.path):
            return None
    except UnreadableSession:
        return None
    except SessionError as error:
        return None if "newer pyllm" in str(error) else "damaged"


def _verify(path: Path) -> None:
    import numpy as np

    with _reader(path) as reader:
        memory = np.empty(max(section.num_bytes for section in reader.sections.values()), np.uint8)
        for name in reader.sections:
            if name != "checksums":
                reader.check(name, reader.read(name, memory))


def _summary(path: Path) -> str:
    try:
        with _reader(path) as reader:
            about, turns = reader.json("fingerprint"), reader.json("chat").get("turns")
            said = f", {len(turns)} turns" if isinstance(turns, list) else ""
            model = about.get("name") or about.get("architecture")
            return f"{len(reader.tokens)} tokens{said}, {str(model)[:40]}, {about.get('kv_type')}"
    except SessionError as error:
        return f"not usable: {str(error).removeprefix(f'{path}: ')}"


def _reader(path: Path) -> SessionReader:
    from pyllm.prompt_cache.session_file import SessionReader

    return SessionReader(path)


def _folder(folder: str | None) -> Path:
    from pyllm.prompt_cache.folder import sessions_dir

    return sessions_dir() if folder is None else Path(folder)


def _files(folder: str | None) -> Iterable[_File]:
    from pyllm.prompt_cache.folder import session_files

    for path in session_files(_folder(folder)):
        try:
            status = path.stat()
        except OSError as error:  # another process removed it just now
            warn(f"{path}: {error.strerror}")
            continue
        yield _File(path, status.st_size, status.st_mtime)


def _path(name: str, folder: str | None) -> Path:
    """The file that is meant.

    Raises:
        UsageError: there is none.
    """
    from pyllm.prompt_cache.folder import SUFFIX, session_path

    if folder is None or "/" in name:
        path = session_path(name)
    else:
        path = Path(folder) / f"{name.removesuffix(SUFFIX)}{SUFFIX}"
    if not path.is_file():
        raise UsageError(f"{path}: there is no such session; pyllm cache list shows what is there")
    return path
