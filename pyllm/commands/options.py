"""Options that several commands have, and what they become.

Each group is a decorator and a dataclass with a field for each of its options: `taken` moves the values that click
found into the dataclass. None stands for the engine's own default.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pyllm.commands.completing import FILE, FOLDER
from pyllm.commands.console import progress_bar
from pyllm.commands.prompt import checked_text, unescape
from pyllm.commands.threads import set_threads

if TYPE_CHECKING:
    from pathlib import Path

    from pyllm.llm import LLM
    from pyllm.sampling import SamplingParams

Command = TypeVar("Command", bound=Callable[..., Any])
Group = TypeVar("Group")

SIZE = click.IntRange(1)


def taken(group: type[Group], values: dict[str, Any]) -> Group:
    """An instance of a dataclass made of the values that carry its fields' names; they are removed from `values`."""
    return group(**{field.name: values.pop(field.name) for field in fields(group)})  # type: ignore[arg-type]


def _given(group: Any, *but: str) -> dict[str, Any]:
    values = {field.name: getattr(group, field.name) for field in fields(group) if field.name not in but}
    return {name: value for name, value in values.items() if value is not None}


def _together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """One decorator for several options, listed by --help in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


# sampling


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen; the names are those of `SamplingParams`."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    penalty_last_n: int | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    xtc_probability: float | None
    xtc_threshold: float | None
    typical_p: float | None
    top_n_sigma: float | None
    logit_bias: dict[int, float]

    def params(self, **more: Any) -> SamplingParams:
        """How to sample.

        Args:
            more: further settings; they win.

        Raises:
            UsageError: a value is out of range.
        """
        from pyllm.sampling import SamplingParams

        stop = tuple(unescape(checked_text(text, "--stop")) for text in self.stop)
        settings = {**_given(self, "max_tokens", "stop"), **more}
        return SamplingParams(max_tokens=self.max_tokens, stop=stop, **settings)


def _biases(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    biases = {}
    for text in values:
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
            if math.isnan(biases[int(token)]):
                raise ValueError
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a token id and a number, such as 42=-1.5 or 42=-inf") from None
    return biases


sampling_options = _together(
    click.option("-n", "--max-tokens", type=SIZE, help="Stop after so many tokens. [default: no limit]"),
    click.option("--temp", "temperature", type=float, help="0 always takes the likeliest token. [default: 0.8]"),
    click.option("--top-k", type=int, help="Choose among the K likeliest tokens; 0: off. [default: 40]"),
    click.option(
        "--top-p", type=float, help="... among the likeliest with this total probability; 1: off. [default: 0.95]"
    ),
    click.option("--min-p", type=float, help="... among those so likely relative to the best; 0: off. [default: 0.05]"),
    click.option("--typical-p", type=float, help="... among the most typical, with this total; 1: off. [default: 1.0]"),
    click.option(
        "--top-n-sigma", type=float, help="... among those so many deviations from the best; 0: off. [default: 0.0]"
    ),
    click.option(
        "--xtc-probability", type=float, help="How often the likeliest are left out (XTC); 0: off. [default: 0.0]"
    ),
    click.option(
        "--xtc-threshold", type=float, help="XTC leaves out tokens at least so likely, but one. [default: 0.1]"
    ),
    click.option(
        "--repeat-penalty",
        "repetition_penalty",
        type=float,
        help="Divides the logits of recent tokens; 1: off. [default: 1.0]",
    ),
    click.option(
        "--frequency-penalty", type=float, help="Taken off per occurrence of a recent token; 0: off. [default: 0.0]"
    ),
    click.option("--presence-penalty", type=float, help="Taken off every recent token once; 0: off. [default: 0.0]"),
    click.option(
        "--repeat-last-n", "penalty_last_n", type=int, help="So many tokens are recent; -1: all. [default: 64]"
    ),
    click.option(
        "--dry-multiplier", type=float, help="Penalty on repeated sequences of tokens (DRY); 0: off. [default: 0.0]"
    ),
    click.option("--dry-base", type=float, help="DRY grows so much per repeated token. [default: 1.75]"),
    click.option("--dry-allowed-length", type=int, help="Repeats shorter than this are free. [default: 2]"),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=VALUE",
        callback=_biases,
        help="Add VALUE to the logit of token ID; -inf forbids it. May be repeated.",
    ),
    click.option("--seed", type=int, help="The same seed gives the same answer. [default: a new one, which is shown]"),
    click.option(
        "--stop", multiple=True, metavar="TEXT", help=r"End before TEXT; \n, \t and \\ are understood. May be repeated."
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model has ended its answer."),
)


# the engine


@dataclass(frozen=True)
class EngineOptions:
    """How the engine is set up; the names are those of the arguments of `LLM`, but for `no_graphs`."""

    ctx_size: int | None
    batch_size: int | None
    ubatch_size: int | None
    kv_type: str | None
    device: str
    no_graphs: bool
    inflight: int | None
    inputs: str | None
    batch_invariant: bool | None
    kv_trace: str | None
    kv_trace_every: int | None

    def open(self, path: Path, **more: Any) -> LLM:
        """Load the model, with a bar.

        Args:
            more: further arguments of `LLM`.
        """
        from pyllm.llm import LLM

        with progress_bar("loading") as progress:
            return LLM(path, progress=progress, graphs=not self.no_graphs, **_given(self, "no_graphs"), **more)


def engine_options(ctx_size: str) -> Callable[[Command], Command]:
    """The options, with a help text for -c."""
    return _together(
        click.option("-c", "--ctx-size", type=SIZE, help=ctx_size),
        click.option("-b", "--batch-size", type=SIZE, help="Tokens queued at once. [default: 2048; on a GPU 4096]"),
        click.option("-ub", "--ubatch-size", type=SIZE, help="Tokens computed together. [default: 512; on a GPU 2048]"),
        click.option(
            "--kv-type",
            type=click.Choice(["f32", "f16", "bf16", "q8_0", "q4_0"]),
            help="Storage of keys and values; q8_0 and q4_0 take about a half and a quarter of f16. [default: f16]",
        ),
        click.option(
            "--device",
            type=click.Choice(["auto", "gpu", "cpu", "emulated"]),
            default="auto",
            show_default=True,
            help="Where to run; auto: on the GPU where CuPy finds one; emulated: for tests, slow.",
        ),
        click.option(
            "-t",
            "--threads",
            type=SIZE,
            callback=set_threads,
            expose_value=False,
            help="CPU threads of a matrix product. Fewer are faster where others compute too. [default: all cores]",
        ),
        click.option("--no-graphs", is_flag=True, help="Queue each op by itself instead of replaying decode steps."),
        click.option("--inflight", type=SIZE, help="Steps queued ahead of the device. [default: 2; on a GPU 4]"),
        click.option(
            "--inputs",
            type=click.Choice(["copy", "zero-copy"]),
            help="Whether a GPU reads a step's inputs in memory of its own or, to compare, the host's. [default: copy]",
        ),
        click.option(
            "--batch-invariant",
            is_flag=True,
            default=None,
            help="A sequence's answer is the same in every bit, whatever runs beside it. GPU only; slower.",
        ),
        click.option(
            "--kv-trace",
            type=FILE,
            metavar="FILE",
            help="Write hashes of the K/V rows that sequences give up; see pyllm kv-diff.",
        ),
        click.option(
            "--kv-trace-every", type=SIZE, metavar="N", help="Hash the rows of each N-th position. [default: 16]"
        ),
    )


# what is kept of sequences that have ended

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def byte_size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """A click callback: a size such as 800M or 4G (powers of 1024; 0: nothing) as bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size, such as 800M or 4G")
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True)
class CacheOptions:
    """What is kept; `engine` gives them the names of the arguments of `LLM`."""

    cache_ram: int | None
    cache_dir: str | None
    cache_disk: int | None
    no_cache: bool

    def engine(self) -> dict[str, Any]:
        """Arguments of `LLM`.

        Raises:
            click.UsageError: two options exclude each other.
        """
        if self.cache_disk is not None and self.cache_dir is None:
            raise click.UsageError("--cache-disk needs --cache-dir")
        if self.no_cache:
            return {}
        return {"prefix_cache": True, **_given(self, "no_cache")}


