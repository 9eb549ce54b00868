"""Mixtures of marks, JSON and words in every form: no error, no lost word, and the same events however they are cut."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from inferplane.dialogue.replies.catalog import FORMS
from inferplane.dialogue.replies.events import CallStart
from tests.unit.dialogue.replies.goldens import GOLDENS, NAMED, TOOLS, parse

NUM_MIXTURES = 5000
MAX_PIECES = 24
WORD = re.compile(r"w\d+z")
COMMON = (
    *("{", "}", "[", "]", '"', "\\", "'", "(", ")", ",", ":", ";", "=", " ", "\n", "\n\n", "\t", "é", "😀", "\\u00e9"),
    *(
        '{"name": "list_all", "arguments": {',
        '{"name": "find_town", "arguments": {"name": "',
        '"parameters": {"',
        '"}}',
    ),
    *('{"arguments": {}', '"name": "list_all"', "find_town", "list_all", "functions.find_town:0", "name=", "None"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "```json", "```", "<", "</", "|", "<|"),
)


def mixture(random: random.Random, form) -> str:
    """Marks, cut marks, and words that occur once each."""
    marks, out = [*form.visible_tokens, *form.visible_tokens], []
    goldens = [golden.text for golden in GOLDENS if NAMED[golden.form] is form]
    for number in range(random.randint(1, MAX_PIECES)):
        kind = random.random()
        if kind < 0.3:
            out.append(f"w{number}z")
        elif kind < 0.6 and marks:
            mark = random.choice(marks)
            out.append(mark if random.random() < 0.9 else mark[: random.randint(0, len(mark))])
        elif kind < 0.7 and goldens:
            text = random.choice(goldens)
            start = random.randrange(len(text))
            out.append(WORD.sub("", text[start : start + random.randint(1, 80)]))
        else:
            out.append(random.choice(COMMON))
    return "".join(out)


@pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])
def test_nothing_of_a_mixture_is_lost(form):
    numbers = random.Random(f"mixtures of {form.name}")
    for _ in range(-(-NUM_MIXTURES // len(FORMS))):
        text = mixture(numbers, form)
        options = {"reasoning_is_open": numbers.random() < 0.3, "max_calls": 10**6}
        whole = parse(form, [text], **options)
        said = " ".join(event.name if isinstance(event, CallStart) else event.text for event in whole)
        assert Counter(WORD.findall(said)) == Counter(WORD.findall(text)), (text, options, whole)
        assert parse(form, list(text), **options) == whole, (text, options)
        cuts = sorted(numbers.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        assert parse(form, pieces, **options) == whole, (pieces, options)
        for mode in ("required", "none"):
            assert parse(form, list(text), mode=mode, **options) == parse(form, [text], mode=mode, **options), text


def test_calls_beyond_the_most_are_left_out():
    text = "".join(f'<tool_call>{{"name": "list_all", "arguments": {{"n": {i}}}}}</tool_call>' for i in range(20))
    for most in (1, 16):
        found = parse(NAMED["qwen3"], [text], TOOLS, max_calls=most)
        assert [event.index for event in found if isinstance(event, CallStart)] == list(range(most))
        assert len(found) == 2 * most
