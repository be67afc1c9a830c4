"""--think: what is done with the reasoning that some models write before an answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

import click


@dataclass(frozen=True)
class Think:
    """What is done with reasoning.

    Attributes:
        limit: tokens of it at most.
    """

    hides: bool = False
    limit: int | None = None

    @classmethod
    def parsed(cls, ctx: click.Context, param: click.Parameter, text: str) -> Think:
        """A click callback."""
        named = {"show": cls(), "hide": cls(hides=True), "off": cls(limit=0)}
        if text in named:
            return named[text]
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise click.BadParameter(f"{text!r} is none of show, hide, off and a number of tokens")
        return cls(limit=int(text))


SHOW = Think()

think_option = click.option(
    "--think",
    metavar="[show|hide|off|N]",
    default="show",
    show_default=True,
    callback=Think.parsed,
    help="Reasoning: show it dimmed, hide it, ask for none, or show it and end it after N tokens.",
)
