"""`pyllm chat`: a conversation."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from pyllm.commands import INTERRUPTED
from pyllm.commands.answer import (
    Answer,
    Timings,
    ctrl_c_ends_generation,
    introduce,
    note_dropped,
    said,
    summary,
    why_cut_off,
)
from pyllm.commands.attachments import Attachments
from pyllm.commands.console import note
from pyllm.commands.models import local_model, model_argument
from pyllm.commands.options import (
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
from pyllm.commands.prompt import checked_text, read_stdin
from pyllm.commands.session_commands import SessionCommands, num_tokens, resumed
from pyllm.commands.think import SHOW, Think, think_option
from pyllm.conversation import Conversation
from pyllm.errors import ContextError, PyllmError, SamplingError, StaleKVError, TemplateError
from pyllm.terminal.answer_view import AnswerView
from pyllm.terminal.completion import files
from pyllm.terminal.editor import Editor, Line, at_terminal, open_editor
from pyllm.terminal.history import history_path
from pyllm.terminal.status import status_text

if TYPE_CHECKING:
    from pyllm.llm import LLM

# What concerns one answer: the next may do better. Any other error ends the program.
_PASSING = (TemplateError, ContextError, SamplingError, StaleKVError)


@dataclass(frozen=True)
class ChatOptions:
    """The command line."""

    model: str
    system: str | None
    session: str | None
    think: Think
    no_history: bool
    sampling: SamplingOptions
    engine: EngineOptions
    cache: CacheOptions
    overflow: OverflowOptions


@click.command("chat")
@model_argument
@click.option("--system", metavar="TEXT", help="System message, put before the conversation by the chat template.")
@think_option
@session_option
@click.option("--no-history", is_flag=True, help="Do not keep the lines that are typed for the next time.")
@engine_options("Tokens that the whole conversation may have. [default: 4096]")
@overflow_options
@cache_options
@sampling_options
def command(**values: Any) -> None:
    """Talk with MODEL: the path of a GGUF file, or a known name such as demo.

    Each line is answered; answers go to standard output, everything else to standard error. A paste is one message,
    however many lines it has; so is what stands between two lines of three quotes. Alt-Enter begins a new line, Tab
    completes commands and files, the arrow keys bring earlier lines back. Ctrl-C stops an answer, of which the
    conversation keeps what was shown. Ctrl-D, or Ctrl-C twice, ends the program.

    \b
    /read FILE     put the text of FILE before the next message
    /save NAME     save the conversation, with all that was computed; NAME may be a path (-f NAME: replace it)
    /load NAME     go on with a saved one: nothing of it is computed again
    /sessions      list the saved ones
    /undo          take the last question back
    /regen         another answer to the last question
    /edit TEXT     put TEXT in the place of the last question
    /fork          go on in a copy; /fork N: back to branch N
    /stats         how full the context is, what was computed and how fast
    /clear         forget the conversation
    /system TEXT   set the system message; without TEXT, remove it
    /help          list these commands
    /exit          end

    If standard input is no terminal, all of it is one message, and there is one answer. Colours are for terminals, and
    NO_COLOR in the environment turns them off. Reasoning is what a model writes between <think> and </think>; later
    questions go without it.

    \b
    pyllm chat demo
    pyllm chat model.gguf --system "Answer in French." -c 8192
    pyllm chat model.gguf --think 200
    pyllm chat model.gguf --session work
    pyllm chat model.gguf < question.txt
    """
    groups = {"sampling": SamplingOptions, "engine": EngineOptions, "cache": CacheOptions, "overflow": OverflowOptions}
    options: dict[str, Any] = {name: taken(group, values) for name, group in groups.items()}
    click.get_current_context().exit(run(ChatOptions(**values, **options)))


def run(options: ChatOptions) -> int:
    """Converse; returns the exit status."""
    conversation = Conversation(None if options.system is None else checked_text(options.system, "--system"))
    options.sampling.params()  # complains before the model is loaded
    from_terminal = at_terminal()
    path = local_model(options.model)
    question = "" if from_terminal else read_stdin().strip()
    if not from_terminal and not question:
        return 0
    with options.engine.open(path, **options.cache.engine(), **options.overflow.engine()) as llm:
        introduce(llm, options.engine.ctx_size)
        conversation = resumed(llm, options.session, conversation)
        chat = Chat(llm, conversation, options.sampling, options.session, options.think)
        if not from_terminal:
            status = INTERRUPTED if chat.answer(question).finish_reason == "interrupted" else 0
            chat.sessions.save_at_end()
            return 128 + chat.ended_by[0] if chat.ended_by else status
        history = None if options.no_history else history_path()
        try:
            return chat.run(open_editor(chat.commands, chat.arguments, history, note))
        finally:  # also where SIGTERM, or a terminal that is closed, ends the program
            chat.sessions.save_at_end()


class Chat:
    """Reads lines, answers them, keeps the conversation.

    Every answer has a seed of its own, counted up from the first one's: the same lines give the same conversation.

    Args:
        session: the name of the saved conversation that this one is.
        think: what is done with reasoning.

    Attributes:
        commands: what each command does with the rest of its line.
        ended_by: signals that end the program; they came while an answer was shown.
    """

    def __init__(
        self,
        llm: LLM,
        conversation: Conversation,
        sampling: SamplingOptions,
        session: str | None = None,
        think: Think = SHOW,
    ) -> None:
        self._llm = llm
        self.conversation = conversation
        self.sessions = SessionCommands(llm, self, session)
        self._sampling = sampling
        self._think = think
        self._seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        if sampling.seed is None and sampling.temperature != 0:
            note(f"--seed {self._seed} repeats this conversation")
        self._answers = 0
        self._ended = False
        self.ended_by: list[int] = []
        self._attachments = Attachments(lambda text: len(llm.tokenize(text, add_special=False)))
        self.show_context()
        self._editor: Editor | None = None
        self.commands: dict[str, Callable[[str], None]] = {
            "/read": self._attachments.read,
            **self.sessions.table(),
            "/clear": self._clear,
            "/system": self._set_system,
            "/help": self._help,
            "/exit": self._exit,
        }

    def show_context(self) -> None:
        """Have the status line say how full the context is with the conversation as it is now: nothing of it was just
        computed."""
        used = num_tokens(self._llm, self.conversation)
        self._status = status_text(used, self._llm.ctx_size, 0, 0, 0.0)

    def arguments(self, command: str, beginning: str) -> Iterable[str]:
        """What the argument of a command may be, for completion."""
        if command == "/load":
            return (name for name in self.sessions.names() if name.startswith(beginning))
        return files(beginning) if command in ("/read", "/save") else ()

    def run(self, editor: Editor) -> int:
        """Answer line after line; returns the exit status."""
        note("Ctrl-C stops an answer, Ctrl-D or /exit ends the conversation, /help lists commands")
        self._editor = editor
        warned = False
        while not self._ended:
            if self.ended_by:
                return 128 + self.ended_by[0]
            try:
                line = self._read(editor)
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

    def _read(self, editor: Editor) -> Line:
        try:
            line = editor.read(self._status)
            return Line(checked_text(line.text, "the line"), line.is_message)
        except (UnicodeError, PyllmError):
            note("This line is not UTF-8 text; it was not sent. Check the terminal's encoding")
            return Line("")

    def _take(self, line: Line) -> None:
        if line.text.startswith("/") and not line.is_message:
            name, _, rest = line.text.partition(" ")
            self.commands.get(name.rstrip(), self._refuse)(rest.strip())
        elif line.text.strip():
            self.ask(self._attachments.before(line.text.strip()))

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
        from pyllm.thinking import ThoughtfulAnswer

        params = self._sampling.params(seed=(self._seed + self._answers) % 2**64)
        messages, answers = self.conversation.asking(question), self.conversation.answers()
        answer = Answer()
        view = AnswerView(self._think.hides)
        typing = nullcontext() if self._editor is None else self._editor.while_answering()
        with typing, ctrl_c_ends_generation(self._llm, self.ended_by) as until_pressed:
            thoughtful = ThoughtfulAnswer(self._llm, messages, params, self._think.limit, answers, view.prefill)
            answer.collect_parts(until_pressed(thoughtful.parts()), view)
        self._answers += 1
        if answer.finish_reason == "interrupted" and not answer.text:
            # Without an answer two questions would follow each other, which many templates refuse.
            note("Interrupted; the question was taken back")
            return answer
        if answer.reasoning.strip() and not answer.text.strip():
            note("No answer: the model was still thinking; the question was taken back. --think N ends it earlier")
        else:
            self.conversation.add(question, answer.text, said(self._llm, answer))
            self._attachments.clear()
        self._report(answer, thoughtful.stats)
        return answer

    def _report(self, answer: Answer, stats: Mapping[str, Any]) -> None:
        note_dropped(stats)
        full = answer.finish_reason == "length" and len(answer.tokens) != self._sampling.max_tokens
        if reason := why_cut_off(self._llm, answer, self._sampling.max_tokens):
            note(reason + self._advice(full))
        size = self._llm.ctx_size
        used = min(size, max(0, stats["prompt_tokens"] + stats["generated_tokens"] - stats.get("dropped_tokens", 0)))
        timings = Timings.of(0.0, stats)
        rate = timings.decode_tokens_per_second
        self._status = status_text(used, size, stats["prompt_tokens"], stats.get("cached_tokens", 0), rate)
        if self._editor is None or not self._editor.shows_status:
            note(f"{summary(stats, timings)}; {used} of {size} tokens of context used")

    def _advice(self, full: bool) -> str:
        return "; /clear starts a new conversation" if full and self.conversation.turns else ""

    # /commands

    def _clear(self, rest: str) -> None:
        try:
            self.sessions.detach()
        except PyllmError as error:
            note(f"Error: {error}; nothing was cleared")
            return
        self.conversation.turns.clear()
        self._attachments.clear()
        self.show_context()
        note("A new conversation")

    def _set_system(self, rest: str) -> None:
        self.conversation.system = rest or None
        self.show_context()
        note("System message set" if rest else "System message removed")

    def _help(self, rest: str) -> None:
        for line in (command.help or "").splitlines():
            if line.strip().startswith("/"):
                note(line.strip())

    def _exit(self, rest: str) -> None:
        self._ended = True

    def _refuse(self, rest: str) -> None:
        note(f"There are {', '.join(self.commands)}; a message that begins with / needs a space before it")
