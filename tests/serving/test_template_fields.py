"""Fields for the chat template: the text is that of transformers, and what a template does not read is said."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import inferplane
from inferplane.dialogue.template import Template
from inferplane.dialogue.template_files import read_template
from inferplane.engine.request.text import Tokenizer
from inferplane.errors import UsageError
from inferplane.serving.chat.call import render_messages
from inferplane.serving.chat.request import ChatRequest
from inferplane.serving.chat_template.fields import list_unread_keys
from inferplane.serving.chat_template.sources import MAX_TEMPLATES, RequestTemplates
from inferplane.serving.chat_template.template import ChatTemplate
from inferplane.serving.errors import ApiError
from inferplane.serving.wire import validate
from tests.serving.live import Live

DEMO = Path(inferplane.__file__).parent / "models" / "demo"
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if documents %}{{ documents | tojson }}{% endif %}{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
TRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
LAST_ONLY = "{{ messages[0].content }}"
USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure, here "}


def rendered(
    source: str, messages: list[dict[str, str]], are_allowed: bool = False, **fields: Any
) -> tuple[str, list[str]]:
    """The text that a request's conversation becomes, and what of the request has no effect."""

    async def run() -> tuple[str, list[str]]:
        own, templates = ChatTemplate(source, {}), RequestTemplates({}, are_allowed)
        request = validate(ChatRequest, {"messages": messages, **fields})
        try:
            async with templates.use(request.chat_template) if request.chat_template else nullcontext(own) as template:
                variables = request.template_variables(template.facts)
                return await render_messages(request.messages, None, template, variables), list(variables.ignored)
        finally:
            await own.close()
            await templates.close()

    return asyncio.run(run())


@pytest.mark.parametrize("source", [PLAIN, TRIMMED])
@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([USER], {}),
        ([USER], {"chat_template_kwargs": {"enable_thinking": False}}),
        ([USER], {"chat_template_kwargs": {"enable_thinking": True}}),
        ([USER], {"chat_template_kwargs": {"reasoning_effort": "low"}}),
        ([USER], {"add_generation_prompt": False}),
        ([USER], {"add_generation_prompt": True}),
        ([USER, REPLY], {"continue_final_message": True}),
        ([USER, REPLY], {"continue_final_message": True, "add_generation_prompt": False}),
        ([USER, {**REPLY, "content": "Sure"}], {"continue_final_message": True}),
        ([USER, {**REPLY, "content": "a\n\n"}, USER], {"continue_final_message": True}),
        ([{**USER, "content": "Sure</><assistant>"}], {"continue_final_message": True}),
    ],
)
def test_the_text_is_that_of_transformers(source, messages, fields):
    more = dict(fields)
    variables = more.pop("chat_template_kwargs", {})
    more.setdefault("add_generation_prompt", not more.get("continue_final_message", False))
    inner = Tokenizer(DEMO).fast
    want = inner.apply_chat_template(messages, chat_template=source, tokenize=False, **more, **variables)
    assert rendered(source, messages, **fields)[0] == want


