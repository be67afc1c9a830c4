"""What a check finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """One row of the report.

    Attributes:
        check: what was looked at.
        status: "ok"; "warn": pyllm works, but not all of it or not well; "fail": something that is here is broken.
        found: what there is.
        advice: what to do about it; empty when there is nothing to do.
    """

    check: str
    status: str
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Check:
    """A function that looks at one thing.

    Attributes:
        name: of its findings, should it fail to make any.
        run: returns findings; may raise whatever it likes.
    """

    name: str
    run: Callable[[], Iterable[Finding]]


def guarded(check: Check) -> Iterator[Finding]:
    """The findings of a check. An exception becomes one that failed: whatever is broken, a report comes of it."""
    try:
        yield from check.run()
    except Exception as error:
        text = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        yield Finding(check.name, FAIL, what, "set PYLLM_DEBUG=1 and run the command that needs it, to see where")
