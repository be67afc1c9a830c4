"""`pyllm bench`: how fast a model runs here, and whether its answers are right."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from pyllm.commands import INTERRUPTED
from pyllm.commands.console import note, one_line, progress_bar, size_text
from pyllm.commands.models import local_model, model_argument
from pyllm.commands.options import SIZE, EngineOptions, engine_options, taken
from pyllm.commands.table import markdown_table
from pyllm.errors import PyllmError, UsageError

if TYPE_CHECKING:
    from pyllm.bench.plan import Plan, Row
    from pyllm.bench.session import ModelFacts, Results


class Counts(click.ParamType):
    """Whole numbers, separated by commas."""

    name = "numbers"

    def __init__(self, minimum: int) -> None:
        self._minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of whole numbers such as 512,2048", param, ctx)
        wrong = [number for number in numbers if not self._minimum <= number < 1 << 30]
        if wrong:
            self.fail(f"{wrong[0]} is out of range; the least is {self._minimum}", param, ctx)
        return numbers


@dataclass(frozen=True)
class BenchOptions:
    """The command line."""

    model: str
    prompts: tuple[int, ...]
    new_tokens: int
    depths: tuple[int, ...]
    concurrency: tuple[int, ...]
    repeats: int
    reference: str
    seed: int
    json: bool
    engine: EngineOptions

    def plan(self) -> Plan:
        """What is to be measured.

        Raises:
            UsageError: nothing; or the hashing of rows, beside everything else.
        """
        if self.engine.kv_trace is not None:
            raise UsageError("--kv-trace would be measured, too; use it with pyllm run")
        from pyllm.bench.plan import Plan

        return Plan.of(self.prompts, self.new_tokens, self.depths, self.concurrency, self.repeats)


@click.command("bench")
@model_argument
@click.option(
    "-p",
    "prompts",
    type=Counts(0),
    default="512",
    show_default=True,
    help="Lengths of the prompts whose prefill is measured, separated by commas; 0: none.",
)
@click.option(
    "-n",
    "new_tokens",
    type=click.IntRange(0),
    default=128,
    show_default=True,
    help="Tokens to generate when decoding is measured; 0: none.",
)
@click.option(
    "-d",
    "depths",
    type=Counts(0),
    default="0",
    show_default=True,
    help="Tokens that are in the cache before; of several each is measured.",
)
@click.option(
    "--concurrency",
    type=Counts(1),
    default="1",
    show_default=True,
    help="Sequences that decode at the same time; of several each is measured.",
)
@click.option("-r", "repeats", type=SIZE, default=3, show_default=True, help="Runs of each that count.")
@click.option(
    "--reference",
    type=click.Choice(["auto", "cpu", "paths"]),
    default="auto",
    show_default=True,
    help="What logits are compared with: cpu also computes them on the CPU; paths compares decode with prefill only; "
    "auto: cpu for files below 1 GB.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Draws the prompts.")
@click.option("--json", is_flag=True, help="Print one JSON object.")
@engine_options("Tokens of a sequence, at least. [default: what the runs need]")
def command(**values: Any) -> None:
    """Measure how fast MODEL, a path or a known name, runs on this machine.

    Prompts are random tokens; decoding is greedy. A rate counts from handing a request over to its last token on the
    host, so what the host does counts too; loading, compiling kernels and recording graphs do not: each row is the
    median of -r runs behind one or two that do not count. Bandwidth is what decoding reads, weights and K/V rows, in
    percent of a large copy on the same GPU.

    The same run compares logits of 16 tokens computed together with those of the same tokens computed one by one, and
    with those of the CPU. The status is 1 when they are too far apart. Ctrl-C or an error prints what is known by then.

    \b
    pyllm bench demo
    pyllm bench model.gguf -p 512,2048,8192 -n 128 -d 0,32768
    pyllm bench model.gguf -p 0 --concurrency 1,8,32 --json
    """
    engine = taken(EngineOptions, values)
    click.get_current_context().exit(run(BenchOptions(**values, engine=engine)))


def run(options: BenchOptions) -> int:
    """Measure, print; returns the exit status."""
    from pyllm.bench.session import Results, read_model

    plan = options.plan()
    model = read_model(local_model(options.model))
    results = Results()
    status = 0
    failure: PyllmError | None = None
    try:
        _measure(options, plan, model, results)
    except KeyboardInterrupt:
        note("Interrupted")
        status = INTERRUPTED
    except PyllmError as error:
        failure = error
    if results.rows or results.figures:
        click.echo(_as_json(model, results) if options.json else "\n".join(_lines(model, results)))
    if failure is not None:
        raise failure  # behind what was measured before
    for point in results.left_out:
        note(f"Left out: {point}: weights and K/V rows do not fit into the device's memory")
    if not results.passed:
        worst = next(figure for figure in results.figures if not figure.passed)
        note(f"Error: the answers are wrong: {worst}")
    return status or (0 if results.passed else 1)


def _measure(options: BenchOptions, plan: Plan, model: ModelFacts, results: Results) -> None:
    from pyllm.bench.session import Session
    from pyllm.llm import EngineOptions as Settings

    wanted = options.engine
    given = {name: value for name, value in vars(wanted).items() if value is not None}
    for name in ("device", "no_graphs", "ctx_size"):  # the session's own
        given.pop(name, None)
    with progress_bar("bench", "run") as progress:
        session = Session(
            model,
            plan,
            device=wanted.device,
            graphs=not wanted.no_graphs,
            options=Settings(**given),
            ctx_size=wanted.ctx_size,
            reference=options.reference,
            seed=options.seed,
            opened=lambda description: note(f"Device: {description}"),
            progress=lambda done, total, words: progress(done, total, words),
        )
        session.check()
        session.run(results)


def _command_line() -> str:
    return shlex.join(["pyllm", *sys.argv[1:]])


def _lines(model: ModelFacts, results: Results) -> Iterator[str]:
    from pyllm.bench.machine import describe_machine, file_hash, pyllm_version

    types = ", ".join(f"{count} {name}" for name, count in model.types.items())
    file = f"{model.path.name}, {size_text(model.num_bytes)}, SHA-256 {file_hash(model.path)}"
    yield one_line(f"- machine: {describe_machine(*results.device)}")
    yield f"- version: {pyllm_version()}"
    yield one_line(f"- model: {file}; tensors: {types}")
    yield one_line(f"- command: `{_command_line()}`")
    if results.ceilings is not None:
        yield f"- copy bandwidth: {results.ceilings.copy / 1e9:,.0f} GB/s"
    for figure in results.figures:
        yield f"- {figure}" + ("" if figure.passed else ": WRONG")
    yield ""
    header = ("test", "depth", "sequences", "tokens/s", "min - max", "read", "bandwidth")
    yield from markdown_table([header, *(_row(row, results) for row in results.rows)], right=range(1, 7))


def _row(row: Row, results: Results) -> tuple[str, ...]:
    point, read, share = row.point, "-", "-"
    if row.bytes_per_second is not None:
        read = f"{row.bytes_per_second / 1e9:,.1f} GB/s"
        if results.ceilings is not None:
            share = f"{row.bytes_per_second / results.ceilings.copy:.1%}"
    spread = f"{_rate(min(row.rates))} - {_rate(max(row.rates))}"
    numbers = (str(point.depth), str(point.sequences), _rate(row.median), spread, read, share)
    return (f"{point.kind} {point.tokens}", *numbers)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _as_json(model: ModelFacts, results: Results) -> str:
    from pyllm.bench.machine import describe_machine, file_hash, pyllm_version

    file = {"path": str(model.path), "bytes": model.num_bytes, "sha256": file_hash(model.path)}
    shown = {
        "machine": describe_machine(*results.device),
        "device": results.device[0],
        "version": pyllm_version(),
        "model": {**file, "tensors": model.types},
        "command": _command_line(),
        "copy_bytes_per_second": results.ceilings.copy if results.ceilings else None,
        "passed": results.passed,
        "figures": [{**_finite(asdict(figure)), "passed": figure.passed} for figure in results.figures],
        "rows": [
            {**asdict(row.point), "tokens_per_second": row.median, "rates": row.rates} | _bytes(row)
            for row in results.rows
        ],
        "left_out": [asdict(point) for point in results.left_out],
    }
    return json.dumps(shown)


def _bytes(row: Row) -> dict[str, float | None]:
    return {"bytes_read_per_second": row.bytes_per_second}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinities: null stands for them."""
    return {name: None if value == float("inf") else value for name, value in values.items()}
