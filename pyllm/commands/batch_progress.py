"""How far a batch has got: a bar for people, JSON lines for programs. All of it on stderr."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

from pyllm.commands.console import note

if TYPE_CHECKING:
    from pyllm.batch.runner import Tally

_EVERY = {"bar": 0.2, "json": 1.0}  # seconds


class Display(Protocol):
    """Shown while a batch runs.

    `begin` says what is known at the start, `update` how far it is, `end` what came of it.
    """

    def begin(self, words: str, **facts: Any) -> None: ...

    def update(self, tally: Tally) -> None: ...

    def end(self, words: str, tally: Tally, status: int) -> None: ...


def display(kind: str, total: int | None, done: int) -> Display:
    """A display of the kind that --progress names.

    Args:
        total: lines of the input; None: not known.
        done: how many of them have a record already.
    """
    if kind == "json":
        return Events(total, done)
    return Bar(total, done, hidden=kind == "none" or not sys.stderr.isatty())


class Bar:
    """Notes, and a bar with lines, time left and tokens per second where there is a terminal."""

    def __init__(self, total: int | None, done: int, hidden: bool) -> None:
        self._total, self._done, self._hidden = total, done, hidden
        self._bar: Any = None
        self._shown_at = 0.0

    def begin(self, words: str, **facts: Any) -> None:
        note(words)

    def update(self, tally: Tally) -> None:
        now = time.monotonic()
        if self._hidden or now - self._shown_at < _EVERY["bar"]:
            return
        self._shown_at = now
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._total, initial=self._done, unit="line", leave=False, file=sys.stderr, mininterval=0
            )
        self._bar.set_postfix_str(f"{tally.tokens_per_second:.0f} tokens/s", refresh=False)
        self._bar.n = self._done + tally.finished
        self._bar.refresh()

    def end(self, words: str, tally: Tally, status: int) -> None:
        if self._bar is not None:
            self._bar.close()
        note(words)


class Events:
    """An object on each line: "start", "progress" once a second at most, and "end"."""

    def __init__(self, total: int | None, done: int) -> None:
        self._total, self._done = total, done
        self._shown_at = 0.0

    def begin(self, words: str, **facts: Any) -> None:
        self._show("start", {"done": self._done, "total": self._total, **facts})

    def update(self, tally: Tally) -> None:
        now = time.monotonic()
        if now - self._shown_at >= _EVERY["json"]:
            self._shown_at = now
            self._show("progress", self._facts(tally))

    def end(self, words: str, tally: Tally, status: int) -> None:
        self._show("end", {**self._facts(tally), "status": status})

    def _facts(self, tally: Tally) -> dict[str, Any]:
        done = self._done + tally.finished
        left = None
        if self._total is not None and tally.finished:
            left = round(max(0, self._total - done) * tally.seconds / tally.finished, 1)
        return {
            "done": done,
            "total": self._total,
            "failed": tally.failed,
            "cut_off": tally.cut_off,
            "prompt_tokens": tally.prompt_tokens,
            "cached_tokens": tally.cached_tokens,
            "prefix_tokens": tally.prefix_tokens,
            "completion_tokens": tally.completion_tokens,
            "tokens_per_second": round(tally.tokens_per_second, 2),
            "seconds": round(tally.seconds, 3),
            "engine_seconds": round(tally.engine_seconds, 3),
            "seconds_left": left,
        }

    @staticmethod
    def _show(event: str, facts: dict[str, Any]) -> None:
        note(json.dumps({"event": event, **facts}))
