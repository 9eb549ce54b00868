"""The forms of thoughts and calls that models write, as tables of marks.

Sources: the chat templates in the models' repositories on https://huggingface.co, and for DeepSeek V3.2 and gpt-oss the
encodings that are published with them. Each table names one. "Held against" names what was read beside it in November
2026: a copy of the template, or the parser of another engine.
"""

from __future__ import annotations

from dataclasses import replace

from inferplane.dialogue.replies.forms import ReasoningForm, ToolForm

# ------------------------------------------------------------------ thoughts

THINK = ReasoningForm("<think>", "</think>", template_marks=("</think>",))
"""DeepSeek R1 to V3.2, Qwen 3, GLM-4.5, MiniMax M2, and most others."""
THINK_OR_CALL = replace(THINK, ended_by_calls=True)
"""Kimi K2 and K2.5, which sometimes call without an end of the thought; the mark of calls is a special token, which the
thought does not speak of. Held against vLLM's reasoning/kimi_k2_reasoning_parser.py."""
THINK_ANSWER = ReasoningForm(
    "<think>",
    "</think>",
    answer_begin="<answer>",
    answer_end="</answer>",
    forced_end="\n</think>\n",
    template_marks=("</think>", "<answer>"),
)
"""Hunyuan. Source: https://huggingface.co/tencent/Hunyuan-A13B-Instruct. Held against vLLM's
reasoning/hunyuan_a13b_reasoning_parser.py and examples/tool_chat_template_hunyuan_a13b.jinja."""
THINK_RESPONSE = ReasoningForm(
    "<think>", "</think>", answer_begin="<response>", answer_end="</response>", template_marks=("<think>", "<response>")
)
"""ERNIE 4.5 and Granite 3.3. Sources: https://huggingface.co/baidu/ERNIE-4.5-21B-A3B-Thinking,
https://huggingface.co/ibm-granite/granite-3.3-8b-instruct. Held against FastDeploy's
reasoning/ernie_x1_reasoning_parsers.py, vLLM's reasoning/ernie45_reasoning_parser.py and, for Granite, llama.cpp's
chat-diff-analyzer."""
THOUGHT_PROCESS = ReasoningForm(
    "Here is my thought process:",
    "Here is my response:",
    other_begin_marks=("Here's my thought process:",),
    other_end_marks=("Here's my response:",),
    padding=" \n",
    template_marks=("Here is my thought process:",),
)
"""Granite 3.2. Source: https://huggingface.co/ibm-granite/granite-3.2-8b-instruct. Held against vLLM's
reasoning/granite_reasoning_parser.py, which has the spellings with "Here's"."""
THINK_BRACKETS = ReasoningForm("[THINK]", "[/THINK]", forced_end="[/THINK]", template_marks=("[THINK]",))
"""Magistral from 2507 on, Ministral 3. Source: https://huggingface.co/mistralai/Magistral-Small-2509. Held against
mistral-common's InstructTokenizerV13, whose marks are tokens; the Magistral of 2506 writes `<think>`."""
THINK_TRIANGLES = ReasoningForm("◁think▷", "◁/think▷", template_marks=("◁think▷",))
"""Kimi-VL-Thinking and Kimi-Dev, before K2. Source: https://huggingface.co/moonshotai/Kimi-VL-A3B-Thinking."""
SEED_THINK = ReasoningForm(
    "<seed:think>",
    "</seed:think>",
    other_begin_marks=("<seed:think><seed:cot_budget_reflect>",),
    template_marks=("<seed:think>",),
)
"""The other mark is at the end of a prompt without a budget for thoughts.
Source: https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct."""
THOUGHT = ReasoningForm("<thought>", "</thought>", template_marks=("<thought>",))
"""Source: https://huggingface.co/LGAI-EXAONE/EXAONE-Deep-7.8B."""
START_THINKING = ReasoningForm(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    answer_begin="<|START_RESPONSE|>",
    answer_end="<|END_RESPONSE|>",
    template_marks=("<|START_THINKING|>",),
)
"""Command A and R7B. Source: https://docs.cohere.com/docs/command-a-hf."""
HARMONY_ANALYSIS = ReasoningForm(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    forced_end="<|end|><|start|>assistant<|channel|>final<|message|>",
    answer_begin="<|start|>assistant<|channel|>final<|message|>",
    answer_end="<|return|>",
    template_marks=("<|channel|>", "analysis"),
)
"""gpt-oss. Source: https://developers.openai.com/cookbook/articles/openai-harmony."""

