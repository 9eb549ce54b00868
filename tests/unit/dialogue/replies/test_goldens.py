"""Replies in every form are parsed into what they say, whole and however they are cut."""

from __future__ import annotations

import random

import pytest

from inferplane.dialogue.replies.events import Arguments, CallStart
from inferplane.dialogue.replies.parser import ReplyParser
from tests.unit.dialogue.replies.goldens import GOLDENS, NAMED, OPENED, TOOLS, parse, summarize


@pytest.mark.parametrize("golden", GOLDENS, ids=[f"{i}-{golden.form}" for i, golden in enumerate(GOLDENS)])
def test_a_reply_is_what_it_says_however_it_is_cut(golden):
    form, text, options = NAMED[golden.form], golden.text, {"reasoning_is_open": golden.form in OPENED}
    whole = parse(form, [text], **options)
    assert summarize(whole, golden.form, text) == golden
    assert parse(form, list(text), **options) == whole
    for at in range(1, len(text)):
        assert parse(form, [text[:at], text[at:]], **options) == whole, (text[:at], text[at:])
    for seed in range(5):
        cuts = sorted(random.Random(seed).choices(range(len(text)), k=len(text) // 4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        assert parse(form, pieces, **options) == whole


@pytest.mark.parametrize("golden", [g for g in GOLDENS if g.calls], ids=lambda golden: golden.form)
def test_the_arguments_of_a_call_arrive_with_its_name(golden):
    """At most three tokens later, even if each is one character."""
    parser = ReplyParser(NAMED[golden.form], TOOLS, reasoning_is_open=golden.form in OPENED)
    begun, first = dict[int, int](), dict[int, int]()
    for number, character in enumerate(golden.text):
        for event in parser.feed(character):
            if isinstance(event, CallStart):
                begun[event.index] = number
            elif isinstance(event, Arguments) and event.text:
                first.setdefault(event.index, number)
    assert begun and all(first[index] - at <= 3 for index, at in begun.items() if index in first)
    assert len(first) >= len(begun) - 1  # the end of the text may be what completes the last one


def test_every_form_of_the_catalog_is_shown():
    assert {golden.form for golden in GOLDENS} == set(NAMED)
