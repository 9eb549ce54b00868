"""Special tokens that stay in the text, and the spaces around them."""

from __future__ import annotations

import random

import pytest

from inferplane.engine.request.text import Detokenizer, Tokenizer
from tests.e2e.tiny_tokenizers import byte_level, metaspace, save

NAMES = ("<|call|>", "[ARGS]", "<|hidden|>")


@pytest.fixture(scope="module", params=[byte_level, metaspace], ids=["byte level", "metaspace"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("visible")
    made = request.param()
    made.add_special_tokens(list(NAMES))
    save(made, folder)
    return Tokenizer(folder)


def pieces_of(tokenizer, ids, visible, prompt=(), stop=()):
    """The text of the tokens, pushed one by one, and the pieces that were shown."""
    text = Detokenizer(tokenizer, stop, prompt, visible)
    pieces = []
    for token in ids:
        text.push([token])
        pieces.append(text.take())
    return [*pieces, text.take(end=True)]


def test_named_ones_stay_and_others_do_not(tokenizer):
    call, arguments, hidden = (next(iter(tokenizer.find_ids([name]))) for name in NAMES)
    word = tokenizer.encode(" over", special=False)
    ids = [hidden, *word, call, *word, 1, arguments, *word, hidden, call]
    plain = tokenizer.decode(word)
    visible = tokenizer.find_ids(["<|call|>", "[ARGS]", "no such token"])
    assert visible == {call, arguments}
    assert tokenizer.decode(ids) == tokenizer.decode([*word, *word, *word]), "none without names"
    found = tokenizer.decode(ids, visible)
    assert found.replace(" ", "") == "over<|call|>over[ARGS]over<|call|>" and found.startswith(plain)
    assert "".join(pieces_of(tokenizer, ids, visible)) == found
    assert found.count(" ") == tokenizer.decode([*word, *word, *word]).count(" "), "no space is added or lost"


def test_any_tokens_decode_as_a_whole(tokenizer):
    draw = random.Random(3)
    visible = tokenizer.find_ids(NAMES[:2])
    specials = [*visible, *tokenizer.find_ids(NAMES[2:]), 1]
    for _ in range(100):
        ids = [draw.choice([*specials, *range(3, 100)]) for _ in range(draw.randint(1, 30))]
        assert "".join(pieces_of(tokenizer, ids, visible)) == tokenizer.decode(ids, visible)


def test_the_prompts_tokens_are_no_text(tokenizer):
    visible = tokenizer.find_ids(NAMES[:1])
    (call,) = visible
    prompt = [*tokenizer.encode("dog", special=False), call]
    whole, before = tokenizer.decode([*prompt, *prompt], visible), tokenizer.decode(prompt, visible)
    assert whole.startswith(before) and whole.endswith("dog<|call|>")
    assert "".join(pieces_of(tokenizer, prompt, visible, prompt)) == whole[len(before) :]


def test_stop_strings_see_them(tokenizer):
    visible = tokenizer.find_ids(NAMES[:1])
    (call,) = visible
    word = tokenizer.encode("dog", special=False)
    text = Detokenizer(tokenizer, ("<|call|>",), word, visible)
    assert text.push([*word, call, *word]) and text.text == tokenizer.decode([*word, *word])[3:]
