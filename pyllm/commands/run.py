"""`pyllm run`: answer one prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyllm.commands import INTERRUPTED
from pyllm.commands.answer import Answer, Timings, as_json, ctrl_c_ends_generation, summary
from pyllm.commands.console import note, progress_bar, warn
from pyllm.commands.models import local_model
from pyllm.commands.prompt import checked_text, read_prompt, unescape

if TYPE_CHECKING:
    from pyllm.llm import LLM, Chunk
    from pyllm.sampling import SamplingParams


@dataclass(frozen=True)
class RunOptions:
    """The command line. None stands for the engine's own default."""

    model: str
    prompt: str | None
    file: str | None
    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop: tuple[str, ...]
    system: str | None
    raw: bool
    parse_special: bool
    ctx_size: int | None
    batch_size: int | None
    ubatch_size: int | None
    kv_type: str | None
    device: str
    ignore_eos: bool
    json: bool

    def check(self) -> None:
        """Refuse combinations that make no sense.

        Raises:
            click.UsageError: two options exclude each other.
        """
        if self.parse_special and not self.raw:
            raise click.UsageError("--parse-special needs --raw: in a chat, special tokens are the template's alone")
        if self.system is not None and self.raw:
            raise click.UsageError("--system has no place without the chat template; leave out --raw")

    def sampling_params(self) -> SamplingParams:
        """How to sample.

        Raises:
            UsageError: a value is out of range.
        """
        from pyllm.sampling import SamplingParams

        given = _given(self, "temperature", "top_k", "top_p", "min_p", "seed")
        stop = tuple(unescape(checked_text(text, "--stop")) for text in self.stop)
        return SamplingParams(max_tokens=self.max_tokens, stop=stop, ignore_eos=self.ignore_eos, **given)

    def engine_options(self) -> dict[str, Any]:
        """Arguments of `LLM`."""
        return {"device": self.device, **_given(self, "ctx_size", "batch_size", "ubatch_size", "kv_type")}


def _given(options: RunOptions, *names: str) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


_SIZE = click.IntRange(1)


@click.command("run")
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("-f", "--file", metavar="FILE", help="Read the prompt from FILE; - is standard input.")
@click.option("-n", "--max-tokens", type=click.IntRange(1), help="Stop after so many tokens. [default: no limit]")
@click.option("--temp", "temperature", type=float, help="0 always takes the likeliest token. [default: 0.8]")
@click.option("--top-k", type=int, help="Choose among the K likeliest tokens; 0: off. [default: 40]")
@click.option(
    "--top-p", type=float, help="... among the likeliest with this total probability; 1: off. [default: 0.95]"
)
@click.option("--min-p", type=float, help="... among those so likely relative to the best; 0: off. [default: 0.05]")
@click.option("--seed", type=int, help="The same seed gives the same answer. [default: a new one, shown at the end]")
@click.option("--stop", multiple=True, help=r"End before this text; \n, \t and \\ are understood. May be repeated.")
@click.option("--system", metavar="TEXT", help="System message, put before the prompt by the chat template.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--parse-special", is_flag=True, help="With --raw: texts such as <|im_end|> become special tokens.")
@click.option("-c", "--ctx-size", type=_SIZE, help="Tokens that prompt and answer may have together. [default: 4096]")
@click.option("-b", "--batch-size", type=_SIZE, help="Tokens queued on the device at once. [default: 2048]")
@click.option("-ub", "--ubatch-size", type=_SIZE, help="Tokens computed together. [default: 512]")
@click.option("--kv-type", type=click.Choice(["f32", "f16", "bf16"]), help="Storage of keys and values. [default: f16]")
@click.option("--device", type=click.Choice(["auto", "gpu", "cpu"]), default="auto", show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Go on after the model has ended its answer.")
@click.option("--json", is_flag=True, help="Print one JSON object when the answer is complete.")
def command(**values: Any) -> None:
    """Answer PROMPT with MODEL: the path of a GGUF file, or a known name such as demo.

    Without PROMPT and -f, the prompt is what comes in on standard input; a newline at its very end is dropped. The
    answer goes to standard output, everything else to standard error. Ctrl-C ends the answer early.

    \b
    pyllm run demo "What is the capital of France?"
    git diff | pyllm run model.gguf --system "Write a commit message."
    pyllm run model.gguf --raw -n 50 "Once upon a time"
    """
    status = run(RunOptions(**values))
    click.get_current_context().exit(status)


def run(options: RunOptions) -> int:
    """Answer one prompt; returns the exit status."""
    options.check()
    prompt = read_prompt(options.prompt, options.file)
    params = options.sampling_params()
    path = local_model(options.model)
    started = time.perf_counter()
    with _open(path, options) as llm:
        load_seconds = time.perf_counter() - started
        answer = Answer()
        with ctrl_c_ends_generation(llm):
            _introduce(llm, options)
            answer.collect(_chunks(llm, prompt, params, options), show=not options.json)
        timings = Timings.of(load_seconds, llm.stats)
        if options.json:
            click.echo(as_json(llm, options.model, answer, timings))
        _report(llm, answer, timings, options)
    return INTERRUPTED if answer.finish_reason == "interrupted" else 0


def _open(path: Path, options: RunOptions) -> LLM:
    from pyllm.llm import LLM

    with progress_bar("loading") as progress:
        return LLM(path, progress=progress, **options.engine_options())


def _introduce(llm: LLM, options: RunOptions) -> None:
    note(f"Device: {llm.device_name}")
    if options.ctx_size is not None and llm.ctx_size < options.ctx_size:
        warn(f"the model was trained for {llm.ctx_size} tokens; -c {options.ctx_size} is cut down to that")


def _chunks(llm: LLM, prompt: str, params: SamplingParams, options: RunOptions) -> Iterator[Chunk]:
    if not options.raw:
        return llm.chat(_messages(prompt, options.system), params)
    return llm.generate(llm.tokenize(prompt, parse_special=options.parse_special), params)


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": checked_text(system, "--system")}]
    return [*before, {"role": "user", "content": prompt}]


def _report(llm: LLM, answer: Answer, timings: Timings, options: RunOptions) -> None:
    stats = llm.stats
    if answer.finish_reason == "interrupted":
        note("Interrupted")
    elif answer.finish_reason == "length" and len(answer.tokens) == options.max_tokens:
        note(f"Cut off after -n {options.max_tokens} tokens")
    elif answer.finish_reason == "length":
        note(f"Cut off: the context of {llm.ctx_size} tokens (-c) is full")
    line = summary(stats, timings)
    if options.seed is None and options.temperature != 0 and answer.tokens:
        line += f"; --seed {stats['seed']} repeats this answer"
    note(line)