# ------------------------------------------------------------------ calls

JSON_CALLS = ToolForm("json", uses_list=True)
"""JSON without marks, at the beginning of an answer."""
FENCED_CALLS = ToolForm("json", begin="```json", end="```", separator="\n")
PLAIN_FENCED_CALLS = ToolForm("json", begin="```", end="```", separator="\n")
HERMES_CALLS = ToolForm(
    "json", begin="<tool_call>", end="</tool_call>", separator="\n", template_marks=("<tool_call>",)
)
"""Hermes, Qwen 2.5 and 3, SmolLM3, EXAONE 4, Granite 4, ERNIE 4.5. Source: https://huggingface.co/Qwen/Qwen3-8B. Held
against FastDeploy's tool_parsers/ernie_x1_tool_parser.py for ERNIE."""
QWEN_CODER_CALLS = ToolForm(
    "parameters",
    begin="<tool_call>",
    end="</tool_call>",
    call_begin="<function=",
    call_end="</function>",
    name_end=">",
    key_begin="<parameter=",
    key_end_marks=((">", "schema"),),
    value_end="</parameter>",
    value_padding="\n",
    separator="\n",
    template_marks=("<tool_call>", "<function="),
)
"""Qwen3-Coder, Qwen 3.5, Nemotron 3. Source: https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct. Held against
vLLM's examples/tool_chat_template_qwen3coder.jinja."""
QWEN_CODER_BARE_CALLS = replace(QWEN_CODER_CALLS, begin="", template_marks=())
"""The model leaves the first mark out at times. Source: vLLM's tool_parsers/qwen3coder_tool_parser.py."""
SEED_CALLS = ToolForm(
    "parameters",
    begin="<seed:tool_call>",
    end="</seed:tool_call>",
    call_begin="<function=",
    call_end="</function>",
    name_end=">",
    key_begin="<parameter=",
    key_end_marks=((">", "schema"),),
    value_end="</parameter>",
    separator="\n",
    template_marks=("<seed:tool_call>",),
)
"""Source: https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct."""
GLM_CALLS = ToolForm(
    "parameters",
    call_begin="<tool_call>",
    call_end="</tool_call>",
    key_begin="<arg_key>",
    key_end_marks=(("</arg_key>", "schema"),),
    value_begin="<arg_value>",
    value_end="</arg_value>",
    separator="\n",
    template_marks=("<arg_key>",),
)
"""GLM-4.5 to 4.7; the last writes no line ends. Source: https://huggingface.co/zai-org/GLM-4.5. Held against
models/templates/glm_4_5.jinja and GLM-4.6.jinja of llama.cpp."""
MINIMAX_CALLS = ToolForm(
    "parameters",
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    call_begin='<invoke name="',
    call_end="</invoke>",
    name_end='">',
    key_begin='<parameter name="',
    key_end_marks=(('">', "schema"),),
    value_end="</parameter>",
    separator="\n",
    template_marks=("<minimax:tool_call>",),
)
"""MiniMax M2. Source: https://huggingface.co/MiniMaxAI/MiniMax-M2, docs/tool_calling_guide.md. Held against llama.cpp's
models/templates/unsloth-MiniMax-M2.jinja."""
DSML_CALLS = ToolForm(
    "parameters",
    begin="<｜DSML｜function_calls>",
    end="</｜DSML｜function_calls>",
    call_begin='<｜DSML｜invoke name="',
    call_end="</｜DSML｜invoke>",
    name_end='">',
    key_begin='<｜DSML｜parameter name="',
    key_end_marks=(('" string="true">', "text"), ('" string="false">', "json")),
    value_end="</｜DSML｜parameter>",
    separator="\n\n",
    tokens=("｜DSML｜",),
    template_marks=("｜DSML｜",),
)
"""DeepSeek V3.2. Source: https://huggingface.co/deepseek-ai/DeepSeek-V3.2, folder encoding."""
DEEPSEEK_CALLS = ToolForm(
    "named_json",
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    call_begin="<｜tool▁call▁begin｜>",
    call_end="```<｜tool▁call▁end｜>",
    headers=("function<｜tool▁sep｜>{name}\n```json\n",),
    tokens=("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    template_marks=("<｜tool▁sep｜>", "```json"),
)
"""DeepSeek V3 and R1. Source: https://huggingface.co/deepseek-ai/DeepSeek-R1-0528."""
DEEPSEEK_31_CALLS = ToolForm(
    "named_json",
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    call_begin="<｜tool▁call▁begin｜>",
    call_end="<｜tool▁call▁end｜>",
    headers=("{name}<｜tool▁sep｜>",),
    tokens=("<｜tool▁sep｜>",),
    template_marks=("<｜tool▁sep｜>",),
)
"""Source: https://huggingface.co/deepseek-ai/DeepSeek-V3.1."""
KIMI_CALLS = ToolForm(
    "named_json",
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    call_begin="<|tool_call_begin|>",
    call_end="<|tool_call_end|>",
    headers=("functions.{name}:{index}<|tool_call_argument_begin|>", "{name}:{index}<|tool_call_argument_begin|>"),
    id_form="functions.{name}:{index}",
    tokens=("<|tool_call_argument_begin|>",),
    template_marks=("<|tool_call_argument_begin|>",),
)
"""Source: https://huggingface.co/moonshotai/Kimi-K2-Instruct, docs/tool_call_guidance.md. Held against llama.cpp's
models/templates/moonshotai-Kimi-K2-Thinking.jinja; the first template of Kimi K2 (moonshotai-Kimi-K2.jinja) shows no
calls, and vLLM's tool_parsers/kimi_k2_tool_parser.py knows headers without "functions.", and the spelling below."""
KIMI_SINGULAR_CALLS = replace(
    KIMI_CALLS, begin="<|tool_call_section_begin|>", end="<|tool_call_section_end|>", template_marks=()
)
MISTRAL_CALLS = ToolForm(
    "named_json",
    call_begin="[TOOL_CALLS]",
    headers=("{name}[ARGS]", "{name}[CALL_ID]{id}[ARGS]", "{name}"),
    tokens=("[ARGS]", "[CALL_ID]"),
    template_marks=("[TOOL_CALLS]", "[ARGS]"),
)
"""Mistral's tokenizers from version 11 on. Source: https://huggingface.co/mistralai/Magistral-Small-2509. Held against
mistral-common's InstructTokenizerV11, which writes the id, and V13, which does not."""
MISTRAL_LIST_CALLS = ToolForm("json", begin="[TOOL_CALLS]", uses_list=True, template_marks=("[TOOL_CALLS]",))
"""Mistral's earlier tokenizers. Source: https://huggingface.co/mistralai/Mistral-7B-Instruct-v0.3."""
LLAMA_CALLS = ToolForm("json", argument_keys=("parameters", "arguments"), template_marks=('"parameters": ',))
"""Llama 3.1 to 3.3. Source: https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct."""
LLAMA_TAG_CALLS = ToolForm("json", begin="<|python_tag|>", argument_keys=("parameters", "arguments"))
PYTHON_CALLS = ToolForm("python", uses_list=True, template_marks=("func_name1(",))
"""Llama 3.2 and 4. Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama4."""
PYTHON_TAG_CALLS = ToolForm("python", uses_list=True, begin="<|python_start|>", end="<|python_end|>")
JSON_TAG_CALLS = ToolForm(
    "json", begin="<|python_start|>", end="<|python_end|>", argument_keys=("parameters", "arguments")
)
LFM_CALLS = ToolForm(
    "python",
    uses_list=True,
    begin="<|tool_call_start|>",
    end="<|tool_call_end|>",
    template_marks=("<|tool_list_start|>",),
)
"""Source: https://huggingface.co/LiquidAI/LFM2-1.2B."""
OLMO_CALLS = ToolForm(
    "python", begin="<function_calls>", end="</function_calls>", separator="\n", template_marks=("<function_calls>",)
)
"""Source: https://huggingface.co/allenai/Olmo-3-7B-Instruct."""
GRANITE_CALLS = ToolForm("json", begin="<|tool_call|>", uses_list=True, template_marks=("<|tool_call|>",))
"""Granite 3. Source: https://huggingface.co/ibm-granite/granite-3.3-8b-instruct. Held against vLLM's
tool_parsers/granite_tool_parser.py: Granite 3.1 writes `<tool_call>` and a list."""
FUNCTION_CALLS = ToolForm("json", begin="<function_call>", template_marks=("<function_call>",))
"""Granite 20B. Source: https://huggingface.co/ibm-granite/granite-20b-functioncalling."""
FUNCTOOLS_CALLS = ToolForm("json", begin="functools", uses_list=True, template_marks=("functools[",))
"""Phi-4-mini, as its card describes it."""
PHI_CALLS = ToolForm("json", begin="<|tool_call|>", end="<|/tool_call|>", uses_list=True, template_marks=("<|/tool|>",))
"""Source: https://huggingface.co/microsoft/Phi-4-mini-instruct."""
TOOL_CALLS_LIST = ToolForm(
    "json", begin="<tool_calls>", end="</tool_calls>", uses_list=True, separator="\n", template_marks=("<tool_calls>",)
)
"""Jamba. Source: https://huggingface.co/ai21labs/AI21-Jamba-Mini-1.6."""
HUNYUAN_CALLS = replace(TOOL_CALLS_LIST, answer_label="助手：", template_marks=("<tool_calls>", "助手："))
"""Source: https://huggingface.co/tencent/Hunyuan-A13B-Instruct. Held against vLLM's
examples/tool_chat_template_hunyuan_a13b.jinja: where tools are shown, answers begin with the label."""
MINIMAX_M1_CALLS = replace(
    TOOL_CALLS_LIST, uses_list=False, template_marks=("<tool_calls></tool_calls>", "<tool_calls>")
)
"""One object a line. Source: https://huggingface.co/MiniMaxAI/MiniMax-M1-40k, docs/function_call_guide.md. Held against
vLLM's examples/tool_chat_template_minimax_m1.jinja."""
NEMOTRON_CALLS = ToolForm(
    "json", begin="<TOOLCALL>", end="</TOOLCALL>", uses_list=True, separator="\n\n", template_marks=("<TOOLCALL>",)
)
"""Nemotron Nano 2. Source: https://huggingface.co/nvidia/NVIDIA-Nemotron-Nano-9B-v2."""
COMMAND_CALLS = ToolForm(
    "json",
    begin="<|START_ACTION|>",
    end="<|END_ACTION|>",
    uses_list=True,
    name_keys=("tool_name",),
    argument_keys=("parameters",),
    id_keys=("tool_call_id",),
    template_marks=("<|START_ACTION|>",),
)
"""Command A and R7B. Source: https://docs.cohere.com/docs/command-a-hf."""
HARMONY_CALLS = ToolForm(
    "harmony",
    call_begin="<|channel|>commentary to=functions.",
    call_end="<|call|>",
    headers=("{name} <|constrain|>json<|message|>",),
    tokens=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    template_marks=("<|channel|>", "commentary"),
)
"""gpt-oss. Source: https://developers.openai.com/cookbook/articles/openai-harmony."""
