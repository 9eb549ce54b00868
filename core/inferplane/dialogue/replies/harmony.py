"""Reads gpt-oss's messages, whose headers name a channel, and for calls the function.

Source: https://developers.openai.com/cookbook/articles/openai-harmony.
"""

from __future__ import annotations

import re

from inferplane.dialogue.replies.calls import CallWriter
from inferplane.dialogue.replies.json_calls import copy_arguments
from inferplane.dialogue.replies.reader import SPACE, Emit, Marks, NotACall, Steps, TextEnded, TextReader

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END_MARKS = ("<|end|>", "<|return|>", "<|call|>")
MAX_HEADER = 256
"""Most characters of a header."""
_TO = r"(?:\s*\bto=(?:functions\.)?(?P<{}>[^\s<]+))?"
_HEADER = re.compile(
    rf"(?:{re.escape(START)}\s*assistant{_TO.format('first')}\s*)?{re.escape(CHANNEL)}\s*(?P<channel>analysis|commentary|final)"
    rf"{_TO.format('second')}\s*(?:{re.escape(CONSTRAIN)})?\s*(?:[a-z]+)?\s*"
)
"""A header, with its recipient on either side of the channel. Some models write the type of the content behind the name
of the function without a space."""
_HEADERS = Marks((START, CHANNEL))
_BODY_END_MARKS = Marks((*END_MARKS, START))


def read_harmony(
    reader: TextReader, calls: CallWriter, write_reasoning: Emit, is_open: bool, reads_calls: bool
) -> Steps[None]:
    """Read a whole reply.

    Args:
        reader: of the reply.
        calls: takes calls and content.
        write_reasoning: takes the text of the channel "analysis".
        is_open: the reply begins inside of such a message.
        reads_calls: messages to functions are calls; else they are content.
    """
    mark = (yield from _copy_body(reader, write_reasoning)) if is_open else ""
    while True:
        if mark != START:
            _, mark = yield from reader.copy_until(_HEADERS, calls.write_content)
        if not mark:
            return
        reader.record(mark)
        try:
            mark = yield from _read_message(reader, calls, write_reasoning, mark, reads_calls)
        except NotACall:
            calls.abandon()
            calls.write_content(reader.stop_record())
            mark = yield from _copy_body(reader, calls.write_content)


def _read_message(
    reader: TextReader, calls: CallWriter, write_reasoning: Emit, mark: str, reads_calls: bool
) -> Steps[str]:
    """Read a message after the mark that begins it. Returns the mark that ended it."""
    header, found = yield from reader.read_to(MAX_HEADER, MESSAGE)
    if not found:
        raise TextEnded
    parts = _HEADER.fullmatch(mark + header)
    if parts is None:
        raise NotACall
    recipient = parts["first"] or parts["second"]
    if recipient:
        if not reads_calls:
            raise NotACall
        calls.announce(recipient if recipient in calls.tools else recipient.removesuffix("json"))
        yield from reader.skip(SPACE)
        yield from copy_arguments(reader, calls.begin, calls.write)
        calls.finish()
        yield from reader.skip(SPACE)
        if not (yield from reader.match(*END_MARKS, is_expected=True)):
            raise NotACall if (yield from reader.next_character()) else TextEnded
        reader.stop_record()
        return END_MARKS[0]
    reader.stop_record()
    is_thought = parts["channel"] == "analysis"
    return (yield from _copy_body(reader, write_reasoning if is_thought else calls.write_content))


def _copy_body(reader: TextReader, write: Emit) -> Steps[str]:
    """Read the text of a message, and return the mark that ended it."""
    return (yield from reader.copy_until(_BODY_END_MARKS, write))[1]
