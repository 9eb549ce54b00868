"""A parsed reply, rendered as history by a template of its family's form, is parsed into the same reply again."""

from __future__ import annotations

import itertools
import json

import pytest

from inferplane.dialogue.replies.catalog import FORMS, find_form
from tests.unit.dialogue.replies.goldens import ALL, NAMED, PLACE, ULM, parse, summarize

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

BEGIN = "{%- for m in messages %}{%- if m.role == 'assistant' %}"
END = "{%- endif %}{%- endfor %}"
THINK = "{%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
CONTENT = "{{ m.content }}"
LOOP = "{%- for c in m.tool_calls %}{%- set f = c.function %}"
ARGUMENTS = "{{ f.arguments | tojson }}"
AS_OBJECT = '{{ \'{"name": "\' + f.name + \'", "arguments": \' }}' + ARGUMENTS + "{{ '}' }}"
LIST = LOOP + "{{ '[' if loop.first else ', ' }}" + AS_OBJECT + "{{ ']' if loop.last }}{% endfor %}"


def if_calls(text: str) -> str:
    return "{%- if m.tool_calls %}" + text + "{%- endif %}"


def parameters(call_begin, name_end, key_begin, key_end, value_end, call_end):
    """A loop over calls, with an inner one over arguments."""
    value = "{{ v if v is string else v | tojson }}"
    one = f"{{{{ {key_begin!r} + k + {key_end!r} }}}}{value}{{{{ {value_end!r} }}}}"
    inner = f"{{%- for k, v in f.arguments.items() %}}{one}{{%- endfor %}}"
    return f"{LOOP}{{{{ {call_begin!r} + f.name + {name_end!r} }}}}{inner}{{{{ {call_end!r} }}}}{{%- endfor %}}"


def python(first, between, last):
    """A loop over calls in Python's syntax."""
    inner = "{%- for k, v in f.arguments.items() %}{{ k + '=' }}{{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}"
    begin = f"{{{{ {first!r} if loop.first else {between!r} }}}}{{{{ f.name + '(' }}}}"
    return f"{LOOP}{begin}{inner}{{{{ ')' }}}}{{{{ {last!r} if loop.last }}}}{{%- endfor %}}"


def think(begin, end):
    return f"{{%- if m.reasoning_content %}}{{{{ {begin!r} + m.reasoning_content + {end!r} }}}}{{% endif %}}"


