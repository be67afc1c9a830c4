"""The command line: parse, call the engine, print. One file per command, imported when it is used.

Errors become messages here and nowhere else: one line on stderr and a status, never a traceback.

    0    done
    1    pyllm cannot do it: a file, the device, the network
    2    the command line is wrong
    130  interrupted with Ctrl-C
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

import click

from pyllm import __version__
from pyllm.commands.console import one_line, warn
from pyllm.errors import PyllmError, UsageError

COMMANDS = (
    "batch",
    "bench",
    "cache",
    "chat",
    "completion",
    "doctor",
    "inspect",
    "kernels",
    "kv-diff",
    "perplexity",
    "pull",
    "run",
    "synth",
    "tokenize",
)
INTERRUPTED = 130

_MAX_USAGE_LINE = 500
_NO_ARGUMENTS = getattr(click.exceptions, "NoArgsIsHelpError", ())  # of click 8.2 on; its message is the help
_LONG_WORD = re.compile(r"(\S{100})\S{100,}(\S{20})")


class _Failure(click.ClickException):
    """Shown by click as one line, "Error: ...", after which it exits with status 1."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class _UsageFailure(_Failure):
    exit_code = 2


class _Commands(click.Group):
    """Finds `pyllm NAME` in the module pyllm.commands.NAME; a hyphen is an underscore there."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return import_module(_module(cmd_name)).command if cmd_name in COMMANDS else None

    def invoke(self, ctx: click.Context) -> Any:
        logging.getLogger("pyllm").addHandler(_Warnings())
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)

    def main(self, *arguments: Any, standalone_mode: bool = True, **more: Any) -> Any:
        """All that can go wrong comes through here: also --help fails when the disk is full."""
        parse_and_run: Callable[..., Any] = super().main
        if not standalone_mode:
            return parse_and_run(*arguments, standalone_mode=False, **more)
        try:
            result = parse_and_run(*arguments, standalone_mode=False, **more)
            sys.exit(result if isinstance(result, int) else 0)
        except click.Abort:  # Ctrl-C while the arguments were read
            sys.exit(INTERRUPTED)
        except click.UsageError as error:
            _show(error if isinstance(error, _NO_ARGUMENTS) else _shortened(error))
        except click.ClickException as error:
            _show(error)
        except Exception as error:
            if os.environ.get("PYLLM_DEBUG", "0") not in ("", "0"):
                raise
            _show(_failure(error))


def _module(name: str) -> str:
    return f"pyllm.commands.{name.replace('-', '_')}"


class _Warnings(logging.Handler):
    """What the engine logs becomes lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        warn(record.getMessage())


def _show(error: click.ClickException) -> NoReturn:
    with suppress(OSError):
        error.show()
    sys.exit(error.exit_code)


def _shortened(error: click.UsageError) -> click.UsageError:
    """The error with a message of one line, in which no argument takes more than a part."""
    message = _LONG_WORD.sub(r"\1...\2", error.format_message())
    return click.UsageError(one_line(message, _MAX_USAGE_LINE), error.ctx)


def _failure(error: Exception) -> _Failure:
    if isinstance(error, PyllmError):
        return (_UsageFailure if isinstance(error, UsageError) else _Failure)(str(error))
    if isinstance(error, OSError) and error.strerror:
        return _Failure(error.strerror + (f": {error.filename}" if error.filename else ""))
    return _Failure(f"unexpected {type(error).__name__}: {error}; set PYLLM_DEBUG=1 to see where, and please report it")


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pyllm")
def main() -> None:
    """Run GGUF language models.

    \b
    pyllm run demo "What is the capital of France?"
    pyllm run model.gguf -f question.txt
    pyllm chat demo
    """
    # Terminals and locales that cannot show a character get a "?" in its place.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
