"""What a rendered conversation has begun of the reply already: a thought that is open, or one that is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferplane.dialogue.replies.forms import ReplyForm


def is_reasoning_over(form: ReplyForm, prompt: str) -> bool:
    """Return whether a rendered conversation has begun the reply with a whole thought, as one that is turned off."""
    text = prompt.rstrip()
    return form.reasoning is not None and any(text.endswith(mark.strip()) for mark in form.reasoning.end_marks)


def is_reasoning_open(form: ReplyForm, prompt: str, messages: Sequence[Mapping[str, Any]], continues: bool) -> bool:
    """Return whether the reply begins inside of a thought.

    Args:
        form: how the model writes.
        prompt: the rendered conversation.
        messages: of the conversation.
        continues: the reply continues the last message, which may be a thought.
    """
    if form.reasoning is None:
        return False
    if not continues:
        return form.reasoning.is_open_after(prompt)
    last = str(messages[-1].get("content") or "")
    begin = max(last.rfind(mark) for mark in form.reasoning.begin_marks)
    return begin >= 0 and begin > max(last.rfind(mark) for mark in form.reasoning.end_marks)
