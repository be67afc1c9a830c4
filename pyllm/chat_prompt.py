"""From chat messages to token ids, so that nothing a person wrote can pose as one of the template's control tokens.

The rendered template is one string, in which the template's own `<|im_start|>` and one typed by a user look alike. So
characters are told apart by where they come from (`template_marks`). What holds:

* Every character of a control token comes from the template's literals, from a message's role, or from the BOS and EOS
  variables. Contents, names, tools and all other arguments never contribute one, whatever the template does with them:
  join parts, change case, cut pieces out.
* A template finds in the messages what is there, also markers such as `</think>`.
* A role is chosen by the calling program, and templates make tokens of it (`<|` + role + `|>`): programs must not take
  roles from users.
* A template's own control token becomes plain text if the template changes its case, cuts it, or formats it in ways
  that `template_sandbox` does not follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyllm.chat_template import ChatTemplate
from pyllm.errors import PyllmError
from pyllm.tokenizer import Tokenizer


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    answers: Sequence[Sequence[int]] = (),
    **template_args: Any,
) -> list[int]:
    """Token ids of a conversation, ready to be continued; one BOS at most.

    Args:
        add_generation_prompt: with what begins the assistant's turn.
        answers: token ids of the assistant's messages, in order, as they were generated. Where the template writes a
            message as these tokens say it, they stand for it: another text encodes in many ways.

    Raises:
        TemplateError: the template refuses the messages.
    """
    ids: list[int] = []
    template_args = {**template_args, "add_generation_prompt": add_generation_prompt}
    known = deque(_known_answers(tokenizer, messages, answers))
    for piece in template.pieces(messages, tokenizer.controls, **template_args):
        if isinstance(piece, int):
            ids.append(piece)
            continue
        while known and (start := piece.rfind(known[0][0])) >= 0:
            text, answer = known.popleft()
            ids += [*tokenizer.encode(piece[:start], add_special=False, parse_special=False), *answer]
            piece = piece[start + len(text) :]
        ids += tokenizer.encode_again(piece)  # what stands around messages is the same in many prompts
    return _with_bos(tokenizer, ids)


def encode_chats(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    conversations: Sequence[tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]],
) -> list[list[int] | PyllmError]:
    """`encode_chat` for each of several conversations, at less cost: their texts are encoded together.

    Args:
        conversations: messages and further variables of the template.

    Returns:
        For each its ids, or what is wrong with it.
    """
    rendered = [_rendered(tokenizer, template, *conversation) for conversation in conversations]
    pieces = [piece for found in rendered if not isinstance(found, PyllmError) for piece in found]
    encoded = iter(tokenizer.encode_all([piece for piece in pieces if isinstance(piece, str)]))
    return [found if isinstance(found, PyllmError) else _joined(tokenizer, found, encoded) for found in rendered]


def _rendered(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    template_args: Mapping[str, Any],
) -> list[str | int] | PyllmError:
    try:
        return template.pieces(messages, tokenizer.controls, **template_args)
    except PyllmError as error:
        return error


def _joined(tokenizer: Tokenizer, pieces: Sequence[str | int], encoded: Iterator[Sequence[int]]) -> list[int]:
    """Ids of pieces, of which the texts are encoded already."""
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            ids.append(piece)
        else:
            ids += next(encoded)
    return _with_bos(tokenizer, ids)


def _with_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def _known_answers(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], answers: Sequence[Sequence[int]]
) -> list[tuple[str, Sequence[int]]]:
    """Texts of the assistant's messages with the tokens that say just that, control tokens not among them."""
    said = [message.get("content") for message in messages if message.get("role") == "assistant"]
    return [
        (text, ids)
        for text, ids in zip(said, answers, strict=False)
        if text and ids and not any(map(tokenizer.is_control, ids)) and tokenizer.decode(ids) == text
    ]
