"""Replies in every form, and what they say: texts as the families write them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from inferplane.dialogue.replies.catalog import FORMS
from inferplane.dialogue.replies.events import Arguments, CallStart, Content, Event, Reasoning, join_events
from inferplane.dialogue.replies.forms import ReplyForm
from inferplane.dialogue.replies.parser import ReplyParser

TOOLS: dict[str, dict[str, Any]] = {
    "find_town": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "limit": {"type": "integer"},
            "near": {"type": ["array", "null"], "items": {"type": ["number", "null"]}},
            "options": {"$ref": "#/$defs/Options"},
        },
        "$defs": {"Options": {"type": "object"}},
    },
    "list_all": {"type": "object", "properties": {}},
}
NAMED = {form.name: form for form in FORMS}
Call = tuple[str, dict[str, Any]]


class Golden(NamedTuple):
    """A reply, and what it says; `ids` are the calls' own."""

    form: str
    text: str
    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()
    ids: tuple[str, ...] = ()


def parse(form: ReplyForm, pieces: list[str], tools: Any = None, **options: Any) -> list[Event]:
    """The joined events of a reply in pieces."""
    parser = ReplyParser(form, TOOLS if tools is None else tools, **options)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return join_events([*events, *parser.end()])


def summarize(events: list[Event], form: str, text: str) -> Golden:
    """What events say, as a golden."""
    arguments: dict[int, str] = {}
    starts = [event for event in events if isinstance(event, CallStart)]
    for event in events:
        if isinstance(event, Arguments):
            arguments[event.index] = arguments.get(event.index, "") + event.text
    calls = tuple((start.name, json.loads(arguments[start.index])) for start in starts)
    ids = tuple(start.id for start in starts if start.id)
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    return Golden(form, text, reasoning, content, calls, ids)


ULM: Call = ("find_town", {"name": 'Ulm "an der" Donau\n</end>', "limit": 3})
ALL: Call = ("list_all", {})
PLACE: Call = ("find_town", {"name": "Āé 市 😀", "near": [48.4, -1e1, None], "options": {"a": {"b": [True]}, "c": ""}})
J_ULM, J_PLACE = json.dumps(ULM[1]), json.dumps(PLACE[1], ensure_ascii=False)
THOUGHT = 'The user wants towns.\n\nI could write <tool_call> or {"name": "list_all"}.'


