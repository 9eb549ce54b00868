"""From a conversation in OpenAI's form to a `GenerateCall`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inferplane.dialogue.replies.catalog import choose_form
from inferplane.dialogue.replies.forms import ReplyForm
from inferplane.dialogue.replies.opening import is_reasoning_open, is_reasoning_over
from inferplane.dialogue.tools import describe_tools
from inferplane.serving.admission import GenerateCall
from inferplane.serving.chat.reply import ReplyPlan
from inferplane.serving.chat.request import ChatRequest, Tool
from inferplane.serving.chat.thinking import make_span
from inferplane.serving.chat.tools import ToolPlan, list_shown_tools
from inferplane.serving.chat_template.fields import TemplateVariables, list_unread_keys
from inferplane.serving.chat_template.template import ChatTemplate, render_conversation
from inferplane.serving.constraints import fields as constraints
from inferplane.serving.errors import invalid

if TYPE_CHECKING:
    from inferplane.serving.model import ServedModel

GENERIC = "json"
"""Name of the form of calls that are JSON alone."""
WORDS = {**constraints.WORDS, "prompt": "messages", "logprobs": "top_logprobs"}


async def build_call(request: ChatRequest, model: ServedModel, tools: ToolPlan) -> tuple[GenerateCall, ReplyPlan]:
    """Return the call that a request makes, and how the replies are read.

    Args:
        request: the request.
        model: has the template, and the form of replies.
        tools: what the request's tools mean.

    Raises:
        ApiError: fields contradict each other, or the model's template refuses the conversation.
    """
    sampling = request.sampling_fields()
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs needs logprobs = true.", "top_logprobs")
    if request.logprobs:
        sampling["logprobs"] = request.top_logprobs or 0
    constraint, ignored = request.constraint()
    if tools.is_forced and constraint:
        name = WORDS.get(*constraint, *constraint)
        raise invalid(f"{name} and a tool_choice that demands a call exclude each other.", name)
    async with model.use_template(request.chat_template) as template:
        facts = template.facts if template is not None else None
        form = model.reply_form(facts)
        variables = request.template_variables(facts, form.reasoning is not None)
        given = request.tools if tools.mode != "none" else None
        text = await render_messages(request.messages, given, template, variables)
    is_open = is_reasoning_open(form, text, request.messages, bool(variables.mark))
    plan = _plan_reply(request, tools, form, is_open)
    if tools.is_forced:
        constraint = tools.constraint()
    if tools.mode != "none":
        ignored += [f"tools.{keyword}" for keyword in tools.not_enforced]
    sampling.update(constraint)
    span = make_span(plan.form, plan.reasoning_is_open, request.budget(), bool(constraint))
    if span is not None and not (constraint and is_reasoning_over(form, text)):
        sampling["reasoning"] = span
    if visible := _visible_tokens(form, tools):
        sampling["visible_tokens"] = visible
    call = GenerateCall(
        prompts=[text],
        sampling=sampling,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        n=request.n or 1,
        timeout_s=request.timeout,
        special=bool(request.add_special_tokens),
        operation="chat",
        model=request.model or "",
        words=_words(request, tools),
        ignored=[*ignored, *variables.ignored, *list_unread_keys(request.messages, facts)],
    )
    return call, plan


def _plan_reply(request: ChatRequest, tools: ToolPlan, form: ReplyForm, is_open: bool) -> ReplyPlan:
    if request.separate_reasoning is False:
        form, is_open = replace(form, reasoning=None), False
    if tools.is_forced:
        form = choose_form(form, tools=GENERIC)
        if form.uses_channels:  # JSON alone has no header, and so no place for a thought before it
            form, is_open = replace(form, reasoning=None), False
    return ReplyPlan(
        tools=tools,
        form=form,
        reasoning_is_open=is_open,
        shows_reasoning=request.include_reasoning is not False,
        is_bare=tools.mode == "named",
        num_earlier_calls=sum(len(message.get("tool_calls") or ()) for message in request.messages),
    )


def _visible_tokens(form: ReplyForm, tools: ToolPlan) -> tuple[str, ...]:
    """Return the special tokens that stay in the text: those of calls only where there may be calls."""
    if tools.mode != "none" or form.uses_channels:
        return form.visible_tokens
    return (*form.reasoning.marks, *form.more_tokens) if form.reasoning is not None else form.more_tokens


def _words(request: ChatRequest, tools: ToolPlan) -> dict[str, str]:
    """Return the engine's names of parameters in the words of the request."""
    words = {**WORDS, "max_tokens": "max_completion_tokens" if request.max_completion_tokens else "max_tokens"}
    words.update(structural_tags="tools", reasoning=request.budget()[1])
    return {**words, **dict.fromkeys(("json_schema", "regex", "grammar"), "tools")} if tools.is_forced else words


async def render_messages(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool] | None,
    template: ChatTemplate | None,
    variables: TemplateVariables | None = None,
) -> str:
    """Render a conversation with a template; tools become text if the template does not support them.

    Args:
        messages: of `normalize_messages`.
        tools: of the request.
        template: the model's, or the request's.
        variables: for the template.

    Raises:
        ApiError: the template refuses the conversation in every form that is tried.
    """
    given = list_shown_tools(tools)
    needs_description = given and template is not None and not template.facts.supports_tools
    description = describe_tools(given) if needs_description else ""
    variables = variables or TemplateVariables({})
    text = await render_conversation(template, variables.mark_last(messages), given, description, variables.values)
    return variables.truncate_at_mark(text)
