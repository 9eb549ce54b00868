"""Reads a reply as it is generated, and states its parts in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from inferplane.dialogue.replies.calls import BareCall
from inferplane.dialogue.replies.events import Arguments, CallStart, Event, Reasoning
from inferplane.dialogue.replies.forms import ReplyForm
from inferplane.dialogue.replies.parser import ReplyParser
from inferplane.dialogue.tools import CallIds, join_calls
from inferplane.serving.chat.custom_input import InputReader
from inferplane.serving.chat.tools import ToolPlan

REASONING = ("reasoning_content", "reasoning")
"""The names of a thought: DeepSeek's and vLLM's older one, and OpenRouter's and vLLM's present one."""


@dataclass(frozen=True)
class ReplyPlan:
    """How the replies to a request are read.

    Args:
        tools: what its tools mean.
        form: how the model writes thoughts and calls.
        reasoning_is_open: the prompt has begun the thought.
        shows_reasoning: the answer has the thought, too.
        is_reasoning_content: the thought is part of the content, with its marks.
        is_bare: the text after the thought is what a named tool is called with, without marks.
        id_form: ids of the model's calls, with the slots `{name}` and `{index}`; "": they have none.
        num_earlier_calls: calls in the conversation, which such ids count, too.
    """

    tools: ToolPlan
    form: ReplyForm
    reasoning_is_open: bool = False
    shows_reasoning: bool = True
    is_reasoning_content: bool = False
    is_bare: bool = False
    id_form: str = ""
    num_earlier_calls: int = 0

    @property
    def is_plain(self) -> bool:
        """All text is content."""
        return self.form.reasoning is None and self.tools.mode == "none" and not self.form.uses_channels

    @property
    def has_reasoning(self) -> bool:
        """Answers have a place for a thought."""
        return self.form.reasoning is not None and self.shows_reasoning and not self.is_reasoning_content


class ReplyReader:
    """Reads one reply. Each part is a delta, as in OpenAI's streams: content, a thought, or a piece of one call.

    Args:
        plan: how.
    """

    def __init__(self, plan: ReplyPlan) -> None:
        self._plan = plan
        mode = "none" if plan.is_bare else plan.tools.mode
        self._parser = ReplyParser(
            plan.form,
            plan.tools.tools,
            reasoning_is_open=plan.reasoning_is_open,
            mode=mode,
            max_calls=plan.tools.max_calls,
            keeps_marks=plan.is_reasoning_content,
        )
        self._bare = BareCall(plan.tools.named) if plan.is_bare else None
        self._inputs: dict[int, InputReader] = {}
        self._custom = set[int]()
        self._ids = CallIds(plan.id_form, plan.num_earlier_calls)
        self.num_calls = 0

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Add text, and return the parts that are certain."""
        return self._state_all(self._parser.feed(text))

    def end(self) -> list[dict[str, Any]]:
        """End the text, and return the remaining parts."""
        found = self._state_all(self._parser.end())
        if self._bare is not None:
            found += [delta for event in self._bare.end() for delta in self._states(event)]
        for index, reader in self._inputs.items():
            found += self._piece(index, reader.end())
        return found

    def _state_all(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        read = events if self._bare is None else self._bare.read(events)
        return [delta for event in read for delta in self._states(event)]

    def _states(self, event: Event) -> Iterator[dict[str, Any]]:
        if isinstance(event, Reasoning):
            if self._plan.shows_reasoning:
                names = ("content",) if self._plan.is_reasoning_content else REASONING
                yield dict.fromkeys(names, event.text)
        elif isinstance(event, CallStart):
            yield from self._begin(event)
        elif isinstance(event, Arguments):
            reader = self._inputs.get(event.index)
            yield from self._piece(event.index, reader.feed(event.text) if reader else event.text)
        else:
            yield {"content": event.text}

    def _begin(self, event: CallStart) -> Iterator[dict[str, Any]]:
        self.num_calls += 1
        call = {"index": event.index, "id": self._ids.choose(event.id, event.name, event.index)}
        if event.name in self._plan.tools.custom:
            self._custom.add(event.index)
            if self._bare is None:  # else the text is the tool's input itself
                self._inputs[event.index] = InputReader()
            yield {"tool_calls": [{**call, "type": "custom", "custom": {"name": event.name, "input": ""}}]}
        else:
            yield {"tool_calls": [{**call, "type": "function", "function": {"name": event.name, "arguments": ""}}]}

    def _piece(self, index: int, text: str) -> Iterator[dict[str, Any]]:
        if text:
            kind, key = ("custom", "input") if index in self._custom else ("function", "arguments")
            yield {"tool_calls": [{"index": index, kind: {key: text}}]}


@dataclass
class JoinedReply:
    """A whole reply, joined from its parts.

    Args:
        content: for the user.
        reasoning: the thought.
        calls: with their ids, as in OpenAI's messages.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, deltas: Sequence[dict[str, Any]]) -> JoinedReply:
        """Return the reply that deltas make, in the order of a stream."""
        return cls(
            "".join(delta.get("content", "") for delta in deltas),
            "".join(delta.get(REASONING[0], "") for delta in deltas),
            join_calls(call for delta in deltas for call in delta.get("tool_calls", ())),
        )
