"""`pyllm batch`: answer many prompts from a file."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from pyllm.commands import INTERRUPTED
from pyllm.commands.batch_progress import Display, display
from pyllm.commands.completing import FILE, MODEL
from pyllm.commands.console import note, size_text, warn
from pyllm.commands.models import DEFAULT_MODEL, local_model
from pyllm.commands.options import SIZE, EngineOptions, SamplingOptions, engine_options, sampling_options, taken
from pyllm.commands.prompt import checked_text, unescape
from pyllm.errors import UsageError

if TYPE_CHECKING:
    from pyllm.batch.input import Source
    from pyllm.batch.output import Output
    from pyllm.batch.runner import Tally
    from pyllm.batch.template import PromptTemplate
    from pyllm.sampling import SamplingParams

SOME_FAILED = 3
TERMINATED = 128 + signal.SIGTERM

_FORMATS = ("jsonl", "csv", "tsv", "text")
_CTX_SIZE = 4096
_KV_TYPE = "f16"


@dataclass(frozen=True)
class BatchOptions:
    """The command line."""

    model: str
    input: str
    output: str
    format: str | None
    template: str | None
    system: str | None
    raw: bool
    logprobs: int | None
    parallel: int | None
    overwrite: bool
    retry_failed: bool
    progress: str
    sampling: SamplingOptions
    engine: EngineOptions

    def check(self) -> None:
        """Refuse combinations that make no sense.

        Raises:
            click.UsageError: two options exclude each other.
        """
        if self.system is not None and self.raw:
            raise click.UsageError("--system has no place without the chat template; leave out --raw")
        if self.overwrite and self.retry_failed:
            raise click.UsageError("--overwrite begins anew, --retry-failed goes on; leave one of the two out")
        if self.output == "-":
            raise click.UsageError("-o - makes no sense: a batch is resumed from its output, which must be a file")

    @property
    def ctx_size(self) -> int:
        return self.engine.ctx_size or _CTX_SIZE

    @property
    def kv_type(self) -> str:
        return self.engine.kv_type or _KV_TYPE


@click.command("batch")
@click.argument("model", type=MODEL)
@click.argument("input", type=FILE, required=False)
@click.option(
    "-o", "--output", type=FILE, required=True, metavar="OUT", help="Append a record for each line to OUT (JSON lines)."
)
@click.option(
    "--format",
    type=click.Choice(_FORMATS),
    help="What INPUT is. [default: what its name says; JSON lines on standard input]",
)
@click.option(
    "--template",
    metavar="TEXT",
    help=r"The prompt, with fields of a line such as {text}; {{ and }} are braces; \n, \t and \\ are understood.",
)
@click.option("--system", metavar="TEXT", help="System message, put before each prompt by the chat template.")
@click.option("--raw", is_flag=True, help="Continue prompts as they are, without the chat template.")
@click.option(
    "--logprobs", metavar="N", type=SIZE, help="Log-probabilities of each token and of the N likeliest, in the records."
)
@click.option(
    "--parallel", metavar="N", type=SIZE, help="Answer N lines at the same time. [default: what memory has room for]"
)
@click.option("--overwrite", is_flag=True, help="Begin anew: forget what OUT holds.")
@click.option(
    "--retry-failed", is_flag=True, help="Answer lines that failed once more: their records are taken out of OUT first."
)
@click.option(
    "--progress",
    type=click.Choice(["bar", "json", "none"]),
    default="bar",
    show_default=True,
    help="On standard error: a bar on terminals, or a JSON object each second.",
)
@engine_options("Tokens that a prompt and its answer may have together. [default: 4096]")
@sampling_options
def command(**values: Any) -> None:
    """Answer each line of INPUT with MODEL; append the answers to OUT.

    INPUT is a file of JSON lines, a CSV or TSV table, a folder or pattern of text files, or - for standard input. Of a
    folder all files are read, also those in its subfolders, but for hidden ones and links to folders. A line is {"id":
    ..., "prompt": ...} or {"id": ..., "messages": [...]}, with settings of its own such as "max_tokens" and
    "temperature", or a line of an OpenAI batch, which gets a record of that kind. Options here are for lines that say
    nothing else.

    PYLLM_MODEL in the environment stands in for MODEL.

    An answer has at most -n tokens, or as many as the context (-c) has room for; where the context ended it, the record
    has "context_full".

    Run the same command again after it was ended, however that was, and it goes on where it was. What is wrong with a
    line becomes a record with an error; the others go on. --retry-failed takes these records out of OUT and answers
    their lines once more.

    Status: 0 all lines are answered, 3 some failed, 130 or 143 ended by Ctrl-C or SIGTERM; else it could not go on.

    \b
    pyllm batch demo prompts.jsonl -o answers.jsonl
    pyllm batch model.gguf reviews.csv -o out.jsonl --template "Is this praise? {review}" -n 5 --temp 0
    pyllm batch model.gguf notes/ -o summaries.jsonl --template "Summarise: {text}" -n 100
    pyllm batch model.gguf "notes/**/*.md" -o out.jsonl --template "Title for: {text}"
    zcat lines.gz | pyllm batch model.gguf - -o out.jsonl --parallel 16 --progress json
    """
    if values["input"] is None:  # a lone argument is INPUT
        default = os.environ.get(DEFAULT_MODEL)
        if not default:
            raise click.UsageError(f"there is no INPUT; a lone argument is one where {DEFAULT_MODEL} names the model")
        values["model"], values["input"] = default, values["model"]
    sampling, engine = taken(SamplingOptions, values), taken(EngineOptions, values)
    click.get_current_context().exit(run(BatchOptions(**values, sampling=sampling, engine=engine)))


def run(options: BatchOptions) -> int:
    """Answer all lines; returns the exit status."""
    options.check()
    from pyllm.batch.input import open_source
    from pyllm.batch.output import Output
    from pyllm.batch.settings import settings_path
    from pyllm.batch.template import PromptTemplate

    params = options.sampling.params(logprobs=options.logprobs or 0)
    template = None
    if options.template is not None:
        template = PromptTemplate(unescape(checked_text(options.template, "--template")))
    path = local_model(options.model)
    out = Path(options.output)
    for name in (options.input, path):
        if out.exists() and os.path.exists(name) and os.path.samefile(name, out):
            raise UsageError(f"{out} is read and would be written; choose another -o")
    source = open_source(options.input, options.format, (out, settings_path(out)))
    with Output(out, options.overwrite, options.retry_failed) as output:
        params = _agreed(options, params, template, path, source, output)
        if output.num_cut:
            note(f"{out} ended in the middle of a record; that line is answered again")
        if output.num_taken_out:
            note(f"{output.num_taken_out} records of errors are taken out of {out}; their lines are answered once more")
        return _answer(options, params, template, path, source, output)


def _agreed(
    options: BatchOptions,
    params: SamplingParams,
    template: PromptTemplate | None,
    path: Path,
    source: Source,
    output: Output,
) -> SamplingParams:
    """The settings, with the seed of the earlier run where there was one; kept for the next.

    Raises:
        UsageError: the earlier run had others, or another input.
    """
    from pyllm.batch.settings import check_same, model_identity, read_settings, write_settings

    goes_on = output.done or output.num_taken_out
    then = read_settings(output.path) if goes_on else None
    if goes_on and then is None:
        raise UsageError(
            f"{output.path} has records, but not the settings of the run that wrote them; choose another -o, or "
            "--overwrite"
        )
    if params.seed is None:
        seed = then.get("seed") if then is not None else None
        params = replace(params, seed=seed if isinstance(seed, int) else secrets.randbits(32))
    sampling = asdict(params)
    seed = sampling.pop("seed")
    now = {
        "model": model_identity(path),
        "context": options.ctx_size,
        "kv_type": options.kv_type,
        **({"batch_invariant": True} if options.engine.batch_invariant else {}),
        "format": options.format,
        "template": None if template is None else template.text,
        "system": options.system,
        "raw": options.raw,
        "sampling": sampling,
        "seed": seed,
    }
    if then is not None:
        check_same(output.path, then, now)
        if not source.has_grown_from(then["input"]):
            raise UsageError(
                f"{options.input} is not what {output.path} was begun with: lines that were there have changed; choose "
                "another -o, or --overwrite"
            )
    output.prepare()  # first: if the program ends here, an empty output asks for no settings
    write_settings(output.path, {**now, "input": source.fingerprint()})
    return params


def _answer(
    options: BatchOptions,
    params: SamplingParams,
    template: PromptTemplate | None,
    path: Path,
    source: Source,
    output: Output,
) -> int:
    from pyllm.batch.collecting import collected_seldom
    from pyllm.batch.lines import LineReader
    from pyllm.batch.runner import Feed, Runner, Tally

    total, before = source.count(), len(output.done)
    shown = display(options.progress, total, before)
    if before:
        note_of = f"{before} of {total} lines" if total is not None else f"{before} lines"
        _remark(options, f"Resuming: {note_of} have a record already")
    if total is not None and before >= total:
        status = SOME_FAILED if output.num_failed else 0
        shown.end("Nothing is left to do", Tally(before, failed=output.num_failed), status)
        return status
    parallel, words = _parallel(options, path)
    system = None if options.system is None else checked_text(options.system, "--system")
    reader = LineReader(params, source.has_columns, template, system, options.raw)
    with options.engine.open(path, n_seqs=parallel, prefix_cache=True, cache_pages=False) as llm:
        if options.engine.ctx_size is not None and llm.ctx_size < options.engine.ctx_size:
            warn(f"the model was trained for {llm.ctx_size} tokens; -c {options.engine.ctx_size} is cut down to that")
        shown.begin(f"Device: {llm.device_description}; {words}", device=llm.device_description, parallel=parallel)
        runner = Runner(llm, reader, output, parallel, path.stem, shown.update)
        with collected_seldom(), _ended_by_signals(runner.stop) as received:
            runner.run(Feed(source.entries(), from_pipe=total is None))
    status = SOME_FAILED if runner.tally.failed else 0
    if received:
        status = TERMINATED if received[0] == signal.SIGTERM else INTERRUPTED
    _tell(options, shown, runner.tally, params, status)
    return status


def _parallel(options: BatchOptions, path: Path) -> tuple[int, str]:
    """How many sequences, and words about it."""
    if options.parallel is not None:
        return options.parallel, _at_a_time(options.parallel)
    from pyllm.batch.parallel import default_parallel
    from pyllm.device import open_device

    device = open_device(options.engine.device, not options.engine.no_graphs)
    try:
        count, size = default_parallel(path, device, options.ctx_size, options.kv_type)
    finally:
        device.close()
    return count, f"{_at_a_time(count)}, {size_text(size)} of keys and values each (--parallel {count})"


def _at_a_time(count: int) -> str:
    return f"{count} line{'' if count == 1 else 's'} at a time"


@contextmanager
def _ended_by_signals(stop: Callable[[], None]) -> Iterator[list[int]]:
    """The first Ctrl-C and SIGTERM end the batch after the step that is going on; a second Ctrl-C does not wait.

    Yields:
        The signals that came.
    """
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        stop()

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    numbers = [signal.SIGTERM, signal.SIGINT]
    former = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if former[number] is not signal.SIG_IGN:  # ignored: started by nohup and the like
            signal.signal(number, end)
    try:
        yield received
    finally:
        for number in numbers:
            signal.signal(number, former[number])


def _remark(options: BatchOptions, words: str) -> None:
    if options.progress != "json":
        note(words)


def _tell(options: BatchOptions, shown: Display, tally: Tally, params: SamplingParams, status: int) -> None:
    words = f"{tally.finished} line{'' if tally.finished == 1 else 's'} in {tally.seconds:.1f} s, "
    words += f"{tally.completion_tokens} answer tokens, {tally.tokens_per_second:.1f} tokens/s"
    if tally.failed:
        words += f"; {tally.failed} failed: see error in {options.output}"
    if tally.cut_off:
        words += f'; {tally.cut_off} cut off, since the context is full (-c): see "context_full" in {options.output}'
    if status in (INTERRUPTED, TERMINATED):
        words = f"Interrupted; the same command goes on. {words}"
    if options.sampling.seed is None and options.sampling.temperature != 0 and tally.finished:
        words += f"; --seed {params.seed} repeats these answers"
    shown.end(words, tally, status)