def test_documents_and_effort_reach_a_template_that_reads_them():
    documents = [{"title": "t", "text": "ü"}]
    assert '[{"title": "t", "text": "ü"}]' in rendered(PLAIN, [USER], documents=documents)[0]
    assert "[high]" in rendered(PLAIN, [USER], reasoning_effort="high")[0]
    assert (
        "[low]" in rendered(PLAIN, [USER], reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"})[0]
    )


def test_variables_that_a_template_does_not_read_are_named():
    given = {"enable_thinking": True, "thinking": True, "documents_": 1}
    assert rendered(PLAIN, [USER], chat_template_kwargs=given)[1] == [
        "chat_template_kwargs.documents_",
        "chat_template_kwargs.thinking",
    ]
    assert rendered(TRIMMED, [USER], chat_template_kwargs={"enable_thinking": False})[1]
    assert rendered(TRIMMED, [USER], reasoning_effort="low")[1] == ["reasoning_effort"]


@pytest.mark.parametrize(
    ("thinks", "effort", "ignored"),
    [
        (False, "high", ["reasoning_effort"]),
        (True, "high", ["reasoning_effort"]),
        (True, "none", ["reasoning_effort"]),
        (False, "none", []),
        (False, None, []),
    ],
)
def test_an_effort_is_named_where_a_switch_decides(thinks, effort, ignored):
    source = "{{ messages[0].content }}{% if enable_thinking %}[thinks]{% endif %}"
    text, found = rendered(source, [USER], enable_thinking=thinks, reasoning_effort=effort)
    assert ("[thinks]" in text) is thinks and found == ignored


@pytest.mark.parametrize(
    ("source", "fields", "param"),
    [
        (TRIMMED, {"documents": [{"text": "x"}]}, "documents"),
        (PLAIN, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (PLAIN, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        (PLAIN, {"chat_template_kwargs": []}, "chat_template_kwargs"),
        (PLAIN, {"chat_template": "x"}, "chat_template"),
        (PLAIN, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (LAST_ONLY, {"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_what_would_not_reach_the_template_is_refused(source, fields, param):
    with pytest.raises(ApiError) as refused:
        rendered(source, [USER, REPLY], **fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_message_without_text_cannot_be_continued():
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    last: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
    with pytest.raises(ApiError, match="no text to continue"):
        rendered(PLAIN, [USER, last], continue_final_message=True)


def test_chat_and_tokenize_render_alike(client):
    for fields in (
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"add_special_tokens": True},
    ):
        body = {"messages": [USER, REPLY], **fields}
        count = client.post("/tokenize", json=body).json()["count"]
        answer = client.post("/v1/chat/completions", json={**body, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == count
    answer = client.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 1, "documents": [{"a": "b"}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents")
    body = {"messages": [USER], "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False}}
    for path in ("/v1/chat/completions", "/tokenize"):
        sent = {k: v for k, v in body.items() if k != "max_tokens" or "chat" in path}
        assert client.post(path, json=sent).headers["x-inferplane-ignored"] == "chat_template_kwargs.enable_thinking"


def test_keys_of_messages_that_the_template_does_not_read_are_named():
    messages = [{**USER, "mood": "good", "name": "a"}, {**REPLY, "mood": "bad", "x-y": 1}]
    assert list_unread_keys(messages, Template(PLAIN, {})) == ["messages[0].mood", "messages[1].x-y"]
    reading = PLAIN + "{{ messages[0].mood }}{{ messages[1]['x-y'] }}"
    assert list_unread_keys(messages, Template(reading, {})) == []
    assert list_unread_keys(messages, Template(PLAIN, {}, tool_source=reading)) == []
    assert list_unread_keys(messages, Template("{{ messages | tojson }}", {})) == []
    assert list_unread_keys(messages, None) == ["messages[0].mood", "messages[1].x-y"]
    many = [{**USER, **{f"k{i}x{k}": 1 for k in range(40)}} for i in range(1500)]
    assert len(list_unread_keys(many, None)) < 200


def test_unknown_keys_of_messages_are_named_or_refused(client):
    body = {"messages": [{**USER, "mood": "good"}]}
    native = {"messages": body["messages"], "req_id": "1", "max_dec_len": 1}
    sent = (("/v1/chat/completions", {**body, "max_tokens": 1}), ("/tokenize", body), ("/v1/chat/completions", native))
    for path, data in sent:
        assert json.loads(client.post(path, json=data).headers["x-inferplane-ignored"]) == "messages[0].mood"
        wrong = client.post(path, json={**data, "messages": [{**USER, "nmae": "b"}]})
        assert wrong.status_code == 400 and "messages[0].nmae" in wrong.text
        going_on = client.post(path, json={**data, "messages": [USER, {**REPLY, "prefix": True}]})
        assert going_on.status_code == 400 and "messages[1].prefix" in going_on.text


def test_a_request_brings_a_template_where_that_is_allowed():
    own = "{% for m in messages %}({{ m.content }}){% endfor %}{% if documents %}{{ documents[0].text }}{% endif %}"
    assert rendered(PLAIN, [USER], are_allowed=True, chat_template=own) == ("(hi)", [])
    said = rendered(PLAIN, [USER], are_allowed=True, chat_template=own, documents=[{"text": "d"}])[0]
    assert said == "(hi)d"
    for wrong, code in (("{% for %}", "template_failed"), ("{{ raise_exception('no') }}", "invalid_value")):
        with pytest.raises(ApiError) as refused:
            rendered(PLAIN, [USER], are_allowed=True, chat_template=wrong)
        assert (refused.value.status, refused.value.code) == (400, code)
    with pytest.raises(ApiError, match=r"TemplateSyntaxError: .*, line 2\)") as refused:
        rendered(PLAIN, [USER], are_allowed=True, chat_template="{{ a }}\n{% for %}")
    assert refused.value.param == "chat_template"
    with pytest.raises(ApiError, match="not the name of a file") as refused:
        rendered(PLAIN, [USER], are_allowed=True, chat_template="think.jinja")
    assert refused.value.param == "chat_template"


def test_templates_of_requests_share_no_process_and_are_few():
    async def run() -> None:
        templates = RequestTemplates({}, are_allowed=True)
        sources = [f"{i}{{{{ messages[0].content }}}}" for i in range(MAX_TEMPLATES + 2)]

        async def render(source: str) -> tuple[str, Any]:
            async with templates.use(source) as template:
                said = await template.render([USER], None)
                return said, template._plain.renderer.process

        found = await asyncio.gather(*map(render, sources + sources[:1]))
        assert [said for said, _ in found] == [f"{i}hi" for i in range(MAX_TEMPLATES + 2)] + ["0hi"]
        assert len({id(process) for _, process in found[: len(sources)]}) == len(sources)
        assert 0 < len({id(process) for _, process in found if process.alive}) <= MAX_TEMPLATES
        assert (await render(sources[0]))[1] is (await render(sources[0]))[1]  # the process waits for the next
        await templates.close()
        assert not any(process.alive for _, process in found)

    asyncio.run(run())


def test_a_template_of_the_settings_is_a_file_or_a_text(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text(PLAIN)
    assert read_template(str(path)) == read_template(PLAIN) == PLAIN
    long = "{}" * 2**18
    for given, said in ((str(tmp_path / "none.jinja"), "cannot be read"), ("{% for %}", "line 1"), (long, "at most")):
        with pytest.raises(UsageError) as refused:
            read_template(given)
        assert said in str(refused.value)


def test_the_settings_template_renders_chats_and_decides_about_those_of_requests():
    body = {"messages": [USER], "chat_template": "b{{ messages[0].content }}"}
    arguments = ("--chat-template", "a{{ messages[0].content }}", "--trust-request-chat-template")
    with Live(*arguments) as live, live.client() as api:
        for sent, said in ((body, "bhi"), ({"messages": [USER]}, "ahi")):
            tokens = api.post("/tokenize", json=sent).raise_for_status().json()["tokens"]
            assert api.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == said
            answer = api.post("/v1/chat/completions", json={**sent, "max_tokens": 1}).raise_for_status().json()
            assert answer["usage"]["prompt_tokens"] == len(tokens)
        failed = api.post("/v1/chat/completions", json={**body, "chat_template": "{{ 1 // 0 }}"})
        assert (failed.status_code, failed.json()["error"]["param"]) == (400, "messages")
