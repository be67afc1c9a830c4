"""A conversation: what was said, the token ids of the answers, and both as JSON for session files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Attributes:
        answer_ids: tokens of the answer as they were generated, without an end token; empty when they are not known.
    """

    question: str
    answer: str
    answer_ids: tuple[int, ...] = ()


@dataclass
class Conversation:
    """What the model sees: the system message, then questions and answers in turn."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def asking(self, question: str) -> list[dict[str, str]]:
        """All messages, and one more of the user."""
        return [*self.messages(), {"role": "user", "content": question}]

    def messages(self) -> list[dict[str, str]]:
        """All messages."""
        said = [{"role": "system", "content": self.system}] if self.system is not None else []
        for turn in self.turns:
            said.append({"role": "user", "content": turn.question})
            said.append({"role": "assistant", "content": turn.answer})
        return said

    def answers(self) -> list[tuple[int, ...]]:
        """Token ids of the answers, in order."""
        return [turn.answer_ids for turn in self.turns]

    def add(self, question: str, answer: str, answer_ids: tuple[int, ...] = ()) -> None:
        """Remember a question that was answered."""
        self.turns.append(Turn(question, answer, answer_ids))

    def copy(self) -> Conversation:
        """One that grows by itself."""
        return Conversation(self.system, list(self.turns))

    def to_json(self) -> dict[str, Any]:
        """For a session file."""
        turns = [[turn.question, turn.answer, list(turn.answer_ids)] for turn in self.turns]
        return {"system": self.system, "turns": turns}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Conversation:
        """The reverse of `to_json`.

        Raises:
            ValueError: it is something else.
        """
        try:
            turns = [Turn(_text(q), _text(a), tuple(map(_token, ids))) for q, a, ids in value["turns"]]
            return cls(None if value["system"] is None else _text(value["system"]), turns)
        except (KeyError, TypeError) as error:
            raise ValueError("it holds no conversation") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("it holds no conversation")
    return value


def _token(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError("it holds no conversation")
    return value
