"""Stop strings where a thought precedes the answer: they count in the answer alone."""

from __future__ import annotations

import pytest

from inferplane.engine.request.text import Detokenizer, Tokenizer
from tests.e2e.tiny_tokenizers import byte_level, save


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stops")
    save(byte_level(), folder)
    return Tokenizer(folder)


def shown(tokenizer, parts, stop, *, end=True):
    """The text of parts, and its pieces, token by token."""
    text, pieces = Detokenizer(tokenizer, stop), []
    for part, content in parts:
        for token in tokenizer.encode(content, special=False):
            text.push([token], part)
            pieces.append(text.take())
    pieces.append(text.take(end=end))
    return text, pieces


@pytest.mark.parametrize(
    ("parts", "want"),
    [
        ([("thought", "a\n\nb\n</think>\n\n"), ("answer", "Yes.\n\nNo.")], "a\n\nb\n</think>\n\nYes."),
        ([("thought", "a\n</think>"), ("answer", "\n\nYes.\n\nNo.")], "a\n</think>\n\nYes."),
        ([("begin", "\n\n<think>"), ("thought", "a</think>"), ("answer", "Yes")], "\n\n<think>a</think>Yes"),
        ([("begin", "\n\n<"), ("answer", "b>")], ""),
        ([("begin", "\n\n")], ""),
        ([("thought", "a\n\nb")], "a\n\nb"),
        ([("answer", "Yes.\n\nNo.")], "Yes."),
    ],
)
def test_they_count_in_the_answer_alone(tokenizer, parts, want):
    text, pieces = shown(tokenizer, parts, ("\n\n",))
    assert text.text == "".join(pieces) == want
    assert text.stopped == (want != "".join(content for _, content in parts))


def test_a_thought_is_not_held_back(tokenizer):
    text = Detokenizer(tokenizer, ("ab",))
    text.push(tokenizer.encode("xa", special=False), "thought")
    assert text.take() == "xa"
    text.push(tokenizer.encode("b ya", special=False), "answer")
    assert text.take() == "b y" and not text.stopped