DSML = parameters(
    '<｜DSML｜invoke name="', '">\n', '<｜DSML｜parameter name="', "", "</｜DSML｜parameter>\n", "</｜DSML｜invoke>\n"
).replace("{{ v if", '{{ \'" string="true">\' if v is string else \'" string="false">\' }}{{ v if')
HARMONY = (
    think("<|channel|>analysis<|message|>", "<|end|>")
    + "{%- if m.content %}{{ '<|start|>assistant<|channel|>' + ('commentary' if m.tool_calls else 'final')"
    + " + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    + LOOP
    + "{{ '<|start|>assistant<|channel|>commentary to=functions.' + f.name + ' <|constrain|>json<|message|>' }}"
    + ARGUMENTS
    + "{{ '<|call|>' }}{%- endfor %}"
)
CODER = ("\n<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>")
SEED = ("\n<function=", ">\n", "<parameter=", ">", "</parameter>\n", "</function>")
GRANITE = think("Here is my thought process:\n", "\nHere is my response:\n")
ANSWER = "{{ '<answer>\n' }}{%- if m.content %}{{ ('' if m.tool_calls else '助手：') + m.content }}{% endif %}"
TEMPLATES = {
    "qwen3": THINK
    + CONTENT
    + LOOP
    + "{{ '\n<tool_call>\n' if m.content or not loop.first else '<tool_call>\n' }}"
    + AS_OBJECT
    + "{{ '\n</tool_call>' }}{%- endfor %}",
    "qwen3_coder": THINK
    + CONTENT
    + parameters("\n<tool_call>\n<function=", *CODER[1:-1], CODER[-1] + "\n</tool_call>"),
    "seed_oss": think("<seed:think>\n", "\n</seed:think>\n")
    + CONTENT
    + if_calls("{{ '\n<seed:tool_call>' }}" + parameters(*SEED) + "{{ '\n</seed:tool_call>' }}"),
    "glm45": "{{ '\n<think>' + (m.reasoning_content or '') + '</think>' }}"
    + "{{ '\n' + m.content if m.content }}"
    + parameters("\n<tool_call>", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
    "minimax_m2": THINK
    + CONTENT
    + if_calls(
        "{{ '\n<minimax:tool_call>\n' }}"
        + parameters('<invoke name="', '">\n', '<parameter name="', '">', "</parameter>\n", "</invoke>\n")
        + "{{ '</minimax:tool_call>' }}"
    ),
    "deepseek_v32": think("<think>", "</think>")
    + CONTENT
    + if_calls("{{ '\n\n<｜DSML｜function_calls>\n' }}" + DSML + "{{ '</｜DSML｜function_calls>' }}"),
    "deepseek_v3": THINK
    + CONTENT
    + if_calls(
        "{{ '<｜tool▁calls▁begin｜>' }}"
        + LOOP
        + "{{ '\n' if not loop.first }}{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\n```json\n' }}"
        + ARGUMENTS
        + "{{ '\n```<｜tool▁call▁end｜>' }}{%- endfor %}{{ '<｜tool▁calls▁end｜>' }}"
    ),
    "deepseek_v31": think("<think>", "</think>")
    + CONTENT
    + if_calls(
        "{{ '<｜tool▁calls▁begin｜>' }}"
        + LOOP
        + "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' }}"
        + ARGUMENTS
        + "{{ '<｜tool▁call▁end｜>' }}{%- endfor %}{{ '<｜tool▁calls▁end｜>' }}"
    ),
    "kimi_k2": think("<think>", "</think>")
    + CONTENT
    + if_calls(
        "{{ '<|tool_calls_section_begin|>' }}"
        + LOOP
        + "{{ '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}"
        + ARGUMENTS
        + "{{ '<|tool_call_end|>' }}{%- endfor %}{{ '<|tool_calls_section_end|>' }}"
    ),
    "mistral": think("[THINK]", "[/THINK]")
    + CONTENT
    + LOOP
    + "{{ '[TOOL_CALLS]' + f.name + '[ARGS]' }}"
    + ARGUMENTS
    + "{%- endfor %}",
    "mistral_list": CONTENT + if_calls("{{ '[TOOL_CALLS] ' }}" + LIST),
    "granite": GRANITE + CONTENT + if_calls("{{ '<|tool_call|>' }}" + LIST),
    "kimi": think("◁think▷", "◁/think▷") + CONTENT,
    "hunyuan_a13b": think("<think>\n", "\n</think>\n")
    + ANSWER
    + if_calls("{{ '<tool_calls>' }}" + LIST + "{{ '</tool_calls>' }}")
    + "{{ '\n</answer>' }}",
    "jamba": CONTENT + if_calls("{{ '\n<tool_calls>' }}" + LIST + "{{ '</tool_calls>' }}"),
    "minimax": THINK
    + CONTENT
    + if_calls(
        "{# <tool_calls></tool_calls> #}{{ '\n<tool_calls>\n' }}"
        + LOOP
        + AS_OBJECT
        + "{{ '\n' }}{%- endfor %}{{ '</tool_calls>' }}"
    ),
    "ernie45": think("<think>\n", "\n</think>\n\n")
    + "{%- if m.content %}{{ '<response>\n' + m.content + '\n</response>\n' }}{% endif %}"
    + LOOP
    + "{{ '\n<tool_call>\n' }}"
    + AS_OBJECT
    + "{{ '\n</tool_call>\n' }}{%- endfor %}",
    "nemotron": THINK
    + CONTENT
    + if_calls("{{ '\n\n' if m.content }}{{ '<TOOLCALL>' }}" + LIST + "{{ '</TOOLCALL>' }}"),
    "command": think("<|START_THINKING|>", "<|END_THINKING|>")
    + "{%- if m.content %}{{ '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{% endif %}"
    + if_calls(
        "{{ '<|START_ACTION|>[\n' }}"
        + LOOP
        + '{{ \'    {"tool_call_id": "\' + c.id + \'", "tool_name": "\' + f.name + \'", "parameters": \' }}'
        + ARGUMENTS
        + "{{ '}' if loop.last else '},\n' }}{%- endfor %}{{ '\n]<|END_ACTION|>' }}"
    ),
    "exaone_deep": think("<thought>\n", "\n</thought>\n\n") + CONTENT,
    "granite-20b-fc": CONTENT + LOOP + "{{ '<function_call> ' }}" + AS_OBJECT + "{%- endfor %}",
    "phi4_mini_json": CONTENT + if_calls("{# <|/tool|> #}{{ '<|tool_call|>' }}" + LIST + "{{ '<|/tool_call|>' }}"),
    "functools": CONTENT + if_calls("{{ 'functools' }}" + LIST + "{# functools[ #}"),
    "llama3_json": CONTENT
    + LOOP
    + "{{ '; ' if not loop.first }}{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' }}"
    + ARGUMENTS
    + "{{ '}' }}{%- endfor %}",
    "llama4_pythonic": CONTENT + python("[", ", ", "]") + "{# [func_name1(param1=value1)] #}",
    "lfm2": THINK + CONTENT + python("<|tool_call_start|>[", ", ", "]<|tool_call_end|>") + "{# <|tool_list_start|> #}",
    "olmo3": THINK + CONTENT + python("\n<function_calls>\n", "\n", "\n</function_calls>"),
    "json": CONTENT + if_calls(LIST),
    "openai": HARMONY,
}
"""Name of a form -> what a template of its family does with an answer; `BEGIN` and `END` are around it."""
ONLY_CALLS = ("json", "llama3_json", "llama4_pythonic")
"""Forms in which an answer with content has no calls."""
REASONING = ("", 'I look first.\n\n<tool_call>{"name": "list_all"} [list_all()]')
CONTENTS = ("", "Two towns:\n- Ulm\n- Ulm")
CALLS = ((), (ULM,), (PLACE, ALL, ULM))


@pytest.fixture(scope="module")
def tokenizer():
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_history_is_parsed_into_the_same_reply(name, tokenizer):
    form, source = NAMED[name], BEGIN + TEMPLATES[name] + END
    reasonings = REASONING if form.reasoning else ("",)
    callings = CALLS if form.tools else ((),)
    for reasoning, content, calls in itertools.product(reasonings, CONTENTS, callings):
        if not (reasoning or content or calls) or (name in ONLY_CALLS and content and calls):
            continue
        ids = [f"functions.{call[0]}:{i}" if name == "kimi_k2" else f"{i}" for i, call in enumerate(calls)]
        listed = [
            {"id": ids[i], "type": "function", "function": {"name": call[0], "arguments": call[1]}}
            for i, call in enumerate(calls)
        ]
        message = {"role": "assistant", "content": content, "tool_calls": listed, "reasoning_content": reasoning}
        messages = [{"role": "user", "content": "Towns?"}, message]
        text = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False)
        found = summarize(parse(form, list(text)), name, text)
        assert (found.reasoning, found.content, found.calls) == (reasoning, content, calls), text
        assert found.ids == (tuple(ids) if name in ("kimi_k2", "command") else ())
        again = {**message, "reasoning_content": found.reasoning, "content": found.content}
        for call, (_, arguments) in zip(again["tool_calls"], found.calls, strict=True):
            call["function"]["arguments"] = json.loads(json.dumps(arguments))
        assert tokenizer.apply_chat_template([messages[0], again], chat_template=source, tokenize=False) == text


def test_every_form_has_a_template():
    assert set(TEMPLATES) == {form.name for form in FORMS}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_form_is_recognized_by_its_template(name):
    found = find_form((BEGIN + TEMPLATES[name] + END).replace("\\n", "\n"))
    assert found.tools[:1] == NAMED[name].tools[:1] if NAMED[name].tools else found.reasoning == NAMED[name].reasoning
    assert found.reasoning == NAMED[name].reasoning