@dataclass(frozen=True)
class OverflowOptions:
    """What happens when the context is full; the names are those of the arguments of `LLM`."""

    overflow: str | None
    keep: int | None

    def engine(self) -> dict[str, Any]:
        """Arguments of `LLM`."""
        return _given(self)


overflow_options = _together(
    click.option(
        "--overflow",
        type=click.Choice(["stop", "error", "shift"]),
        help="When the context is full: end the answer, fail, or drop tokens behind --keep and shift the rest. "
        "[default: stop]",
    ),
    click.option(
        "--keep",
        type=click.IntRange(0),
        metavar="N",
        help="The first N tokens stay, and the system message. [default: 0]",
    ),
)

session_option = click.option(
    "--session",
    metavar="NAME",
    help="Go on with a saved conversation, or begin one, and save it at the end. NAME may be a path.",
)

cache_options = _together(
    click.option(
        "--cache-ram",
        metavar="SIZE",
        callback=byte_size,
        help="Memory of the host for what is kept of ended sequences; saving and loading take a few pages more. "
        "[default: 1/8 of it, at most 4G]",
    ),
    click.option(
        "--cache-dir",
        type=FOLDER,
        metavar="DIR",
        help="Keep conversations in DIR too, where later processes find them. Private.",
    ),
    click.option(
        "--cache-disk", metavar="SIZE", callback=byte_size, help="Room for the files in --cache-dir. [default: 8G]"
    ),
    click.option("--no-cache", is_flag=True, help="Keep nothing of ended sequences: compute every prompt anew."),
)
