"""Bodies that are large, deep, wrong or ambiguous: JSON and its fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Any

from tests.serving.attack.target import CHAT, COMPLETIONS, EMBEDDINGS, Target
from tests.serving.test_lists import LISTS, MAPPINGS, fill

MANY = 10**5
BODY_BYTES = 4 * 2**20 - 1024
SAY = [{"role": "user", "content": "x"}]
PROMPTS = ((COMPLETIONS, "prompt"), (EMBEDDINGS, "input"), (COMPLETIONS, "input_ids"), ("/detokenize", "tokens"))
"""Routes and their fields for token ids."""


@lru_cache(64)
def large_body(field: str, unit: str, size: int = BODY_BYTES) -> bytes:
    """A list of the same item again and again, as large as a body may be."""
    return f'{{"{field}":[{",".join([unit] * (size // (len(unit) + 1)))}]}}'.encode()


def wrong(field: str, text: str) -> bytes:
    """A completion with one more field, as it is written."""
    return f'{{"prompt":"x","max_tokens":1,"{field}":{text}}}'.encode()


def send_giant_lists(target: Target, draw: Random) -> list[int]:
    found = []
    for path, others, where in draw.sample(LISTS, 5):
        item = draw.choice(([], None, 1.5, -1))
        found.append(target.ask(path, fill(others, where, [item] * MANY)))
    return found


def send_giant_mappings(target: Target, draw: Random) -> list[int]:
    found = []
    for path, others, where in draw.sample(MAPPINGS, 3):
        value = {f"name {i}": draw.choice((1, None)) for i in range(MANY)}
        found.append(target.ask(path, fill(others, where, value)))
    return found


def send_large_bodies_of_values(target: Target, draw: Random) -> list[int]:
    path, field = draw.choice(PROMPTS)
    body = large_body(field, draw.choice(("[]", "48000", '"a"', '{"a":1}', "[[[]]]", "1.5", "null")))
    return target.ask_at_once([target.post(path, body)] * 4)


def send_large_bodies_of_text(target: Target, draw: Random) -> list[int]:
    text = draw.choice(("x", "[{,:", "\u00e9", "x ")) * (BODY_BYTES // 8)
    bodies = [{"prompt": text}, {"messages": [{"role": "user", "content": text}]}, {"text": text}]
    return target.ask_at_once(target.post(p, b) for p, b in zip((COMPLETIONS, CHAT, COMPLETIONS), bodies))


def send_bodies_beyond_the_limit(target: Target, draw: Random) -> list[int]:
    return target.ask_at_once([target.post(COMPLETIONS, b" " * (BODY_BYTES + 2048 * draw.randrange(1, 1000)))] * 3)


def send_deep_values(target: Target, draw: Random) -> list[int]:
    deep = ["[" * n + "]" * n for n in (50, 500, 50_000)] + ['{"a":' * n + "1" + "}" * n for n in (50, 500, 50_000)]
    fields = ("prompt", "stop", "logit_bias", "response_format", "metadata", "chat_template_kwargs")
    return target.ask_at_once(target.post(COMPLETIONS, wrong(draw.choice(fields), d)) for d in deep)


def send_repeated_names(target: Target, draw: Random) -> list[int]:
    many = ",".join(['"max_tokens":1'] * 50_000)
    bodies = (f'{{"prompt":"x",{many}}}', f'{{{many},"prompt":["x"],"prompt":"y"}}', '{"prompt":"x","prompt":[[]]}')
    return target.ask_at_once(target.post(COMPLETIONS, b.encode()) for b in bodies)


def send_numbers_that_are_none(target: Target, draw: Random) -> list[int]:
    texts = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "0x10", "1_000", "+1", "01", ".5")
    fields = ("temperature", "top_p", "min_p", "seed", "n", "presence_penalty", "timeout")
    return target.ask_at_once(target.post(COMPLETIONS, wrong(draw.choice(fields), t)) for t in texts)


def send_huge_numbers(target: Target, draw: Random) -> list[int]:
    texts = ("9" * 200_000, "1" + "0" * 400, str(2**64), str(-(2**63) - 1), "1e308", "1e-400", "0." + "1" * 100_000)
    fields = ("seed", "n", "max_tokens", "top_k", "logprobs", "min_tokens", "best_of", "timeout")
    return target.ask_at_once(target.post(COMPLETIONS, wrong(draw.choice(fields), t)) for t in texts)


def send_invalid_text(target: Target, draw: Random) -> list[int]:
    pieces = (b"\xc3\x28", b"\xff\xfe", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\0", b"\x1f", b"\xc0\x80")
    return target.ask_at_once(target.post(COMPLETIONS, b'{"prompt":"' + p * 1000 + b'"}') for p in pieces)


def send_escapes(target: Target, draw: Random) -> list[int]:
    """Lone surrogates are no text; NUL, marks of direction and a byte order mark are."""
    texts = ("\\ud800", "\\udfff\\ud800", "\\u0000", "\\u202e", "\\ufeff", "\\uD83D\\uDE00" * 200, "\\x41", "\\u12")
    return target.ask_at_once(
        target.post(COMPLETIONS, f'{{"prompt":"{t}","max_tokens":1,"stop":["{t}"],"user":"{t}"}}'.encode())
        for t in texts
    )


def send_long_names(target: Target, draw: Random) -> list[int]:
    names = ("temperatur" + "e" * 10**6, "\\u00e9" * 10**5, " prompt", "prompt\\u0000", "x" * 3 * 10**6)
    return target.ask_at_once(target.post(COMPLETIONS, wrong(name, "1")) for name in names)


def send_other_types(target: Target, draw: Random) -> list[int]:
    """Bodies that are JSON, but no request; and each field with a value of another type."""
    bodies = [b"[]", b"null", b'"x"', b"1", b"{}", b"", b" ", b"{}{}", b"\xef\xbb\xbf{}"]
    fields = ("model", "stream", "user", "echo", "suffix", "stream_options", "response_format", "logit_bias", "stop")
    values = ("[[]]", '{"a":{}}', "1e5", "true", '"' + "x" * 10_000 + '"')
    bodies += [wrong(draw.choice(fields), draw.choice(values)) for _ in range(6)]
    return target.ask_at_once(target.post(draw.choice((COMPLETIONS, CHAT)), b) for b in bodies)


def send_long_prompts(target: Target, draw: Random) -> list[int]:
    units = ("a", " ", "\u3042", "\U0001f600", "ab ", "\n", "0", "\u0301")
    found = []
    for unit in draw.sample(units, 3):
        found.append(target.ask(COMPLETIONS, {"prompt": unit * (300_000 // len(unit.encode())), "max_tokens": 1}))
    return found


def flood(target: Target, path: str, make: Callable[[int], Any], count: int) -> list[int]:
    """So many requests at once."""
    return target.ask_at_once(target.post(path, make(i)) for i in range(count))


def flood_tokenize(target: Target, draw: Random) -> list[int]:
    return flood(target, "/tokenize", lambda i: {"prompt": f"{i} def " * 2000, "return_token_strs": True}, 12)


def flood_detokenize(target: Target, draw: Random) -> list[int]:
    return flood(target, "/detokenize", lambda i: {"tokens": [draw.randrange(4000) for _ in range(2000)]}, 12)


def flood_embeddings(target: Target, draw: Random) -> list[int]:
    return flood(target, EMBEDDINGS, lambda i: {"input": [f"{draw.random()} x"] * 16}, 4)


def send_prompt_arrays(target: Target, draw: Random) -> list[int]:
    arrays = (["x"] * 64, ["x"] * 65, [[5]] * 64, [[5] * 1000] * 200, ["", ""], [[], [5]], ["x", [5]], [])
    return target.ask_at_once(target.post(COMPLETIONS, {"prompt": a, "max_tokens": 1}) for a in arrays)


def send_stop_lists(target: Target, draw: Random) -> list[int]:
    lists = (
        ["x" * 100_000],
        [""],
        [str(i) for i in range(17)],
        [f"{i}" * 100 for i in range(16)],
        "y" * 10**6,
        [["x"]],
    )
    return target.ask_at_once(target.post(COMPLETIONS, {"prompt": "x", "max_tokens": 8, "stop": s}) for s in lists)


def send_biases(target: Target, draw: Random) -> list[int]:
    biases: tuple[Any, ...] = (
        {str(i): 100 for i in range(1000)},
        {str(i): 1 for i in range(3000)},
        {"-1": 1},
        {"99999999999": 1},
        {"x" * 10**5: 1},
        {"5": 1e30},
        {"5": None},
    )
    return target.ask_at_once(
        target.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2, "logit_bias": b}) for b in biases
    )


def send_conversations(target: Target, draw: Random) -> list[int]:
    """Many messages, large messages, parts that are no text, roles and calls that are none."""
    call = {"id": "x" * 10_000, "type": "function", "function": {"name": "f", "arguments": "{" * 10_000}}
    conversations: tuple[Any, ...] = (
        SAY * 2000,
        SAY * 3000,
        [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2000}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}],
        [{"role": "x" * 10**5, "content": "x"}],
        [{"role": "assistant", "content": None, "tool_calls": [call] * 100}, {"role": "tool", "content": "x"}],
        [{"role": "tool", "content": "x", "tool_call_id": "\u202e"}],
        [{"role": "user", "content": "{{ [].__class__.__base__.__subclasses__() }}"}],
    )
    return target.ask_at_once(target.post(CHAT, {"messages": c, "max_tokens": 2}) for c in conversations)


def send_tools(target: Target, draw: Random) -> list[int]:
    """Tools with huge, deep and recursive schemas, of which a call is required."""
    wide = {"type": "object", "properties": {f"name{i}": {"type": "string"} for i in range(draw.randrange(400, 1500))}}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    itself = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    remote = {"$ref": "http://169.254.169.254/schema"}
    found = []
    for schema in (wide, deep, itself, remote):
        tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(8)]
        found.append(target.ask(CHAT, {"messages": SAY, "tools": tools, "tool_choice": "required", "max_tokens": 4}))
    return found


def send_template_fields(target: Target, draw: Random) -> list[int]:
    fields: tuple[dict[str, Any], ...] = (
        {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"},
        {"chat_template_kwargs": {"messages": [], "tools": [1]}},
        {"chat_template_kwargs": {"a" * 10_000: json.loads("[" * 100 + "]" * 100)}},
        {"chat_template_kwargs": {"range": 1, "__class__": "x", "self": {}}},
        {"documents": [{"text": "x" * 10_000}] * 100},
        {"continue_final_message": True, "add_generation_prompt": True},
        {"reasoning_effort": "x" * 10_000},
    )
    return target.ask_at_once(target.post(CHAT, {"messages": SAY, "max_tokens": 2, **more}) for more in fields)
