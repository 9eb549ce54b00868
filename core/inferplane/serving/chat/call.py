"""From a conversation in OpenAI's form to a `GenerateCall`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inferplane.dialogue.replies.call_rules import read_generic
from inferplane.dialogue.replies.forms import ReplyForm
from inferplane.dialogue.replies.opening import is_reasoning_open, is_reasoning_over
from inferplane.dialogue.tools import describe_tools
from inferplane.serving.admission import GenerateCall
from inferplane.serving.chat.call_rules import demand_calls, list_unenforced, tag_calls
from inferplane.serving.chat.reply import ReplyPlan
from inferplane.serving.chat.request import ChatRequest, Tool
from inferplane.serving.chat.thinking import list_visible_tokens, make_span
from inferplane.serving.chat.tools import ToolPlan, list_shown_tools
from inferplane.serving.chat_template.fields import TemplateVariables, list_unread_keys
from inferplane.serving.chat_template.template import ChatTemplate, render_conversation
from inferplane.serving.constraints import fields as constraints
from inferplane.serving.errors import invalid

if TYPE_CHECKING:
    from inferplane.engine.request.fields import StructuralTag
    from inferplane.serving.model import ServedModel

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
        variables = request.template_variables(facts, form)
        given = request.tools if tools.mode != "none" else None
        text = await render_messages(request.messages, given, template, variables)
    is_open = is_reasoning_open(form, text, request.messages, bool(variables.mark))
    own, unenforced = None, set[str]()
    if tools.is_forced and model.can_constrain and facts is not None and facts.supports_tools:  # else JSON is described
        own = await asyncio.to_thread(demand_calls, form, tools, model.special_tokens, unenforced)
    is_generic = tools.is_forced and own is None
    plan = _plan_reply(request, tools, form, is_open, is_generic=is_generic)
    if tools.is_forced:
        constraint = own or tools.constraint()
    tags: Sequence[StructuralTag] = ()
    if tools.mode == "auto" and not constraint and model.can_constrain:
        tags = await asyncio.to_thread(tag_calls, form, tools, model.special_tokens, unenforced)
    if tools.mode != "none":
        unenforced = unenforced if own or tags else set()
        ignored += [f"tools.{keyword}" for keyword in sorted(unenforced.union(tools.not_enforced))]
    if tools.mode == "auto" and not tags and (tools.is_strict or (model.can_constrain and not constraint)):
        ignored += list_unenforced(form, tools)
    sampling.update({"structural_tags": tags} if tags else constraint)
    if is_generic and form.uses_channels and form.reasoning is not None:  # there is no thought before JSON alone
        ignored += [name for most, name in [request.budget()] if most is not None]
    else:
        span = make_span(
            form,
            is_open,
            request.budget(),
            is_constrained=bool(constraint) and own is None,
            has_calls=bool(own or tags),
        )
        if span is not None and not ((constraint or tags) and is_reasoning_over(form, text)):
            sampling["reasoning"] = span
    if visible := list_visible_tokens(form, has_calls=tools.mode != "none"):
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
        has_optional_tags=not tools.is_strict,
        ignored=[*ignored, *variables.ignored, *list_unread_keys(request.messages, facts)],
    )
    return call, plan


def _plan_reply(
    request: ChatRequest, tools: ToolPlan, form: ReplyForm, is_open: bool, *, is_generic: bool
) -> ReplyPlan:
    id_form = form.tools[0].id_form if form.tools else ""
    is_content = request.separate_reasoning is False
    if is_content and tools.mode == "none":  # else a mark of calls inside of the thought is none
        form, is_open = replace(form, reasoning=None), False
    if is_generic:
        form, is_open = read_generic(form, is_open)
    return ReplyPlan(
        tools=tools,
        form=form,
        reasoning_is_open=is_open,
        shows_reasoning=request.include_reasoning is not False,
        is_reasoning_content=is_content,
        is_bare=is_generic and tools.mode == "named",
        id_form=id_form,
        num_earlier_calls=sum(len(message.get("tool_calls") or ()) for message in request.messages),
    )


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
