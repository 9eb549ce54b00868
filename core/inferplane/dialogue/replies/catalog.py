"""The forms of replies by name, and which of them a model writes, by its chat template and its family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from inferplane.dialogue.near_names import find_nearest
from inferplane.dialogue.replies import tables
from inferplane.dialogue.replies.forms import ReasoningForm, ReplyForm, ToolForm
from inferplane.errors import UsageError

AUTO, NONE = "auto", "none"
"""Names that stand for the form of the model, and for no form."""
FENCED = (tables.FENCED_CALLS, tables.PLAIN_FENCED_CALLS)
"""What models write that were shown tools as text. It is recognized beside a model's own form if that is JSON too: from
others, a fenced call is an example.
"""

_LLAMA = (tables.LLAMA_TAG_CALLS, tables.PYTHON_TAG_CALLS, tables.JSON_TAG_CALLS)


def _form(
    name: str,
    reasoning: ReasoningForm | None,
    *tools: ToolForm,
    also: tuple[str, ...] = (),
    types: tuple[str, ...] = (),
    more_tokens: tuple[str, ...] = (),
) -> ReplyForm:
    plain: tuple[ToolForm, ...] = ()
    if tools and tools[0].syntax != "harmony":
        plain = (tables.JSON_CALLS, *(FENCED if tools[0].syntax == "json" else ()))
    return ReplyForm(
        name, reasoning, (*tools, *(form for form in plain if form not in tools)), also, types, more_tokens
    )


FORMS: tuple[ReplyForm, ...] = (
    _form(
        "openai", tables.HARMONY_ANALYSIS, tables.HARMONY_CALLS, also=("gptoss", "openai_gptoss"), types=("gpt_oss",)
    ),
    _form("deepseek_v32", tables.THINK, tables.DSML_CALLS, types=("deepseek_v32",)),
    _form("deepseek_v3", tables.THINK, tables.DEEPSEEK_CALLS, also=("deepseek_r1", "holo2"), types=("deepseek_v3",)),
    _form("deepseek_v31", tables.THINK, tables.DEEPSEEK_31_CALLS),
    _form("kimi_k2", tables.THINK_OR_CALL, tables.KIMI_CALLS, tables.KIMI_SINGULAR_CALLS, types=("kimi_k2",)),
    _form("kimi", tables.THINK_TRIANGLES),
    _form("glm45", tables.THINK, tables.GLM_CALLS, also=("glm47",), types=("glm4_moe",)),
    _form("minimax_m2", tables.THINK, tables.MINIMAX_CALLS, types=("minimax_m2",)),
    _form("seed_oss", tables.SEED_THINK, tables.SEED_CALLS, types=("seed_oss",)),
    _form("command", tables.START_THINKING, tables.COMMAND_CALLS, also=("cohere_command3",), types=("cohere2",)),
    _form(
        "mistral",
        tables.THINK_BRACKETS,
        tables.MISTRAL_CALLS,
        tables.MISTRAL_LIST_CALLS,
        types=("mistral3", "ministral"),
    ),
    _form("mistral_list", None, tables.MISTRAL_LIST_CALLS, tables.MISTRAL_CALLS, types=("mistral", "mixtral")),
    _form("hunyuan_a13b", tables.THINK_ANSWER, tables.HUNYUAN_CALLS, types=("hunyuan_v1_moe", "hunyuan_v1_dense")),
    _form("minimax", tables.THINK, tables.MINIMAX_M1_CALLS, also=("minimax_m1",), types=("minimax_m1",)),
    _form("jamba", None, tables.TOOL_CALLS_LIST, types=("jamba",)),
    _form("phi4_mini_json", None, tables.PHI_CALLS, tables.FUNCTOOLS_CALLS, types=("phi3",)),
    _form(
        "granite", tables.THOUGHT_PROCESS, tables.GRANITE_CALLS, tables.HERMES_CALLS, types=("granite", "granitemoe")
    ),
    _form(
        "ernie45", tables.THINK_RESPONSE, tables.HERMES_CALLS, also=("ernie-x1",), types=("ernie4_5", "ernie4_5_moe")
    ),
    _form("exaone_deep", tables.THOUGHT),
    _form(
        "qwen3_coder",
        tables.THINK,
        tables.QWEN_CODER_CALLS,
        tables.QWEN_CODER_BARE_CALLS,
        also=("qwen3_xml", "mimo", "nemotron_v3"),
        types=("qwen3_next",),
    ),
    _form("lfm2", tables.THINK, tables.LFM_CALLS, types=("lfm2", "lfm2_moe")),
    _form("olmo3", tables.THINK, tables.OLMO_CALLS, types=("olmo3",)),
    _form("nemotron", tables.THINK, tables.NEMOTRON_CALLS, also=("nemotron_json",), types=("nemotron_h",)),
    _form("granite-20b-fc", None, tables.FUNCTION_CALLS),
    _form("functools", None, tables.FUNCTOOLS_CALLS, tables.PHI_CALLS),
    _form("llama4_pythonic", None, tables.PYTHON_CALLS, *_LLAMA, also=("pythonic",), types=("llama4",)),
    _form("qwen3", tables.THINK, tables.HERMES_CALLS, also=("hermes",), types=("qwen2", "qwen3", "qwen3_moe")),
    _form("llama3_json", None, tables.LLAMA_CALLS, *_LLAMA, tables.PYTHON_CALLS, also=("llama4_json",)),
    _form("json", None, tables.JSON_CALLS, tables.HERMES_CALLS, tables.DEEPSEEK_CALLS),
)
"""Of forms that a template has equally many marks of, the first counts. The last is for all other models."""


def register_reply_forms(register: Callable[[str, ReplyForm], None]) -> None:
    """Register the forms of this package, as a plugin does by its hook."""
    for form in FORMS:
        register(form.name, form)


def find_form(template_source: str | None, model_type: str = "", forms: Sequence[ReplyForm] = FORMS) -> ReplyForm:
    """Return the form that a model writes, as far as its template and family tell.

    Thoughts and calls are recognized each by itself: fine-tuned models combine them. What the template does not show is
    that of the family; a template without marks of a thought has none.

    Args:
        template_source: the chat template's text, with all of its variants; None if there is none.
        model_type: of the model's config.
        forms: known forms; earlier ones come first.
    """
    source = template_source or ""
    family = next((form for form in forms if model_type and model_type in form.model_types), None)
    default = forms[-1]
    thinks = _find_marked(source, [(form, form.reasoning) for form in forms if form.reasoning])
    calls = _find_marked(source, [(form, form.tools[0]) for form in forms if form.tools])
    own = family.reasoning if family else None
    if template_source is None or (own and thinks and thinks.reasoning and _has_same_marks(own, thinks.reasoning)):
        thinks = family  # it may know of marks around the answer, which the template does not show
    if calls and calls.reasoning and calls.reasoning.ended_by_calls and thinks and thinks.reasoning:
        thinks = calls if _has_same_marks(calls.reasoning, thinks.reasoning) else thinks
    calls = calls or family or default
    return _combine(thinks, calls)


def _find_marked(source: str, parts: Sequence[tuple[ReplyForm, ReasoningForm | ToolForm]]) -> ReplyForm | None:
    """The form whose marks a template has all of: the one with the most marks, and the first of these."""
    found = [
        (form, part) for form, part in parts if part.template_marks and all(m in source for m in part.template_marks)
    ]
    return max(found, key=lambda each: len(each[1].template_marks))[0] if found else None


def _has_same_marks(one: ReasoningForm, other: ReasoningForm) -> bool:
    return (one.begin, one.end) == (other.begin, other.end)


def _combine(thinks: ReplyForm | None, calls: ReplyForm | None) -> ReplyForm:
    """The thoughts of one form and the calls of another."""
    if thinks is calls and calls is not None:
        return calls
    found = [form for form in (thinks, calls) if form is not None]
    return ReplyForm(
        name="+".join(form.name for form in found) or NONE,
        reasoning=thinks.reasoning if thinks else None,
        tools=calls.tools if calls else (),
        more_tokens=tuple(token for form in found for token in form.more_tokens),
    )


def choose_form(
    own: ReplyForm, reasoning: str = AUTO, tools: str = AUTO, forms: Sequence[ReplyForm] = FORMS
) -> ReplyForm:
    """Return a model's form with what the user chose by name.

    Args:
        own: the model's form, of `find_form`.
        reasoning: name of the form of thoughts; "auto": the model's own; "none": thoughts are content.
        tools: the same for calls.
        forms: known forms.

    Raises:
        UsageError: a name is unknown, or its form has no thoughts or no calls.
    """
    if reasoning == tools == AUTO:
        return own
    thinks = own if reasoning == AUTO else _find_named(reasoning, "reasoning", forms)
    calls = own if tools == AUTO else _find_named(tools, "tools", forms)
    return _combine(thinks, calls)


def list_names(forms: Iterable[ReplyForm] = FORMS, part: str = "") -> list[str]:
    """Return the names of forms, other names too, sorted.

    Args:
        forms: known forms.
        part: "reasoning" or "tools": of those that have it; "": of all.
    """
    has_part = [form for form in forms if not part or getattr(form, part)]
    return sorted({name for form in has_part for name in (form.name, *form.other_names)})


def _find_named(name: str, part: str, forms: Sequence[ReplyForm]) -> ReplyForm | None:
    if name == NONE:
        return None
    for form in forms:
        if name in (form.name, *form.other_names) and getattr(form, part):
            return form
    there = list_names(forms, part)
    what = {"reasoning": "thoughts", "tools": "tool calls"}[part]
    near = find_nearest(name, tuple(there))
    remedy = f"write {near!r}" if near else f"choose one of them, {AUTO!r} or {NONE!r}"
    raise UsageError(f"There is no form of {what} named {name!r}.", there_is=", ".join(there), remedy=remedy)
