"""What `pyllm chat` does with whole conversations: sessions, taking turns back, branches, numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pyllm.commands.answer import Timings
from pyllm.commands.console import note, size_text
from pyllm.conversation import Conversation
from pyllm.errors import PyllmError, SessionError, TemplateError
from pyllm.prompt_cache.folder import SUFFIX, ready_path, session_files, session_path, sessions_dir

if TYPE_CHECKING:
    from pyllm.llm import LLM

_METER = 20  # characters
_SHIFTED = "; those behind them were shifted when the context was full, and are computed anew"
_TEXTS_ALONE = "; what was said is there, all of it is computed anew"


class Asker(Protocol):
    """The chat, as the commands see it."""

    conversation: Conversation

    def ask(self, question: str) -> None:
        """Answer a question, or say why not."""

    def show_context(self) -> None:
        """The conversation is another one: say how full the context is with it."""


def num_tokens(llm: LLM, conversation: Conversation) -> int:
    """Tokens of the context that a conversation takes; 0 where its template wants a question first."""
    if not conversation.turns:
        return 0
    try:
        return len(
            llm.chat_tokens(conversation.messages(), answers=conversation.answers(), add_generation_prompt=False)
        )
    except TemplateError:
        return 0


def load(llm: LLM, name: str) -> Conversation | None:
    """Bring a session back; None where there is none of that name yet.

    Raises:
        SessionError: it is damaged, or of another model; nothing has changed.
        ContextError: it does not fit.
    """
    path = session_path(name)
    if not path.exists():
        return None
    session = llm.load_session(path)
    try:
        conversation = Conversation.from_json(session.chat)
    except ValueError as error:
        raise SessionError(f"{path}: {error}; it was saved by another program") from None
    turns = len(conversation.turns)
    note(
        f"Session {name}: {turns} turn{'' if turns == 1 else 's'}, {len(session.token_ids)} tokens that need not be "
        f"computed ({size_text(session.num_bytes)}){_SHIFTED if session.shifted else ''}"
    )
    return conversation


def resumed(llm: LLM, session: str | None, begun: Conversation) -> Conversation:
    """The conversation of a session; of none, or one that is not there yet, the one that was begun. A system message
    that was given now counts."""
    conversation = (load(llm, session) if session is not None else None) or begun
    if begun.system is not None:
        conversation.system = begun.system
    return conversation


def save(llm: LLM, name: str, conversation: Conversation) -> None:
    """Write a session.

    Raises:
        SessionError: it cannot be written.
    """
    path = ready_path(name)
    ids = llm.chat_tokens(conversation.messages(), answers=conversation.answers(), add_generation_prompt=False)
    session = llm.save_session(path, ids, conversation.to_json())
    more = _SHIFTED if session.shifted else "" if session.token_ids else _TEXTS_ALONE
    note(f"Saved {len(session.token_ids)} tokens in {path} ({size_text(session.num_bytes)}){more}")


class SessionCommands:
    """The commands of one chat.

    Args:
        name: of the session that the chat was opened with.
    """

    def __init__(self, llm: LLM, chat: Asker, name: str | None) -> None:
        self._llm = llm
        self._chat = chat
        self.name = name
        self._saved: Conversation | None = chat.conversation.copy() if name else None
        self._branches = [chat.conversation]

    def table(self) -> dict[str, Callable[[str], None]]:
        """What each command does with the rest of its line."""
        return {
            "/save": self._told(self._save),
            "/load": self._told(self._load),
            "/sessions": self._list,
            "/undo": self._undo,
            "/regen": self._regen,
            "/edit": self._edit,
            "/fork": self._fork,
            "/stats": self._stats,
        }

    def names(self) -> list[str]:
        """Of the saved sessions."""
        return [path.name.removesuffix(SUFFIX) for path in session_files(sessions_dir())]

    def save_at_end(self) -> None:
        """Save the chat's own session, where it has one that has changed.

        Raises:
            PyllmError: it cannot be saved.
        """
        if self.name and self._chat.conversation.turns and self._chat.conversation != self._saved:
            save(self._llm, self.name, self._chat.conversation)

    def _told(self, command: Callable[[str], None]) -> Callable[[str], None]:
        def run(rest: str) -> None:
            try:
                command(rest)
            except PyllmError as error:
                note(f"Error: {error}")
            except KeyboardInterrupt:
                note("Interrupted; nothing was saved or loaded")

        return run

    def detach(self) -> None:
        """A new conversation begins: the one so far is saved, and its session stays as it is then.

        Raises:
            PyllmError: it cannot be saved; it is the chat's session still.
        """
        self.save_at_end()
        if self.name:
            note(f"Session {self.name} stays as it is")
        self.name = self._saved = None

    def _save(self, rest: str) -> None:
        replaces = rest.startswith("-f ")
        name = rest.removeprefix("-f ").strip() or self.name
        if not name:
            note("Give it a name: /save NAME, or a path")
        elif not self._chat.conversation.turns:
            note("There is nothing to save yet")
        elif name != self.name and not _may_write(session_path(name), replaces):
            note(f"{session_path(name)} is there already; /save -f {name} replaces a session")
        else:
            save(self._llm, name, self._chat.conversation)
            if self.name in (None, name):  # otherwise it is a copy
                self.name, self._saved = name, self._chat.conversation.copy()

    def _load(self, rest: str) -> None:
        name = rest or self.name
        if not name:
            note("Which one? /load NAME; /sessions lists them")
            return
        self.save_at_end()
        conversation = load(self._llm, name)
        if conversation is None:
            note(f"There is no session {name}; /sessions lists them")
            return
        self._become(conversation)
        self.name, self._saved = name, conversation.copy()

    def _list(self, rest: str) -> None:
        files = session_files(sessions_dir())
        for path in files:
            note(f"{path.name.removesuffix(SUFFIX)}  {size_text(_size(path))}")
        if not files:
            note(f"There are none in {sessions_dir()}; /save NAME makes one")

    def _undo(self, rest: str) -> None:
        turns = self._chat.conversation.turns
        if turns:
            note(f"Taken back: {_short(turns.pop().question)}")
            self._chat.show_context()
        else:
            note("There is nothing to take back")

    def _regen(self, rest: str) -> None:
        self._ask_again("There is no answer yet")

    def _edit(self, rest: str) -> None:
        if rest:
            self._ask_again("There is no question yet", rest)
        else:
            note("/edit TEXT puts TEXT in the place of the last question")

    def _ask_again(self, nothing: str, question: str | None = None) -> None:
        """The last question, or another in its place. Without an answer the conversation is as it was."""
        turns = self._chat.conversation.turns
        if not turns:
            note(nothing)
            return
        last, before = turns.pop(), len(turns)
        try:
            self._chat.ask(question or last.question)
        finally:
            if self._chat.conversation.turns is turns and len(turns) == before:
                turns.append(last)
                self._chat.show_context()

    def _fork(self, rest: str) -> None:
        """A copy that grows by itself, or back to another branch."""
        here = next(i for i, one in enumerate(self._branches) if one is self._chat.conversation)
        if not rest:
            self._become(self._chat.conversation.copy(), keep=True)
            note(f"Branch {len(self._branches)}, a copy of {here + 1}; /fork {here + 1} goes back")
        elif rest.isdecimal() and 1 <= int(rest) <= len(self._branches):
            self._chat.conversation = self._branches[int(rest) - 1]
            self._chat.show_context()
            note(f"Branch {int(rest)}, {len(self._chat.conversation.turns)} turns")
        else:
            note(f"There are branches 1 to {len(self._branches)}; /fork alone makes another")

    def _become(self, conversation: Conversation, keep: bool = False) -> None:
        here = next(i for i, one in enumerate(self._branches) if one is self._chat.conversation)
        self._chat.conversation = conversation
        if keep:
            self._branches.append(conversation)
        else:
            self._branches[here] = conversation
            self._chat.show_context()

    def _stats(self, rest: str) -> None:
        used, size, stats = num_tokens(self._llm, self._chat.conversation), self._llm.ctx_size, self._llm.stats
        filled = round(_METER * min(1, used / size))
        note(f"Context  [{'#' * filled}{'.' * (_METER - filled)}] {used} of {size} tokens")
        if not stats:
            note("Nothing was computed yet")
            return
        note("The last answer:")
        cached, prompt = stats.get("cached_tokens", 0), stats["prompt_tokens"]
        note(f"Prompt   {prompt} tokens, {cached} of them from before ({100 * cached / max(prompt, 1):.0f} %)")
        timings = Timings.of(0.0, stats)
        note(f"Prefill  {timings.prefill_seconds:.2f} s, {timings.prefill_tokens_per_second:.1f} tokens/s")
        note(f"Decode   {timings.decode_seconds:.2f} s, {timings.decode_tokens_per_second:.1f} tokens/s")
        for name, pool in stats.get("memory", {}).items():
            in_use, most, budget = (size_text(pool[key]) for key in ("bytes", "high_water_bytes", "budget_bytes"))
            note(f"{name.capitalize():8} {in_use} of the host's memory, at most {most} so far, {budget} allowed")


def _may_write(path: Path, replaces: bool) -> bool:
    """Whether a session can be written there: a file that is none is never replaced, a session when that is wanted."""
    if not os.path.lexists(path):
        return True
    if not replaces:
        return False
    from pyllm.prompt_cache.session_file import SessionReader

    try:
        with SessionReader(path):
            return True
    except SessionError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
