"""Messages over HTTP are those of Python, in every format, with the same errors; tools are shown as given."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from inferplane.dialogue.messages import normalize_messages
from inferplane.dialogue.replies.catalog import FORMS
from inferplane.engine.sampling.spans.token_text import TokenText
from inferplane.errors import UsageError
from inferplane.serving.chat.call import render_messages
from inferplane.serving.chat.request import ChatRequest
from inferplane.serving.chat_template.template import ChatTemplate
from inferplane.serving.errors import ApiError
from inferplane.serving.http.completions import CompletionRendering, CompletionRequest
from inferplane.serving.http.tokens import TokenizeRequest
from inferplane.serving.native import NativeRequest, build_call
from inferplane.serving.rendering import GeneratedChoice
from inferplane.serving.wire import validate

REQUESTS = (ChatRequest, TokenizeRequest, NativeRequest)
BAD: list[tuple[list[Any], str]] = [
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": "x", "images": ["y"]}], "messages[0].images"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "contents": "x"}], "messages[0].content"),
    ([{"role": "bot", "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0]"),
    (["x"], "messages"),
]


@pytest.mark.parametrize("request_class", REQUESTS)
@pytest.mark.parametrize(("messages", "param"), BAD)
def test_refused_as_in_python(request_class, messages, param):
    with pytest.raises(ApiError) as refused:
        validate(request_class, {"messages": messages})
    with pytest.raises(UsageError) as in_python:
        normalize_messages(messages)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message == str(in_python.value)


@pytest.mark.parametrize("request_class", REQUESTS)
def test_parts_are_joined(request_class):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = validate(request_class, {"messages": [{"role": "developer", "content": parts}]})
    assert asked.messages == [{"role": "system", "content": "a\nb"}]


def run(source: str, work: Any) -> Any:
    """Do something with a model that has a template."""

    async def main() -> Any:
        template = ChatTemplate(source, {}, render_s=20.0)
        try:
            return await work(SimpleNamespace(template=template, reply_form=lambda facts: FORMS[-1]))
        finally:
            await template.close()

    return asyncio.run(main())


def test_the_native_dialect_sends_calls_back_too():
    source = (
        "{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %};"
    )
    source += "{% endfor %}"
    call = {"function": {"name": "f", "arguments": ""}}
    asked = validate(
        NativeRequest, {"messages": [{"content": "x"}, {"role": "assistant", "tool_calls": [call]}], "req_id": "1"}
    )
    made = run(source, lambda model: build_call(asked, model, "chat"))
    assert made.prompts == ['user:;assistant:{"name": "f", "arguments": {}};']


def test_tools_are_shown_as_they_were_given():
    """In the client's order of keys, with its nulls and its own keys, as transformers shows them."""
    tool = {"function": {"parameters": None, "name": "f", "x-own": [1]}, "type": "function", "own": True}
    asked = validate(ChatRequest, {"messages": [{"role": "user", "content": "x"}], "tools": [tool]})
    said = run("{{ tools[0] | tojson }}", lambda model: render_messages(asked.messages, asked.tools, model.template))
    assert said == '{"function": {"parameters": null, "name": "f", "x-own": [1]}, "type": "function", "own": true}'


# ------------------------------------------------------------------ where a token begins in the text


class Spelled:
    """A vocabulary in the manner of SentencePiece, with special tokens."""

    tokens = ("<s>", "\u2581the", "<0xE2>", "<0x82>", "<0xAC>", "\u2581", "a", "<0xFF>", "<added>")
    added_tokens_decoder = {
        0: SimpleNamespace(content="<s>", special=True),
        8: SimpleNamespace(content="<added>", special=False),
    }

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.tokens[token]


def offsets(generated: list[int], prompt: tuple[str, list[int]] = ("", [])) -> list[int]:
    text, ids = prompt
    asked = validate(CompletionRequest, {"prompt": text or "x", "logprobs": 0, "echo": bool(text)})
    model: Any = SimpleNamespace(fingerprint="", token_text=TokenText(Spelled()))
    model.token_name = model.token_text.name_of
    scores = [SimpleNamespace(token_id=i, logprob=-1.0, top=()) for i in generated]
    generation: Any = SimpleNamespace(prompts=[ids], call=SimpleNamespace(n=1))
    whole = CompletionRendering(asked, model, "m", "1")
    shown: Any = whole._choice(generation, 0, GeneratedChoice("", generated, "stop", logprobs=scores), True)
    stream, pieces = CompletionRendering(asked, model, "m", "1"), []
    for i, score in enumerate(scores):
        piece: Any = stream._choice(generation, 0, GeneratedChoice("", [score.token_id], logprobs=[score]), i == 0)
        pieces += piece["logprobs"]["text_offset"]
    assert pieces == shown["logprobs"]["text_offset"] or not scores
    return shown["logprobs"]["text_offset"]


@pytest.mark.parametrize(
    ("generated", "want"),
    [
        ([1, 6, 1], [0, 4, 5]),
        ([2, 3, 4, 6], [0, 0, 0, 1]),
        ([6, 2, 3, 4, 2, 3, 4, 6], [0, 1, 1, 1, 2, 2, 2, 3]),
        ([7, 6], [0, 1]),
        ([6, 0, 6], [0, 1, 1]),
        ([8, 6], [0, 7]),
        ([5, 5, 6], [0, 1, 2]),
    ],
)
def test_offsets_count_characters_of_the_text(generated, want):
    """Not those of the names of bytes, and none of special tokens, which are not in the text."""
    assert offsets(generated) == want


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        (("the a", [0, 1, 5, 6]), [0, 0, 3, 4, 5]),
        ((" the", [1]), [0, 4]),
        (("a\u20aca", [0, 6, 2, 3, 4, 6]), [0, 0, 1, 1, 1, 2, 3]),
        (("<s>a", [0, 0, 6]), [0, 3, 3, 4]),
    ],
)
def test_offsets_after_the_prompt(prompt, want):
    assert offsets([6], prompt) == want
