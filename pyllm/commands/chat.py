"""`pyllm chat`: a conversation."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from pyllm.commands import INTERRUPTED
from pyllm.commands.answer import Answer, Timings, ctrl_c_ends_generation, introduce, said, summary, why_cut_off
from pyllm.commands.console import note
from pyllm.commands.line import at_terminal, read_line
from pyllm.commands.models import local_model, model_argument
from pyllm.commands.options import (
    CacheOptions,
    EngineOptions,
    SamplingOptions,
    cache_options,
    engine_options,
    sampling_options,
    session_option,
    taken,
)
from pyllm.commands.prompt import checked_text, read_stdin
from pyllm.commands.session_commands import SessionCommands, resumed
from pyllm.conversation import Conversation
from pyllm.errors import ContextError, PyllmError, SamplingError, StaleKVError, TemplateError

if TYPE_CHECKING:
    from pyllm.llm import LLM

MARKER = "> "

# What concerns one answer: the next may do better. Any other error ends the program.
_PASSING = (TemplateError, ContextError, SamplingError, StaleKVError)


@dataclass(frozen=True)
class ChatOptions:
    """The command line."""

    model: str
    system: str | None
    session: str | None
    sampling: SamplingOptions
    engine: EngineOptions
    cache: CacheOptions


@click.command("chat")
@model_argument
@click.option("--system", metavar="TEXT", help="System message, put before the conversation by the chat template.")
@session_option
@engine_options("Tokens that the whole conversation may have. [default: 4096]")
@cache_options
@sampling_options
def command(**values: Any) -> None:
    """Talk with MODEL: the path of a GGUF file, or a known name such as demo.

    Each line is answered; answers go to standard output, everything else to standard error. Ctrl-C stops an answer, of
    which the conversation keeps what was shown. Ctrl-D, or Ctrl-C twice, ends the program.

    \b
    /save NAME     save the conversation, with all that was computed; NAME may be a path
    /load NAME     go on with a saved one: nothing of it is computed again
    /sessions      list the saved ones
    /undo          take the last question back
    /regen         another answer to the last question
    /edit TEXT     put TEXT in the place of the last question
    /fork          go on in a copy; /fork N: back to branch N
    /stats         how full the context is, what was computed and how fast
    /clear         forget the conversation
    /system TEXT   set the system message; without TEXT, remove it
    /exit          end

    If standard input is no terminal, all of it is one message, and there is one answer.

    \b
    pyllm chat demo
    pyllm chat model.gguf --system "Answer in French." -c 8192
    """
    groups = {"sampling": SamplingOptions, "engine": EngineOptions, "cache": CacheOptions}
    options: dict[str, Any] = {name: taken(group, values) for name, group in groups.items()}
    click.get_current_context().exit(run(ChatOptions(**values, **options)))


def run(options: ChatOptions) -> int:
    """Converse; returns the exit status."""
    conversation = Conversation(None if options.system is None else checked_text(options.system, "--system"))
    options.sampling.params()  # complains before the model is loaded
    from_terminal = at_terminal()
    question = "" if from_terminal else read_stdin().strip()
    if not from_terminal and not question:
        return 0
    with options.engine.open(local_model(options.model), **options.cache.engine()) as llm:
        introduce(llm, options.engine.ctx_size)
        conversation = resumed(llm, options.session, conversation)
        chat = Chat(llm, conversation, options.sampling, options.session)
        if from_terminal:
            status = chat.run()
        else:
            status = INTERRUPTED if chat.answer(question).finish_reason == "interrupted" else 0
        chat.sessions.save_at_end()
        return status


class Chat:
    """Reads lines, answers them, keeps the conversation.

    Every answer has a seed of its own, counted up from the first one's: the same lines give the same conversation.
    """

    def __init__(
        self, llm: LLM, conversation: Conversation, sampling: SamplingOptions, session: str | None = None
    ) -> None:
        self._llm = llm
        self.conversation = conversation
        self.sessions = SessionCommands(llm, self, session)
        self._sampling = sampling
        self._seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        if sampling.seed is None and sampling.temperature != 0:
            note(f"--seed {self._seed} repeats this conversation")
        self._answers = 0
        self._ended = False
        self._commands: dict[str, Callable[[str], None]] = {
            **self.sessions.table(),
            "/clear": self._clear,
            "/system": self._set_system,
            "/exit": self._exit,
        }

    def run(self) -> int:
        """Answer line after line; returns the exit status."""
        note("Ctrl-C stops an answer, Ctrl-D or /exit ends the conversation")
        warned = False
        while not self._ended:
            try:
                line = self._read_line()
            except EOFError:
                note("")
                return 0
            except KeyboardInterrupt:
                note("")
                if warned:
                    return INTERRUPTED
                note("Ctrl-C once more, Ctrl-D or /exit ends the conversation")
                warned = True
                continue
            warned = False
            self._take(line)
        return 0

    @staticmethod
    def _read_line() -> str:
        try:
            return checked_text(read_line(MARKER), "the line")
        except (UnicodeDecodeError, PyllmError):
            note("This line is not UTF-8 text; it was not sent. Check the terminal's encoding")
            return ""

    def _take(self, line: str) -> None:
        if line.startswith("/"):
            name, _, rest = line.partition(" ")
            self._commands.get(name, self._refuse)(rest.strip())
        elif line.strip():
            self.ask(line.strip())

    def ask(self, question: str) -> None:
        """Answer a question, or say why not."""
        try:
            self.answer(question)
        except _PASSING as error:
            note(f"Error: {error}")
            note("The question was taken back" + self._advice(isinstance(error, ContextError)))

    def answer(self, question: str) -> Answer:
        """Answer one question, showing the answer as it comes.

        Raises:
            PyllmError: there is no answer, or only a part; the conversation is as it was.
        """
        params = self._sampling.params(seed=(self._seed + self._answers) % 2**64)
        answer = Answer()
        with ctrl_c_ends_generation(self._llm) as until_pressed:
            answers = self.conversation.answers()
            chunks = self._llm.chat(self.conversation.asking(question), params, answers=answers)
            answer.collect(until_pressed(chunks), show=True)
        self._answers += 1
        if answer.finish_reason == "interrupted" and not answer.text:
            # Without an answer two questions would follow each other, which many templates refuse.
            note("Interrupted; the question was taken back")
            return answer
        self.conversation.add(question, answer.text, said(self._llm, answer))
        self._report(answer)
        return answer

    def _report(self, answer: Answer) -> None:
        stats = self._llm.stats
        full = answer.finish_reason == "length" and len(answer.tokens) != self._sampling.max_tokens
        if reason := why_cut_off(self._llm, answer, self._sampling.max_tokens):
            note(reason + self._advice(full))
        used = stats["prompt_tokens"] + stats["generated_tokens"]
        note(f"{summary(stats, Timings.of(0.0, stats))}; {used} of {self._llm.ctx_size} tokens of context used")

    def _advice(self, full: bool) -> str:
        return "; /clear starts a new conversation" if full and self.conversation.turns else ""

    # /commands

    def _clear(self, rest: str) -> None:
        self.conversation.turns.clear()
        note("A new conversation")

    def _set_system(self, rest: str) -> None:
        self.conversation.system = rest or None
        note("System message set" if rest else "System message removed")

    def _exit(self, rest: str) -> None:
        self._ended = True

    def _refuse(self, rest: str) -> None:
        note(f"There are {', '.join(self._commands)}; a message that begins with / needs a space before it")
