"""Chat templates render as in transformers, in another process, with limits of time, size and memory."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

import inferplane
from inferplane.engine.request.text import Tokenizer
from inferplane.engine.sampling.spans.token_text import TokenText
from inferplane.serving.chat.call import render_messages
from inferplane.serving.chat.request import ChatRequest
from inferplane.serving.chat_template.template import ChatTemplate
from inferplane.serving.errors import ApiError
from inferplane.serving.wire import validate

DEMO = Path(inferplane.__file__).parent / "models" / "demo"
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "ü <&> \x00"},
    {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, "é"]}}}]},
    {"role": "user", "content": "{{ 7 * 7 }}"},
]
TEMPLATES = [
    "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<go>{% endif %}",
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content | trim }}"
    "{%- if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}\n{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}\n{% endfor %}"
    "{{ tools | tojson }}",
    "{% for m in messages %}{% generation %}{% set x = m.content %}<{{ x }}>{% endgeneration %}{% endfor %}",
    "{% for m in messages %}\n    {% if loop.last %}{{ m.content }}{% endif %}\n{% endfor %}{{ eos_token }}",
]


def render(source: str, messages=MESSAGES, tools=None, seconds: float = 20.0) -> str:
    async def run() -> str:
        template = ChatTemplate(source, {"bos_token": "<b>", "eos_token": "<e>"}, render_s=seconds)
        try:
            return await template.render(messages, tools)
        finally:
            await template.close()

    return asyncio.run(run())


@pytest.mark.parametrize("source", TEMPLATES)
def test_it_renders_as_transformers_does(source):
    inner = Tokenizer(DEMO).fast
    tools = [{"type": "function", "function": {"name": "f", "description": "<ü>"}}]
    want = inner.apply_chat_template(
        MESSAGES, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    tokens = {"bos_token": inner.bos_token, "eos_token": inner.eos_token}

    async def run() -> str:
        template = ChatTemplate(source, tokens)
        try:
            return await template.render(MESSAGES, tools)
        finally:
            await template.close()

    assert asyncio.run(run()) == want


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[99].content.x }}", "Undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('id') }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe"),
        ("{% for i in range(100000000) %}{% endfor %}", ""),
        ("{{ 'x' * 20000000 }}", "more than"),
        ("{% for i in range(99000) %}{{ 'x' * 1000 }}{% endfor %}", "more than"),
        ("{{ 'x' * 4000000000 }}", ""),
        ("{{ open('/etc/passwd') }}", "undefined"),
        ("{% include '/etc/passwd' %}", ""),
    ],
)
def test_a_template_cannot_do_harm(source, said):
    with pytest.raises(ApiError) as refused:
        render(source)
    assert refused.value.status == 400
    assert refused.value.param == "messages"
    assert said in refused.value.message


def test_one_that_loops_is_ended_and_the_next_conversation_is_rendered():
    source = "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    source += "{% endfor %}{% endif %}fine"

    async def run() -> None:
        template = ChatTemplate(source, {}, render_s=0.5)
        try:
            assert await template.render([{"role": "user", "content": "x"}], None) == "fine"
            begun = time.monotonic()
            with pytest.raises(ApiError, match="takes longer than"):
                await template.render([{"role": "user", "content": "loop"}], None)
            assert time.monotonic() - begun < 30
            waiting = asyncio.create_task(template.render([{"role": "user", "content": "loop"}], None))
            await asyncio.sleep(0.1)
            waiting.cancel()  # a client that leaves must not leave its answer to the next one
            await asyncio.gather(waiting, return_exceptions=True)
            assert await template.render([{"role": "user", "content": "x"}], None) == "fine"
        finally:
            await template.close()

    asyncio.run(run())


def test_a_caller_who_leaves_leaves_the_process():
    async def run() -> None:
        template = ChatTemplate("{{ messages[0].content }}", {})
        try:
            assert await template.render([{"role": "user", "content": "first"}], None) == "first"
            process = template._plain.renderer.process
            for wait_s in (0, 0, 0.001, 0.01):
                leaving = asyncio.create_task(template.render([{"role": "user", "content": "left"}], None))
                waiting = asyncio.create_task(template.render([{"role": "user", "content": "next"}], None))
                await asyncio.sleep(wait_s)
                leaving.cancel()
                assert await waiting == "next"
            assert template._plain.renderer.process is process is not None
        finally:
            await template.close()

    asyncio.run(run())


def test_a_template_that_is_none_is_refused():
    with pytest.raises(ApiError, match=r"does not compile \(TemplateSyntaxError"):
        render("{% for %}")


# ---------------------------------------------------------------- tokens as bytes


def test_bytes_of_tokens_make_up_the_text():
    tokenizer = Tokenizer(DEMO)
    spelled = TokenText(tokenizer.fast)
    text = "def f(x):\n    return 'é€😀' + x\t\x00"
    ids = tokenizer.encode(text)
    assert b"".join(map(spelled.bytes_of, ids)).decode() == text
    assert any(spelled.name_of(i).startswith("bytes:\\x") for i in ids), "the emoji should take several tokens"
    assert spelled.name_of(1) == "<|eos|>"


class Pieces:
    """A vocabulary in the manner of SentencePiece."""

    added_tokens_decoder: dict = {}

    def get_vocab(self):
        return {"\u2581the": 0, "<0x0A>": 1, "<0xE2>": 2}

    def convert_ids_to_tokens(self, token):
        return ["\u2581the", "<0x0A>", "<0xE2>", None][token]


def test_vocabularies_without_byte_letters():
    spelled = TokenText(Pieces())
    assert [spelled.bytes_of(i) for i in range(4)] == [b" the", b"\n", b"\xe2", b"<3>"]


LAST_SYSTEM = (
    "{% set ns = namespace(s='') %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set ns.s = m['content'] %}{% endif %}"
    "{% endfor %}{{ ns.s }}|{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "<call>{{ m['tool_calls'][0]['function']['name'] + m['tool_calls'][0]['function']['arguments'] }}"
    "{% elif m['role'] != 'system' %}<{{ m['role'] }}>{{ m['content'] }}{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] + '' }}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": {"type": "object"}}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}
CALLED["tool_calls"][0]["function"] = {"name": "look", "arguments": '{"x": 1}'}


def conversation(source: str, messages: list[Any], tools: list[Any] | None) -> str:
    """What chat sends for it."""

    async def run() -> str:
        template = ChatTemplate(source, {})
        asked = validate(ChatRequest, {"messages": messages, "tools": tools} if tools else {"messages": messages})
        try:
            return await render_messages(asked.messages, asked.tools, template)
        finally:
            await template.close()

    return asyncio.run(run())


def test_tools_are_told_where_the_template_knows_of_none():
    system, user = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}
    said = conversation(LAST_SYSTEM, [system, user], [TOOL])
    assert '"name": "look"' in said.partition("|")[0] and said.endswith("Be kind.|<user>hi")
    assert '"name": "look"' in conversation(LAST_SYSTEM, [user], [TOOL]).partition("|")[0]
    said = conversation(NO_SYSTEM, [user, {"role": "assistant", "content": "yo"}], [TOOL])
    assert said.startswith("<user>To call") and said.endswith("\n\nhi<assistant>yo")
    with pytest.raises(ApiError, match="no system"):
        conversation(NO_SYSTEM, [system, user], [TOOL])
    assert conversation(NO_SYSTEM, [user], None) == "<user>hi"


def test_earlier_calls_are_shown_in_the_form_that_the_template_asks_for():
    """Content is None if the template tests for None, arguments are text if it joins them; tools are described."""
    user, answer = {"role": "user", "content": "hi"}, {"role": "tool", "content": "42", "tool_call_id": "1"}
    said = conversation(LAST_SYSTEM, [user, CALLED, answer], [TOOL])
    assert said.endswith('|<user>hi<call>look{"x": 1}<tool>42') and said.startswith("To call")
    assert conversation(NO_SYSTEM, [user, CALLED, answer], None) == "<user>hi<assistant><tool>42"
