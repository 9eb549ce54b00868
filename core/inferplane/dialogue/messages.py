"""Messages of a conversation in the one form that chat templates get, whichever interface they came through.

Sources: OpenAI's chat messages, https://platform.openai.com/docs/api-reference/chat/create; what transformers passes to
templates, https://huggingface.co/docs/transformers/chat_templating.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from reprlib import Repr
from typing import Any

from inferplane.dialogue.near_names import find_nearest
from inferplane.errors import UsageError

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_KEYS = 64
"""Most keys of a message: OpenAI's and templates' have a dozen."""
MAX_NAME_CHARACTERS = 256
"""Most characters of a name or an id in a message."""
MAX_ARGUMENT_VALUES = 2**16
"""Most values and keys in the arguments of a conversation's calls; the arguments of 2,048 calls have some ten thousand.
"""
TEXT_PARTS = {"text": "text", "refusal": "refusal"}
"""Type of a part of a message -> the key of its text."""
MEDIA = {
    **dict.fromkeys(("image", "images", "image_url", "input_image"), "Images"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "Audio"),
    **dict.fromkeys(("video", "videos", "video_url", "input_video"), "Videos"),
    **dict.fromkeys(("file", "files", "input_file"), "Files"),
}
"""Type of a part, or key of a message -> what it holds."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of an earlier answer's reasoning. Templates read the first or the second; each gets the text of any."""
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "id", "refusal", *REASONING)
"""The known keys of a message. Others are for the template; one that is near a known key is taken for a typo."""
CONTINUED = ("prefix", "partial")
"""Keys by which DeepSeek, Moonshot and Qwen continue an assistant's message; a request has a field for that here."""
OTHER_ARGUMENTS = ("parameters", "args", "input")
"""What clients call the arguments of a function; without `arguments` they would be lost."""
MAX_COMPARED = 256
"""Most keys of a conversation that are compared with the known ones."""
_FORM = 'lists of {"role": ..., "content": ...}'


