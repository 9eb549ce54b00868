"""What chat templates see, against transformers' own rendering, and histories as servers return them."""

from __future__ import annotations

import json
import string

import pytest

from inferplane.dialogue import render
from inferplane.dialogue.messages import normalize_messages
from inferplane.dialogue.renderer import Renderer, RenderError
from inferplane.dialogue.template import Template, forms
from inferplane.dialogue.tools import new_call_id
from inferplane.errors import UsageError

TOKENS = {"bos_token": "<b>", "eos_token": "<e>", "pad_token": "<p>", "unk_token": "<u>"}
TOOL = {"function": {"name": "f", "parameters": None, "description": "<ü> & 'x'"}, "type": "function"}
MESSAGES = [
    {"role": "system", "content": " s "},
    {"role": "user", "content": "ü <&> \x00 {{ 7 * 7 }}"},
    {"role": "assistant", "content": "a\n", "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, "é"]}}}]},
]
SNIPPETS = [
    "{% if tools is not none %}{{ tools | length }}{% endif %}none",
    "{% if tools is none %}no{% else %}{{ tools | tojson(indent=2) }}{% endif %}",
    "{% if documents is not none %}{{ documents[0] }}{% endif %}",
    "{% if documents is defined %}defined{% endif %}{{ documents }}",
    "{% if tools is defined and tools %}{% for t in tools %}{{ t.function | tojson }}{% endfor %}{% endif %}",
    "{% if add_generation_prompt is defined %}{{ add_generation_prompt }}{% endif %}",
    "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}[{{ sep_token }}]",
    "{% if sep_token is defined %}sep{% endif %}{{ bos_token is string }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content | trim }}{% break %}{% endfor %}",
    "{{ messages | tojson }}{{ messages[1].content | tojson(ensure_ascii=True) }}",
    "{{ messages[2].tool_calls[0].function.arguments | tojson(false, 4) }}",
    "{{ {'b': 1, 'a': [1, 2]} | tojson(separators=(',', ':'), sort_keys=true) }}",
    "{% for m in messages %}{% generation %}<{{ m.content }}>{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(found=false, n=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ strftime_now('%Y') | length }}{{ strftime_now(format='%Y') | length }}",
    "{% macro show(x) %}<{{ x }}>{% endmacro %}{{ show(messages[0].role) }}{{ dict(a=1) }}",
    "{% for m in messages %}\n    {% if loop.last %}{{ m.content }}{% endif %}\n{% endfor %}\n",
    "{{ continue_final_message is defined }}{{ messages[0].name is defined }}{{ messages[0].content.strip() }}",
    "{{ messages[2].tool_calls[0].function.arguments.items() | list }}{{ messages[1].content[:3] }}{{ 'a' ~ 1 }}",
    "{% for k, v in messages[2].tool_calls[0].function.arguments | items %}{{ k }}{{ v | string }}{% endfor %}",
]
REFUSING = [
    "{{ raise_exception('no such role') }}",
    "{{ messages[99].content.x }}",
    "{{ ''.__class__.__mro__ }}",
    "{% set _ = messages.append(1) %}",
    "{% set ns = namespace(_x=1) %}",
    "{{ missing() }}",
]


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("source", SNIPPETS)
def test_as_in_transformers(source, tools):
    from transformers.utils.chat_template_utils import render_jinja_template

    (want,), _ = render_jinja_template(
        [MESSAGES], tools=tools, chat_template=source, add_generation_prompt=True, **TOKENS
    )
    assert render.render(render.compile_template(source), {**TOKENS, "messages": MESSAGES, "tools": tools}) == want


@pytest.mark.parametrize("source", REFUSING)
def test_what_transformers_refuses(source):
    with pytest.raises(UsageError, match=r"The chat template refuses these messages: .*Error: "):
        Template(source, TOKENS).render(normalize_messages([{"role": "user", "content": "x"}]))


def test_what_a_template_is_given_without_tools():
    """`tools` and `documents` are None: undefined, they pass for `is not none`."""
    source = "{% if tools is not none %}{{ tools[0].function.name }}{% endif %}{{ documents is none }}{{ bos_token }}"
    assert Template(source, TOKENS).render(normalize_messages([{"role": "user", "content": "x"}])) == "True<b>"


# ------------------------------------------------------------------ histories with calls

AS_DATA = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %};{% endfor %}{% endfor %}"
)
AS_TEXT = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }};"
    "{% endfor %}{% endfor %}"
)
AS_JSON = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }};{% endfor %}{% endfor %}"
NINE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{{ c.id }}"
    "{% endfor %}"
    "{% if m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('and these') }}{% endif %}={{ m.tool_call_id }} {% endif %}{% endfor %}"
)


