"""`pyllm run`: answer one prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from pyllm.commands import INTERRUPTED
from pyllm.commands.answer import (
    Answer,
    Timings,
    as_json,
    ctrl_c_ends_generation,
    introduce,
    note_dropped,
    said,
    summary,
    why_cut_off,
)
from pyllm.commands.completing import FILE
from pyllm.commands.console import note
from pyllm.commands.models import local_model, model_and_text, model_argument
from pyllm.commands.options import (
    SIZE,
    CacheOptions,
    EngineOptions,
    OverflowOptions,
    SamplingOptions,
    cache_options,
    engine_options,
    overflow_options,
    sampling_options,
    session_option,
    taken,
)
from pyllm.commands.prompt import checked_text, read_prompt
from pyllm.commands.session_commands import resumed, save
from pyllm.commands.think import SHOW, Think, think_option
from pyllm.conversation import Conversation
from pyllm.terminal.answer_view import AnswerView

if TYPE_CHECKING:
    from pyllm.llm import LLM
    from pyllm.sampling import SamplingParams


@dataclass(frozen=True)
class RunOptions:
    """The command line."""

    model: str
    prompt: str | None
    file: str | None
    system: str | None
    raw: bool
    parse_special: bool
    json: bool
    logprobs: int | None
    session: str | None
    think: Think
    sampling: SamplingOptions
    engine: EngineOptions
    cache: CacheOptions
    overflow: OverflowOptions

    def check(self) -> None:
        """Refuse combinations that make no sense.

        Raises:
            click.UsageError: two options exclude each other.
        """
        if self.parse_special and not self.raw:
            raise click.UsageError("--parse-special needs --raw: in a chat, special tokens are the template's alone")
        if self.system is not None and self.raw:
            raise click.UsageError("--system has no place without the chat template; leave out --raw")
        if self.think != SHOW and self.raw:
            raise click.UsageError("--think is for chat templates: leave out --raw")
        if self.session is not None and self.raw:
            raise click.UsageError("--session keeps conversations: leave out --raw")
        if self.logprobs is not None and not self.json:
            raise click.UsageError("--logprobs needs --json, where they are shown")


@click.command("run")
@model_argument
@click.argument("prompt", required=False)
@click.option("-f", "--file", type=FILE, metavar="FILE", help="Read the prompt from FILE; - is standard input.")
@click.option("--system", metavar="TEXT", help="System message, put before the prompt by the chat template.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--parse-special", is_flag=True, help="With --raw: texts such as <|im_end|> become special tokens.")
@click.option("--json", is_flag=True, help="Print one JSON object when the answer is complete.")
@click.option(
    "--logprobs", metavar="N", type=SIZE, help="With --json: log-probabilities of each token and of the N likeliest."
)
@think_option
@session_option
@engine_options("Tokens that prompt and answer may have together. [default: 4096]")
@overflow_options
@cache_options
@sampling_options
def command(**values: Any) -> None:
    """Answer PROMPT with MODEL: the path of a GGUF file, or a known name such as demo.

    Without PROMPT and -f, the prompt is what comes in on standard input; a newline at its very end is dropped. The
    answer goes to standard output, everything else to standard error. Ctrl-C ends the answer early. PYLLM_MODEL in the
    environment stands in for MODEL.

    \b
    pyllm run demo "What is the capital of France?"
    git diff | pyllm run model.gguf --system "Write a commit message."
    pyllm run model.gguf --raw -n 50 "Once upon a time"
    """
    if values["file"] is None:
        values["model"], values["prompt"] = model_and_text(values["model"], values["prompt"])
    groups = {"sampling": SamplingOptions, "engine": EngineOptions, "cache": CacheOptions, "overflow": OverflowOptions}
    options: dict[str, Any] = {name: taken(group, values) for name, group in groups.items()}
    status = run(RunOptions(**values, **options))
    click.get_current_context().exit(status)


def run(options: RunOptions) -> int:
    """Answer one prompt; returns the exit status."""
    options.check()
    prompt = read_prompt(options.prompt, options.file)
    params = options.sampling.params(logprobs=options.logprobs or 0)
    path = local_model(options.model)
    started = time.perf_counter()
    keeps = options.session is not None or options.cache.cache_dir is not None  # else nothing comes after it
    with options.engine.open(path, **(options.cache.engine() if keeps else {}), **options.overflow.engine()) as llm:
        load_seconds = time.perf_counter() - started
        answer = Answer()
        begun = Conversation(None if options.system is None else checked_text(options.system, "--system"))
        ended_by: list[int] = []
        with ctrl_c_ends_generation(llm, ended_by) as until_pressed:
            introduce(llm, options.engine.ctx_size)
            conversation = resumed(llm, options.session, begun)
            stats = _collect(llm, prompt, params, options, conversation, answer, until_pressed)
        timings = Timings.of(load_seconds, stats)
        if options.json:
            click.echo(as_json(llm, options.model, answer, stats, timings))
        _report(llm, answer, stats, timings, options)
        if options.session is not None and answer.text:
            conversation.add(prompt, answer.text, said(llm, answer))
            save(llm, options.session, conversation)
    if ended_by:
        return 128 + ended_by[0]
    return INTERRUPTED if answer.finish_reason == "interrupted" else 0


def _collect(
    llm: LLM,
    prompt: str,
    params: SamplingParams,
    options: RunOptions,
    conversation: Conversation,
    answer: Answer,
    until_pressed: Callable[[Iterable[Any]], Iterator[Any]],
) -> Mapping[str, Any]:
    """Have the prompt answered; returns counts and times."""
    if options.raw:
        chunks = llm.generate(llm.tokenize(prompt, parse_special=options.parse_special), params)
        answer.collect(until_pressed(chunks), show=not options.json)
        return llm.stats
    from pyllm.thinking import ThoughtfulAnswer

    messages, answers = conversation.asking(prompt), conversation.answers()
    thoughtful = ThoughtfulAnswer(llm, messages, params, options.think.limit, answers)
    answer.collect_parts(until_pressed(thoughtful.parts()), None if options.json else AnswerView(options.think.hides))
    return thoughtful.stats


def _report(llm: LLM, answer: Answer, stats: Mapping[str, Any], timings: Timings, options: RunOptions) -> None:
    if reason := why_cut_off(llm, answer, options.sampling.max_tokens):
        note(reason)
    if answer.reasoning.strip() and not answer.text.strip():
        note("No answer: the model was still thinking. --think N ends it earlier")
    note_dropped(stats)
    line = summary(stats, timings)
    if options.sampling.seed is None and options.sampling.temperature != 0 and answer.tokens:
        line += f"; --seed {stats['seed']} repeats this answer"
    note(line)
