"""Stop strings where a thought precedes the answer: they count in the answer alone."""

from __future__ import annotations

import pytest

from inferplane.engine.clients.chat import make_span
from inferplane.engine.request.text import Detokenizer, Tokenizer
from tests.e2e.tiny_tokenizers import byte_level, save
from tests.unit.dialogue.replies.goldens import NAMED


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stops")
    save(byte_level(), folder)
    return Tokenizer(folder)


def shown(tokenizer, parts, stop, *, end=True, span=None):
    """The text of parts, and its pieces, token by token."""
    text, pieces = Detokenizer(tokenizer, stop, span=span), []
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


FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
COMMENTARY = "<|start|>assistant<|channel|>commentary<|message|>"


@pytest.mark.parametrize(
    ("parts", "stop", "want"),
    [
        ([("begin", "<|channel|>"), ("answer", "final<|message|>The final.")], "final", f"{FINAL}The "),
        ([("thought", f"{ANALYSIS}final<|end|>"), ("answer", f"<|start|>assistant{FINAL}No.")], "assistant", None),
        ([("answer", f"{COMMENTARY}I look.<|end|><|start|>assistant{FINAL}No.")], "oo", f"{COMMENTARY}I l"),
        ([("answer", f"{COMMENTARY}I look.<|end|><|start|>assistant{FINAL}No o.")], "o.", None),
        ([("answer", f"{COMMENTARY}Yes.<|end|><|start|>assistant{ANALYSIS}a, b<|end|>{FINAL}c, d")], ", ", None),
        ([("answer", "<|start|>assist")], "assist", "<|start|>assist"),
    ],
)
def test_they_do_not_count_in_headers_and_later_thoughts(tokenizer, parts, stop, want):
    span = make_span(NAMED["openai"], is_open=False)
    text, pieces = shown(tokenizer, parts, (stop,), span=span)
    whole = "".join(content for _, content in parts)
    if want is None:  # cut in the last message alone, if at all
        want = whole[: whole.rindex(stop)] if stop in whole.rpartition("<|message|>")[2] else whole
    assert text.text == "".join(pieces) == want
    assert text.stopped == (want != whole)


def test_without_a_span_every_text_counts(tokenizer):
    assert shown(tokenizer, [("answer", f"{FINAL}No.")], ("final",))[0].text == "<|channel|>"