def history(*arguments, ids=("call_0123456789abcdef01234567",), answered=True):
    pairs = zip(arguments, ids * len(arguments) if len(ids) == 1 else ids)
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": a}} for a, i in pairs]
    tools = [{"role": "tool", "tool_call_id": c["id"], "content": "4"} for c in calls] if answered else []
    return normalize_messages([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}, *tools])


@pytest.mark.parametrize(
    ("source", "arguments", "want"),
    [
        (AS_DATA, ("",), "f;"),
        (AS_DATA, ('{"x": 1}', " "), "f x=1;f;"),
        (AS_DATA, ('{"x": 1, "y',), 'f arguments={"x": 1, "y;'),
        (AS_DATA, ("[1]",), "f arguments=[1];"),
        (AS_DATA, ('{"x": 1}', "{"), "f x=1;f arguments={;"),
        (AS_TEXT, ("",), "f{};"),
        (AS_TEXT, ('{"x": 1}', '{"x'), 'f{"x": 1};f{"x;'),
        (AS_JSON, ("",), '{"name": "f", "arguments": {}};'),
        (AS_JSON, ('{"x": 1}',), '{"name": "f", "arguments": {"x": 1}};'),
        (AS_JSON, ('{"x',), '{"name": "f", "arguments": "{\\"x"};'),
        (AS_JSON, ("[" * 100_000,), json.dumps({"name": "f", "arguments": "[" * 100_000}) + ";"),
    ],
)
def test_arguments_that_are_empty_or_cut_off(source, arguments, want):
    assert Template(source, {}).render(history(*arguments)) == want


@pytest.mark.parametrize(
    "own", ["call_0123456789abcdef01234567", "1", "functions.f:0", "toolu_01A09q90qw90lq917835lq9", ""]
)
def test_ids_that_mistral_refuses(own):
    first, _, rest = Template(NINE, {}).render(history("{}", ids=(own,))).partition("=")
    assert first == rest.strip() and len(first) == 9 and set(first) <= set(string.ascii_letters + string.digits)
    again = Template(NINE, {}).render(history("{}", ids=(own,)))
    assert again == f"{first}={rest}", "the same each time: prefixes stay equal"


def test_ids_that_are_missing_or_good():
    assert Template(NINE, {}).render(history("{}", ids=("aB3456789",))) == "aB3456789=aB3456789 "
    calls = [{"function": {"name": "f"}}, {"function": {"name": "g"}}]
    answers = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    said = Template(NINE, {}).render(normalize_messages([{"role": "assistant", "tool_calls": calls}, *answers]))
    found, first, second = said.replace("=", " ").split()
    assert found == first + second and first != second


def test_our_own_ids_are_nine_letters_and_digits():
    ids = {new_call_id() for _ in range(50)}
    assert len(ids) == 50 and all(len(i) == 9 and i.isalnum() and i.isascii() for i in ids)


def test_most_conversations_have_one_form():
    template = Template("x", {})
    assert len(list(forms(template, normalize_messages([{"role": "user", "content": "x"}])))) == 1
    assert len(list(forms(template, history("{}", ids=("aB3456789",))))) == 2


@pytest.mark.parametrize("end", ["", "}}"])
@pytest.mark.parametrize("piece", ["{{", "{%", "'\\", '"\\', "\\'", "'{{", "{{'", "\\'\\\""])
def test_braces_and_quotes_that_never_close_are_read_once(piece, end):
    """If each of them were followed to the end of a text that a request brings, this would take minutes."""
    text = "{{ x }}{{ " + piece * (2**18 // len(piece)) + end
    template = Template(text, TOKENS)
    assert template.reads_variable("x") and not template.reads_variable("y")


@pytest.mark.parametrize(
    ("source", "is_read"),
    [
        ("{{ x }}", True),
        ("{% if x is defined %}", True),
        ("{{ 'x' }}", False),
        ('{{ "a\\"x" }}', False),
        ("{{ 'it''s' ~ x }}", True),
        ("x {{ y }} x", False),
        ("{{ y.x }}", False),
        ("{{ y }}{{ x", False),
        ('{{ "it\'s" }} x {{ x }}', True),
        ("{{ 'a }} x", False),
    ],
)
def test_which_variables_are_read(source, is_read):
    assert Template(source, TOKENS).reads_variable("x") is is_read


def test_a_template_whose_process_ends_is_an_error(tmp_path, monkeypatch):
    script = tmp_path / "ends.py"
    script.write_text("import sys\nsys.stdin.readline()\nprint('{}', flush=True)\n")
    monkeypatch.setattr(render, "__file__", str(script))
    with pytest.raises(RenderError, match="its process ended") as caught:
        Renderer("x", {}).render({"messages": []})
    assert caught.value.reason == "template_failed"
