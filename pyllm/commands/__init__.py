"""The command line: parse, call the engine, print. One file per command, imported when it is used.

Errors become messages here and nowhere else: one line on stderr and a status, never a traceback.

    0    done
    1    pyllm cannot do it: a file, the device, the network
    2    the command line is wrong
    130  interrupted with Ctrl-C
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from importlib import import_module
from typing import Any

import click

from pyllm import __version__
from pyllm.commands.console import one_line, warn
from pyllm.errors import PyllmError, UsageError

COMMANDS = ("chat", "inspect", "kernels", "perplexity", "pull", "run", "tokenize")
INTERRUPTED = 130


class _Failure(click.ClickException):
    """Shown by click as one line, "Error: ...", after which it exits with status 1."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class _UsageFailure(_Failure):
    exit_code = 2


class _Commands(click.Group):
    """Finds `pyllm NAME` in the module pyllm.commands.NAME."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return import_module(f"pyllm.commands.{cmd_name}").command if cmd_name in COMMANDS else None

    def invoke(self, ctx: click.Context) -> Any:
        logging.getLogger("pyllm").addHandler(_Warnings())
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except Exception as error:
            if _is_closed_pipe(error) or os.environ.get("PYLLM_DEBUG", "0") not in ("", "0"):
                raise  # a reader that has seen enough (`| head`): click ends quietly
            raise _failure(error) from None


class _Warnings(logging.Handler):
    """What the engine logs becomes lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        warn(record.getMessage())


def _is_closed_pipe(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EPIPE


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