def _json(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


GOLDENS = [
    # -- Hermes and Qwen 3
    Golden(
        "qwen3",
        f"<think>\n{THOUGHT}\n</think>\n\nI look.\n<tool_call>\n{_json(ULM)}\n</tool_call>\n"
        f"<tool_call>\n{_json(ALL)}\n</tool_call>",
        THOUGHT,
        "I look.",
        (ULM, ALL),
    ),
    Golden("qwen3", f"{THOUGHT[:21]}\n</tool_call> <think>", "", f"{THOUGHT[:21]}\n</tool_call> <think>"),
    Golden("qwen3", f"<think>\n\n</think>\n\n<tool_call>{_json(PLACE)}</tool_call>", calls=(PLACE,)),
    # -- parameters between marks
    Golden(
        "qwen3_coder",
        'I look.\n<tool_call>\n<function=find_town>\n<parameter=name>\nUlm "an der" Donau\n</end>\n</parameter>\n'
        "<parameter=limit>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=list_all>\n</function>\n</tool_call>",
        "",
        "I look.",
        (ULM, ALL),
    ),
    Golden(
        "qwen3_coder",
        f"<think>\n{THOUGHT}\n</think>\n\n<tool_call>\n<function=find_town>\n<parameter=name>\nĀé 市 😀\n</parameter>\n"
        '<parameter=near>\n[48.4, -1e1, null]\n</parameter>\n<parameter=options>\n{"a": {"b": [true]}, "c": ""}\n'
        "</parameter>\n</function>\n</tool_call>",
        THOUGHT,
        "",
        (PLACE,),
    ),
    Golden(
        "qwen3_coder",
        "I look.\n<function=find_town>\n<parameter=limit>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<function=list_all>\n</function>",
        "",
        "I look.",
        (("find_town", {"limit": 3}), ALL),
    ),
    Golden("qwen3_coder", "Write <function=name>, or <function=.", "", "Write <function=name>, or <function=."),
    Golden(
        "seed_oss",
        f"<seed:think>\n{THOUGHT}\n</seed:think>\nI look.\n<seed:tool_call>\n<function=find_town>\n"
        '<parameter=name>Ulm "an der" Donau\n</end></parameter>\n<parameter=limit>3</parameter>\n</function>\n'
        "</seed:tool_call>",
        THOUGHT,
        "I look.",
        (ULM,),
    ),
    Golden(
        "glm45",
        f"\n<think>{THOUGHT}</think>\nI look.\n<tool_call>find_town\n<arg_key>name</arg_key>\n"
        '<arg_value>Ulm "an der" Donau\n</end></arg_value>\n<arg_key>limit</arg_key>\n<arg_value>3</arg_value>\n'
        "</tool_call>\n<tool_call>list_all\n</tool_call>",
        THOUGHT,
        "I look.",
        (ULM, ALL),
    ),
    Golden(
        "glm45",
        "<think></think><tool_call>list_all</tool_call><tool_call>find_town<arg_key>name</arg_key>"
        "<arg_value>Āé 市 😀</arg_value><arg_key>near</arg_key><arg_value>[48.4, -1e1, null]</arg_value>"
        '<arg_key>options</arg_key><arg_value>{"a": {"b": [true]}, "c": ""}</arg_value></tool_call>',
        calls=(ALL, PLACE),
    ),
    Golden(
        "minimax_m2",
        f"<think>\n{THOUGHT}\n</think>\n\nI look.\n<minimax:tool_call>\n"
        '<invoke name="find_town">\n<parameter name="name">Ulm "an der" Donau\n</end></parameter>\n'
        '<parameter name="limit">3</parameter>\n</invoke>\n<invoke name="list_all">\n</invoke>\n</minimax:tool_call>',
        THOUGHT,
        "I look.",
        (ULM, ALL),
    ),
    Golden(
        "deepseek_v32",
        f'{THOUGHT}</think>I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="find_town">\n'
        '<｜DSML｜parameter name="name" string="true">Ulm "an der" Donau\n</end></｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="limit" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="list_all">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        THOUGHT,
        "I look.",
        (ULM, ALL),
    ),
    # -- a name, then JSON
    Golden(
        "deepseek_v3",
        f"{THOUGHT}\n</think>\n\nI look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find_town\n"
        f"```json\n{J_ULM}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>list_all\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        THOUGHT,
        "I look.",
        (ULM, ALL),
    ),
    Golden(
        "deepseek_v31",
        f"{THOUGHT}</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find_town<｜tool▁sep｜>{J_PLACE}"
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>list_all<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        THOUGHT,
        "I look.",
        (PLACE, ALL),
    ),
    Golden(
        "kimi_k2",
        f"<think>{THOUGHT}</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.find_town:0"
        f"<|tool_call_argument_begin|>{J_ULM}<|tool_call_end|><|tool_call_begin|>functions.list_all:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        THOUGHT,
        "I look.",
        (ULM, ALL),
        ("functions.find_town:0", "functions.list_all:1"),
    ),
    Golden(
        "kimi_k2",
        f"<think></think><|tool_call_section_begin|><|tool_call_begin|>find_town:4<|tool_call_argument_begin|>{J_PLACE}"
        "<|tool_call_end|><|tool_call_section_end|>",
        calls=(PLACE,),
        ids=("functions.find_town:4",),
    ),
    # K2.5 calls in the middle of a thought.
    Golden(
        "kimi_k2",
        f"<think>{THOUGHT}<|tool_calls_section_begin|><|tool_call_begin|>functions.find_town:0"
        f"<|tool_call_argument_begin|>{J_ULM}<|tool_call_end|><|tool_calls_section_end|>",
        THOUGHT,
        calls=(ULM,),
        ids=("functions.find_town:0",),
    ),
    Golden("kimi", "◁think▷Hm.\n◁/think▷No.", "Hm.", "No."),
    Golden(
        "mistral",
        f"[THINK]{THOUGHT}[/THINK]I look.[TOOL_CALLS]find_town[ARGS]{J_ULM}[TOOL_CALLS]list_all[ARGS]{{}}",
        THOUGHT,
        "I look.",
        (ULM, ALL),
    ),
    Golden(
        "mistral",
        f"[TOOL_CALLS]find_town[CALL_ID]a1B2c3D4e[ARGS]{J_PLACE}[TOOL_CALLS]list_all{{}}",
        calls=(PLACE, ALL),
        ids=("a1B2c3D4e",),
    ),
    Golden("mistral", f"[TOOL_CALLS] [{_json(ULM)}, {_json(ALL)}]", calls=(ULM, ALL)),
    Golden("mistral_list", f"I look.[TOOL_CALLS][{_json(ULM)}]", content="I look.", calls=(ULM,)),
    # -- JSON between marks
    Golden(
        "granite",
        f"Here is my thought process:\n{THOUGHT}\nHere is my response:\n<|tool_call|>[{_json(ULM)}, {_json(ALL)}]",
        THOUGHT,
        "",
        (ULM, ALL),
    ),
    Golden("granite", "Here's my thought process: Hm. Here's my response: No.", "Hm.", "No."),
    Golden("granite-20b-fc", f"<function_call> {_json(ULM)}<function_call> {_json(ALL)}", calls=(ULM, ALL)),
    Golden("phi4_mini_json", f"<|tool_call|>[{_json(ULM)}]<|/tool_call|>", calls=(ULM,)),
    Golden("functools", f"functools[{_json(ULM)}, {_json(ALL)}]", calls=(ULM, ALL)),
    Golden("granite", f"<tool_call>[{_json(ULM)}, {_json(ALL)}]", calls=(ULM, ALL)),
    Golden(
        "hunyuan_a13b",
        f"<think>\n{THOUGHT}\n</think>\n<answer>\nI look.<tool_calls>[{_json(ULM)}, {_json(ALL)}]</tool_calls>\n"
        "</answer>",
        THOUGHT,
        "I look.",
        (ULM, ALL),
    ),
    Golden("hunyuan_a13b", f"<think>\n\n</think>\n<tool_calls>[{_json(PLACE)}]</tool_calls>", calls=(PLACE,)),
    Golden("hunyuan_a13b", "<think>\nHm.\n</think>\n<answer>\n助手：助手：No.\n</answer>", "Hm.", "助手：No."),
    Golden("hunyuan_a13b", f"助手：<tool_calls>[{_json(ALL)}]</tool_calls>", calls=(ALL,)),
    Golden("jamba", f"I look.\n<tool_calls>[\n{_json(ULM)},\n{_json(ALL)}\n]</tool_calls>", "", "I look.", (ULM, ALL)),
    Golden(
        "minimax",
        f"<think>\n{THOUGHT}\n</think>\n\n<tool_calls>\n{_json(ULM)}\n{_json(ALL)}\n</tool_calls>",
        THOUGHT,
        "",
        (ULM, ALL),
    ),
    Golden(
        "hunyuan_a13b", "<think>\nHm.\n</think>\n<answer>\nYes, <answer> </answer> it is.\n</answer>", "Hm."
    )._replace(content="Yes, <answer> </answer> it is."),
    Golden(
        "ernie45",
        f"{THOUGHT}\n</think>\n\n<response>\nI look.\n</response>\n\n<tool_call>\n{_json(ULM)}\n</tool_call>\n",
        THOUGHT,
        "I look.",
        (ULM,),
    ),
    Golden("ernie45", f"{THOUGHT}\n</think>\n\n\n<tool_call>\n{_json(ALL)}\n</tool_call>\n", THOUGHT, "", (ALL,)),
    Golden(
        "nemotron",
        f"<think>\n{THOUGHT}\n</think>\n\nI look.\n\n<TOOLCALL>[{_json(ULM)}, {_json(ALL)}]</TOOLCALL>",
        THOUGHT,
        "I look.",
        (ULM, ALL),
    ),
    Golden(
        "command",
        f"<|START_THINKING|>{THOUGHT}<|END_THINKING|><|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "find_town", "parameters": {J_ULM}}},\n'
        '    {"tool_call_id": "1", "tool_name": "list_all", "parameters": {}}\n]<|END_ACTION|>',
        THOUGHT,
        "",
        (ULM, ALL),
        ("0", "1"),
    ),
    Golden("command", "<|START_RESPONSE|>No.<|END_RESPONSE|>", "", "No."),
    Golden("exaone_deep", "<thought>\nHm.\n</thought>\n\nNo.", "Hm.", "No."),
    # -- JSON and Python without marks
    Golden("llama3_json", _json(ULM, "parameters"), calls=(ULM,)),
    Golden(
        "llama3_json",
        '{"type": "function", "function": {"name": "list_all", "parameters": {}}}; '
        f'{{"type": "function", "name": "find_town", "parameters": {J_PLACE}}}',
        calls=(ALL, PLACE),
    ),
    Golden("llama3_json", f"<|python_tag|>{_json(ULM, 'parameters')}; {_json(ALL, 'parameters')}", calls=(ULM, ALL)),
    Golden("llama3_json", "[list_all()]", calls=(ALL,)),
    Golden(
        "llama4_pythonic",
        '[find_town(name="Ulm \\"an der\\" Donau\\n</end>", limit=3), list_all(), '
        "find_town(name='\\u0100\\xe9 市 \\U0001F600', near=[48.4, -1e1, None], "
        "options={'a': {'b': (True,)}, \"c\": ''})]",
        calls=(ULM, ALL, PLACE),
    ),
    Golden("llama4_pythonic", "<|python_start|>[list_all()]<|python_end|>", calls=(ALL,)),
    Golden("llama4_pythonic", f"<|python_start|>{_json(ULM, 'parameters')}<|python_end|>", calls=(ULM,)),
    Golden(
        "lfm2",
        'I look.<|tool_call_start|>[find_town(name="Ulm \\"an der\\" Donau\\n</end>", limit=3)]<|tool_call_end|>Wait.',
        content="I look.Wait.",
        calls=(ULM,),
    ),
    Golden(
        "olmo3",
        "<function_calls>\nfind_town(name='Ulm \"an der\" Donau\\n</end>', limit=3)\nlist_all()\n</function_calls>",
        calls=(ULM, ALL),
    ),
    Golden("json", f"[{_json(ULM)}, {_json(ALL)}]", calls=(ULM, ALL)),
    Golden("json", f"{_json(ULM)}\n{_json(ALL)}", calls=(ULM, ALL)),
    Golden("json", f"Here:\n```json\n{_json(ULM)}\n```\nDone.", content="Here:\nDone.", calls=(ULM,)),
    Golden("json", f"```\n[{_json(ULM)}]\n```", calls=(ULM,)),
    Golden("json", 'Look:\n```json\n{"a": 1}\n```', content='Look:\n```json\n{"a": 1}\n```'),
    Golden("qwen3", f"<think>\nHm.\n</think>\n\n{_json(ULM)}", "Hm.", "", (ULM,)),
    Golden("json", json.dumps({"name": "find_town", "arguments": J_ULM}), calls=(ULM,)),
    Golden("json", json.dumps({"name": "find_town", "arguments": J_PLACE}), calls=(PLACE,)),
    Golden("qwen3", f'<tool_call>{{"arguments": {J_ULM}, "name": "find_town"}}</tool_call>', calls=(ULM,)),
    # -- gpt-oss
    Golden(
        "openai",
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.find_town <|constrain|>json<|message|>{J_ULM}<|call|>",
        THOUGHT,
        "I look.",
        (ULM,),
    ),
    Golden(
        "openai",
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
        "<|start|>assistant to=functions.list_all<|channel|>commentary json<|message|>{}<|call|>",
        THOUGHT,
        "",
        (ALL,),
    ),
    Golden("openai", "<|channel|>final<|message|>No.<|return|>", "", "No."),
    Golden("openai", "<|channel|>commentary to=functions.list_alljson<|message|>{}", calls=(ALL,)),
]
"""DeepSeek's and ERNIE's thoughts are begun by the prompt."""
OPENED = ("deepseek_v3", "deepseek_v31", "deepseek_v32", "ernie45")