class _Short(Repr):
    """Shows the beginning of any value. The base class sorts all keys of a mapping to show four."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


short = _Short().repr


class MessageError(UsageError):
    """A message is not valid. `param` is the path of what is wrong, as in `messages[0].content`; `is_missing` tells
    that it is not there.
    """

    param, is_missing = "messages", False

    @classmethod
    def at(cls, param: str, what: str, there_is: str = "", remedy: str = "", is_missing: bool = False) -> MessageError:
        """Return the error about what is at a path."""
        error = cls(what, there_is=there_is, remedy=remedy)
        error.param, error.is_missing = param, is_missing
        return error


def normalize_messages(messages: Any, default_role: str = "") -> list[dict[str, Any]]:
    """Check a conversation, and return it as chat templates expect it.

    Content is text (parts are joined by line ends), a refusal's where there is no other, or None in a message that has
    only tool calls. The role "developer" is "system". A call's arguments are JSON text, however they came; empty ones
    are `{}`. Other keys that are not None are kept: some templates know them.

    Args:
        messages: mappings in OpenAI's form, oldest first.
        default_role: of a message without a role; "": there must be one.

    Raises:
        MessageError: it is no conversation, or holds what is no text.
    """
    if (
        isinstance(messages, str)
        or not isinstance(messages, Sequence)
        or not all(isinstance(m, Mapping) for m in messages)
    ):
        remedy = "use generate for a plain prompt"
        raise MessageError.at("messages", f"messages = {short(messages)}.", _FORM, remedy)
    if not messages:
        raise MessageError.at("messages", "messages = [].", remedy="pass at least one message")
    roles = {"role": default_role} if default_role else {}
    found = [_normalize({**roles, **message}, i) for i, message in enumerate(messages)]
    _check_near_names(messages)
    _check_arguments(found)
    return found


def _normalize(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    path = f"messages[{index}]"
    if len(message) > MAX_KEYS:
        raise MessageError.at(path, f"{path} has {len(message)} keys.", f"messages of at most {MAX_KEYS} keys")
    _check_keys(message, index)
    _check_unsupported(message, path)
    out: dict[str, Any] = {}
    for key, value in message.items():
        if key == "role":
            out[key] = "system" if value == "developer" else value
        elif key == "content":
            out[key] = _text(value, f"{path}.content")
        elif key == "tool_calls":
            calls = _calls(() if value is None else value, f"{path}.tool_calls")
            out.update({key: calls} if calls else {})
        elif value is not None and not (key in CONTINUED and value is False):
            out[key] = _other(key, value, path)
    if not out.get("content"):
        out["content"] = None if "tool_calls" in out else _refusal(message)
    reasoning = next((out[key] for key in REASONING if key in out), None)
    return out if reasoning is None else {"thinking": reasoning, **out, "reasoning_content": reasoning}


def _check_keys(message: Mapping[str, Any], index: int) -> None:
    """Raise MessageError if a message lacks a role or a content, or has an unknown role."""
    path = f"messages[{index}]"
    for name in ("role", "content"):
        if name in message or (name == "content" and ("tool_calls" in message or _refusal(message))):
            continue
        close = get_close_matches(name, [str(key)[:MAX_NAME_CHARACTERS] for key in message], n=1)
        remedy = f"write {name!r} in place of {close[0]!r}" if close else f"give it a {name}"
        what = f"Message {index} lacks {name!r}: {path} = {short(dict(message))}."
        raise MessageError.at(f"{path}.{name}", what, _FORM, remedy, is_missing=True)
    if message["role"] not in ROLES:
        there = ", ".join(map(repr, ROLES))
        raise MessageError.at(f"{path}.role", f"{path} has the role {short(message['role'])}.", there)


def _check_unsupported(message: Mapping[str, Any], path: str) -> None:
    """Raise MessageError if a key asks for what templates cannot do."""
    for key in CONTINUED:
        if message.get(key) is True and message["role"] == "assistant":
            remedy = "leave it out; chat completions have the field continue_final_message"
            raise MessageError.at(f"{path}.{key}", f"{path}.{key} is not supported.", remedy=remedy)
    if message.get("function_call") is not None:
        where = f"{path}.function_call"
        raise MessageError.at(where, f"{where} is not supported.", remedy="use tool_calls")


def _check_near_names(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise MessageError if a key is near a known one that its message lacks, and therefore probably mistyped."""
    compared: set[tuple[Any, ...]] = set()
    for i, message in enumerate(messages):
        absent = tuple(key for key in KEYS if key not in message)
        for key in message:
            if key in KEYS or message[key] is None or not isinstance(key, str) or (key, absent) in compared:
                continue
            compared.add((key, absent))
            if len(compared) > MAX_COMPARED:
                return
            if near := find_nearest(key, absent):
                raise _make_error(f"messages[{i}]", key, near)


def _make_error(path: str, key: str, known: str) -> MessageError:
    where = f"{path}.{key}"
    return MessageError.at(where, f"{where!r} is no known key.", remedy=f"write {known!r} in place of {key!r}")


def _refusal(message: Mapping[str, Any]) -> str:
    """What an assistant said in place of a content; "" if that is nothing."""
    reason = message.get("refusal") if message.get("role") == "assistant" else None
    return reason if isinstance(reason, str) else ""


