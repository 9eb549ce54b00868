"""Continues the last message of a conversation in place of a reply: templates end a message with marks of their own, so
the text that is to be continued gets a mark behind it, at which the rendered conversation ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferplane.dialogue.messages import MessageError

FIELD = "continue_final_message"


def mark_last(messages: Sequence[Mapping[str, Any]], mark: str) -> Sequence[Mapping[str, Any]]:
    """Return the messages, the last one with a mark behind its text; "" marks nothing.

    Raises:
        MessageError: the last message has no text.
    """
    if not mark:
        return messages
    last = messages[-1]
    if not isinstance(last.get("content"), str) or last.get("tool_calls"):
        raise MessageError.at(FIELD, "The last message has no text to continue.")
    return [*messages[:-1], {**last, "content": f"{last['content']}{mark} "}]


def truncate_at_mark(text: str, mark: str) -> str:
    """Return a rendered conversation up to the mark, without it. A template that removes the space behind the mark
    would have removed spaces at the end of the message.

    Raises:
        MessageError: the template left the mark out.
    """
    if not mark:
        return text
    before, found, after = text.rpartition(mark)
    if not found:
        raise MessageError.at(FIELD, "The chat template does not show the last message.")
    return before if after.startswith(" ") else before.rstrip()
