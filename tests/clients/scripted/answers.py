"""What the scripted model answers: a table from questions to calls and texts, in Qwen 3's published form.

A right model would say the same in other words; here the words are fixed, so that a client's test may expect them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.clients.scripted.tokens import BEGIN, END

Call = tuple[str, Mapping[str, Any]]


class Answer(NamedTuple):
    """The answer to a question.

    Args:
        question: a regular expression that the last message of the user contains.
        text: the last words of the answer; `{result}` is what the tools have returned.
        calls: the calls of each round before them; a round is taken if the request has tools of these names.
        values: the same as data, where JSON is requested: forced arguments, or a schema.
    """

    question: str
    text: str
    calls: tuple[tuple[Call, ...], ...] = ()
    values: Mapping[str, Any] | list[Any] | None = None


WEATHER: Mapping[str, Any] = {"location": "Oslo"}
JOKE = {"setup": "Why do cats like keyboards?", "punchline": "Because of the mouse beside them."}
KNOWLEDGE = {
    "What is two plus two?": "four",
    "What is the capital of Norway?": "Oslo",
    "Which animal barks?": "dog",
    "What is the opposite of cold?": "hot",
}
ANSWERS = (
    Answer(r"magic_function\(3\)", "The value is {result}.", ((("magic_function", {"input": 3}),),)),
    Answer(r"magic_function_no_args", "The value is {result}.", ((("magic_function_no_args", {}),),)),
    Answer(r"[Pp]irate greeting", "{result}", ((("greeting_generator", {"answer_style": "pirate"}),),)),
    Answer(r"3 \+ 4", "3 + 4 = 7.", ((("my_adder_tool", {"a": 3, "b": 4}),),)),
    Answer(r"1 \+ 2", "1 + 2 = 3.", ((("my_adder_tool", {"a": 1, "b": 2}),),)),
    Answer(
        r"weather in San Francisco",
        "It is {result} there.",
        ((("get_weather", {"location": "San Francisco, CA"}),),),
    ),
    Answer(r"[Jj]oke", "{setup} {punchline}".format(**JOKE), values=JOKE),
    Answer(
        r"Oslo and (in )?Rome",
        "Both have sun: {result}.",
        ((("get_weather", {"location": "Oslo"}), ("get_weather", {"location": "Rome"})),),
    ),
    Answer(r"Oslo", "In Oslo: {result}.", ((("get_weather", WEATHER),),), {"city": "Oslo", "celsius": 7}),
    Answer(
        r"你好啊集团", "{result}", ((("unicode_customer", {"customer_name": "你好啊集团", "description": "科技"}),),)
    ),
    Answer(
        r"こんにちは",
        "{result}",
        ((("unicode_customer", {"customer_name": "こんにちは株式会社", "description": "a firm"}),),),
    ),
    *(Answer(re.escape(question), answer) for question, answer in KNOWLEDGE.items()),
    Answer(r"[Hh]aiku", "Old pond, still water.\nA frog leaps into the dusk.\nThe sound of one plop."),
    Answer(r"List the files", "There is one file.", ((("shell", {"input": "ls -l"}),),)),
    Answer(r"story about a cat", "A cat sat by the door until it was opened. It stayed inside."),
    Answer(r"(?i)how are you", "I am well, thank you."),
    Answer(r"(?i)^h(i|ello)\b", "Hello! How may I help you?", ((("magic_function", {"input": 1}),),)),
)
DEFAULT = Answer("", "I do not know that.")
THOUGHT = "The last message decides what is to do."
DOCUMENTS = tuple(f"Question: {question}\nAnswer: {answer}\n".encode() for question, answer in KNOWLEDGE.items())
"""Texts outside of chats: a prompt that begins one is continued."""
OPENING = b"<think>\n\n</think>\n\n"
"""What the template begins an answer with if thinking is turned off."""
_TOOLS = re.compile(rf"# Tools.*?<tools>\n(.*)\n</tools>.*?{re.escape(END)}", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_AS_JSON = re.compile(r"json", re.IGNORECASE)


class Conversation(NamedTuple):
    """What the model reads of a prompt.

    Args:
        question: the last message of the user that is no tool's result.
        tools: names of the functions that may be called.
        rounds: how often the model has called since.
        results: of these calls, in order.
        asks_for_json: whether the messages speak of JSON.
        is_thinking: whether the answer may begin with a thought.
    """

    question: str
    tools: tuple[str, ...]
    rounds: int
    results: tuple[str, ...]
    asks_for_json: bool
    is_thinking: bool


def read_conversation(prompt: str, is_thinking: bool) -> Conversation:
    """Read the messages of a rendered conversation that stand before the answer."""
    question, rounds, results = "", 0, list[str]()
    stated = _TOOLS.search(prompt)
    for part in prompt.split(BEGIN)[1:]:
        role, _, text = part.partition("\n")
        text = text.rstrip("\n").removesuffix(END)
        if role == "user" and text.startswith("<tool_response>"):
            rounds += 1
            results += _RESULT.findall(text)
        elif role == "user":
            question, rounds, results = text, 0, []
    tools = [json.loads(line)["function"]["name"] for line in stated[1].splitlines()] if stated else []
    asks_for_json = bool(_AS_JSON.search(_TOOLS.sub("", prompt)))
    return Conversation(question, tuple(tools), rounds, tuple(results), asks_for_json, is_thinking)


def find_answer(question: str) -> Answer:
    """The first row whose question the text contains."""
    return next((row for row in ANSWERS if re.search(row.question, question)), DEFAULT)


def write_call(name: str, arguments: Any) -> str:
    """A call in Qwen's form."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def list_answers(conversation: Conversation) -> list[str]:
    """Texts that answer a conversation, the best one first; those behind it serve where a constraint forbids it."""
    row, tools = find_answer(conversation.question), conversation.tools
    calls = [call for calls in row.calls[conversation.rounds : conversation.rounds + 1] for call in calls]
    calls = [call for call in calls if call[0] in tools]
    text = row.text.replace("{result}", "; ".join(conversation.results))
    as_data = [] if row.values is None else [json.dumps(row.values, ensure_ascii=False)]
    forced = calls or ([(name, row.values) for name in tools] if isinstance(row.values, Mapping) else [])
    if calls:
        natural = ["\n".join(write_call(*call) for call in calls)]
    elif conversation.asks_for_json and as_data and not conversation.rounds:
        natural = [f"```json\n{as_data[0]}\n```" if "```" in conversation.question else as_data[0], text]
    else:
        natural = [text]
    listed = [{"name": name, "arguments": arguments} for name, arguments in forced]
    data = [json.dumps(listed, ensure_ascii=False)] if listed else []
    data += [json.dumps(arguments, ensure_ascii=False) for _, arguments in forced[:1]]
    answers = dict.fromkeys([*natural, *(write_call(*call) for call in forced), *as_data, *data])
    if not conversation.is_thinking:
        return list(answers)
    thought = f"<think>\n{THOUGHT}\n</think>"
    return [f"{thought}{lines}{text}" for lines in ("\n\n", "") for text in answers] + list(answers)


def list_texts(so_far: bytes) -> list[bytes]:
    """What may follow a text, the best one first; empty where the table says nothing. Bytes, because a text may end in
    the middle of a character.
    """
    before, mark, own = so_far.rpartition(f"{BEGIN}assistant\n".encode())
    if not mark:
        return [text[len(so_far) :] for text in DOCUMENTS if text.startswith(so_far) and text != so_far]
    opening = OPENING if own.startswith(OPENING) else b""
    own = own[len(opening) :]
    answers = list_answers(read_conversation(before.decode(errors="replace"), is_thinking=not opening))
    whole = [(text + END).encode() for text in answers]
    return [text[len(own) :] for text in whole if text.startswith(own) and text != own]
