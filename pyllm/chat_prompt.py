"""From chat messages to token ids, so that nothing a person wrote can pose as one of the template's special tokens.

The rendered template is one string in which the template's own `<|im_start|>` and one typed by a user look alike. So
special-token strings in message contents are replaced by stand-in characters before rendering. Afterwards the rendered
text is cut at the special tokens that are left (the template's own), and the stand-ins are turned back in the pieces,
which are then encoded as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pyllm.chat_template import ChatTemplate
from pyllm.tokenizer import Tokenizer

_STAND_INS = range(0xF0000, 0xFFFFD)  # Unicode's private-use plane 15


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **template_args: Any
) -> list[int]:
    """Token ids of a conversation, ready to be continued; one BOS at most.

    Raises:
        TemplateError: the template refuses the messages.
    """
    guard = _Guard(tokenizer.control_texts(), messages)
    rendered = template.render(guard.protect(messages), add_generation_prompt=True, **template_args)
    ids: list[int] = []
    for piece in guard.cut(rendered):
        if piece in guard.controls:
            ids.append(guard.controls[piece])
        elif piece:
            ids.extend(tokenizer.encode(guard.restore(piece), add_special=False, parse_special=False))
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


class _Guard:
    """Stand-ins for the special-token strings that occur in one conversation.

    Args:
        controls: text -> id of the tokens that plain text must not produce.
    """

    def __init__(self, controls: Mapping[str, int], messages: Any) -> None:
        self.controls = controls
        # Longest first, as tokenisers match them.
        self._pattern = re.compile("|".join(map(re.escape, sorted(controls, key=len, reverse=True))) or r"(?!)")
        used = set("".join(_strings(messages)))
        self._free = (chr(code) for code in _STAND_INS if chr(code) not in used)
        self._stand_ins: dict[str, str] = {}

    def protect(self, value: Any) -> Any:
        """The same structure with stand-ins in all its strings."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._stand_in(match.group()), value)
        if isinstance(value, Mapping):
            return {key: self.protect(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.protect(item) for item in value]
        return value

    def cut(self, rendered: str) -> list[str]:
        """Plain pieces and special-token strings in turn."""
        return re.split(f"({self._pattern.pattern})", rendered)

    def restore(self, piece: str) -> str:
        for text, stand_in in self._stand_ins.items():
            piece = piece.replace(stand_in, text)
        return piece

    def _stand_in(self, text: str) -> str:
        if text not in self._stand_ins:
            self._stand_ins[text] = next(self._free)
        return self._stand_ins[text]


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _strings(item)]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in _strings(item)]
    return []