def _text(content: Any, path: str) -> str | None:
    """The text of a message's content, of which parts are joined as lines."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise MessageError.at(path, f"{path} = {short(content)}.", "strings, and lists of parts with the type 'text'")
    return "\n".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        media = MEDIA.get(kind) if isinstance(kind, str) else None
        what = f"{media} are not supported: {path} has the type {kind!r}." if media else f"{path} = {short(part)}."
        raise MessageError.at(f"{path}.type" if kind else path, what, 'parts as {"type": "text", "text": ...}')
    if not isinstance(part.get(key), str):
        what = f"{path}.{key} = {short(part[key])}." if key in part else f"{path} lacks {key!r}."
        raise MessageError.at(f"{path}.{key}", what, "strings", is_missing=key not in part)
    return str(part[key])


def _check_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise MessageError if the calls of a conversation have more values in their arguments than are parsed. Templates
    want them as data, and texts of millions of lists or numbers take seconds.
    """
    count = 0
    for i, message in enumerate(messages):
        for k, call in enumerate(message.get("tool_calls") or ()):
            text = call["function"]["arguments"]
            own = count_values(text, MAX_ARGUMENT_VALUES - count)
            if own > MAX_ARGUMENT_VALUES and not text.lstrip().startswith("{"):
                continue  # no object, as arguments have to be: it stays text, like what was cut off
            count += own
            if count > MAX_ARGUMENT_VALUES:
                where = f"messages[{i}].tool_calls[{k}].function.arguments"
                what = f"The arguments of calls, up to {where}, hold more than {MAX_ARGUMENT_VALUES} values."
                raise MessageError.at(where, what, remedy="send long data as one text")


def count_values(text: str, most: int) -> int:
    """Return about how many values and keys JSON has. What looks like one inside of a text counts only where all
    together are more than `most`, for telling the two apart takes longer.
    """
    found = sum(map(text.count, ",:[{"))
    if found > most:
        plain = text.replace(r"\\", "").replace(r"\"", "")
        found = sum(map("".join(plain.split('"')[::2]).count, ",:[{"))
    return found


def _calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """The tool calls of a message, with their arguments as JSON text."""
    if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
        raise MessageError.at(path, f"{path} = {short(calls)}.", "lists of calls")
    return [_call(call, f"{path}[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, path: str) -> dict[str, Any]:
    form = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}'
    if isinstance(call, Mapping) and call.get("type") == "custom":
        call = _with_function(call, path)
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type") not in (None, "function"):
        raise MessageError.at(path, f"{path} = {short(call)}.", form)
    name, arguments = function.get("name"), function.get("arguments")
    if not name or not isinstance(name, str) or len(name) > MAX_NAME_CHARACTERS:
        raise MessageError.at(f"{path}.function.name", f"{path}.function.name = {short(name)}.", "names of functions")
    if "arguments" not in function:
        for key in function:
            if key in OTHER_ARGUMENTS or (isinstance(key, str) and find_nearest(key, ("arguments",))):
                raise _make_error(f"{path}.function", key, "arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = "{}"
    elif isinstance(arguments, Mapping):
        arguments = _json(arguments, f"{path}.function.arguments")
    elif not isinstance(arguments, str):
        where = f"{path}.function.arguments"
        raise MessageError.at(where, f"{where} = {short(arguments)}.", "JSON text, and mappings")
    found = {} if call.get("id") is None else {"id": _other("id", call["id"], path)}
    return {**found, "type": "function", "function": {"name": name, "arguments": arguments}}


def _with_function(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A call of a custom tool, which takes one text, as that of a function: templates know no other."""
    custom = call.get("custom")
    if not isinstance(custom, Mapping) or not isinstance(custom.get("input"), str):
        form = '{"id": ..., "type": "custom", "custom": {"name": ..., "input": "..."}}'
        raise MessageError.at(path, f"{path} = {short(call)}.", form)
    function = {"name": custom.get("name"), "arguments": {"input": custom["input"]}}
    return {"id": call.get("id"), "type": "function", "function": function}


def _other(key: str, value: Any, path: str) -> Any:
    """The value of a key that is neither role, content nor tool calls."""
    where = f"{path}.{key}"
    if key in MEDIA:
        raise MessageError.at(where, f"{MEDIA[key]} are not supported: {where} is given.", "text")
    if key in ("id", "name", "tool_call_id") and not (isinstance(value, str) and len(value) <= MAX_NAME_CHARACTERS):
        raise MessageError.at(where, f"{where} = {short(value)}.", f"strings of up to {MAX_NAME_CHARACTERS} characters")
    _json(value, where)
    return value


def _json(value: Any, path: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError.at(path, f"{path} = {short(value)} is no JSON data ({error}).") from error
