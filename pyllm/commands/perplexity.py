"""`pyllm perplexity`: measure how well a model predicts a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyllm.commands import INTERRUPTED
from pyllm.commands.completing import FILE
from pyllm.commands.console import note, progress_bar
from pyllm.commands.models import local_model, model_argument
from pyllm.commands.options import SIZE, EngineOptions, engine_options, taken
from pyllm.commands.prompt import read_prompt
from pyllm.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from pyllm.kl_base import BaseReader
    from pyllm.perplexity import Mean, Save, WindowScores
    from pyllm.tokenizer import Tokenizer

_WINDOW = 512


@dataclass(frozen=True)
class PerplexityOptions:
    """The command line."""

    model: str
    file: str
    windows: int | None
    kl_base: str | None
    save: bool
    json: bool
    engine: EngineOptions

    def check(self) -> None:
        """Refuse combinations that make no sense.

        Raises:
            click.UsageError: --save lacks a file.
        """
        if self.save and self.kl_base is None:
            raise click.UsageError("--save needs --kl-base FILE, which says where")

    @property
    def saves(self) -> bool:
        """Whether FILE is to be made."""
        return self.kl_base is not None and (self.save or not Path(self.kl_base).exists())


@dataclass(frozen=True)
class Task:
    """What is to be scored. Known before any weight is read."""

    path: Path
    tokenizer: Tokenizer
    windows: np.ndarray


@click.command("perplexity")
@model_argument
@click.option("-f", "--file", type=FILE, metavar="FILE", required=True, help="The text; - is standard input.")
@click.option("--windows", metavar="N", type=SIZE, help="Score only the first N windows. [default: all]")
@click.option(
    "--kl-base",
    type=FILE,
    metavar="FILE",
    help="Compare with the log-probabilities in FILE; if there is no such file, make it.",
)
@click.option("--save", is_flag=True, help="Make the file of --kl-base even if there is one.")
@click.option("--json", is_flag=True, help="Print one JSON object at the end.")
@engine_options("Tokens of a window. [default: 512]")
def command(**values: Any) -> None:
    """Measure how well MODEL, a path or a known name, predicts a text.

    The text is cut into windows of -c tokens, each of which starts with an empty context. The second half of each
    window is scored. Lower is better; only values of the same text, window and vocabulary can be compared. Ctrl-C ends
    it with what is known by then.

    With --kl-base, one run saves what it predicted, and others are compared with it token by token. The file takes 2
    bytes for each token of the vocabulary and each scored token.

    \b
    pyllm perplexity model.gguf -f text.txt
    pyllm perplexity model-f16.gguf -f text.txt --kl-base f16.npz
    pyllm perplexity model-q4.gguf -f text.txt --kl-base f16.npz
    """
    engine = taken(EngineOptions, values)
    click.get_current_context().exit(run(PerplexityOptions(**values, engine=engine)))


def run(options: PerplexityOptions) -> int:
    """Score, print; returns the exit status."""
    options.check()
    task = _prepare(options)
    scored: list[WindowScores] = []
    status = 0
    try:
        _score(options, task, scored)
    except KeyboardInterrupt:
        note("Interrupted")
        status = INTERRUPTED
    if scored:
        shown = _as_json(options, task, scored) if options.json else "\n".join(_lines(task, scored))
        click.echo(shown)
    return status


def _prepare(options: PerplexityOptions) -> Task:
    from pyllm.gguf_split import open_model
    from pyllm.perplexity import cut_windows
    from pyllm.tokenizer import Tokenizer

    text = read_prompt(None, options.file, "text")
    size = options.engine.ctx_size or _WINDOW
    path = local_model(options.model)
    with open_model(path) as gguf:
        tokenizer = Tokenizer.from_metadata(gguf.metadata, str(gguf.path))
        trained_for = gguf.get_int(f"{gguf.architecture}.context_length", size)
        if size > trained_for:
            raise UsageError(f"-c is {size}; {gguf.path} was trained for {trained_for} tokens, take that or less")
        return Task(Path(gguf.path), tokenizer, cut_windows(tokenizer, text, size, options.windows))


def _score(options: PerplexityOptions, task: Task, scored: list[WindowScores]) -> None:
    """Score all windows, adding each to `scored` when it is complete."""
    from pyllm.perplexity import all_nll, perplexity, score_window

    # One ubatch at a time: with large vocabularies, logits take more memory than anything else.
    engine = replace(options.engine, ctx_size=task.windows.shape[1], batch_size=options.engine.batch_size or 1)
    with _base(options, task) as (base, save), engine.open(task.path) as llm:
        note(f"Device: {llm.device_description}")
        with progress_bar("perplexity", "window") as progress:
            for window in task.windows:
                scored.append(score_window(llm, window, task.tokenizer.vocab_size, base, save))
                so_far = perplexity(all_nll(scored))
                progress(len(scored), len(task.windows), f"perplexity {so_far.value:.4f}")


@contextmanager
def _base(options: PerplexityOptions, task: Task) -> Iterator[tuple[BaseReader | None, Save | None]]:
    """What --kl-base asks for: a file to compare with, or a function that adds to the new one."""
    from pyllm.kl_base import BaseReader, BaseWriter, model_fingerprint, vocabulary_hash

    if options.kl_base is None:
        yield None, None
        return
    path, vocabulary, vocab_size = Path(options.kl_base), vocabulary_hash(task.tokenizer), task.tokenizer.vocab_size
    if options.saves:
        with BaseWriter(path, model_fingerprint(task.path), vocabulary, task.windows, vocab_size) as writer:
            yield None, writer.add
        note(f"Saved {path}")
    else:
        with BaseReader(path, vocabulary, task.windows, vocab_size) as reader:
            note(f"Comparing with {reader.model['name']}")
            yield reader, None


def _lines(task: Task, scored: list[WindowScores]) -> Iterator[str]:
    from pyllm.perplexity import all_nll, compare, perplexity

    nll = all_nll(scored)
    count, size = len(scored), task.windows.shape[1]
    of_all = f" of {len(task.windows)}" if count < len(task.windows) else ""
    windows = f"{count}{of_all} windows of {size} tokens, {len(nll)} tokens scored"
    yield f"Perplexity: {_mean(perplexity(nll))} ({windows})"
    if scored[0].kl is not None:
        found = compare(scored)
        yield f"Base perplexity: {_mean(found.base)}"
        yield f"Difference: {_mean(found.delta, '+.4f')}"
        spread = f"median {found.kl_median:.6f}, 99 % below {found.kl_99:.6f}, max {found.kl_max:.6f}"
        yield f"KL divergence: {_mean(found.kl, '.6f')} ({spread})"
        yield f"Same top token: {100 * found.same_top.value:.3f} +/- {100 * found.same_top.error:.3f} %"


def _mean(mean: Mean, form: str = ".4f") -> str:
    return f"{mean.value:{form}} +/- {mean.error:{form.removeprefix('+')}}"


def _as_json(options: PerplexityOptions, task: Task, scored: list[WindowScores]) -> str:
    from pyllm.perplexity import Mean, all_nll, compare, perplexity

    nll = all_nll(scored)
    found, mean = perplexity(nll), Mean.of(nll)
    shown = {
        "model": options.model,
        "file": options.file,
        "perplexity": found.value,
        "error": found.error,
        "nll": mean.value,
        "window_nll": [float(window.nll.mean()) for window in scored],
        "window": task.windows.shape[1],
        "windows": len(scored),
        "scored": len(nll),
        "complete": len(scored) == len(task.windows),
    }
    if scored[0].kl is not None:
        shown["kl_base"] = {"file": options.kl_base, **asdict(compare(scored))}
    return json.dumps(shown)
