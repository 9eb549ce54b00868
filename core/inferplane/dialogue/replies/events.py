"""What a reply consists of, in pieces: the events of `ReplyParser`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the thought before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins.

    Args:
        index: number of the call in its reply, from 0.
        name: of a known function.
        id: the call's id in the text; "" where the form has none.
    """

    index: int
    name: str
    id: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments. All pieces of a complete call, one after the other, are one JSON object.

    Args:
        index: number of the call.
        text: JSON text, which may break off anywhere, inside an escape too.
    """

    index: int
    text: str


Event = Reasoning | Content | CallStart | Arguments


def join_events(events: list[Event]) -> list[Event]:
    """Return events with neighbouring pieces of the same thing joined into one."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Arguments) and isinstance(last, Arguments) and last.index == event.index:
            out[-1] = Arguments(event.index, last.text + event.text)
        elif isinstance(event, (Reasoning, Content)) and type(last) is type(event):
            assert isinstance(last, (Reasoning, Content))
            out[-1] = type(event)(last.text + event.text)
        else:
            out.append(event)
    return out
