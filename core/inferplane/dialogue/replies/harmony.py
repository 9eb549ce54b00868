"""Reads gpt-oss's messages, whose headers name a channel, and for calls the function.

Source: https://developers.openai.com/cookbook/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from inferplane.dialogue.replies.calls import CallWriter
from inferplane.dialogue.replies.json_calls import copy_arguments
from inferplane.dialogue.replies.reader import SPACE, Emit, Marks, NotACall, Steps, TextEnded, TextReader

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END_MARKS = ("<|end|>", "<|return|>", "<|call|>")
CHANNELS = ("analysis", "commentary", "final")
MAX_HEADER = 256
"""Most characters of a header."""
_TO = r"(?:\s*\bto=(?:functions\.)?(?P<{}>[^\s<]+))?"
_HEADER = re.compile(
    rf"(?:{re.escape(START)}\s*assistant{_TO.format('first')}\s*)?{re.escape(CHANNEL)}\s*(?P<channel>{'|'.join(CHANNELS)})"
    rf"{_TO.format('second')}\s*(?:{re.escape(CONSTRAIN)})?\s*(?:[a-z]+)?\s*"
)
"""A header, with its recipient on either side of the channel. Some models write the type of the content behind the name
of the function without a space."""
_BEGUN_HEADER = re.compile(
    rf"(?:{re.escape(START)}\s*(?P<role>[a-z]*)\s*(?:to=(?P<first>[^\s<]*))?\s*)?"
    rf"(?:{re.escape(CHANNEL)}\s*(?P<channel>[a-z]*)\s*(?:\bto=(?P<second>[^\s<]*))?\s*(?:{re.escape(CONSTRAIN)})?"
    r"\s*[a-z]*\s*)?"
)
"""What a header may have begun with."""
_MARKS = Marks((*END_MARKS, START, CHANNEL))
"""What is between messages, and ends the text of one."""


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
    write = write_reasoning if is_open else calls.write_content
    mark = (yield from _copy_body(reader, write)) if is_open else ""
    while True:
        if mark not in (START, CHANNEL):
            write = calls.write_content
            mark = yield from _copy_body(reader, write)
            if mark in END_MARKS:  # one without a message, as where the end of a thought is forced between two
                continue
        if not mark:
            return
        if mark == START:
            write = calls.write_content
        reader.record(mark)
        try:
            mark, write = yield from _read_message(reader, calls, write_reasoning, mark, reads_calls)
        except NotACall:
            calls.abandon()
            write(reader.stop_record())
            mark = yield from _copy_body(reader, write)


def _read_message(
    reader: TextReader, calls: CallWriter, write_reasoning: Emit, mark: str, reads_calls: bool
) -> Steps[tuple[str, Emit]]:
    """Read a message after the mark that begins it.

    Returns:
        The mark that ended it, and what its text was passed to.
    """
    header, end = yield from reader.read_to(MAX_HEADER, MESSAGE, START, *END_MARKS, reads_mark=False)
    header = re.sub(r"\s+", " ", mark + header)
    if end != MESSAGE:  # it is cut off, by the end of the text or by a mark that is forced
        if not _is_begun(header, calls.tools):
            raise NotACall if end else TextEnded
        reader.stop_record()
        if not end:
            raise TextEnded
        return (yield from reader.match(end)), calls.write_content
    yield from reader.match(MESSAGE)
    again = header.rfind(CHANNEL)
    if header.count(CHANNEL) > 1 and _is_begun(header[:again], calls.tools):
        header = header[again:]
    parts = _HEADER.fullmatch(header)
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
        return END_MARKS[0], calls.write_content
    reader.stop_record()
    write = write_reasoning if parts["channel"] == "analysis" else calls.write_content
    return (yield from _copy_body(reader, write)), write


def _is_begun(text: str, functions: Iterable[str]) -> bool:
    """Whether a text is the beginning of a header of a message to all, or to one of the functions."""
    found = _BEGUN_HEADER.fullmatch(text)
    if found is None or not "assistant".startswith(found["role"] or ""):
        return False
    recipient = found["first"] or found["second"] or ""
    recipients = ("", *(known for name in functions for known in (name, "functions." + name)))
    return any(known.startswith(recipient) for known in recipients) and any(
        channel.startswith(found["channel"] or "") for channel in CHANNELS
    )


def _copy_body(reader: TextReader, write: Emit) -> Steps[str]:
    """Read the text of a message, and return the mark that ended it."""
    return (yield from reader.copy_until(_MARKS, write))[1]
