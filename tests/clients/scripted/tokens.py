"""The tokenizer of the scripted model: the demo model's bytes and merges, with the marks of Qwen 3's chats."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import inferplane

DEMO = Path(inferplane.__file__).parent / "models" / "demo"
BEGIN, END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL = (END_OF_TEXT, BEGIN, END)
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added tokens that stay in decoded text, as Qwen 3's configuration has them."""
BYTES_ALIKE = (range(33, 127), range(161, 173), range(174, 256))
"""Bytes that byte-level vocabularies write as the character of the same number; the others follow from 256 on."""


@cache
def tokenizer() -> dict[str, Any]:
    """The content of its tokenizer.json."""
    content = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    first = len(content["model"]["vocab"])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    names = [(name, True) for name in SPECIAL] + [(name, False) for name in MARKS]
    content["added_tokens"] += [
        {"id": first + i, "content": name, "special": special, **plain} for i, (name, special) in enumerate(names)
    ]
    return content


@cache
def texts() -> list[bytes]:
    """What each token adds to a text, in bytes, by its id."""
    content = tokenizer()
    alike = [byte for some in BYTES_ALIKE for byte in some]
    others = [byte for byte in range(256) if byte not in alike]
    byte_of = {chr(byte): byte for byte in alike} | {chr(256 + i): byte for i, byte in enumerate(others)}
    added = {token["id"]: token["content"].encode() for token in content["added_tokens"]}
    size = max([*added, *content["model"]["vocab"].values()]) + 1
    found = [b""] * size
    for name, number in content["model"]["vocab"].items():
        found[number] = added[number] if number in added else bytes(byte_of[letter] for letter in name)
    for number, text in added.items():
        found[number] = text
    return found
