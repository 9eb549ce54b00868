"""Tools of a conversation, as chat templates and models get them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def new_call_id() -> str:
    """Return an id for a call: nine letters and digits, as Mistral's templates demand when the call comes back."""
    return uuid.uuid4().hex[:9]


def make_call_id(id_form: str, name: str, index: int) -> str:
    """Return an id for a call whose text has none: in the model's own form, if that is made of name and number.

    Args:
        id_form: of the model's `ToolForm`; "": there is none.
        name: of the function.
        index: number of the call in its conversation.
    """
    if not id_form or "{id}" in id_form:
        return new_call_id()
    return id_form.format(name=name, index=index)


class CallIds:
    """Chooses an id for each call of one reply, different from those of the calls before it.

    Args:
        id_form: as of `make_call_id`.
        num_earlier_calls: calls in the conversation before the reply.
    """

    def __init__(self, id_form: str, num_earlier_calls: int) -> None:
        self._id_form, self._num_earlier_calls = id_form, num_earlier_calls
        self._chosen: set[str] = set()

    def choose(self, own_id: str, name: str, index: int) -> str:
        """Return the id of a call.

        Args:
            own_id: the id in the text; "": there is none.
            name: of the function.
            index: number of the call in the reply.
        """
        found = own_id
        if not found or found in self._chosen:
            found = make_call_id(self._id_form, name, self._num_earlier_calls + index)
        while found in self._chosen:
            found = new_call_id()
        self._chosen.add(found)
        return found


def join_calls(pieces: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls that pieces make, in the order of their indices.

    Args:
        pieces: in the form of OpenAI's streams: the first of a call has its id, type and name, all have its index and a
            piece of its arguments, or of a custom tool's input.
    """
    first, texts = dict[int, Mapping[str, Any]](), dict[int, list[str]]()
    for piece in pieces:
        index = piece["index"]
        first.setdefault(index, piece)
        body = piece.get("function") or piece["custom"]
        texts.setdefault(index, []).append(body.get("arguments") or body.get("input") or "")
    return [_whole_call(call, "".join(texts[index])) for index, call in sorted(first.items())]


def _whole_call(first: Mapping[str, Any], text: str) -> dict[str, Any]:
    kind, key = ("function", "arguments") if "function" in first else ("custom", "input")
    return {"id": first["id"], "type": first["type"], kind: {"name": first[kind]["name"], key: text}}


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Describe tools in text, for models whose chat template does not support tools."""
    listed = "\n".join(json.dumps(t["function"], ensure_ascii=False) for t in tools)
    return 'To call one of these functions, answer with JSON alone: {"name": <its name>, "arguments": {...}}\n' + listed
